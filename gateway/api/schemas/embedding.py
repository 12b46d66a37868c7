"""`POST /v1/embeddings`: one text or many, or their token ids."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.common import invalid

__all__ = ["MAX_INPUTS", "MAX_TOKENS", "EmbeddingRequest"]

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs together. Both bounds are OpenAI's."""


class EmbeddingRequest(Struct, kw_only=True):
    """Null means absent. Unknown fields are tolerated: clients run ahead."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    # Extensions of ours.
    service_tier: str | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None

    def check(self) -> None:
        """Rules between fields."""
        self.inputs()

    def inputs(self) -> list[str | list[int]]:
        """One entry per vector: its text, or its token ids."""
        given = self.input
        if isinstance(given, str):
            given = [given]
        kinds = {type(each) for each in given}
        if kinds == {int}:
            return [given]  # type: ignore[list-item]
        if len(given) > MAX_INPUTS:
            raise invalid("input", f"'input' holds at most {MAX_INPUTS} texts, not {len(given)}.")
        if not given or not all(each for each in given if not isinstance(each, int)):
            raise invalid("input", "'input' can't be empty, nor any text or list of token ids in it.")
        if kinds not in ({str}, {list}):
            raise invalid("input", "'input' is a text, a list of texts, a list of token ids or a list of such lists.")
        return given  # type: ignore[return-value]
