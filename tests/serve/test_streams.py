"""Requests through a real engine process: what comes out, and what the usage record says of it."""

from __future__ import annotations

from tests.serve.conftest import Gateway, StartEngine


def test_a_request_streams_to_its_end(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=0,prefill_tps=0,text=Hello there")
    gateway.send("r1")
    gateway.finish()
    answer = gateway.answers["r1"]
    assert answer.text() == "Hello there"
    assert [d.finish for d in answer.deltas if d.finish] == ["stop"]
    final = gateway.final("r1")
    assert (final.reason, final.prompt_tokens, final.completion_tokens, final.wasted_tokens) == ("stop", 5, 11, 0)
    assert gateway.state("r1") == "finished"
    assert gateway.redis.exists(gateway.keys.open_by_tenant("alpha"), gateway.keys.engine_requests("e1")) == 0
