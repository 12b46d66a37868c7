#!lua name={library}
