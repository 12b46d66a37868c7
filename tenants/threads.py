"""Running ORM code from the event loop without leaving a database connection behind in the worker thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections

__all__ = ["off_loop"]

P = ParamSpec("P")
T = TypeVar("T")


def off_loop(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """An awaitable twin of `function` that runs in a thread and gives its connection back before it returns.

    A connection kept for the length of a stream would exhaust the pool: thirty streams on four connections.
    """

    @wraps(function)
    def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return sync_to_async(bounded, thread_sensitive=False)
