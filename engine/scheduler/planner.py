"""One step, decided on paper: decodes first, then whoever has to catch up, in the policy's order.

A planner lives for one plan. It reads the scheduler's state and spends from a forked ledger; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from engine.kv.table import blocks_for
from engine.scheduler.contract import Accounts
from engine.scheduler.cost import Load
from engine.scheduler.forecast import Outlook
from engine.scheduler.ledger import Ledger
from engine.scheduler.policies.base import Key, Policy, View
from engine.scheduler.preemption import TIER, Victims, cheapest
from engine.scheduler.sequence import Sequence, State
from engine.scheduler.step import BlockCopy, Drop, Extend, Park, Restore, Slice, Start, StepPlan
from engine.scheduler.window import BatchWindow, buckets

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler

__all__ = ["Planner"]

Candidate = tuple[Key, int, Sequence, Iterator[Sequence] | None, int]
"""Key; arrival number; who; what waits behind it; what was asked for the key: band and kind, urgency (1), ties (2)."""

_HEAVY, _EASY, _LENT = 0.4, 2 / 3, 1.5
"""Longest step with prefill of who has a second to spare (of a heavy tenant, or not), and of a light one with few rows,
as parts of what others are allowed. So streams get ahead of their due, which is lent, and newcomers wait less. A heavy
tenant that is alone is no other's neighbour."""
_TRIES = 8
"""Candidates that may fail to fit before the plan stops looking: bounds plan time under memory pressure."""


