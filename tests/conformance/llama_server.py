#!/usr/bin/env python3
"""Stands in for the `llama-server` binary in llama.cpp's own server tests and passes what they ask to a running Sluice.

It knows how that server's routes, fields and flags are called, and must not know how a test wants to be answered: it
renames and reshapes, and never makes up a value that the server did not give. What has no counterpart is passed on as
it is, and fails. `SLUICE_BASE` (…/v1), `SLUICE_KEY`, `SLUICE_MODEL` and `SLUICE_EMBEDDING_MODEL` say where to.
It can as well stand before a server for tests of other clients whose keys and models are fixed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_BASE = urlsplit(os.environ.get("SLUICE_BASE", "http://127.0.0.1:8000/v1"))
_KEY = os.environ.get("SLUICE_KEY", "")
_MODEL = os.environ.get("SLUICE_MODEL", "smollm2-135m")
_EMBEDDING_MODEL = os.environ.get("SLUICE_EMBEDDING_MODEL", "all-minilm-l6-v2")
_NO_LIMIT = 1_000_000

Json = dict[str, Any]


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--temp", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--n-predict", type=int, default=-1)
    parser.add_argument("--api-key")
    parser.add_argument("--alias")
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--reasoning", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("--chat-template-kwargs", type=json.loads, default={})
    return parser.parse_known_args()[0]


FLAGS = _flags()


class Upstream:
    """One request to the server behind."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> None:
        self._connection = http.client.HTTPConnection(_BASE.hostname or "", _BASE.port, timeout=600)
        self._connection.request(method, path, body, headers)
        self.response = self._connection.getresponse()
        self.status = self.response.status


def ask(headers: dict[str, str], route: str, body: Json) -> tuple[int, Json]:
    """A POST with a JSON answer."""
    upstream = Upstream("POST", f"{_BASE.path}/{route}", headers, json.dumps(body).encode())
    return upstream.status, json.loads(upstream.response.read())


def key_headers(given: Any) -> dict[str, str]:
    """The test's key becomes ours; a wrong one stays wrong."""
    sent = {name: value for name, value in given.items() if name.lower() not in _HOP}
    named = {given.get("Authorization"), f"Bearer {given.get('X-Api-Key')}"}
    if FLAGS.api_key is None or f"Bearer {FLAGS.api_key}" in named:
        sent = {name: value for name, value in sent.items() if name.lower() not in ("authorization", "x-api-key")}
        sent["Authorization"] = f"Bearer {_KEY}"
    return sent


_HOP = frozenset(("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive"))


# -- requests: llama-server's fields under our names ------------------------------------------------------------------


def generation(body: Json) -> Json:
    """Defaults that are flags there, the one model it serves, and other names for the same fields."""
    sent = dict(body)
    sent["model"] = _MODEL
    for name, value in (("temperature", FLAGS.temp), ("seed", FLAGS.seed)):
        if value is not None and sent.get(name) is None:
            sent[name] = value
    wanted = sent.pop("n_predict", None)
    limit = FLAGS.n_predict if wanted is None else wanted  # the flag is a default, no bound
    if sent.get("max_tokens") is None and sent.get("max_completion_tokens") is None:
        sent["max_tokens"] = limit if limit >= 0 else _NO_LIMIT
    for theirs, ours in (("grammar", "grammar"), ("json_schema", "json")):
        if sent.get(theirs) is not None:
            sent["structured_outputs"] = {ours: sent.pop(theirs)}
    if isinstance(form := sent.get("response_format"), dict) and isinstance(form.get("json_schema"), dict):
        sent["response_format"] = form | {"json_schema": {"name": "answer"} | form["json_schema"]}
    return sent


def native(headers: dict[str, str], body: Json) -> Json:
    """A request of `/completion` as one of `/v1/completions`."""
    sent = generation(body)
    sent["prompt"] = prompt_of(headers, body.get("prompt"))
    if "logit_bias" in body:
        sent["logit_bias"] = biases(headers, body["logit_bias"])
    if body.get("stream"):
        sent["stream_options"] = {"include_usage": True}
    return sent


def prompt_of(headers: dict[str, str], prompt: Any, model: str = _MODEL) -> Any:
    """Its mixed forms, as the uniform lists that our routes take."""
    if isinstance(prompt, dict) and set(prompt) == {"prompt_string"}:
        return prompt["prompt_string"]
    if not isinstance(prompt, list) or all(isinstance(p, int) for p in prompt):
        return prompt
    if any(isinstance(p, int) for p in prompt):  # one sequence of ids and texts
        return [i for p in prompt for i in ([p] if isinstance(p, int) else ids_of(headers, p, model))]
    each = [prompt_of(headers, p, model) for p in prompt]
    return each if all(isinstance(p, str) for p in each) else [ids_of(headers, p, model) for p in each]


