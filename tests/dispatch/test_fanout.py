"""Deltas reach their requests in order, in lots between which the event loop does other things."""

from __future__ import annotations

import asyncio

from engine.protocol.messages import Delta
from gateway.dispatch.fanout import _LOT, _MOST_WAITING, Fanout


def delta(request: str, start: int, finish: str | None = None) -> Delta:
    return Delta(request, 0, 0, start, (7,), "x", finish=finish)


def step(start: int, streams: int = 100) -> list[Delta]:
    """One engine step: a token for each stream."""
    return [delta(f"r{i}", start) for i in range(streams)]


async def everything(fanout: Fanout) -> None:
    while fanout._turn is not None:  # noqa: ASYNC110  (each turn of the loop hands a lot out)
        await asyncio.sleep(0)


async def test_a_small_entry_is_handed_out_at_once() -> None:
    got: list[list[Delta]] = []
    Fanout(got.append).give(step(5, _LOT))
    assert got == [step(5, _LOT)]


async def test_a_large_entry_comes_in_lots_and_in_order() -> None:
    got: list[list[Delta]] = []
    fanout = Fanout(got.append)
    fanout.give(step(5))
    assert [len(lot) for lot in got] == [_LOT]
    await everything(fanout)
    assert [len(lot) for lot in got] == [_LOT] * (100 // _LOT) + [100 % _LOT] * bool(100 % _LOT)
    assert [d for lot in got for d in lot] == step(5)


async def test_the_event_loop_has_a_turn_between_two_lots() -> None:
    happened: list[str] = []
    fanout = Fanout(lambda lot: happened.append("lot"))
    fanout.give(step(5))
    asyncio.get_running_loop().call_soon(happened.append, "other")
    await everything(fanout)
    assert happened.index("other") < 3


async def test_a_first_token_overtakes_what_waits_of_others() -> None:
    got: list[list[Delta]] = []
    fanout = Fanout(got.append)
    fanout.give(step(5))
    fanout.give([delta("new", 0)])
    assert got[1] == [delta("new", 0)]
    fanout.give([*step(6), delta("newer", 0), delta("new", 1)])
    assert got[2] == [delta("newer", 0)]
    await everything(fanout)
    order = [d.start for lot in got for d in lot if d.request == "r99"]
    assert order == [5, 6]


async def test_a_request_keeps_its_order_also_when_it_is_short() -> None:
    got: list[list[Delta]] = []
    fanout = Fanout(got.append)
    fanout.give(step(5))
    fanout.give([delta("whole", 0, finish="stop"), delta("two", 0), delta("two", 1, finish="stop")])
    await everything(fanout)
    seen = [d for lot in got for d in lot]
    assert [d.start for d in seen if d.request == "two"] == [0, 1]
    assert len(seen) == len(set(seen)) == 103
    assert seen.index(delta("whole", 0, finish="stop")) > seen.index(delta("r99", 5))


async def test_the_reader_waits_when_too_much_waits() -> None:
    got: list[list[Delta]] = []
    fanout = Fanout(got.append)
    fanout.give([delta(f"r{i}", 5) for i in range(_MOST_WAITING + 10 * _LOT)])
    assert fanout.full
    while fanout.full:  # noqa: ASYNC110  (each turn of the loop hands a lot out)
        await asyncio.sleep(0)
    assert 0 < len(fanout._waiting) <= _MOST_WAITING
    assert sum(map(len, got)) + len(fanout._waiting) == _MOST_WAITING + 10 * _LOT
