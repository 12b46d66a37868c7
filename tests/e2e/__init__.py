"""The whole stack, started as `make up` starts it and used as its users use it."""
