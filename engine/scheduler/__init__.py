"""DECIDES: which tokens of which sequences are computed in the next step, and who is parked to make room.

Pure Python: it must not know torch, Redis, the wall clock or a random source; the time is an argument of every call.
"""
