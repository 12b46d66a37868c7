"""What crosses the process boundary: messages, key names and the versioned Redis function library.

It must not know torch, Django, the scheduler or who is on the other end of a key.
"""
