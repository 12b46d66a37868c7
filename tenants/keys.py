"""API keys as text: `sk-<public id>-<secret>`. The public id finds the row, the secret proves the bearer."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

__all__ = ["PUBLIC_ID_CHARS", "digest", "display_prefix", "matches", "mint", "parse"]

PUBLIC_ID_CHARS = 16
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(rf"sk-([0-9a-z]{{{PUBLIC_ID_CHARS}}})-([A-Za-z0-9_-]{{43}})", re.ASCII)


def mint() -> tuple[str, str, str]:
    """A new (public id, secret, full key). The secret has 256 random bits."""
    public_id = "".join(secrets.choice(_ALPHABET) for _ in range(PUBLIC_ID_CHARS))
    secret = secrets.token_urlsafe(32)
    return public_id, secret, f"sk-{public_id}-{secret}"


def parse(full_key: str) -> tuple[str, str] | None:
    """(public id, secret), or None for anything that isn't exactly a key."""
    match = _KEY.fullmatch(full_key)
    return (match[1], match[2]) if match else None


def digest(secret: str, pepper: bytes) -> bytes:
    """HMAC-SHA256 under the server's pepper. The secret is random, so a slow password hash would add only delay."""
    return hmac.new(pepper, secret.encode(), hashlib.sha256).digest()


def matches(secret: str, pepper: bytes, stored: bytes) -> bool:
    """Constant-time comparison with the stored digest."""
    return hmac.compare_digest(digest(secret, pepper), stored)


def display_prefix(public_id: str) -> str:
    """What may be shown and logged of a key."""
    return f"sk-{public_id[:8]}"