def ids_of(headers: dict[str, str], text: Any, model: str = _MODEL) -> Any:
    if not isinstance(text, str):
        return text
    return ask(headers, "tokenize", {"model": model, "prompt": text})[1]["tokens"]


def biases(headers: dict[str, str], given: Any) -> Any:
    """Pairs or a map, by id or by text: as a map by id."""
    pairs = given.items() if isinstance(given, dict) else given
    result = {}
    for token, bias in pairs:
        known = isinstance(token, int) or token.isdigit()
        for each in [token] if known else ids_of(headers, token):
            result[str(each)] = bias
    return result


def embedding(headers: dict[str, str], body: Json) -> Json:
    """An entry's text may be wrapped in an object there, and texts and ids be mixed."""

    def text(entry: Any) -> Any:
        parts = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(parts, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
            return "".join(p["text"] for p in parts)
        return entry

    given = body.get("input")
    plain = [text(e) for e in given] if isinstance(given, list) else text(given)
    return dict(body) | {"model": _EMBEDDING_MODEL, "input": prompt_of(headers, plain, _EMBEDDING_MODEL)}


# -- answers: ours under llama-server's names -------------------------------------------------------------------------


def native_answer(answer: Json) -> Any:
    """An object per choice, in a list if there are several."""
    usage = answer["usage"]
    each = [
        {"index": c["index"], "content": c["text"], "stop": True, "tokens": [], "truncated": False}
        | {"has_new_line": "\n" in c["text"], "stop_type": _stop_type(c["finish_reason"]), "model": answer["model"]}
        for c in answer["choices"]
    ]
    if len(each) > 1:
        return each
    return each[0] | {"timings": _counts(usage)}


def native_events(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks of our stream as its events: the last one has the counts."""
    reason, text = None, ""
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            yield line + b"\n"
        elif chunk["choices"]:
            choice = chunk["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"] or reason
            if choice["text"]:
                event: Json = {"index": choice["index"], "content": choice["text"], "stop": False, "tokens": []}
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
        else:
            last = {"content": "", "stop": True, "tokens": [], "truncated": False, "has_new_line": "\n" in text}
            last |= {"stop_type": _stop_type(reason), "timings": _counts(chunk["usage"])}
            yield b"data: " + json.dumps(last).encode() + b"\n\n"


def chat_events(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The role comes in an event of its own there, before any text."""
    for line in lines:
        chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            if "role" in delta and delta.get("content"):
                alone = {"delta": {"role": delta.pop("role"), "content": None}, "logprobs": None}
                yield b"data: " + json.dumps(chunk | {"choices": [choice | alone]}).encode() + b"\n\n"
                line = b"data: " + json.dumps(chunk).encode() + b"\n"
        yield line


def error_named(status: int, answer: Json) -> Json:
    """A wrong key is an invalid request here, and has a type of its own there."""
    if status == 401:
        answer["error"]["type"] = "authentication_error"
    return answer


def _stop_type(reason: str | None) -> str:
    return "limit" if reason == "length" else "eos"


def _counts(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "prompt_n": usage["prompt_tokens"] - cached,
        "cache_n": cached,
        "predicted_n": usage["completion_tokens"],
    }


def rendered(body: Json) -> Json:
    """`/apply-template` shows a prompt without running it. Ours is no route but functions: the server's own, from the
    check of the request to the text. The flags are defaults of template variables; `auto` means on."""
    from engine.text.chat import ChatTemplate
    from gateway.api.schemas.decode import decode_body
    from gateway.api.schemas.messages import render
    from gateway.api.schemas.tokenize import TokenizeRequest

    assert FLAGS.chat_template_file is not None
    template = ChatTemplate(FLAGS.chat_template_file.read_text(), bos_token="<|im_start|>", eos_token="<|im_end|>")
    variables = {"enable_thinking": FLAGS.reasoning != "off"} | FLAGS.chat_template_kwargs
    variables |= body.get("chat_template_kwargs") or {}
    sent = body | {"model": _MODEL, "chat_template_kwargs": variables}
    request = decode_body(json.dumps(sent).encode(), TokenizeRequest)
    request.check()
    tools = body.get("tools") or None
    return {"prompt": template.render(render(request.messages or []), tools=tools, options=request.options()).text}


class Handler(BaseHTTPRequestHandler):
    """One connection of a test."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the tests print what they get."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self._relay(Upstream("GET", "/readyz", {}))
        elif path in ("/models", "/v1/models") and FLAGS.alias:
            upstream = Upstream("GET", f"{_BASE.path}/models/{_MODEL}", key_headers(self.headers))
            model = json.loads(upstream.response.read())
            self._json(upstream.status, {"object": "list", "data": [model | {"id": FLAGS.alias}]})
        else:
            self._forward()

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        route = urlsplit(self.path).path
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if isinstance(body, dict):
            self._route(route, key_headers(self.headers), body, raw)
        else:
            self._forward(raw)

    def _route(self, route: str, headers: dict[str, str], body: Json, raw: bytes) -> None:
        match route:
            case "/completion" | "/completions":
                self._native(headers, body)
            case "/chat/completions" | "/v1/chat/completions" if body.get("stream"):
                self._stream(headers, "/chat/completions", generation(body), chat_events)
            case "/chat/completions" | "/v1/chat/completions" | "/v1/completions":
                self._post(headers, route.removeprefix("/v1"), generation(body))
            case "/embeddings" | "/v1/embeddings":
                self._post(headers, "/embeddings", embedding(headers, body))
            case "/chat/completions/input_tokens":
                status, answer = ask(headers, "tokenize", {"model": _MODEL, "messages": body.get("messages")})
                self._json(status, {"input_tokens": answer["count"]} if status == 200 else answer)
            case "/tokenize":
                self._tokenize(headers, body)
            case "/detokenize":
                status, answer = ask(headers, "detokenize", {"model": _MODEL, "tokens": body.get("tokens")})
                self._json(status, {"content": answer["prompt"]} if status == 200 else answer)
            case "/apply-template" if FLAGS.chat_template_file is not None:
                self._json(200, rendered(body))
            case _:
                self._forward(raw)

    def do_OPTIONS(self) -> None:
        """A preflight that is granted is answered 200 there, without a body too."""
        upstream = Upstream("OPTIONS", "/v1" + self.path.removeprefix("/v1"), key_headers(self.headers))
        self._relay(upstream, 200 if upstream.status == 204 else upstream.status)

    def do_DELETE(self) -> None:
        self._forward()

    def _native(self, headers: dict[str, str], body: Json) -> None:
        sent = native(headers, body)
        if body.get("stream"):
            self._stream(headers, "/completions", sent, native_events)
            return
        status, answer = ask(headers, "completions", sent)
        self._json(status, native_answer(answer) if status == 200 else error_named(status, answer))

    def _stream(
        self, headers: dict[str, str], route: str, sent: Json, events: Callable[[Iterator[bytes]], Iterator[bytes]]
    ) -> None:
        upstream = Upstream("POST", _BASE.path + route, headers, json.dumps(sent).encode())
        if upstream.status != 200:
            self._relay(upstream)
            return
        self._head(200, {"content-type": "text/event-stream"})
        for event in events(iter(upstream.response.readline, b"")):
            self._write(event)

    def _tokenize(self, headers: dict[str, str], body: Json) -> None:
        asked = {"model": _MODEL, "prompt": body.get("content"), "return_token_strs": bool(body.get("with_pieces"))}
        status, answer = ask(headers, "tokenize", asked)
        if status == 200:
            tokens = answer["tokens"]
            if body.get("with_pieces"):
                tokens = [{"id": i, "piece": s} for i, s in zip(tokens, answer["token_strs"], strict=True)]
            answer = {"tokens": tokens}
        self._json(status, answer)

    def _post(self, headers: dict[str, str], route: str, body: Json) -> None:
        self._relay(Upstream("POST", _BASE.path + route, headers, json.dumps(body).encode()))

    def _forward(self, body: bytes | None = None) -> None:
        path = self.path if self.path.startswith("/v1") else "/v1" + self.path
        self._relay(Upstream(self.command, path, key_headers(self.headers), body))

    def _relay(self, upstream: Upstream, status: int | None = None) -> None:
        """The tests look for headers as if their names had a case."""
        headers = {n.title(): v for n, v in upstream.response.getheaders() if n.lower() not in _HOP}
        self._head(status or upstream.status, headers)
        while data := upstream.response.read1(65536):
            self._write(data)

    def _json(self, status: int, answer: Any) -> None:
        self._head(status, {"content-type": "application/json"})
        self._write(json.dumps(answer).encode())

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    Server((FLAGS.host, FLAGS.port), Handler).serve_forever()
