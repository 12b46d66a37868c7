"""Template filters of the console. They format; they must not fetch."""
