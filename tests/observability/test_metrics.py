"""The figures agree with what clients saw, and strangers don't get them."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.admission.test_limits import start, until
from tests.api.test_chat import ask
from tests.api.test_errors import check
from tests.harness import POOL, Gateway


def figures(gateway: Gateway) -> dict[tuple[str, ...], float]:
    text = httpx.get(gateway.base.removesuffix("/v1") + "/metrics").raise_for_status().text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *sorted(s.labels.values())): s.value for s in samples}


def test_requests_refusals_and_tokens_are_counted(gateway: Gateway) -> None:
    before = figures(gateway)
    with gateway.client() as client:
        usage = ask(client).json()["usage"]
        ask(client, stream=True)
        ask(client, model="none")
    after = figures(gateway)

    def grown(*key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    where = ("interactive", POOL)
    assert grown("sluice_requests_total", *sorted(("200", "chat", *where))) == 2
    assert grown("sluice_prompt_tokens_total", *where) == 2 * usage["prompt_tokens"]
    assert grown("sluice_delivered_tokens_total", *where) == 2 * usage["completion_tokens"]
    assert grown("sluice_ttft_seconds_count", *where) == 2 and grown("sluice_tpot_seconds_count", *where) == 1
    assert grown("sluice_refusals_total", "404", "model_not_found") == 1
    assert after[("sluice_lease_held",)] == 1


async def test_requests_in_flight_come_and_go(gateway: Gateway) -> None:
    idle = figures(gateway)[("sluice_open_requests",)]
    async with gateway.async_client() as client:
        running = await start(client)
        assert figures(gateway)[("sluice_open_requests",)] == idle + 1
        await running.aclose()
        await until(lambda: figures(gateway)[("sluice_open_requests",)] == idle)


def test_not_through_a_proxy(gateway: Gateway) -> None:
    url = gateway.base.removesuffix("/v1") + "/metrics"
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        check(httpx.get(url, headers={header: "127.0.0.1"}), 404, "not_found")
