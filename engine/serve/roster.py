"""The requests this engine has: how they enter, what a step did to them, how they leave. No clock, no Redis."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from engine.backends.contract import Backend, Constraining, Extras, Seeing
from engine.protocol.events import Event, Kind
from engine.protocol.messages import Delta, TokenLogprob, encode
from engine.scheduler.contract import Advance, Scheduling
from engine.scheduler.step import StepOutcome, StepPlan
from engine.serve.active import Active, Choice
from engine.serve.link import Arrived, Parcel, Prepared
from engine.text import Tokenizer

__all__ = ["Roster"]


class Roster:
    """Keeps requests and sequences together. What is to be said collects in `parcel` until it is taken."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduling,
        tokenizer: Tokenizer,
        engine: str,
        wall_ms: Callable[[], int],
        tell_prepared: Callable[[Prepared], None],
    ) -> None:
        self.backend, self.scheduler, self.tokenizer = backend, scheduler, tokenizer
        self.engine, self.wall_ms, self.tell_prepared = engine, wall_ms, tell_prepared
        self.requests: dict[str, Active] = {}
        self.sequences: dict[int, tuple[Active, Choice]] = {}
        self.parcel = Parcel()
        self.made: dict[str, int] = {}
        """Output tokens ever sent, by `tier:tenant`."""
        self._unready: set[str] = set()
        """Requests whose constraint is still being compiled, or whose images decoded: they have no sequences yet."""
        self._next_sequence = 0
        self._next_group = 0

    def take_parcel(self) -> Parcel:
        parcel, self.parcel = self.parcel, Parcel()
        return parcel

    @property
    def preparing(self) -> int:
        """Sequences there will be of requests that are not ready."""
        works = (self.requests[request].work for request in self._unready)
        return sum(len(work.prompts) * work.n for work in works)

    def running_by_tier(self) -> dict[str, int]:
        """Open sequences by tier name. Reads copies, so another thread may call it."""
        count: dict[str, int] = {}
        for active in list(self.requests.values()):
            count[active.work.tier] = count.get(active.work.tier, 0) + active.open
        return count

    # Entering ----------------------------------------------------------------------------------------------------

    def admit(self, arrived: Arrived, now: float) -> None:
        """Start a pulled request, or end it at once with the reason why it can't start."""
        work = arrived.work
        if work.request in self.requests:
            return  # recovered from a lost answer that was not lost after all
        active = Active(arrived, now, self.wall_ms())
        self.requests[work.request] = active
        self._event(active, Kind.PULLED, now, queued_s=active.queued_s, epoch=active.epoch)
        card = self.backend.card
        if work.card_hash and work.card_hash != card.hash:
            self.fail(active, "error", "card_mismatch", "the request was made for another model card", now)
        elif work.kind not in card.capabilities:
            self.fail(active, "error", "unsupported", f"this engine does not serve {work.kind} requests", now)
        elif 0 < work.expires_ms <= self.wall_ms():
            self.fail(active, "expired", "queue_timeout", "not started before its deadline", now)
        else:
            self._prepare(active, now)

    def _prepare(self, active: Active, now: float) -> None:
        """Submit, at once or when its constraint is compiled or its images are decoded: no step waits for that."""
        request, grammar = active.work.request, active.work.sampling.grammar
        if active.work.kind == "image":
            self._look(active, now)
        elif not grammar:
            self._submit(active, now)
        elif not isinstance(self.backend, Constraining):
            self.fail(active, "error", "unsupported", "this engine can't constrain its answers", now)
        elif self.backend.prepare(grammar, partial(self._tell_compiled, request)):
            self._submit(active, now)
        else:
            self._unready.add(request)

    def _look(self, active: Active, now: float) -> None:
        work = active.work
        if not isinstance(self.backend, Seeing):
            self.fail(active, "error", "unsupported", "this engine takes no images", now)
        elif len(work.images) != len(work.prompts):
            self.fail(active, "error", "bad_work", "there is not one image for each prompt", now)
        else:
            self._unready.add(work.request)
            wanted = partial(self._unready.__contains__, work.request)
            self.backend.look(work.images, work.tier_rank, partial(self._tell_seen, work.request), wanted)

    def _tell_compiled(self, request: str, reason: str) -> None:
        """Called from any thread, as the next one is."""
        self.tell_prepared(Prepared(request, reason, "invalid_grammar"))

    def _tell_seen(self, request: str, pixels: tuple[bytes, ...], code: str, reason: str) -> None:
        self.tell_prepared(Prepared(request, reason, code, pixels))

    def prepared(self, prepared: Prepared, now: float) -> None:
        """What a request waited for is there, or can't be. The request may be gone by now."""
        request = prepared.request
        if request not in self._unready:
            return
        self._unready.discard(request)
        active = self.requests[request]
        if prepared.reason:
            self.fail(active, "error", prepared.code, prepared.reason, now)
        else:
            active.pixels = prepared.pixels
            self._submit(active, now)

    def _submit(self, active: Active, now: float) -> None:
        active.open_choices(self._next_sequence, self.tokenizer)
        self._next_sequence += len(active.choices)
        self._next_group += 1
        for choice in active.choices.values():
            self.sequences[choice.sequence] = (active, choice)
        try:
            for choice in active.choices.values():
                request = active.request(choice, self._next_group, self.backend.card.eos_ids)
                self.scheduler.submit(request, now)
                self.backend.add(active.input(choice))
        except ValueError as error:
            self.fail(active, "error", "context_length_exceeded", str(error), now)

    # Advancing ---------------------------------------------------------------------------------------------------

    def account(self, plan: StepPlan, outcome: StepOutcome, now: float) -> int:
        """Share the step's time out by tokens, note cache hits, parks and tokens computed again. Before `commit`,
        which ends sequences. Returns the prompt tokens of the step."""
        self._placements(plan, now)
        share_s = outcome.seconds / max(1, plan.tokens)
        share_j = outcome.joules / max(1, plan.tokens)
        prefill = 0
        for s in plan.slices:
            pair = self.sequences.get(s.sequence)
            if pair is None:
                continue
            active, choice = pair
            tokens = s.length + len(s.drafts)
            active.engine_s += share_s * tokens
            active.joules += share_j * tokens
            end = s.start + s.length
            active.wasted += max(0, min(choice.computed, end) - s.start)
            choice.computed = max(choice.computed, end)
            if s.start < len(choice.prompt):
                prefill += s.length
        return prefill

    def _placements(self, plan: StepPlan, now: float) -> None:
        for start in plan.starts:
            if (pair := self.sequences.get(start.sequence)) is None:
                continue
            active, choice = pair
            if choice.computed == 0:
                choice.cached = min(start.cached, len(choice.prompt))
                choice.computed = start.cached
                if active.epoch > 0:  # another engine computed all this before
                    active.wasted += len(choice.prompt) + len(choice.delivered) - start.cached
            self._unpark(active, choice, now)
        for restore in plan.restores:
            if (pair := self.sequences.get(restore.sequence)) is not None:
                self._unpark(*pair, now)
        for park in plan.parks:
            if (pair := self.sequences.get(park.sequence)) is not None:
                active, choice = pair
                choice.parked_s = now
                active.parks += 1
                self._event(active, Kind.PARKED, now, choice=choice.index, swapped=bool(park.host))

    def _unpark(self, active: Active, choice: Choice, now: float) -> None:
        if choice.parked_s is not None:
            active.parked_s += now - choice.parked_s
            choice.parked_s = None
            self._event(active, Kind.RESUMED, now, choice=choice.index)

    def advance(self, advances: Iterable[Advance], now: float) -> None:
        """Turn what `commit` reported into deltas."""
        extras = self.backend.extras()
        for a in advances:
            pair = self.sequences.get(a.sequence)
            if pair is not None:
                self._advance(*pair, a, extras, now)

    def _advance(self, active: Active, choice: Choice, a: Advance, extras: Extras, now: float) -> None:
        start = choice.count
        tokens, text = choice.advance(a.tokens) if a.tokens else (a.tokens, "")
        if tokens or choice.sequence in extras.vectors:
            active.last_s = now
            if active.first_s is None:
                active.first_s = now
                self._event(active, Kind.FIRST_TOKEN, now, cached_tokens=choice.cached)
        stopped_by_us = choice.finish is not None and a.finish is None
        if choice.finish is None and a.finish is not None:
            choice.finish = a.finish
            if a.finish != "error":
                text += choice.rest()
        if not (tokens or text or choice.finish):
            return
        if stopped_by_us:
            self.scheduler.end(choice.sequence, now)
        if choice.finish is not None:
            self._closed(active, choice, a, now)
        logprobs: tuple[TokenLogprob, ...] = ()
        if active.work.sampling.logprobs >= 0 and tokens:
            logprobs = choice.logprobs(extras.logprobs.get(choice.sequence, ())[: len(tokens)])
        delta = Delta(
            active.work.request, choice.index, active.epoch, start, tuple(tokens), text, logprobs, choice.finish,
            code="engine_fault" if choice.finish == "error" else "",
            detail=a.reason if choice.finish == "error" else "",
            vector=_vector(extras.vectors.get(choice.sequence)),
            last=active.open == 0,
            cached_tokens=choice.cached,
            queued_s=active.queued_s if start == 0 else None,
            prefill_s=active.first_s - active.pulled_s if start == 0 and active.first_s is not None else None,
        )  # fmt: skip
        self._say(active, delta)
        if active.open == 0:
            self._leave(active, now)

    def _closed(self, active: Active, choice: Choice, a: Advance, now: float) -> None:
        """One choice has ended. The request's reason is the worst of its choices'."""
        active.open -= 1
        del self.sequences[choice.sequence]
        reason = choice.finish or "stop"
        if active.reason in ("", "stop") or reason == "error":
            active.reason = reason
        if reason == "error":
            active.code, active.detail = "engine_fault", a.reason

    # Leaving -----------------------------------------------------------------------------------------------------

    def cancel(self, request: str, reason: str, now: float) -> bool:
        """End a request from outside. Nobody reads its stream any more, but a last delta says that it is over."""
        active = self.requests.get(request)
        if active is None:
            return False
        delta = Delta(request, 0, active.epoch, 0, (), "", finish="abort", detail=reason, last=True)
        self._end(active, "abort", "cancelled", reason, delta, now)
        return True

    def fail(self, active: Active, reason: str, code: str, detail: str, now: float) -> None:
        """End a request with an error for its client."""
        self._end(active, reason, code, detail, active.failed(code, detail), now)

    def forget(self, active: Active, now: float) -> None:
        """Stop a request that belongs to somebody else by now: no delta, no Final."""
        self._stop_sequences(active, now)
        del self.requests[active.work.request]
        self._unready.discard(active.work.request)

    def _end(self, active: Active, reason: str, code: str, detail: str, delta: Delta, now: float) -> None:
        self._stop_sequences(active, now)
        active.reason, active.code, active.detail = reason, code, detail
        self._say(active, delta)
        self._leave(active, now)

    def _stop_sequences(self, active: Active, now: float) -> None:
        for sequence in active.choices:
            if self.sequences.pop(sequence, None) is not None:
                self.scheduler.end(sequence, now)
        active.open = 0

    def _leave(self, active: Active, now: float) -> None:
        work = active.work
        del self.requests[work.request]
        self._unready.discard(work.request)
        final = active.final(self.engine, self.wall_ms())
        if final.completion_tokens:
            self._event(active, Kind.LAST_TOKEN, now, tokens=final.completion_tokens)
        self._event(
            active, Kind.FINISHED, now,
            reason=final.reason, code=final.code, prompt_tokens=final.prompt_tokens, cached_tokens=final.cached_tokens,
            completion_tokens=final.completion_tokens, wasted_tokens=final.wasted_tokens, engine_s=final.engine_s,
        )  # fmt: skip
        self.parcel.finals.append((work.request, active.epoch, active.era, encode(final)))

    def _say(self, active: Active, delta: Delta) -> None:
        if delta.tokens:
            account = f"{active.work.tier}:{active.work.tenant}"
            self.made[account] = self.made.get(account, 0) + len(delta.tokens)
        self.parcel.deltas.setdefault(active.work.reply_to, []).append(delta)
        if active.work.resumable:
            self.parcel.kept.setdefault(active.work.request, []).append(delta)

    def _event(self, active: Active, kind: Kind, now: float, **attributes: str | int | float | bool | None) -> None:
        work = active.work
        since_s, active.event_s = now - active.event_s, now
        self.parcel.events.append(
            Event(
                work.request, kind.value, self.wall_ms(), since_s, self.engine,
                work.tenant, work.tier, work.pool, attributes,
            )
        )  # fmt: skip

    def charge(self, charges: Iterable[tuple[int, str, float]], tiers: Mapping[int, str]) -> None:
        """Take over the scheduler's charges, under the tiers' names."""
        for rank, tenant, cost in charges:
            account = (tiers.get(rank, str(rank)), tenant)
            self.parcel.charges[account] = self.parcel.charges.get(account, 0.0) + cost


def _vector(values: list[float] | None) -> bytes:
    """Little-endian float32, as `Delta.vector` wants it."""
    return b"" if values is None else struct.pack(f"<{len(values)}f", *values)
