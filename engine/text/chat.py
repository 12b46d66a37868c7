"""A model's chat template, rendered so that neither the template nor a message can do harm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import jinja2
from jinja2 import meta

from engine.text.sandbox import Limits, OverLimit, Sandbox, TemplateError, render_within
from engine.text.tools import with_tools_as_text

__all__ = ["PLAIN", "RESERVED_VARIABLES", "ChatOptions", "ChatTemplate", "Rendered", "TemplateError"]

_MARKERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: no text needs them
_GIVEN: Final = {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
_JINJA: Final = {"loop", "self", "super", "caller", "varargs", "kwargs", "true", "false", "none", "True", "False"} | {
    "None"
}
RESERVED_VARIABLES: Final = frozenset(_GIVEN | _JINJA | Sandbox().globals.keys())
"""Names that a template gets from here, or from its language, and a client can't set."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt, beside what is said in it."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends inside the last message, for the model to go on with it."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template, such as `enable_thinking`; none of `RESERVED_VARIABLES`."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text with special tokens written out. `marker` sits inside those the client wrote; removing it restores them."""

    text: str
    marker: str = ""


PLAIN: Final = ChatOptions()


class ChatTemplate:
    """Compiled on first use. Everything that can go wrong, at compile time or in a render, is a `TemplateError`."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", limits: Limits | None = None) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = limits or Limits()
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        options: ChatOptions = PLAIN,
        guarded: re.Pattern[str] | None = None,
    ) -> Rendered:
        """The prompt. What `guarded` matches inside the client's text comes out broken up by a marker character."""
        plain = [_plain(m) for m in messages]
        if not self.takes_tools:
            plain, tools = with_tools_as_text(plain, tools), None
        values = {"documents": None, **options.variables, "messages": plain, "tools": list(tools) if tools else None}
        marker = cut = ""
        if guarded is not None and _any_match(values, guarded):
            marker = _free_marker(values)
            values = _map_text(values, lambda text: guarded.sub(lambda m: _broken(m.group(), marker), text))
        if options.continue_final_message:
            cut = _free_marker(values)
            values["messages"][-1]["content"] += f"{cut} "
        opens = options.add_generation_prompt and not cut
        text = self._rendered(values | self._tokens | {"add_generation_prompt": opens})
        return Rendered(_up_to(text, cut) if cut else text, marker)

    def _rendered(self, values: Mapping[str, Any]) -> str:
        try:
            return render_within(self._limits, self._template(), values)
        except TemplateError:
            raise
        except (OverLimit, RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template ran over its limits: {error}") from error
        except Exception as error:  # a template may raise whatever Python can
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template itself says what tools there are."""
        try:
            return "tools" in meta.find_undeclared_variables(Sandbox().parse(self._source))
        except (jinja2.TemplateError, RecursionError, ValueError):
            return False  # it can't be rendered either, and then the error is told

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            if not self._source:
                raise TemplateError("this model has no chat template; use the completions endpoint")
            self._compiled = Sandbox().from_string(self._source)
        return self._compiled


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content a string, the arguments of tool calls an object."""
    result = dict(message)
    content = result.get("content")
    if content is None:
        result["content"] = ""
    elif isinstance(content, list | tuple):
        if any(not isinstance(p, Mapping) or p.get("type") not in ("text", "input_text") for p in content):
            raise TemplateError("this model takes text content only")
        result["content"] = "".join(str(part.get("text", "")) for part in content)
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_plain_call(call) for call in calls]
    return result


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            pass  # a client may replay what a model wrote wrongly; the template shows it as it was
    return dict(call) | {"function": function}


def _texts(values: Any) -> Iterator[str]:
    """Every string in them, keys too, in no certain order."""
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            left += value
        elif value is not None and isinstance(value, dict | Mapping):  # `Mapping` takes long to say no
            left += value
            left += value.values()


def _map_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {(change(k) if isinstance(k, str) else k): _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value


def _any_match(values: Any, pattern: re.Pattern[str]) -> bool:
    return any(map(pattern.search, _texts(values)))


def _free_marker(values: Any) -> str:
    used = set().union(*map(set, _texts(values)))
    for marker in _MARKERS:
        if marker not in used:
            return marker
    raise TemplateError("the messages use every Unicode noncharacter")


def _up_to(text: str, cut: str) -> str:
    """The prompt as far as the last message goes. Where the template strips messages, blank space at its end goes."""
    at = text.rfind(cut)
    if at < 0:
        raise TemplateError("the chat template does not end with the text of the last message")
    return text[:at] if text.startswith(f"{cut} ", at) else text[:at].rstrip()


def _broken(token: str, marker: str) -> str:
    """The token with the marker between all its characters, so that no shorter special token is left inside it."""
    return marker.join(token)
