"""Request bodies of the management API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

__all__ = ["BoundedJSONParser"]


class BoundedJSONParser(JSONParser):
    """JSON whose depth the interpreter can follow; the framework's own lets a deeper one end as a server error."""

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            return super().parse(stream, media_type, parser_context)
        except RecursionError:
            raise ParseError("JSON parse error - nested too deep") from None
