"""What the verbs of the record refuse, in words for whoever asked."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(ValueError):
    """The request was understood and is not allowed by a rule of the record; the message says which."""
