"""First come, first served: the baseline."""

from __future__ import annotations

from engine.scheduler.policies.base import Key, View
from engine.scheduler.sequence import Sequence

__all__ = ["Fcfs"]


class Fcfs:
    name = "fcfs"

    def band(self, s: Sequence, view: View) -> Key:
        return ()

    def urgency(self, s: Sequence, view: View) -> Key:
        return ()

    def evicts(self, waiting: Sequence, running: Sequence, view: View) -> bool:
        return False
