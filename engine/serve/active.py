"""One request while this engine has it: its choices, what they said so far, and the facts its Final is made of."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.contract import SequenceInput, TokenInfo
from engine.protocol.messages import Delta, Final, Timeline, TokenLogprob, Work
from engine.scheduler.contract import Request
from engine.serve.link import Arrived
from engine.text import Detokenizer, StopScanner, Tokenizer

__all__ = ["Active", "Choice"]


class Choice:
    """One sequence of a request. Its text is a pure function of its token ids, wherever they were cut."""

    def __init__(self, sequence: int, index: int, prompt: tuple[int, ...], work: Work, tokenizer: Tokenizer) -> None:
        self.sequence, self.index, self.prompt = sequence, index, prompt
        self.tokenizer = tokenizer
        self.stops = bool(work.sampling.stop)
        self.delivered = work.delivered[index] if index < len(work.delivered) else ()
        self.count = len(self.delivered)
        self.finish: str | None = None
        self.cached = 0
        self.computed = 0
        """Highest position computed so far; computing below it again is waste."""
        self.parked_s: float | None = None
        """When it was parked; None while it is not."""
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(work.sampling.stop)
        self._scanner.push(self._detokenizer.push(self.delivered))  # brings both to where the other engine left off

    def advance(self, tokens: Sequence[int]) -> tuple[Sequence[int], str]:
        """Take new tokens: those that count (up to a completed stop string) and the text they release."""
        if not self.stops:
            self.count += len(tokens)
            return tokens, self._detokenizer.push(tokens)
        text = ""
        for taken, token in enumerate(tokens, start=1):
            released, hit = self._scanner.push(self._detokenizer.push((token,)))
            text += released
            if hit is not None:
                self.finish = "stop"
                self.count += taken
                return tokens[:taken], text
        self.count += len(tokens)
        return tokens, text

    def rest(self) -> str:
        """The text that was held back, when the choice ended by itself."""
        text, hit = self._scanner.push(self._detokenizer.flush())
        if hit is not None:
            self.finish = "stop"
            return text
        return text + self._scanner.flush()

    def logprobs(self, infos: Sequence[TokenInfo]) -> tuple[TokenLogprob, ...]:
        """On the wire's form, with the bytes of each token."""
        bytes_of = self.tokenizer.token_bytes
        return tuple(
            TokenLogprob(
                info.token,
                bytes_of(info.token),
                info.logprob,
                tuple((t.token, bytes_of(t.token), t.logprob) for t in info.top),
            )
            for info in infos
        )


class Active:
    """A pulled request until its Final is handed to the sender."""

    def __init__(self, arrived: Arrived, now: float, wall_ms: int) -> None:
        self.work, self.epoch, self.era = arrived.work, arrived.epoch, arrived.era
        self.by_floor, self.light = arrived.by_floor, arrived.light
        self.pulled_s = now
        self.queued_s = max(0.0, (wall_ms - self.work.arrival_ms) / 1000)
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.event_s = now
        """Time of the last event, for the next one's duration."""
        self.choices: dict[int, Choice] = {}
        self.open = 0
        self.engine_s = self.joules = self.parked_s = 0.0
        self.wasted = self.parks = 0
        self.reason = self.code = self.detail = ""
        self.pixels: tuple[bytes, ...] = ()
        """What the backend made of the work's images, by prompt."""

    def open_choices(self, first_sequence: int, tokenizer: Tokenizer) -> None:
        """One sequence per prompt and choice, numbered from `first_sequence` on."""
        sequence = first_sequence
        for p, prompt in enumerate(self.work.prompts):
            for i in range(self.work.n):
                self.choices[sequence] = Choice(sequence, p * self.work.n + i, prompt, self.work, tokenizer)
                sequence += 1
        self.open = len(self.choices)

    def input(self, choice: Choice) -> SequenceInput:
        """What the backend is told."""
        return SequenceInput(
            sequence=choice.sequence,
            tokens=choice.prompt + choice.delivered,
            prompt_length=len(choice.prompt),
            sampling=self.work.sampling,
            seed=self.work.seed,
            choice=choice.index,
            pixels=self.pixels[choice.index // self.work.n] if self.pixels else b"",
        )

    def request(self, choice: Choice, group: int, eos: Sequence[int]) -> Request:
        """What the scheduler is told."""
        work, sampling = self.work, self.work.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))
        arrival_s = self.pulled_s - self.queued_s
        one_shot = work.kind in ("embedding", "image")
        return Request(
            sequence=choice.sequence,
            group=group,
            tier=work.tier_rank,
            tenant=work.tenant,
            prompt=choice.prompt + choice.delivered,
            max_new=0 if one_shot else max(1, sampling.max_tokens - len(choice.delivered)),
            arrival_s=arrival_s,
            ttft_deadline_s=arrival_s + work.ttft_target_ms / 1000,
            tpot_s=work.tpot_target_ms / 1000,
            ends=ends,
            salt=work.salt,
            min_new=max(0, sampling.min_tokens - len(choice.delivered)),
            weight=work.weight,
            cost_tokens=len(choice.prompt) if one_shot else 0,
            by_floor=self.by_floor,
            light=self.light,
        )

    def failed(self, code: str, detail: str) -> Delta:
        """The last delta of the whole request: an error."""
        return Delta(self.work.request, 0, self.epoch, 0, (), "", finish="error", code=code, detail=detail, last=True)

    def final(self, engine: str, at_ms: int) -> Final:
        """The usage record. A prompt is counted once, however many choices were made of it, and as far as it got."""
        n, choices = self.work.n, self.choices.values()
        firsts = [c for c in choices if c.index % n == 0]
        reached = {c.index // n: 0 for c in firsts}
        for c in choices:
            reached[c.index // n] = max(reached[c.index // n], min(len(c.prompt), c.computed))
        gap = None if self.first_s is None or self.last_s is None else self.last_s - self.first_s
        return Final(
            request=self.work.request,
            epoch=self.epoch,
            pool=self.work.pool,
            tier=self.work.tier,
            tenant=self.work.tenant,
            engine=engine,
            reason=self.reason,
            prompt_tokens=sum(reached.values()),
            cached_tokens=sum(c.cached for c in firsts),
            completion_tokens=sum(c.count for c in self.choices.values()),
            wasted_tokens=self.wasted,
            engine_s=self.engine_s,
            joules=self.joules,
            timeline=Timeline(
                queued_s=self.queued_s,
                prefill_s=None if self.first_s is None else self.first_s - self.pulled_s,
                decode_s=gap,
                parked_s=self.parked_s,
                parks=self.parks,
            ),
            at_ms=at_ms,
            code=self.code,
            detail=self.detail,
        )
