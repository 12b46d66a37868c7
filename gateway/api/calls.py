"""Tool calls out of the text that a model writes, piece by piece as it comes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import orjson

__all__ = ["OPENING", "CallReader", "ToolCall"]

OPENING = "<tool_call>"
"""How models announce a call (Hermes, Qwen, SmolLM and others); what follows is JSON with a name and arguments."""

_HEAD = re.compile(
    r'(?:[\s,\[\]]|</?tool_call>)*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class ToolCall:
    """One call as far as it has come."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    """Reads the text of one choice. `forced`: all of it is calls; else calls begin after the opening mark.

    `push` returns the plain text to show and the deltas of `tool_calls`; what may still become the mark is held back.
    """

    def __init__(self, forced: bool) -> None:
        self.calls: list[ToolCall] = []
        self._inside = forced
        self._buffer = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        self._buffer += text
        shown = "" if self._inside else self._before_mark()
        return shown, self._read() if self._inside else []

    def flush(self) -> str:
        """At the end: text that was held back. What looked like a call but was none is text after all."""
        rest, self._buffer = self._buffer, ""
        return "" if self.calls else rest

    def _before_mark(self) -> str:
        at = self._buffer.find(OPENING)
        if at >= 0:
            self._inside = True
            shown, self._buffer = self._buffer[:at], self._buffer[at:]
            return shown
        keep = next((n for n in range(len(OPENING) - 1, 0, -1) if self._buffer.endswith(OPENING[:n])), 0)
        cut = len(self._buffer) - keep
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return shown

    def _read(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        while self._buffer:
            if self._depth == 0 and not self._begin(deltas):
                break
            self._arguments(deltas)
        return deltas

    def _begin(self, deltas: list[dict[str, Any]]) -> bool:
        """A call's name has been read, and its arguments begin."""
        # The brace that closes the call before this one comes first.
        head = _HEAD.match(self._buffer.lstrip("} \n\r\t") if self.calls else self._buffer)
        if head is None:
            return False
        call = ToolCall(len(self.calls), orjson.loads(head[1]))
        self.calls.append(call)
        self._buffer = head.string[head.end() :]
        function = {"name": call.name, "arguments": ""}
        deltas.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        return True

    def _arguments(self, deltas: list[dict[str, Any]]) -> None:
        """Take the JSON object that the buffer goes on with, to its closing brace or to the end of the buffer."""
        end = len(self._buffer)
        for at, char in enumerate(self._buffer):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end = at + 1
                    break
        piece, self._buffer = self._buffer[:end], self._buffer[end:]
        call = self.calls[-1]
        call.arguments.append(piece)
        deltas.append({"index": call.index, "function": {"arguments": piece}})
