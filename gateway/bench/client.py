"""One streamed request to an OpenAI-compatible server, timed as its bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gateway.bench.metrics import Trace
from gateway.bench.workload import Prompt

__all__ = ["Ask", "EventParser", "Target", "Unreachable", "find_model", "open_session", "stream", "take"]

REFUSALS = frozenset({429, 503})
"""Over a limit, and no capacity: the server said no in good order. Other statuses are failures."""


class Unreachable(Exception):
    """The server can't be benchmarked at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its base URL (with or without `/v1`) and the tenants' keys as (name, key)."""

    base: str
    keys: tuple[tuple[str, str], ...] = (("", ""),)
    model: str = ""

    def url(self, path: str) -> str:
        base = self.base.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/{path}"


@dataclass(frozen=True, slots=True)
class Ask:
    """What every request asks for. `follow_dataset`: reply lengths of the data set, capped by `max_tokens`."""

    max_tokens: int = 64
    ignore_eos: bool = True
    follow_dataset: bool = False
    temperature: float = 0.0
    chat: bool = True
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    def path(self) -> str:
        return "chat/completions" if self.chat else "completions"

    def body(self, model: str, prompt: Prompt) -> bytes:
        tokens = min(self.max_tokens, prompt.reply_tokens) if self.follow_dataset else self.max_tokens
        said = {"messages": [{"role": "user", "content": prompt.text}]} if self.chat else {"prompt": prompt.text}
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": self.temperature}
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return orjson.dumps({"model": model, **said, "max_tokens": tokens, **options, **eos, **self.extra})


class EventParser:
    """Server-sent events from bytes cut anywhere: CR, LF or CRLF, comments, several data lines to an event."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that this chunk completes."""
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._line + chunk).split(b"\n")
        self._line = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


def take(trace: Trace, data: bytes, now: float) -> None:
    """Note one event of the stream. Raises when it isn't what the API promises."""
    if data == b"[DONE]":
        trace.ending, trace.code = "ok", ""
        return
    event = orjson.loads(data)
    if event.get("error"):
        trace.ending, trace.code = "failed", _code(event)
        return
    if usage := event.get("usage"):
        trace.prompt_tokens, trace.usage_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        trace.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        trace.finish = choice.get("finish_reason") or trace.finish
        delta = choice.get("delta") or choice
        said = delta.get("content") or delta.get("text") or delta.get("reasoning_content") or ""
        if said or delta.get("tool_calls"):
            trace.chunks_s.append(now)
            trace.text += said


def open_session(ask: Ask) -> aiohttp.ClientSession:
    """No limit on connections: the load decides how many streams are open, never the client."""
    timeout = aiohttp.ClientTimeout(total=ask.timeout_s, sock_connect=30)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)


async def stream(
    session: aiohttp.ClientSession, url: str, key: str, body: bytes, trace: Trace, clock: Callable[[], float]
) -> None:
    """Send, read to the end, and note in `trace` what happened. Only cancellation gets out."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        async with session.post(url, data=body, headers=headers) as response:
            trace.status = response.status
            if response.status != 200:
                trace.ending = "refused" if response.status in REFUSALS else "failed"
                trace.code = _code(await response.read())
                return
            await _read(response, trace, clock)
    except TimeoutError:
        trace.ending, trace.code = "abandoned", "timeout"
    except (aiohttp.ClientError, OSError) as error:
        trace.ending, trace.code = "failed", type(error).__name__
    except (ValueError, LookupError, AttributeError, TypeError):
        trace.ending, trace.code = "failed", "malformed_event"


async def _read(response: aiohttp.ClientResponse, trace: Trace, clock: Callable[[], float]) -> None:
    parser = EventParser()
    async for chunk in response.content.iter_any():
        now = clock()
        for data in parser.feed(chunk):
            take(trace, data, now)
            if trace.ending == "failed":
                return
    if trace.ending != "ok":
        trace.ending, trace.code = "failed", "no_done"


async def find_model(target: Target) -> str:
    """The first model the server lists. Raises Unreachable."""
    key = target.keys[0][1]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(target.url("models"), headers=headers) as response,
        ):
            body = await response.read()
            if response.status != 200:
                raise Unreachable(f"{target.url('models')} answered {response.status} {_code(body)}")
            return str(orjson.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"can't reach {target.url('models')}: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(f"{target.url('models')} lists no model: name one with --model") from error


def _code(body: bytes | dict[str, Any]) -> str:
    """The stable name of an error in OpenAI's shape, or the start of whatever the server said."""
    try:
        event = orjson.loads(body) if isinstance(body, bytes) else body
        error = event["error"]
        return str(error.get("code") or error.get("type") or error["message"])[:80]
    except (ValueError, LookupError, TypeError, AttributeError):
        return (body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body))[:80]
