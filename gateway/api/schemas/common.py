"""Fields and rules that chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.errors import ApiError

__all__ = [
    "FunctionName",
    "GenerationRequest",
    "StreamOptions",
    "StructuredOutputs",
    "check_bias",
    "check_lengths",
    "check_unconstrained",
    "invalid",
    "stops_of",
    "unsupported",
]

MAX_STOPS = 4
MAX_STOP_CHARS = 512
MAX_BIASES = 1024

_OTHER_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema")

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
"""Python's `$` alone would let a line feed follow."""
Choice = Annotated[str, Meta(min_length=1, max_length=4096)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Struct):
    """An extension: exactly one of these is what the whole answer must be."""

    json: dict[str, Any] | bool | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=16_384)] | None = None
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    """Lark, or GBNF."""

    def check(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise invalid("structured_outputs", "'structured_outputs' has exactly one of json, regex, choice, grammar.")


class GenerationRequest(Struct, kw_only=True):
    """What both kinds of completion take. Null means absent. Unknown fields are tolerated: clients run ahead."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    user: str | None = None
    service_tier: str | None = None
    # Extensions of ours.
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Other servers' names for that, refused by name: ignored they would leave the answer unconstrained.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None

    def check(self) -> None:
        """Rules between fields."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is true.")
        stops_of(self.stop)
        if self.structured_outputs is not None:
            self.structured_outputs.check()
        if self.stop_token_ids is not None and len(self.stop_token_ids) > 64:
            raise invalid("stop_token_ids", "'stop_token_ids' holds at most 64 ids.")
        for name in _OTHER_NAMES:
            if getattr(self, name) is not None:
                raise unsupported(name, "use 'structured_outputs' or 'response_format'.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_lengths(least: int | None, most: int | None) -> None:
    """`min_tokens` against the limit of the same answer."""
    if most is not None and (least or 0) > most:
        raise invalid("min_tokens", f"'min_tokens' is more than the {most} tokens asked for.")


def check_unconstrained(body: GenerationRequest) -> None:
    """A constrained answer ends where its grammar ends: neither sooner nor later."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise unsupported(name, "a constrained answer ends where its grammar does.")


def invalid(param: str, message: str) -> ApiError:
    return ApiError("invalid_value", message, param=param)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError("unsupported_parameter", f"'{param}' is not supported: {why}", param=param)


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings: at most four, none empty."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"'stop' holds at most {MAX_STOPS} strings.")
    for text in stops:
        if not text:
            raise invalid("stop", "A stop string can't be empty.")
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"A stop string has at most {MAX_STOP_CHARS} characters.")
    return tuple(dict.fromkeys(stops))


def check_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Token ids inside the vocabulary, biases between -100 and 100."""
    if not bias:
        return {}
    if len(bias) > MAX_BIASES:
        raise invalid("logit_bias", f"'logit_bias' holds at most {MAX_BIASES} tokens.")
    checked = {}
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token < vocab_size or str(token) != key:  # "05" and "5" would be one token twice
            raise invalid("logit_bias", f"'{key[:32]}' is not a token id of this model (0 to {vocab_size - 1}).")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", "A bias is between -100 and 100.")
        checked[token] = value
    return checked
