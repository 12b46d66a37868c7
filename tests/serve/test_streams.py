"""Requests through a real engine process: what comes out, and what the usage record says of it."""

from __future__ import annotations

from engine.protocol.events import Event
from engine.protocol.messages import Heartbeat, decode
from tests.serve.conftest import Gateway, StartEngine, wait_for


def test_a_request_streams_to_its_end(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate="decode_tps=0,prefill_tps=0,text=Hello there")
    gateway.send("r1", "hello")
    gateway.finish()
    answer = gateway.answers["r1"]
    assert answer.text() == "Hello there"
    assert "ello" not in str(engine.log), "what clients say and hear stays out of the log"
    assert [d.finish for d in answer.deltas if d.finish] == ["stop"]
    final = gateway.final("r1")
    assert (final.reason, final.prompt_tokens, final.completion_tokens, final.wasted_tokens) == ("stop", 5, 11, 0)
    assert final.engine_s > 0 and final.timeline.prefill_s is not None and final.timeline.decode_s is not None
    assert gateway.state("r1") == "finished"
    assert gateway.redis.exists(gateway.keys.open_by_tenant("alpha"), gateway.keys.engine_requests("e1")) == 0


def test_usage_equals_tokens_for_many_streams(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=200,prefill_tps=0")
    for i in range(16):
        gateway.send(
            f"r{i}", "x" * (1 + 90 * i), max_tokens=5 + 3 * i, tier=("interactive", "standard", "batch")[i % 3]
        )
    gateway.finish(timeout_s=20)
    for i in range(16):
        final = gateway.final(f"r{i}")
        assert len(gateway.answers[f"r{i}"].tokens()) == final.completion_tokens == 5 + 3 * i
        assert final.prompt_tokens == 1 + 90 * i
        assert final.reason == "length"
    assert len(gateway.finals()) == 16
    wait_for(lambda: not gateway.redis.keys(gateway.keys.queue("demo", "*", "*")))
    assert gateway.redis.hgetall(gateway.keys.depth("demo")) == {}


def test_one_entry_per_step_holds_all_streams(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=50,prefill_tps=0")
    for i in range(8):
        gateway.send(f"r{i}", max_tokens=20)
    gateway.finish(timeout_s=20)
    entries = gateway.redis.xlen(gateway.keys.replies("gw-1"))
    assert entries < 8 * 20 / 3, "deltas of one step must share an entry"


def test_choices_have_their_index_and_one_usage(ready: Gateway) -> None:
    ready.send("choices", n=3, max_tokens=12)
    ready.finish("choices")
    answer = ready.answers["choices"]
    assert [len(answer.tokens(i)) for i in range(3)] == [12, 12, 12]
    assert sorted(d.choice for d in answer.deltas if d.finish) == [0, 1, 2]
    assert sum(d.last for d in answer.deltas) == 1
    final = ready.final("choices")
    assert (final.prompt_tokens, final.completion_tokens) == (5, 36)


def test_stop_string_ends_generation_and_never_shows(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=0,prefill_tps=0,text=one two three four")
    gateway.send("r1", stop=("thr",), max_tokens=100)
    gateway.finish()
    assert gateway.answers["r1"].text() == "one two "
    final = gateway.final("r1")
    assert (final.reason, final.completion_tokens) == ("stop", len("one two thr"))


def test_a_held_back_stop_prefix_is_flushed_at_the_end(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=0,prefill_tps=0,text=one two th")
    gateway.send("r1", stop=("three",), max_tokens=100)
    gateway.finish()
    assert gateway.answers["r1"].text() == "one two th"


def test_logprobs_come_with_their_tokens(ready: Gateway) -> None:
    ready.send("logprobs", logprobs=2, max_tokens=4)
    ready.finish("logprobs")
    deltas = [d for d in ready.answers["logprobs"].deltas if d.tokens]
    assert [tuple(lp.token for lp in d.logprobs) for d in deltas] == [d.tokens for d in deltas]
    assert all(lp.bytes == bytes([lp.token]) and len(lp.top) == 2 for d in deltas for lp in d.logprobs)


def test_events_tell_the_life_of_a_request_once(ready: Gateway) -> None:
    ready.send("events")
    ready.finish("events")

    def kinds() -> list[str]:
        entries = ready.redis.xrange(ready.keys.events)
        return [e.kind for _, f in entries for e in decode(f[b"e"], list[Event]) if e.request == "events"]

    wait_for(lambda: "finished" in kinds())
    assert kinds() == ["pulled", "first_token", "last_token", "finished"]


def test_heartbeat_shows_progress(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=50,prefill_tps=0")

    def beat() -> Heartbeat:
        return decode(gateway.redis.get(gateway.keys.engine("e1")) or b"", Heartbeat)

    wait_for(lambda: gateway.redis.exists(gateway.keys.engine("e1")))  # the first beat follows the registration
    assert (beat().state, beat().steps, beat().backend) == ("ready", 0, "simulated")
    gateway.send("r1", max_tokens=90)
    wait_for(lambda: beat().steps > 0 and beat().running == 1 and beat().by_tier == {"standard": 1})
    assert beat().tokens_per_s > 0
    assert beat().kv_free < beat().kv_blocks
    wait_for(lambda: 0 < beat().kv_unwritten < beat().block_size)  # one sequence: only its last block isn't full
    gateway.finish()


def test_output_is_charged_to_the_tenant(ready: Gateway) -> None:
    def counter() -> float:
        return float(ready.redis.hget(ready.keys.counters("demo"), "standard:alpha") or 0)

    before = counter()
    ready.send("charged", max_tokens=50)
    ready.finish("charged")
    wait_for(
        lambda: counter() - before >= 2 * 49
    )  # an output token weighs two; the first belongs to the prompt's slice


def test_two_engines_share_a_pool(start: StartEngine, gateway: Gateway) -> None:
    start("e1", simulate="decode_tps=100,prefill_tps=0,rows=4")
    start("e2", simulate="decode_tps=100,prefill_tps=0,rows=4")
    for i in range(8):
        gateway.send(f"r{i}", max_tokens=300)  # longer than an engine on a busy machine takes to ask for work
    gateway.finish(timeout_s=30)
    engines = [gateway.final(f"r{i}").engine for i in range(8)]
    assert sorted(engines) == ["e1"] * 4 + ["e2"] * 4, "a full engine must leave work to the idle one"


def test_a_better_tier_takes_the_only_row_and_gives_it_back(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=50,prefill_tps=0,rows=1")
    gateway.send("low", tier="batch", max_tokens=80)
    gateway.read(lambda: len(gateway.answers["low"].tokens()) > 20)
    gateway.send("high", tier="interactive", max_tokens=5)
    gateway.finish("high")
    assert not gateway.answers["low"].done
    gateway.finish("low")
    assert len(gateway.answers["low"].tokens()) == 80, "nothing lost, nothing twice"
    final = gateway.final("low")
    assert final.timeline.parks == 1 and final.timeline.parked_s > 0
    assert final.wasted_tokens > 0, "it has no host memory, so it was computed again"
    assert gateway.final("high").wasted_tokens == 0


def test_an_idle_engine_starts_at_once(ready: Gateway) -> None:
    waits: list[float] = []
    for i in range(5):
        ready.send(f"idle{i}", max_tokens=1)
        ready.finish(f"idle{i}")
        waits.append(ready.final(f"idle{i}").timeline.queued_s or 0.0)
    assert min(waits) < 0.05, waits
