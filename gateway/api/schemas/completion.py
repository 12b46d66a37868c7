"""`POST /v1/completions`: a prompt as text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from gateway.api.schemas.common import GenerationRequest, check_lengths, check_unconstrained, invalid, unsupported
from gateway.api.schemas.structured import ResponseFormat, TextFormat, Wanted, wanted_by_extension

__all__ = ["DEFAULT_MAX_TOKENS", "MAX_PROMPTS", "CompletionRequest"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""
MAX_PROMPTS = 128


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
    # Of chat; ignored they would leave the answer unconstrained.
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise unsupported("suffix", "the models here do not fill in the middle.")
        if not isinstance(self.response_format, TextFormat | None):
            raise unsupported("response_format", "use 'structured_outputs', or ask for a chat completion.")
        if self.tools:
            raise unsupported("tools", "ask for a chat completion.")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise invalid("best_of", "'best_of' must not be smaller than 'n'.")
        if self.chooses and self.stream:
            raise invalid("best_of", "Which answers are the best shows at their end: they can't be streamed.")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "'max_tokens' must be at least 1.")
        check_lengths(self.min_tokens, self.max_tokens if self.max_tokens is not None else DEFAULT_MAX_TOKENS)
        if self.structured_outputs is not None:
            check_unconstrained(self)
        prompts = self.prompts()
        if len(prompts) * self.made > MAX_PROMPTS:
            message = f"At most {MAX_PROMPTS} answers can be asked for at once (prompts times 'n' or 'best_of')."
            raise invalid("prompt", message)

    @property
    def made(self) -> int:
        """Answers to each prompt that are computed."""
        return self.best_of or self.n or 1

    @property
    def chooses(self) -> bool:
        """More are computed than shown."""
        return self.made > (self.n or 1)

    def constraint(self) -> Wanted | None:
        """What the answer is held to."""
        return wanted_by_extension(self.structured_outputs)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: its text, or its token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt", "'prompt' is an empty list.")
        kinds = {type(p) for p in prompt}
        if kinds == {int}:
            return [prompt]  # type: ignore[list-item]
        if kinds == {str} or kinds == {list}:
            if any(p == [] for p in prompt):
                raise invalid("prompt", "A list of token ids in 'prompt' is empty.")
            return prompt  # type: ignore[return-value]
        raise invalid("prompt", "'prompt' is a string, a list of strings, a list of token ids or a list of such lists.")
