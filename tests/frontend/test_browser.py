"""The console as a person sees it, in a real browser on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Page, Route, expect

from . import sample
from .conftest import Console, Watched, sign_in
from .sample import Publisher

pytestmark = [pytest.mark.browser, pytest.mark.django_db, pytest.mark.asyncio(loop_scope="module")]
SOON_MS = 15_000
"""Patience of checks whose time is not the point: the machine may be busy."""


@pytest.fixture
def publisher(console: Console, redis_url: str) -> Iterator[Publisher]:
    """Publishes once a second; `publisher.make` may be exchanged at any time."""
    with Publisher(redis_url, console.prefix, lambda step: sample.snapshot()) as running:
        yield running


def alpha(**figures: Any) -> dict[str, Any]:
    tiers = [sample.tier("interactive", 0, 1000, [sample.tenant("alpha", **figures)])]
    return sample.snapshot(tiers)


def _alpha_queued(queued: int, step: int) -> dict[str, Any]:
    return alpha(queued=queued)


async def test_figures_move_by_themselves_without_a_complaint(
    watched: Watched, publisher: Publisher, console: Console
) -> None:
    page = watched.page
    await sign_in(page, "admin")
    await expect(page.locator("#freshness .word")).to_have_text("Live")
    for queued in (7, 4321):
        publisher.make = partial(_alpha_queued, queued)
        started_s = time.monotonic()
        await expect(page.locator("#row-interactive-alpha").get_by_role("cell").first).to_have_text(
            f"{queued:,}", timeout=SOON_MS
        )
        await expect(page.locator("#sum-queued")).to_have_text(f"{queued:,}")
        # One second until it is published, and what is left of two to get here.
        assert time.monotonic() - started_s < 2.0
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith(console.url)] == []


async def test_what_stopped_moving_does_not_look_live(page: Page, publisher: Publisher) -> None:
    await sign_in(page, "admin")
    await expect(page.locator("#freshness .word")).to_have_text("Live")
    figure = page.locator("#sum-queued")
    live_colour = await figure.evaluate("e => getComputedStyle(e).color")
    publisher.stop()
    stopped_s = time.monotonic()
    notice = page.get_by_text("Live data stopped at")
    await expect(notice).to_be_visible(timeout=SOON_MS)
    assert 2.0 < time.monotonic() - stopped_s < 6.0
    await expect(page.locator("#freshness .word")).to_have_text("Stale")
    await expect(page).to_have_title("(stale) Live · Sluice")
    stale_colour = await figure.evaluate("e => getComputedStyle(e).color")
    label_colour = await page.locator(".summary dt").first.evaluate("e => getComputedStyle(e).color")
    assert stale_colour == label_colour != live_colour
    age = page.locator("#freshness .age")
    before = await age.inner_text()
    await expect(age).not_to_have_text(before)

    publisher.publish()
    await expect(notice).to_be_hidden(timeout=SOON_MS)
    await expect(page).to_have_title("Live · Sluice")


@pytest.mark.slow
async def test_a_lost_console_is_said_and_found_again(page: Page, publisher: Publisher, console: Console) -> None:
    await sign_in(page, "admin")
    await expect(page.locator("#freshness .word")).to_have_text("Live")
    console.stop()
    lost = page.get_by_text("The connection to the console is down")
    await expect(lost).to_be_visible(timeout=SOON_MS)
    await expect(page.locator("#freshness .word")).to_have_text("Stale")
    console.start()
    publisher.make = lambda step: alpha(queued=99)
    await expect(page.locator("#sum-queued")).to_have_text("99", timeout=SOON_MS)
    await expect(lost).to_be_hidden()
    await expect(page.locator("#freshness .word")).to_have_text("Live")


async def test_a_session_that_ended_elsewhere_leads_to_sign_in(
    context: BrowserContext, page: Page, publisher: Publisher, console: Console
) -> None:
    await sign_in(page, "admin")
    other = await context.new_page()
    await other.goto("/requests/")
    await other.get_by_role("button", name="Sign out").click()
    await expect(other).to_have_url(f"{console.url}/login/")
    console.stop()
    console.start()
    await page.wait_for_url("**/login/?next=/", timeout=SOON_MS)


async def test_an_engine_that_dies_is_seen(page: Page, publisher: Publisher) -> None:
    await sign_in(page, "admin")
    row = page.locator("#engine-engine-1")
    await expect(row.locator(".badge")).to_have_text("ready")
    last_ms = time.time_ns() // 1_000_000

    def silent(step: int) -> dict[str, Any]:
        age_ms = time.time_ns() // 1_000_000 - last_ms
        return sample.snapshot(engines=[sample.engine(at_ms=last_ms, age_ms=age_ms)])

    publisher.make = silent
    await expect(row.locator(".badge")).to_have_text("silent", timeout=SOON_MS)
    await expect(page.get_by_text("No engine is ready for smollm2-135m")).to_be_visible()
    await expect(page.get_by_text("Engine engine-1 has been silent since")).to_be_visible()
    # Its lease lapsed: the publisher knows it no more, the console still does.
    publisher.make = lambda step: sample.snapshot(engines=[])
    await asyncio.sleep(2)
    await expect(row.locator(".badge")).to_have_text("silent")
    await expect(page.locator("#freshness .word")).to_have_text("Live")


async def test_a_member_sees_its_own_tenant_and_no_other_figure(page: Page, publisher: Publisher) -> None:
    await sign_in(page, "olive")
    await expect(page.locator("#row-interactive-alpha")).to_be_visible()
    publisher.make = lambda step: sample.snapshot(sample.loaded(step))
    await expect(page.locator("#row-interactive-alpha")).to_contain_text("0.018422", timeout=SOON_MS)
    text = await page.locator("main").inner_text()
    for hidden in ("Beta", "Gamma", "standard", "engine-1", "Engines", "0.034"):
        assert hidden not in text


async def test_without_javascript_the_page_is_a_readable_snapshot(
    browser: Browser, console: Console, publisher: Publisher
) -> None:
    context = await browser.new_context(base_url=console.url, java_script_enabled=False)
    page = await context.new_page()
    await sign_in(page, "admin")
    await expect(page.locator("noscript p")).to_contain_text("Live updates need JavaScript")
    assert await page.locator("noscript p").is_visible()
    await expect(page.locator("#row-standard-beta")).to_contain_text("6.21 s")
    await expect(page.locator("#engine-engine-1")).to_contain_text("ready")
    await context.close()


@pytest.mark.slow
async def test_a_slow_network_does_not_lose_the_push(page: Page, publisher: Publisher) -> None:
    """The extension arrives long after htmx; and the first attempt to connect fails."""
    refused = 0

    async def late(route: Route) -> None:
        await asyncio.sleep(1.0)
        await route.continue_()

    async def refuse_once(route: Route) -> None:
        nonlocal refused
        refused += 1
        if refused == 1:
            await route.fulfill(status=503, body="not yet")
        else:
            await route.continue_()

    await page.route("**/hx-sse-4.min.js", late)
    await page.route("**/live/stream", refuse_once)
    await sign_in(page, "admin")
    publisher.make = lambda step: alpha(queued=1234)
    await expect(page.locator("#sum-queued")).to_have_text("1,234", timeout=30_000)
    assert refused >= 2


async def test_a_newcomer_finds_the_request_just_sent(watched: Watched, console: Console) -> None:
    page = watched.page
    await sign_in(page, "olive")
    await page.get_by_role("link", name="Requests").click()
    row = page.get_by_role("row", name=console.request)
    await expect(row).to_contain_text("0.000123456 USD")
    await expect(row.locator(".badge")).to_have_text("met")
    await expect(page.get_by_role("row")).to_have_count(2)
    await page.get_by_label("Request id").fill(f"chatcmpl-{console.request}")
    await page.get_by_role("button", name="Find").click()
    await expect(page.get_by_role("row", name=console.request)).to_be_visible()
    assert watched.complaints == []


async def test_pages_are_accessible_and_fit_a_phone(page: Page, publisher: Publisher) -> None:
    """axe finds nothing, in light and dark, wide and narrow, live and stale; nothing is wider than 360 px."""
    publisher.make = lambda step: sample.snapshot(engines=[sample.engine(), sample.engine("engine-2", age_ms=9000)])
    await page.goto("/login/")
    await _check(page, ["light", "dark"])
    await sign_in(page, "admin")
    await expect(page.get_by_text("engine-2 has been silent")).to_be_visible(timeout=SOON_MS)
    await _check(page, ["light", "dark"])
    await _check(page, ["dark", "light"])
    publisher.stop()
    await expect(page.get_by_text("Live data stopped at")).to_be_visible(timeout=SOON_MS)
    await _check(page, ["light", "dark"])
    await page.goto("/requests/")
    await _check(page, ["dark", "light"])


async def _check(page: Page, schemes: list[Literal["light", "dark"]]) -> None:
    """One colour scheme on a wide screen, the other on a narrow one."""
    for width, scheme in zip((1280, 360), schemes, strict=True):
        await page.set_viewport_size({"width": width, "height": 800})
        await page.emulate_media(color_scheme=scheme)
        found = await Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
