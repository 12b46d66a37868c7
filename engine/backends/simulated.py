"""An engine without a model: it speaks the real protocol at programmable speed, with programmable text and failures.

For trying Sluice out, for load tests of everything around the engine, and for fault tests. A token is one byte, so the
text is exact and a token costs next to nothing. Each token is a pure function of (seed, choice, position) and the
prompt, so a request resumed on another engine goes on with the same text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from urllib.parse import unquote

from engine.backends.contract import Capacity, Extras, Logprob, SequenceInput, TokenInfo
from engine.protocol.messages import PROTOCOL_VERSION, ModelCard
from engine.scheduler.step import Sample, Slice, StepOutcome, StepPlan

__all__ = ["Simulated", "SimulatedCrash", "Simulation", "create"]

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END = 256 + _SPECIALS.index("<|im_end|>")
_WORDS = (
    "water", "stone", "light", "river", "cloud", "field", "grain", "steel", "paper", "glass", "north", "south",
    "table", "chair", "sound", "music", "green", "white", "black", "brown", "quiet", "early", "later", "again",
    "round", "sharp", "small", "great", "story", "house", "plant", "ocean",
)  # fmt: skip
"""All five letters long: with the space, the word at an output position is found without counting."""


class SimulatedCrash(RuntimeError):
    """The programmed crash of the whole engine."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `--simulate key=value,…` may set. Rates of 0 mean no delay; counts of 0 mean never."""

    decode_tps: float = 50.0
    """Output tokens a second of each sequence (the step time is its inverse)."""
    prefill_tps: float = 4000.0
    """Prompt tokens a second of the whole engine."""
    text: str = "words"
    """"words", "echo" (the prompt again), or the text itself; a comma in it is written %2C."""
    tokens: int = 0
    """The answer ends by itself after so many tokens (0: at max_tokens, or at the end of a given text)."""
    fail_after: int = 0
    """The sequence fails alone after so many output tokens."""
    crash_after: int = 0
    """The whole engine crashes when a sequence reaches so many output tokens."""
    stall_after: int = 0
    stall_s: float = 0.0
    """One step takes `stall_s` longer when a sequence reaches `stall_after` output tokens."""
    on: str = ""
    """Only prompts that contain this text fail, crash or stall."""
    tools: int = 0
    """1: the card says that tools can be called (the text decides whether one is)."""
    rows: int = 256
    step_tokens: int = 2048
    kv_tokens: int = 1_048_576
    context: int = 32_768

    @classmethod
    def parse(cls, text: str) -> Simulation:
        """From `key=value,…`. Raises ValueError that names what is wrong."""
        known = {f.name: type(getattr(cls(), f.name)) for f in fields(cls)}
        values: dict[str, str | int | float] = {}
        for part in filter(None, text.split(",")):
            key, separator, value = part.partition("=")
            if not separator or key.strip() not in known:
                raise ValueError(f"--simulate: {part!r} is not key=value with a key of {', '.join(known)}")
            kind = known[key.strip()]
            try:
                values[key.strip()] = kind(unquote(value))
            except ValueError:
                raise ValueError(f"--simulate: {key.strip()} must be {kind.__name__}, not {value!r}") from None
            if not isinstance(values[key.strip()], str) and float(values[key.strip()]) < 0:
                raise ValueError(f"--simulate: {key.strip()} can't be negative")
        return cls(**values)  # type: ignore[arg-type]


