"""Strict tiers, then arrival."""

from __future__ import annotations

from engine.scheduler.policies.base import Key, View
from engine.scheduler.sequence import Sequence

__all__ = ["Priority"]


class Priority:
    name = "priority"

    def band(self, s: Sequence, view: View) -> Key:
        return (s.tier,)

    def urgency(self, s: Sequence, view: View) -> Key:
        return ()

    def evicts(self, waiting: Sequence, running: Sequence, view: View) -> bool:
        return waiting.tier < running.tier
