"""Running a transaction again when Postgres asks for it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import OperationalError

__all__ = ["retrying"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_AGAIN = {"40P01": "deadlock", "40001": "serialization failure"}


def retrying(attempt: Callable[[], T], tries: int = 6) -> T:
    """Call `attempt`, a whole transaction, until Postgres neither breaks a deadlock nor a serialization tie with it."""
    for number in range(1, tries + 1):
        try:
            return attempt()
        except OperationalError as error:
            why = _AGAIN.get(getattr(error.__cause__, "sqlstate", None) or "")
            if why is None or number == tries:
                raise
            log.info("%s, transaction tried again (%d of %d)", why, number, tries)
            time.sleep(random.uniform(0.5, 1.5) * 0.01 * 2**number)
    raise AssertionError("unreachable")
