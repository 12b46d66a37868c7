"""The five policies. Each is the baseline before it plus one idea."""

from __future__ import annotations

from engine.scheduler.policies.base import Key, Price, View
from engine.scheduler.sequence import Sequence

_GAIN = 20.0
"""Slack gained per second of restore cost, at least: keeps what evictions add to the work under a twentieth."""

__all__ = ["Deadline", "Fair", "Fcfs", "Priority", "Tiered"]


class Fcfs:
    """First come, first served."""

    name = "fcfs"
    relegates = lends = False

    def band(self, s: Sequence, view: View) -> Key:
        return ()

    def urgency(self, s: Sequence, view: View) -> Key:
        return ()

    def ties(self, s: Sequence, view: View) -> Key:
        return ()

    def reaches(self, tier: int, worst: int) -> bool:
        return False

    def evicts(self, waiting: Sequence, running: Sequence, view: View, price: Price) -> bool:
        return False


class Priority(Fcfs):
    """Strict tiers, then arrival. A better tier evicts a worse one: a strict order, so never in turn."""

    name = "priority"

    def band(self, s: Sequence, view: View) -> Key:
        return (s.tier,)

    def reaches(self, tier: int, worst: int) -> bool:
        return tier < worst

    def evicts(self, waiting: Sequence, running: Sequence, view: View, price: Price) -> bool:
        return waiting.tier < running.tier


class Fair(Fcfs):
    """Weighted virtual token counters: the tenant that was served least goes first (VTC, OSDI 2024).

    Service of two backlogged tenants of one tier never differs by more than 2·max(w_in·longest prompt, w_out·M), M
    being the tokens that may run at once: only the one behind is admitted, so the one ahead gains what it has running.
    """

    name = "fair"

    def urgency(self, s: Sequence, view: View) -> Key:
        return (view.counter(s),)


class Deadline(Fcfs):
    """Least slack first; those that are late already stand behind those that are not, oldest first."""

    name = "deadline"
    relegates = True

    def urgency(self, s: Sequence, view: View) -> Key:
        if view.its_turn(s):
            return (-1.0,)
        return (1.0 if s.late and not s.computed else 0.0,)

    def ties(self, s: Sequence, view: View) -> Key:
        if (s.late and not s.computed) or view.its_turn(s):
            return ()
        return (round(view.slack(s), 2), -float(view.hit(s)))  # within 10 ms the warmer prefix goes first

    def reaches(self, tier: int, worst: int) -> bool:
        return True

    def evicts(self, waiting: Sequence, running: Sequence, view: View, price: Price) -> bool:
        """Only who was never parked evicts, only for a gain that pays the price: so no two evict each other in turn."""
        if waiting.parks or running.parks or waiting.late:
            return False
        mine = view.slack(waiting)
        gain = view.slack(running) - mine - view.config.min_stay_s
        return mine >= 0.0 and gain > 0.0 and gain > _GAIN * price(running)


class Tiered(Deadline):
    """Deficit-gated least slack: tier floors, strict tiers, tenants within Δ of the least served, then least slack.

    Starvation bound. Let K be `aging_every`, R the rows of a step, and w a request of tier t with n older ones of t
    waiting. Of every K + R admissions of t at least one is the longest-waiting of t: `its_turn` puts it first in t from
    the plan after K others have passed, one plan admits at most R, and who is impatient is not passed for lack of room.
    So w is admitted by the (n + 1)·(K + R)-th admission of t after its arrival. And t itself is served: strict order
    passes over it only while its deficit is below max(quantum, prompt cost), and each weighted token served elsewhere
    while t waits adds floor_t to it; so t's turn comes at least once per (quantum + longest prompt) / floor_t weighted
    tokens served elsewhere. Both are bounds in service, which is what an engine gives; time follows from its speed.
    """

    name = "tiered"
    lends = True

    def band(self, s: Sequence, view: View) -> Key:
        first = view.light(s) or view.its_turn(s)
        return (0.0 if view.by_floor(s) else 1.0, s.tier, 0.0 if first else 1.0)

    def urgency(self, s: Sequence, view: View) -> Key:
        if view.its_turn(s):
            return (-1.0, 0.0)
        return (view.gate(s), 1.0 if s.late and not s.computed else 0.0)

    def reaches(self, tier: int, worst: int) -> bool:
        return tier <= worst

    def evicts(self, waiting: Sequence, running: Sequence, view: View, price: Price) -> bool:
        """A strictly better tier; of equals a light tenant, where that costs no more than its own prompt. (By slack it
        cost a third of the goodput under load.) Who was parked evicts no equal: so no two evict each other in turn."""
        if waiting.tier != running.tier:
            return waiting.tier < running.tier
        cheap = not waiting.parks and view.displaces(waiting, running)
        return cheap and price(running) <= view.cost.prefill_seconds(waiting.known)
