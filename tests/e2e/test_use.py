"""The main job through the official client: answers stream, are counted, priced and shown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest
from openai import APIStatusError, OpenAI

from tests.e2e.stack import Stack, sluice, until

MODEL = "smollm2-135m"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def _usage_row(stack: Stack, completion_id: str) -> tuple[int, int, str, Decimal]:
    """Prompt tokens, completion tokens, reason and price of a request, as soon as it is settled."""
    request = uuid.UUID(completion_id.split("-", 1)[1])
    query = "SELECT prompt_tokens, completion_tokens, reason, money FROM billing_usagerecord WHERE request_id = %s"
    rows = until(lambda: stack.rows(query, [request]), 10, "the usage row")
    assert len(rows) == 1
    return rows[0]  # type: ignore[return-value]


def test_it_was_ready_in_time_and_said_how_to_use_it(stack: Stack) -> None:
    said = stack.credentials
    assert set(said) == {"api_base", "console_url", "model", "admin", "tenants"}
    assert said["model"] == MODEL
    assert {name: t["tier"] for name, t in said["tenants"].items()} == {
        "alpha": "interactive",
        "beta": "standard",
        "delta": "standard",
        "gamma": "batch",
    }
    kept = stack.data_dir / "credentials.json"
    assert json.loads(kept.read_text()) == said and kept.stat().st_mode & 0o777 == 0o600


def test_a_plain_answer_is_real_and_counted(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    row = _usage_row(stack, answer.id)
    assert row[:2] == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert row[3] > 0


def test_a_stream_joins_to_the_same_text_and_counts_the_same(stack: Stack) -> None:
    client = stack.client("beta")
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert _usage_row(stack, chunks[0].id)[:2] == (usage.prompt_tokens, usage.completion_tokens)


async def test_sixteen_streams_of_different_lengths_complete_and_balance(stack: Stack) -> None:
    async with stack.async_client("delta") as client:

        async def one(number: int) -> tuple[str, int, str | None]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Count from {number} upwards."}],
                max_tokens=4 + 2 * number,
                stream=True,
                stream_options={"include_usage": True},
            )
            last, reason, tokens = "", None, 0
            async for chunk in stream:
                last = chunk.id
                if chunk.choices and chunk.choices[0].finish_reason:
                    reason = chunk.choices[0].finish_reason
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
            return last, tokens, reason

        answers = await asyncio.gather(*(one(n) for n in range(16)))
    for number, (completion, tokens, reason) in enumerate(answers):
        assert reason in {"length", "stop"}
        assert 0 < tokens <= 4 + 2 * number
        row = await asyncio.to_thread(_usage_row, stack, completion)
        assert row[1] == tokens
    total = await asyncio.to_thread(stack.rows, "SELECT COALESCE(SUM(amount), 0) FROM billing_ledgerentry")
    assert total == [(Decimal(0),)]


def test_manage_reaches_this_installation(stack: Stack) -> None:
    count = "from tenants.models import Tenant; print(Tenant.objects.count())"
    done = sluice("manage", "shell", "-v", "0", "-c", count, SLUICE_DATA_DIR=str(stack.data_dir))
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


@pytest.mark.parametrize("tenant", ["alpha", "beta", "delta", "gamma"])
def test_every_printed_key_works(stack: Stack, tenant: str) -> None:
    models = stack.client(tenant).models.list()
    assert [m.id for m in models.data] == [MODEL]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "no-such-model"}, 404, "model_not_found", None),
        ({"temperature": 9}, 400, None, "temperature"),
        ({"max_tokens": 0}, 400, None, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, 400, "context_length_exceeded", None),
    ],
)
def test_bad_input_is_the_clients_fault(
    stack: Stack, change: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    with pytest.raises(APIStatusError) as caught:
        stack.client().chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 4, **change})
    assert caught.value.status_code == status
    if code:
        assert caught.value.code == code
    if param:
        assert caught.value.param == param


def test_a_wrong_key_is_401(stack: Stack) -> None:
    client = OpenAI(base_url=stack.credentials["api_base"], api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=QUESTION)


def test_a_client_that_leaves_frees_its_slot_and_pays_for_what_was_made(stack: Stack) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {stack.key('gamma')}"}
    count = "SELECT COUNT(*) FROM billing_usagerecord WHERE tenant = 'gamma'"
    before = stack.rows(count)[0][0]
    with httpx.stream(
        "POST", f"{stack.credentials['api_base']}/chat/completions", json=body, headers=headers, timeout=60
    ) as response:
        next(response.iter_lines())
    until(lambda: all(e["running"] == 0 for e in stack.status()["engines"]), 5, "the engine is free")
    until(lambda: stack.rows(count)[0][0] == before + 1, 10, "one usage row")
    reason, tokens = stack.rows(
        "SELECT reason, completion_tokens FROM billing_usagerecord WHERE tenant = 'gamma' ORDER BY request_id DESC"
    )[0]
    assert reason == "abort" and 0 < tokens < 2000


async def test_a_killed_engine_hangs_nobody_and_comes_back(stack: Stack) -> None:
    before = await asyncio.to_thread(stack.status)
    victim = before["processes"][[p["name"] for p in before["processes"]].index("engine-1")]["pid"]
    async with stack.async_client("alpha") as client:
        under_way = [asyncio.Event() for _ in range(4)]

        async def one(number: int) -> str:
            try:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
                )
                async for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        under_way[number].set()
                    if chunk.choices and chunk.choices[0].finish_reason:
                        return chunk.choices[0].finish_reason
            except openai.APIError:
                return "error"
            return "closed"

        streams = [asyncio.create_task(one(n)) for n in range(4)]
        await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in under_way))
        os.kill(victim, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*streams), 60)
    assert set(ends) <= {"error", "stop", "length"}
    status = await asyncio.to_thread(until, lambda: _back(stack, victim), 60, "the engine is back")
    assert status["restarts"] == 1
    answer = await asyncio.to_thread(lambda: until(lambda: _answers(stack), 30, "an answer from the new engine"))
    assert answer


def _back(stack: Stack, victim: int) -> dict[str, Any] | None:
    report = stack.status()
    engine = next(p for p in report["processes"] if p["name"] == "engine-1")
    ready = any(e["pid"] == engine["pid"] and e["state"] == "ready" for e in report["engines"] or [])
    return engine if engine["pid"] not in {None, victim} and ready else None


def _answers(stack: Stack) -> str | None:
    try:
        answer = stack.client().chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
    except APIStatusError as error:
        assert error.status_code == 503
        return None
    return answer.choices[0].message.content
