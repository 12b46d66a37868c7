"""Messages between gateway, engine and settler. Encoded with msgpack (`encode` / `decode`); structs are arrays there.

Times: `*_ms` are wall-clock milliseconds since 1970, `*_s` are durations in seconds (differences of a monotonic clock).
Money is integer nano-units of the price book's currency. Token counts are integers.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "Control",
    "Delta",
    "Final",
    "Heartbeat",
    "ModelCard",
    "Outcome",
    "Refusal",
    "Sampling",
    "Timeline",
    "TokenLogprob",
    "Work",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 1
"""Engines and gateways refuse each other when this differs (it is part of the card)."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """How to choose tokens. Already validated and bounded by the gateway; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int = -1
    """Number of alternatives to report per token; -1: no log-probabilities at all, 0: only the chosen token's."""
    echo: bool = False
    grammar: str = ""
    """Empty, or a constraint for structured output: a JSON object {"kind": "json_schema"|"regex"|"lark"|..., ...}."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One admitted request. `prompts` x `n` choices; choice index = prompt index * n + i.

    `seed` keys all randomness of the request (drawn by the gateway when the client gave none). `delivered` are, by
    choice, token ids the client already has (after a re-dispatch); they are computed again but not sent again.
    """

    request: str
    pool: str
    tier: str
    tier_rank: int
    tenant: str
    reply_to: str
    kind: str
    """"chat", "completion", "embedding" or "image"."""
    card_hash: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    n: int
    seed: int
    arrival_ms: int
    ttft_target_ms: int
    tpot_target_ms: int
    expires_ms: int = 0
    """Wall time after which the request must not start any more (0: never)."""
    weight: float = 1.0
    salt: str = ""
    epoch: int = 0
    delivered: tuple[tuple[int, ...], ...] = ()
    messages: list[dict[str, Any]] = []
    """The client's messages, for upstream engines that template themselves."""
    resumable: bool = False
    trace: str = ""
    """W3C traceparent."""
    images: tuple[bytes, ...] = ()
    """Of kind "image": encoded images, one for each prompt, which then holds a zero for each token that it costs."""


Bytes = bytes
"""For the struct below, whose field hides the name."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability and the best alternatives as (token id, text bytes, logprob)."""

    token: int
    bytes: Bytes
    logprob: float
    top: tuple[tuple[int, Bytes, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice. `start` is the index (in output tokens of the choice) of the first id.

    `text` may lag behind the ids (bytes or a possible stop string held back); joined over all deltas it is a pure
    function of the ids. `finish` is None or one of stop, length, abort, error, content_filter, tool_calls.
    """

    request: str
    choice: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    code: str = ""
    """A stable error code when `finish` is "error"."""
    detail: str = ""
    vector: bytes = b""
    """Embedding, or the scores of an image's classes, as little-endian float32."""
    last: bool = False
    """True on the last delta of the whole request (all choices ended)."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache (meaningful on the first delta of a choice)."""
    queued_s: float | None = None
    """On the first delta of a choice: admission to pull, seconds."""
    prefill_s: float | None = None
    """On the first delta of a choice: pull to the request's first token, seconds."""


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """Durations of one request in an engine, seconds, monotonic. None: never reached."""

    queued_s: float | None = None
    """Admission to pull (wall clock of the two machines)."""
    prefill_s: float | None = None
    """Pull to the first token."""
    decode_s: float | None = None
    """First to last token."""
    parked_s: float = 0.0
    parks: int = 0


class Final(msgspec.Struct, frozen=True, array_like=True):
    """THE usage record: exactly one per admitted request that computed anything, from whoever ended it."""

    request: str
    epoch: int
    pool: str
    tier: str
    tenant: str
    engine: str
    reason: str
    """stop, length, abort, error, expired, lost."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wasted_tokens: int
    """Tokens computed twice or after an abort: declared, never billed."""
    engine_s: float
    """This request's share of measured step time, seconds."""
    joules: float
    timeline: Timeline
    at_ms: int
    code: str = ""
    detail: str = ""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What the client saw, from the gateway, exactly one per admitted request."""

    request: str
    pool: str
    tier: str
    tenant: str
    project: str
    key: str
    model: str
    kind: str
    stream: bool
    status: int
    """HTTP status; 499 when the client left first."""
    reason: str
    received_ms: int
    ttft_s: float | None
    tpot_s: float | None
    stall_s: float | None
    """Longest gap between two deliveries."""
    total_s: float
    delivered_tokens: int
    prompt_tokens: int
    code: str = ""
    client_request_id: str = ""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A request that was not admitted; kept for 24 h in a capped stream for "explain"."""

    request: str
    tenant: str
    key: str
    tier: str
    model: str
    status: int
    code: str
    at_ms: int
    detail: str = ""


class ModelCard(msgspec.Struct, frozen=True):
    """All a gateway must know of a model. Published by an engine when it registers; one pool has one card hash.

    `tokenizer` is the JSON of the Hugging Face `tokenizers` library. `chat_template` is Jinja, run in a sandbox.
    """

    model: str
    hash: str
    protocol: int
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    tokenizer: str
    chat_template: str
    capabilities: tuple[str, ...]
    """Of: chat, completion, embedding, image, logprobs, grammar, tools."""
    price_class: str
    created_ms: int
    aliases: tuple[str, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    backend: str = "causal_lm"
    owned_by: str = "sluice"
    embedding_dimensions: int = 0
    add_eos: bool = False
    """A text is ended with the first of `eos_ids` (encoders)."""
    image_tokens: int = 0
    """What one image counts in prompt tokens (image models)."""
    labels: tuple[str, ...] = ()
    """Names of the classes, by index (image models)."""


class Heartbeat(msgspec.Struct, frozen=True):
    """State of one engine, at least once a second. `steps` must grow while `running` > 0: progress, not only life."""

    engine: str
    pool: str
    model: str
    card_hash: str
    backend: str
    state: str
    """starting, ready, draining, stopped."""
    pid: int
    at_ms: int
    started_ms: int
    steps: int
    running: int
    waiting: int
    parked: int
    kv_blocks: int
    kv_free: int
    kv_cached: int
    block_size: int
    tokens_per_s: float
    prefill_tokens_per_s: float
    step_s: float
    """Median of recent steps, seconds."""
    by_tier: dict[str, int]
    """Running sequences by tier name."""
    made: dict[str, int] = {}
    """Output tokens since `started_ms` by `tier:tenant`: counters, so that any reader can make rates of them."""
    shadow: dict[str, dict[str, int]] = {}
    """By shadow policy: plans asked of it, how many differed from the real one, how many were cut short by the cap."""
    kv_unwritten: int = 0
    """Token slots that running sequences hold and have not written: waste, as a part of all slots of blocks in use."""
    threads: int = 0
    device: str = "cpu"
    dtype: str = ""
    version: str = ""


class Control(msgspec.Struct, frozen=True, array_like=True):
    """An order to one engine, on its control stream. `kind`: "cancel" (argument: request id) or "drain"."""

    kind: str
    argument: str = ""
    reason: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
T = TypeVar("T")


def encode(message: Any) -> bytes:
    """Encode a message (or a list of them) as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode and validate. Raises `msgspec.ValidationError` or `msgspec.DecodeError` on anything else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return decoder.decode(data)  # type: ignore[no-any-return]
