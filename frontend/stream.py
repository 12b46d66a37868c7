"""The push: the live page's fragment as server-sent events, rendered once per snapshot and scope for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakKeyDictionary

from django.template.loader import render_to_string

from frontend.board import Board, build
from frontend.feed import LiveFeed
from frontend.snapshot import Scope

__all__ = ["board_of", "events", "fragment"]

PUSH_S = 1.5
"""Longest silence: without news the fragment is pushed again with its age, so that silence means a dead connection."""
MIN_GAP_S = 0.2
"""However fast snapshots come, a viewer gets no more than five a second."""
RECHECK_S = 10.0
"""How long a stream may outlive the session that opened it."""

_Rendered = dict[tuple[object, ...], str]
_rendered: WeakKeyDictionary[LiveFeed, tuple[int, _Rendered]] = WeakKeyDictionary()


def board_of(feed: LiveFeed, scope: Scope) -> Board:
    """The live page for one scope, now."""
    return build(
        feed.latest,
        age_s=feed.age_s,
        history=feed.history,
        scope=scope,
        connected=feed.connected,
        unreadable=feed.unreadable,
    )


def fragment(feed: LiveFeed, scope: Scope) -> str:
    """The board as HTML. Kept per scope until the next snapshot, or until its age shows otherwise."""
    version, kept = _rendered.get(feed, (-1, {}))
    if version != feed.version:
        kept = {}
        _rendered[feed] = (feed.version, kept)
    tenths = None if feed.age_s is None else int(feed.age_s * 10)
    key = (scope, tenths, feed.connected, feed.unreadable)
    html = kept.get(key)
    if html is None:
        if len(kept) > 256:  # ages of a snapshot that has long stopped
            kept.clear()
        html = kept[key] = render_to_string("console/board.html", {"board": board_of(feed, scope)})
    return html


async def events(
    feed: LiveFeed, scope: Scope, still_signed_in: Callable[[], Awaitable[Scope | None]]
) -> AsyncIterator[bytes]:
    """One event per snapshot, or per `PUSH_S` without one, until the viewer leaves or its session ends."""
    checked_at_s = time.monotonic()
    while True:
        version = feed.version
        yield _event(fragment(feed, scope))
        await asyncio.sleep(MIN_GAP_S)
        await feed.newer_than(version, PUSH_S - MIN_GAP_S)
        if time.monotonic() - checked_at_s > RECHECK_S:
            fresh = await still_signed_in()
            if fresh is None:
                yield b"event: console:signed-out\ndata: bye\n\n"
                return
            scope, checked_at_s = fresh, time.monotonic()


def _event(html: str) -> bytes:
    lines = (line for line in html.splitlines() if line.strip())
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode()
