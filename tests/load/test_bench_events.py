"""Server-sent events come cut anywhere, with any line ending; what is read must not depend on it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.bench import Ask, Prompt, Target, Trace
from gateway.bench.client import EventParser, take

fixed = settings(derandomize=True, max_examples=300, deadline=None)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12).map(str.encode)
events = st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6)


@st.composite
def wire(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Events, and one of the many byte strings that mean them."""
    found = draw(events)
    out = b""
    for event in found:
        end = draw(ends)
        if draw(st.booleans()):
            out += b": keep-alive" + end + end
        if draw(st.booleans()):
            out += b"event: message" + end
        for line in event:
            space = b" " if line.startswith(b" ") or draw(st.booleans()) else b""
            out += b"data:" + space + line + end
        out += end
    return [b"\n".join(event) for event in found], out


@fixed
@given(wire(), st.data())
def test_events_do_not_depend_on_how_the_bytes_are_cut(made: tuple[list[bytes], bytes], data: st.DataObject) -> None:
    expected, raw = made
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    parser = EventParser()
    found = [e for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for e in parser.feed(raw[a:b])]
    assert found == expected


@fixed
@given(wire())
def test_events_byte_by_byte(made: tuple[list[bytes], bytes]) -> None:
    expected, raw = made
    parser = EventParser()
    assert [e for i in range(len(raw)) for e in parser.feed(raw[i : i + 1])] == expected


def test_an_event_without_its_blank_line_is_no_event() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n\ndata: two\n") == [b"one"]
    assert parser.feed(b"\n") == [b"two"]


def chunk(**delta: object) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})


def test_a_role_or_an_empty_piece_is_not_content() -> None:
    trace = Trace(0, "", 0.0, 0.0)
    take(trace, chunk(role="assistant", content=""), 1.0)
    take(trace, chunk(role="assistant"), 2.0)
    assert trace.ttft_s is None
    take(trace, chunk(content="Hi"), 3.0)
    take(trace, orjson.dumps({"choices": [{"text": " all", "finish_reason": "stop"}]}), 4.0)
    take(trace, chunk(tool_calls=[{"index": 0}]), 5.0)
    assert (trace.chunks_s, trace.text, trace.finish, trace.ending) == ([3.0, 4.0, 5.0], "Hi all", "stop", "abandoned")
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    take(trace, orjson.dumps({"choices": [], "usage": usage}), 6.0)
    take(trace, b"[DONE]", 6.0)
    assert (trace.prompt_tokens, trace.usage_tokens, trace.cached_tokens, trace.ending) == (7, 9, 4, "ok")


def test_an_error_frame_fails_the_request_with_its_code() -> None:
    lost = {"code": "engine_lost", "message": "m"}
    for error, code in ((lost, "engine_lost"), ({"message": "m"}, "m"), ("no", "no")):
        trace = Trace(0, "", 0.0, 0.0)
        take(trace, orjson.dumps({"error": error}), 1.0)
        assert trace.ending == "failed"
        assert code in trace.code


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_may_or_may_not_end_in_v1(base: str) -> None:
    assert Target(base).url("models") == "http://h:1/v1/models"


def test_what_is_asked() -> None:
    prompt = Prompt("Say it.", 12)
    body = orjson.loads(Ask(max_tokens=64, extra={"tier": "batch"}).body("m", prompt))
    assert body["messages"] == [{"role": "user", "content": "Say it."}]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["tier"]) == (64, True, True, "batch")
    assert body["stream_options"] == {"include_usage": True}
    plain = orjson.loads(Ask(64, ignore_eos=False, follow_dataset=True, chat=False).body("m", prompt))
    assert (plain["prompt"], plain["max_tokens"]) == ("Say it.", 12)
    assert "ignore_eos" not in plain
