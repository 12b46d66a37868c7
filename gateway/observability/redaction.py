"""The one place that knows what must never be written down: API keys, and what stands in an Authorization header."""

from __future__ import annotations

import logging
import re

__all__ = ["Redact", "redact"]

_SECRET = re.compile(
    r"""
      (sk-[0-9A-Za-z]{4})[0-9A-Za-z_-]{8,}                                  # an API key, also a malformed or cut one
    | (?i:((?:bearer|basic)\s+)[^\s"',;]{8,})                               # a credential of a header
    | (?i:((?:api[_-]?key|password|secret|token)["']?\s*[=:]\s*["']?)[^\s"'&,;]{8,})  # one in a URL, form or dump
    | (://[^\s:/@]*:)[^\s@/]+(?=@)                                          # the password of a database or Redis URL
    """,
    re.VERBOSE,
)


def redact(text: str) -> str:
    """The text with secrets cut to their first characters."""
    return _SECRET.sub(lambda m: next(g for g in m.groups() if g is not None) + "[redacted]", text)


class Redact(logging.Filter):
    """A filter for log handlers. It works on the finished message, so arguments and tracebacks are covered too."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        clean = redact(message)
        if clean != message:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_text is None:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True
