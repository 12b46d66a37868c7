"""A Jinja environment for templates that come with a model, and are therefore somebody else's program.

Jinja's own sandbox keeps a template from Python's internals. What it doesn't do is bound the work: so loops, calls,
concatenations and filters here spend from a budget of ticks, characters and time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["Limits", "OverLimit", "Sandbox", "TemplateError", "render_within"]


class TemplateError(ValueError):
    """The chat template refused the conversation, or is at fault itself."""


class OverLimit(Exception):
    """A template did more than its budget allows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`ticks` are loop rounds, calls and filters together; `characters` bounds the output and any single string."""

    ticks: int = 400_000
    characters: int = 16_000_000
    seconds: float = 2.0


class _Budget:
    def __init__(self, limits: Limits) -> None:
        self._ticks = limits.ticks
        self._characters = limits.characters
        self._deadline = time.monotonic() + limits.seconds

    def tick(self) -> None:
        self._ticks -= 1
        if self._ticks < 0:
            raise OverLimit("too many steps")
        if not self._ticks & 63 and time.monotonic() > self._deadline:
            raise OverLimit("too much time")

    def size(self, characters: int) -> None:
        if characters > self._characters:
            raise OverLimit("too much text")

    def checked(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self.size(len(value))
        return value


_budget: ContextVar[_Budget] = ContextVar("template budget")
_OF_DICTS = frozenset(dir(dict))
_MAX_NUMBER = 1_000_000  # widths and counts; a larger one is only good for filling memory


def render_within(limits: Limits, template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Render piece by piece, so that output is bounded as it grows."""
    budget = _Budget(limits)
    token = _budget.set(budget)
    try:
        pieces: list[str] = []
        total = 0
        for piece in template.generate(**values):
            total += len(piece)
            budget.size(total)
            budget.tick()
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates as `transformers` renders them (same flags, same helper functions), under `Limits`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            autoescape=False,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(call) for name, call in self.filters.items()}
        self.filters |= {"_rounds": _rounds, "_concat": _concat}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def from_string(self, source: Any, *arguments: Any, **options: Any) -> jinja2.Template:
        """Compile. Raises `TemplateError`."""
        try:
            template = super().from_string(source, *arguments, **options)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise TemplateError(f"the chat template can't be compiled: {error}") from error
        template.globals = dict(template.globals)  # a chain of maps, walked at each render: half of a short one's time
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja's rule is an attribute first, then a key; a message has keys alone, and no exception tells so."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        """Put every loop and every `~` under the budget before code is made of the tree."""
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_rounds", [], [], None, None, lineno=loop.lineno)
        return super()._generate(_with_bounded_concat(source, self), name, filename, defer_init)

    def call(self, context: Context, function: Any, *arguments: Any, **options: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        if isinstance(getattr(function, "__self__", None), str):  # ljust, zfill, format …
            _refuse_large_numbers(arguments, options)
        return budget.checked(super().call(context, function, *arguments, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            sequence, count = (left, right) if hasattr(left, "__len__") else (right, left)
            budget.size(len(sequence) * max(0, count))
        elif operator == "**":
            _refuse_large_numbers((left, right), {}, limit=64)
        elif operator == "%" and isinstance(left, str) and re.search(r"\d{5}|\*", left):
            raise OverLimit("a format is too wide")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_bounded_concat(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """`a ~ b` becomes a filter over [a, b]: the operator itself can't be intercepted."""

    def visit(node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                value[:] = [replaced(item) for item in value]
            elif isinstance(value, nodes.Node):
                setattr(node, field, replaced(value))

    def replaced(item: Any) -> Any:
        if not isinstance(item, nodes.Node):
            return item
        visit(item)
        if isinstance(item, nodes.Concat):
            parts = nodes.List(item.nodes, lineno=item.lineno)
            return nodes.Filter(parts, "_concat", [], [], None, None, lineno=item.lineno)
        return item

    visit(tree)
    tree.set_environment(environment)
    return tree


def _rounds(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.tick()
        yield item


def _concat(parts: list[Any]) -> str:
    budget = _budget.get()
    budget.tick()
    texts = [str(part) for part in parts]
    budget.size(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(call: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(call, "jinja_pass_arg", None)  # how Jinja marks filters that take its context or environment
    first = 1 if passed is None else 2  # after the value that is filtered

    def bounded(*arguments: Any, **options: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        _refuse_large_numbers(arguments[first:], options)
        return budget.checked(call(*arguments, **options))

    if passed is not None:
        bounded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return bounded


def _refuse_large_numbers(arguments: tuple[Any, ...], options: Mapping[str, Any], limit: int = _MAX_NUMBER) -> None:
    for value in (*arguments, *options.values()):
        if isinstance(value, int) and abs(value) > limit:
            raise OverLimit("a number is too large")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as templates are written for