class Planner:
    def __init__(self, scheduler: Scheduler, policy: Policy, now: float, accounts: Accounts | None) -> None:
        self._s, self._policy, self._config = scheduler, policy, scheduler.config
        config = scheduler.config
        facts = (now, config, scheduler.cost, scheduler.book, scheduler.backlog, self._hit, scheduler.running)
        self._view, self._opening = View(*facts), View(*facts)  # the second one stays as it was before any charge
        self._victims = Victims(scheduler, self._view)
        self._now, self._size = now, config.block_size
        self._ledger = Ledger(
            scheduler.device, scheduler.host, config.max_rows - len(scheduler.running), config.max_step_tokens
        )
        self._slices: dict[int, Slice] = {}
        self._behind: list[Sequence] = []  # running, with more than one token to compute
        self._starts: list[Start] = []
        self._extends: dict[int, Extend] = {}
        self._copies: list[BlockCopy] = []
        self._parks: dict[int, Park] = {}
        self._restores: list[Restore] = []
        self._outlooks: dict[int, Outlook] = {}
        self._fresh_groups: set[int] = set()
        self._evicted: list[tuple[float, ...]] = []  # bands of the sequences this plan parks
        self._futile: set[tuple[float, ...]] = set()  # bands of newcomers for whom no victims were found
        self._pressed = False
        self._prefilled = False
        self._spare_s, self._easy_s, self._lent_s = inf, (0.0, 0.0), 0.0
        self._rest_s = 0.0  # of the step that is not prefill
        self._ahead: list[Sequence] = []  # running ones that make way for a prompt
        self._bucket: range | None = None
        self._window_open = True
        self._context = 0

    def build(self) -> StepPlan:
        self._relieve()
        self._spare(self._decode())
        self._open_window()
        self._catch_up()
        if not self._prefilled:
            self._go_on()
        return StepPlan(
            step=self._s.step,
            slices=tuple(self._slices.values()),
            starts=tuple(self._starts),
            extends=tuple(self._extends.values()),
            copies=tuple(self._copies),
            parks=tuple(self._parks.values()),
            restores=tuple(self._restores),
            drops=tuple([Drop(n) for n in self._s.dropping]),
        )

    # Decodes -----------------------------------------------------------------------------------------------------

    def _relieve(self) -> None:
        """Memory runs out: park the least deserving until what the running ones need in two steps is there.

        Two steps, because blocks that a swap frees can be spent only in the next one.
        """
        size, ledger, running = self._size, self._ledger, self._s.running
        short = {n: k for n, s in running.items() if (k := s.known // size + 1 - len(s.table.blocks)) > 0}
        ledger.promised = sum(running[n].lacks(size) for n in short)
        if sum(short.values()) <= ledger.device.available:
            return
        self._pressed = True
        keep = min(running.values(), key=lambda s: (self._policy.band(s, self._view), s.number))
        for victim in self._victims.under_pressure(keep):
            if sum(short.values()) <= ledger.device.available + ledger.coming:
                return
            short.pop(victim.number, None)
            self._park(victim)

    def _decode(self) -> dict[float, float]:
        """A row for every running sequence that is one token behind, but for those that make way for a light tenant's
        prompt: what they are ahead of their due is lent to it. When the first of them is due, by TPOT."""
        borrower, dues = self._borrower(), {inf: inf}
        for number, s in self._s.running.items():
            if number in self._parks:
                continue
            if s.known - s.computed != 1 or not s.generated:
                if s.prefilling:
                    self._behind.append(s)
                continue
            if s.due_s < dues.get(s.tpot_s, inf):
                dues[s.tpot_s] = s.due_s
            if borrower and s.due_s - self._now > 2.0 * s.tpot_s and self._view.displaces(borrower, s):
                self._ahead.append(s)
            else:
                self._advance(s)
        if self._ahead and not self._worth(self._ahead):
            self._go_on()
        return dues

    def _worth(self, ahead: list[Sequence]) -> bool:
        """Do they take half as much of a step as there is to one without them? They will need a step more for it."""
        seconds = self._s.cost.seconds
        return seconds(Load(0, len(ahead), sum(s.computed + 1 for s in ahead))) > 1.5 * seconds(Load(0, 0, 0))

    def _go_on(self) -> None:
        """Those that were to make way don't."""
        for s in self._ahead:
            if s.number not in self._parks:
                self._advance(s)
        self._ahead = []

    def _borrower(self) -> Sequence | None:
        """A light tenant's sequence with a prompt to compute."""
        if not self._policy.lends:
            return None
        running = (s for s in self._s.running.values() if s.request.light and s.prefilling)
        waiting = (s for s in self._s.backlog if s.request.light)
        return next(filter(self._view.light, chain(running, waiting)), None)

    def _advance(self, s: Sequence) -> None:
        """A row for its next token, if there is a block for it."""
        start = s.computed
        if not start % self._size and start == len(s.table.blocks) * self._size:
            if not self._ledger.device.available:
                return
            self._extends[s.number] = Extend(s.number, self._ledger.take(1))
        self._slices[s.number] = Slice(s.number, start, 1, True)
        self._context += start + 1
        self._ledger.tokens -= 1

    def _spare(self, dues: dict[float, float]) -> None:
        """Seconds left for prefill in this step: what keeps every decode within its TPOT, by its least slack.

        Where the decodes alone can't keep it, prefill still gets a fifth of the time: else it would all but stop.
        """
        if len(dues) == 1 or not self._config.adaptive_chunk:
            return
        decodes_s = self._rest_s = self._s.cost.seconds(Load(0, len(self._slices), self._context))
        heavy, easy, most, lent = (
            max(
                min(max(min(0.5, part) * tpot, min(due - self._now, part * tpot)) for tpot, due in dues.items()),
                1.25 * decodes_s,
            )
            for part in (_HEAVY if self._s.book.company(self._now) else _EASY, _EASY, 1.0, _LENT)
        )
        self._spare_s = most - decodes_s
        if self._policy.lends and most < inf:
            self._easy_s, self._lent_s = (heavy - most, easy - most), lent - most

    def _chunk(self, s: Sequence, start: int) -> int:
        """Most tokens the next prefill slice may have; the first of a step always gets `min_chunk`."""
        if self._spare_s == inf:
            return self._ledger.tokens
        spare_s = self._spare_s
        if self._lent_s:
            easy_s = self._easy_s[s.request.light] if self._view.slack(s) > 1.0 else 0.0
            spare_s += self._lent_s if self._view.light(s) else easy_s
        least = 0 if self._prefilled else self._config.min_chunk
        return min(self._ledger.tokens, max(least, self._s.cost.largest_prefill(spare_s, start)))

    # Catching up -------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Prefilling, parked and waiting sequences in one order; within a band in that order of kinds.

        A parked sequence that does not fit holds back the rest. A waiting one that does not fit lets others pass
        until its patience is over; then nobody passes it, so what ends makes room for it.
        """
        heap = self._candidates()
        tries = 0
        while heap and self._ledger.tokens > 0 and (self._spare_s + self._lent_s > 0.0 or not self._prefilled):
            _, _, s, stream, asked = first = heap[0]
            if asked < 2:
                heapreplace(heap, self._ask(first))
                continue
            heappop(heap)
            if s.state is State.RUNNING:
                if s.number not in self._parks:  # a newcomer before it in the order may have evicted it
                    blocks = self._slice(s, s.computed, len(s.table.blocks))
                    if blocks:
                        self._extends[s.number] = Extend(s.number, blocks)
                continue
            if self._behind_the_evicted(s):
                continue
            if s.state is State.WAITING and self._chunk(s, 0) < 1:
                break  # to start it without computing would only hold memory, and put it before better ones that come
            if not self._held_back(s) and self._admit(s) is False:
                tries += 1
                impatient = self._now - s.submitted_s > self._config.patience_s
                if s.state is State.PARKED or self._parks or tries >= _TRIES or impatient:
                    heap = sorted(c for c in heap if c[2].state is State.RUNNING)
                    continue
            following = next(stream, None) if stream else None
            if following is not None:
                heappush(heap, (self._key(following, 2), following.number, following, stream, 1))

    def _open_window(self) -> None:
        """May one-shot work start now, and if the backend pads: which lengths go together (the most urgent one's)."""
        config = self._config
        if not (config.window_s or config.padded):
            return
        waiting = [s for s in self._s.backlog if s.one_shot]
        if not waiting:
            return
        self._window_open = BatchWindow(config, self._s.cost, self._s.rate).open(waiting, self._now)
        if config.padded:
            order = [(self._key(s, 2), self._policy.ties(s, self._view), s.number, s.known) for s in waiting]
            first = min(order)[-1]
            fill = config.window_count or config.max_rows
            made = buckets([s.known for s in waiting], config.context_length, fill)
            self._bucket = next(bucket for bucket in made if first in bucket)

    def _held_back(self, s: Sequence) -> bool:
        """One-shot work outside the window or of another length."""
        return s.one_shot and not (self._window_open and (self._bucket is None or s.known in self._bucket))

    def _candidates(self) -> list[Candidate]:
        """A heap of all that may catch up now, by band and kind."""
        band, view = self._policy.band, self._view
        heap: list[Candidate] = [((*band(s, view), 0), s.number, s, None, 0) for s in self._behind]
        if not self._pressed:
            tiers = self._hopeful()
            heap += [((*band(s, view), 1), s.number, s, None, 0) for s in self._s.parked.values() if s.tier in tiers]
            waiting = [(next(stream), stream) for stream in self._s.backlog.heads(tiers)]
            heap += [((*band(s, view), 2), s.number, s, stream, 0) for s, stream in waiting]
        heapify(heap)
        return heap

    def _ask(self, candidate: Candidate) -> Candidate:
        """The rest of the key is asked of those alone who come first by what is known: a longer key stays behind."""
        key, number, s, stream, asked = candidate
        more = self._policy.ties(s, self._view) if asked else self._policy.urgency(s, self._opening)
        return (*key, *more), number, s, stream, asked + 1

    def _hopeful(self) -> set[int]:
        """Tiers with a row, or with anyone they could evict: spares a full engine the keys of who can only wait."""
        tiers = {*self._s.backlog.tiers(), *map(TIER, self._s.parked.values())}
        if self._ledger.rows > 0:
            return tiers
        reaches, victims = self._policy.reaches, self._victims
        if not self._config.preempt or not any(reaches(tier, victims.worst) for tier in tiers):
            return set()
        worst = max(map(TIER, self._s.running.values()))
        return {tier for tier in tiers if reaches(tier, worst)}

    def _key(self, s: Sequence, kind: int) -> Key:
        return (*self._policy.band(s, self._view), kind, *self._policy.urgency(s, self._view))

    def _behind_the_evicted(self, s: Sequence) -> bool:
        """Who was parked in this very plan comes before newcomers of its class, from the next plan on."""
        return bool(self._evicted) and self._policy.band(s, self._view) >= min(self._evicted)

    def _slice(self, s: Sequence, start: int, held: int) -> tuple[int, ...]:
        """As much of the sequence as the chunk allows. Blocks for it, those for what comes before it included."""
        todo = s.known - start
        room = self._chunk(s, start)
        length = todo if self._whole(s) and not (self._prefilled and todo > room) else min(todo, room)
        if not s.one_shot:
            length = min(length, (held + self._ledger.device.available) * self._size - start)
        if length > 0:
            self._prefilled = True
            self._slices[s.number] = Slice(s.number, start, length, length == todo)
            seconds = self._s.cost.prefill_seconds(length, start)
            self._spare_s -= seconds
            self._ledger.tokens -= length
            if length == todo and self._lent_s and self._view.light(s):
                self._rest_s -= seconds
                if self._rest_s < 0.0:  # its token would wait for others' prompts longer than a step of their own adds
                    self._spare_s = -inf
        lacks = 0 if s.one_shot else blocks_for(start + max(0, length), self._size) - held
        return self._ledger.take(lacks) if lacks > 0 else ()

    def _whole(self, s: Sequence) -> bool:
        return s.one_shot or self._config.whole_prefill

    def _admit(self, s: Sequence) -> bool | None:
        """Start or restore a sequence, evicting for it if the policy allows. None: not yet, others may pass."""
        leader = self._s.leader(s)
        if (leader is not None and leader.computed < len(s.request.prompt)) or s.request.group in self._fresh_groups:
            return None  # its sibling's prompt will be shared as soon as it is computed
        path = self._path(s)
        if self._whole(s) and self._prefilled and s.known - len(path) * self._size > self._chunk(s, 0):
            return None
        size = self._size
        need = 0 if s.one_shot else blocks_for(s.known, size) - len(path)
        if leader is not None:
            shared = (len(s.request.prompt) - 1) // size
            need, path = blocks_for(s.known, size) - shared, leader.table.blocks[:shared]
        if not self._make_room(s, need, path):
            return False
        self._ledger.rows -= 1
        if s.state is State.WAITING:
            self._view.charge(s)
        self._ledger.device.pin(path)
        self._ledger.promised += need
        if s.host:
            self._restores.append(Restore(s.number, s.host, self._slice(s, s.computed, 0), s.computed))
        elif leader is not None:
            self._copy_on_write(s, leader, path)
        else:
            if not s.one_shot:
                self._fresh_groups.add(s.request.group)
            cached = len(path) * size
            self._starts.append(Start(s.number, (*path, *self._slice(s, cached, len(path))), cached))
        return True

    def _copy_on_write(self, s: Sequence, leader: Sequence, path: list[int]) -> None:
        """A sibling of n > 1: whole prompt blocks are shared, the one both go on writing is copied."""
        index, prompt = len(path), len(s.request.prompt)
        blocks = self._slice(s, prompt - 1, index)
        if prompt - 1 == index * self._size:
            self._starts.append(Start(s.number, (*path, *blocks), prompt - 1))
        else:
            source = leader.table.blocks[index]
            self._starts.append(Start(s.number, (*path, source, *blocks[1:]), prompt - 1))
            self._copies.append(BlockCopy(s.number, index, source, blocks[0]))

    def _path(self, s: Sequence) -> list[int]:
        """Cached blocks the sequence can start on; at least its last token is always computed."""
        if s.host or s.one_shot or not self._config.prefix_cache:
            return []
        taken, path = self._ledger.device.taken, []
        for node in self._s.device.index.match(s.request.salt, s.tokens, s.known - 1):
            if node.block in taken:
                break
            path.append(node.block)
        return path

    def _hit(self, s: Sequence) -> int:
        """Cached tokens of a waiting sequence, kept until the index changes."""
        if s.one_shot or s.host or not self._config.prefix_cache:
            return 0
        index, match = self._s.device.index, s.match
        if match is None or match[0] != index.version or match[1] != s.known:
            nodes = index.match(s.request.salt, s.tokens, s.known - 1)
            match = s.match = (index.version, s.known, len(nodes) * self._size)
        return match[2]

    # Room --------------------------------------------------------------------------------------------------------

    def _make_room(self, s: Sequence, need: int, path: list[int]) -> bool:
        """A row, the blocks of the whole prompt, and a forecast of output that fits; or victims for them."""
        device, ledger = self._ledger.device, self._ledger
        need += device.unpinned(path)
        fits = need <= ledger.free
        alone = not self._slices and not self._parks and not self._s.running and not self._starts
        if ledger.rows > 0 and fits and (alone or self._outlook_fits(s, need * self._size)):
            return True
        if not self._config.preempt:
            return False
        band = self._policy.band(s, self._view)
        if band in self._futile:
            return False
        rows = 1 - ledger.rows
        blocks = need - ledger.free - ledger.coming
        chosen = self._victims.for_newcomer(s, self._policy, self._parks, rows, blocks)
        if not chosen:
            self._futile.add(band)
        for victim in chosen:
            self._park(victim)
        return bool(chosen) and ledger.rows > 0 and need <= ledger.free

    def _outlook_fits(self, s: Sequence, held: int) -> bool:
        """Is there room for its output too, beside the growth of those it could not evict later?"""
        if not self._config.forecast_output or s.one_shot:
            return True
        outlook = self._outlooks.get(s.tier) or self._outlook(s)
        expected = self._s.remaining(s)
        if not outlook.fits(expected, held):
            return False
        for tier, other in self._outlooks.items():
            if tier >= s.tier:
                other.add(expected, held)
        return True

    def _outlook(self, s: Sequence) -> Outlook:
        scheduler, view = self._s, self._view
        running = [r for r in scheduler.running.values() if r.number not in self._parks and not r.one_shot]
        stay = running
        if self._config.preempt:
            stay = [r for r in running if r.tier <= s.tier or not self._policy.evicts(s, r, view, lambda _: 0.0)]
        pool, size = scheduler.device, self._size
        shared = max(0, pool.live * size - sum(min(r.known, len(r.table.blocks) * size) - r.cached for r in running))
        members = ((scheduler.remaining(r), r.known - r.cached) for r in stay)
        self._outlooks[s.tier] = Outlook(members, shared, pool.size * self._size)
        return self._outlooks[s.tier]

    def _park(self, victim: Sequence) -> None:
        """Take a running sequence out of this step; what the plan had in mind for it is undone on paper."""
        number, ledger = victim.number, self._ledger
        piece = self._slices.pop(number, None)
        if piece is not None:
            ledger.tokens += piece.length
        ledger.promised -= victim.lacks(self._size)
        extend = self._extends.pop(number, None)
        if extend is not None:
            ledger.device.undo(extend.blocks)
            ledger.promised += len(extend.blocks)
        self._outlooks.clear()
        self._view.park(victim)
        self._evicted.append(self._policy.band(victim, self._view))
        ledger.rows += 1
        count = blocks_for(victim.computed, self._size)
        shared = victim.table.shared(self._s.device.refs)
        if cheapest(self._s, victim, shared, ledger.host.available)[0]:
            device = tuple(victim.table.blocks[:count])
            self._parks[number] = Park(number, device, ledger.host.take(count), victim.computed)
            ledger.coming += len(victim.table.blocks) - shared
        else:
            self._parks[number] = Park(number, (), (), 0)
            ledger.device.give(victim.table.blocks)
