"""Who is looking: the scope of a signed-in user, and whether a session that opened a stream still holds."""

from __future__ import annotations

from django.contrib.auth import get_user
from django.db import connections
from django.http import HttpRequest

from frontend.snapshot import EVERYTHING, Scope
from tenants.models import User
from tenants.selectors import SEES_MONEY, tenants_for

__all__ = ["release_connections", "scope_of", "still_signed_in"]


def scope_of(user: User) -> Scope:
    """Staff see everything; others see their own tenants, and amounts only where their role says so."""
    if user.is_active and user.is_staff:
        return EVERYTHING
    tenants = frozenset(tenants_for(user).values_list("slug", flat=True))
    money = frozenset(tenants_for(user, SEES_MONEY).values_list("slug", flat=True))
    return Scope(staff=False, tenants=tenants, money=money)


def release_connections() -> None:
    """Give back this thread's database connections: a stream lasts as long as its page and must not hold any."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def still_signed_in(request: HttpRequest) -> Scope | None:
    """Read session and user again. None: the session ended, the password changed or the user was disabled."""
    session = type(request.session)(request.session.session_key)
    fresh = HttpRequest()
    fresh.session = session
    try:
        user = get_user(fresh)
        return scope_of(user) if isinstance(user, User) and user.is_active else None
    finally:
        release_connections()