class _Sequence:
    """The answer of one sequence, position by position."""

    __slots__ = ("answer", "computed", "known", "length", "made", "marked", "offset")

    def __init__(self, given: SequenceInput, simulation: Simulation) -> None:
        self.made = len(given.tokens) - given.prompt_length
        self.known = len(given.tokens)
        prompt = bytes(t for t in given.tokens[: given.prompt_length] if t < 256)
        self.marked = simulation.on.encode() in prompt
        self.offset = int.from_bytes(
            hashlib.blake2b(f"{given.seed}:{given.choice}".encode(), digest_size=4).digest(), "big"
        )
        self.answer: bytes | None = None
        if simulation.text == "echo":
            self.answer = prompt
        elif simulation.text != "words":
            self.answer = simulation.text.encode()
        self.length = simulation.tokens or (len(self.answer) if self.answer is not None else 0)

    def next(self) -> int:
        """The token after `made` output tokens."""
        i = self.made
        self.made += 1
        if self.length and i >= self.length:
            return _END
        if self.answer is not None:
            return self.answer[i % len(self.answer)] if self.answer else _END
        word = _WORDS[(self.offset + (i // 6) * 7 + (i // 6) ** 2) % len(_WORDS)]
        return ord(" ") if i % 6 == 5 else ord(word[i % 6])


class Simulated:
    """Implements `contract.Backend`. `sleep` may be replaced, to run in virtual time."""

    def __init__(self, model: str, simulation: Simulation, sleep: Callable[[float], None] = time.sleep) -> None:
        self.simulation = simulation
        self.card = _card(model, simulation)
        self.capacity = Capacity(
            block_size=16,
            device_blocks=max(1, simulation.kv_tokens // 16),
            host_blocks=0,
            max_rows=simulation.rows,
            max_step_tokens=max(simulation.rows, simulation.step_tokens),
            context_length=simulation.context,
        )
        self._sleep = sleep
        self._sequences: dict[int, _Sequence] = {}
        self._inputs: dict[int, SequenceInput] = {}
        self._extras = Extras()

    def add(self, sequence: SequenceInput) -> None:
        self._sequences[sequence.sequence] = _Sequence(sequence, self.simulation)
        if sequence.sampling.logprobs >= 0:
            self._inputs[sequence.sequence] = sequence

    def execute(self, plan: StepPlan) -> StepOutcome:
        started = time.perf_counter()
        self._extras = Extras()
        for drop in plan.drops:
            self._sequences.pop(drop.sequence, None)
            self._inputs.pop(drop.sequence, None)
        samples: list[Sample] = []
        faults: list[tuple[int, str]] = []
        for s in plan.slices:
            sequence = self._sequences[s.sequence]
            if s.samples:
                self._sample(s.sequence, sequence, samples, faults)
        delay = self._delay(plan.slices) - (time.perf_counter() - started)
        if delay > 0:
            self._sleep(delay)
        seconds = time.perf_counter() - started
        return StepOutcome(step=plan.step, samples=tuple(samples), seconds=seconds, faults=tuple(faults))

    def _sample(self, number: int, sequence: _Sequence, samples: list[Sample], faults: list[tuple[int, str]]) -> None:
        how, made = self.simulation, sequence.made
        if sequence.marked:
            if how.crash_after and made >= how.crash_after:
                raise SimulatedCrash(f"programmed to crash after {how.crash_after} tokens")
            if how.fail_after and made >= how.fail_after:
                faults.append((number, f"programmed to fail after {how.fail_after} tokens"))
                return
            if how.stall_after and made == how.stall_after:
                self._sleep(how.stall_s)
        token = sequence.next()
        samples.append(Sample(number, (token,)))
        if (given := self._inputs.get(number)) is not None:
            self._extras.logprobs[number] = (_info(token, given.sampling.logprobs),)

    def _delay(self, slices: tuple[Slice, ...]) -> float:
        """Seconds the step should take: the decode step's, plus its prompt tokens at the prefill rate."""
        how = self.simulation
        seconds = 1 / how.decode_tps if how.decode_tps and any(s.samples for s in slices) else 0.0
        prompt = sum(s.length for s in slices if s.length > 1)
        return seconds + (prompt / how.prefill_tps if how.prefill_tps else 0.0)

    def extras(self) -> Extras:
        return self._extras

    def fingerprint(self) -> str:
        return f"simulated:{self.card.hash}"

    def close(self) -> None:
        self._sequences.clear()


def _info(token: int, alternatives: int) -> TokenInfo:
    """A sure token (probability 0.9) and, below it, its neighbours in the alphabet."""
    others = tuple(Logprob((token + i) % 256, -2.303 - i) for i in range(1, alternatives))
    top = (Logprob(token, -0.105), *others) if alternatives else ()
    return TokenInfo(token, -0.105, top)


def _tokenizer() -> str:
    """A byte-level tokenizer without merges, in the JSON of the `tokenizers` library: token id = byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    vocabulary = {shifted.get(b, chr(b)): b for b in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                    "normalized": False, "special": True,
                }
                for i, name in enumerate(_SPECIALS)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "vocab": vocabulary, "merges": [],
            },
        }
    )  # fmt: skip


def _card(model: str, simulation: Simulation) -> ModelCard:
    tokenizer = _tokenizer()
    capabilities = ("chat", "completion", "logprobs", *(("tools",) if simulation.tools else ()))
    facts = f"simulated:{PROTOCOL_VERSION}:{model}:{simulation.context}:{capabilities}:{_TEMPLATE}:{tokenizer}"
    return ModelCard(
        model=model,
        hash=hashlib.sha256(facts.encode()).hexdigest(),
        protocol=PROTOCOL_VERSION,
        context_length=simulation.context,
        vocab_size=256 + len(_SPECIALS),
        eos_ids=(_END, 256),
        bos_id=None,
        add_bos=False,
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
        capabilities=capabilities,
        price_class="simulated",
        created_ms=1_700_000_000_000,
        bos_token="",
        eos_token=_SPECIALS[2],
        backend="simulated",
    )


def create(model: str, simulate: str = "") -> Simulated:
    """What the registry calls: the model's name for clients and `key=value,…`."""
    return Simulated(model, Simulation.parse(simulate))
