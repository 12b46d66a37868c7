"""Tool calls out of the text that a model writes, piece by piece as it comes.

Two forms are known: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere in the text (Hermes, Qwen and
others), and one such object with nothing before it. `parameters` is read as `arguments`. What names no tool of the
request, or is no such object, is text like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from engine.text.tools import CALL_CLOSE, CALL_OPEN

__all__ = ["CallReader", "ToolCall"]

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", "type", "id", *_ARGUMENTS)


@dataclass(slots=True)
class ToolCall:
    """One call as far as it has come."""

    index: int
    name: str
    id: str
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    """Reads the text of one choice. `push` returns the text to show and the deltas of `tool_calls`.

    `bare`: a call may come without its marks. `many` false: the first call is the last, and what follows it is dropped.
    `seed` makes the calls' ids: the same answer read again has the same ones.
    """

    def __init__(self, names: Collection[str], *, bare: bool, many: bool, seed: str) -> None:
        self.calls: list[ToolCall] = []
        self._names, self._bare, self._many, self._seed = names, bare, many, seed
        self._held = ""
        """Text that may still become part of a call's mark, or blank space before one."""
        self._body: _Body | None = None
        self._closing = False
        """A call's object is complete; its closing mark may follow."""
        self._begun = False
        """Something other than blank space has come."""

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        self._held += text
        shown: list[str] = []
        deltas: list[dict[str, Any]] = []
        while self._step(shown, deltas):
            pass
        return "".join(shown), deltas

    def flush(self) -> str:
        """The text is over: what was held back. A call that was not announced yet is text after all."""
        body, self._body = self._body, None
        rest, self._held = (body.raw if body is not None and body.call is None else "") + self._held, ""
        return "" if self.calls and not rest.strip() else rest

    # -- steps: each takes something from the held text, or returns False to wait for more ----------------------------

    def _step(self, shown: list[str], deltas: list[dict[str, Any]]) -> bool:
        if self.calls and self._body is None and not self._many:
            self._held = ""
            return False
        if not self._held:
            return False
        if self._body is not None:
            return self._in_body(self._body, shown, deltas)
        if self._closing:
            return self._after_body()
        if not self._begun:
            return self._at_start(shown)
        return self._in_text(shown)

    def _at_start(self, shown: list[str]) -> bool:
        """Only blank space so far (since the last call): it is shown only if text follows."""
        text = self._held.lstrip()
        if not text or (len(text) < len(CALL_OPEN) and CALL_OPEN.startswith(text)):
            return False
        if text.startswith(CALL_OPEN):
            self._open(text[len(CALL_OPEN) :], CALL_OPEN)
        elif text[0] == "{" and self._bare and not self.calls:
            self._open(text, "")
        else:
            self._begun = True
        return True

    def _in_text(self, shown: list[str]) -> bool:
        at = self._held.find(CALL_OPEN)
        if at >= 0:
            shown.append(self._held[:at])
            self._open(self._held[at + len(CALL_OPEN) :], CALL_OPEN)
            return True
        keep = next((n for n in range(len(CALL_OPEN) - 1, 0, -1) if self._held.endswith(CALL_OPEN[:n])), 0)
        cut = len(self._held) - keep
        shown.append(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _open(self, rest: str, mark: str) -> None:
        self._body, self._held, self._begun = _Body(mark), rest, True

    def _in_body(self, body: _Body, shown: list[str], deltas: list[dict[str, Any]]) -> bool:
        self._held = self._held[body.feed(self._held) :]
        body.wrong = body.wrong or bool(body.name and body.name not in self._names)
        self._announce(body, deltas)
        if body.call is not None and (piece := body.take()):
            body.call.arguments.append(piece)
            deltas.append({"index": body.call.index, "function": {"arguments": piece}})
        if not (body.done or body.wrong):
            return False
        self._body = None
        if body.call is None:
            shown.append(body.raw)
        else:
            self._closing, self._begun = True, False
        return True

    def _announce(self, body: _Body, deltas: list[dict[str, Any]]) -> None:
        if body.call is not None or body.name not in self._names or not (body.started or body.done):
            return
        index = len(self.calls)
        digest = hashlib.blake2b(f"{self._seed}:{index}".encode(), digest_size=12).hexdigest()
        body.call = ToolCall(index, body.name, f"call_{digest}")
        self.calls.append(body.call)
        function = {"name": body.call.name, "arguments": ""}
        deltas.append({"index": index, "id": body.call.id, "type": "function", "function": function})

    def _after_body(self) -> bool:
        text = self._held.lstrip()
        if not text or (len(text) < len(CALL_CLOSE) and CALL_CLOSE.startswith(text)):
            return False
        self._closing = False
        if text.startswith(CALL_CLOSE):
            self._held = text[len(CALL_CLOSE) :]
        return True


class _Body:
    """A call's JSON object, followed character by character.

    Only what is needed is understood: the outermost keys, the name, and where the arguments begin and end.
    Without a mark it is taken for a call only as long as all its keys are a call's.
    """

    def __init__(self, mark: str) -> None:
        self.raw = mark
        """All of it, for when it turns out to be no call."""
        self.name = ""
        self.started = False
        """The arguments have begun to come."""
        self.done = self.wrong = False
        self.call: ToolCall | None = None
        self._marked = bool(mark)
        self._arguments = ""
        self._state = "open"
        self._key = self._value = ""
        self._depth = 0
        self._quoted = self._escaped = self._wanted = False

    def take(self) -> str:
        """The arguments that came since the last time; for a call without any, an empty object at its end."""
        if self.done and not self.started:
            self.started, self._arguments = True, self._arguments or "{}"
        piece, self._arguments = self._arguments, ""
        return piece

    def feed(self, text: str) -> int:
        """Take characters up to the end of the object; how many."""
        for at, char in enumerate(text):
            if self.done or self.wrong:
                return at
            self.raw += char
            self._take(char)
        return len(text)

    def _take(self, char: str) -> None:
        if self._state in ("key", "value"):
            self._inside(char)
        elif char.isspace():
            return
        elif self._state == "before value":
            self._state, self._value = "value", ""
            self._wanted = self._key in _ARGUMENTS and not self.started and not self._arguments
            self.started = self.started or (self._wanted and char == "{")
            self._inside(char)
        elif (self._state, char) in _MOVES:
            self._state = _MOVES[self._state, char]
            self.done = self._state == "end"
            if self._state == "key":
                self._key, self._quoted = '"', True
        else:
            self.wrong = True

    def _inside(self, char: str) -> None:
        """One character of a key, or of a value of the outermost object."""
        within = self._depth > 0 or self._quoted
        if self._state == "key":
            self._key += char
            self._nest(char)
            if not self._quoted:
                self._end_key()
        elif self._value and not within and (char in ",}" or char.isspace()):  # after a number, true, false or null
            self._end_value()
            self._take(char)
        else:
            self._value += char
            if self._wanted and self.started:
                self._arguments += char
            self._nest(char)
            if not self._depth and not self._quoted and char in '}]"':
                self._end_value()

    def _nest(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = char == "\\"
            self._quoted = char != '"'
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_key(self) -> None:
        self._key, self._state = _text(self._key), "colon"
        self.wrong = not self._marked and self._key not in _KEYS

    def _end_value(self) -> None:
        self._state = "after value"
        if self._key == "name":
            self.name = _text(self._value)
        elif self._wanted and not self.started:
            # Some models write the arguments as a string that holds the object.
            self._arguments = _text(self._value)


_MOVES: Final = {
    ("open", "{"): "before key",
    ("before key", '"'): "key",
    ("before key", "}"): "end",
    ("colon", ":"): "before value",
    ("after value", ","): "before key",
    ("after value", "}"): "end",
}


def _text(value: str) -> str:
    """The string that a JSON value is; empty for any other."""
    try:
        text = json.loads(value)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""
