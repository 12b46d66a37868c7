"""The console in a real browser shows the very request that was made."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.e2e.stack import Stack

pytestmark = pytest.mark.browser
CHROMIUM = "/usr/bin/chromium"
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
QUIET += ("--disable-component-update", "--disable-sync")


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield await browser.new_page()
        await browser.close()


async def _sign_in(page: Page, stack: Stack) -> None:
    await page.goto(stack.credentials["console_url"])
    await page.get_by_label("User name").fill(stack.credentials["admin"]["username"])
    await page.get_by_label("Password").fill(stack.credentials["admin"]["password"])
    await page.get_by_role("button", name="Sign in").click()


async def test_a_request_is_counted_against_tenant_slo_and_price(stack: Stack, page: Page) -> None:
    async with stack.async_client("alpha") as client:
        answer = await client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Hi!"}], max_tokens=8
        )
    await _sign_in(page, stack)
    row = page.locator("#row-interactive-alpha")
    await expect(row.locator("td[data-label='Requests']")).not_to_have_text("0", timeout=15_000)
    await expect(row.locator("td[data-label^='Charged']")).to_contain_text("USD", timeout=15_000)
    await expect(page.locator("#freshness .word")).to_have_text("Live")
    await expect(page.locator("table.engines .badge").first).to_have_text("ready")

    request = uuid.UUID(answer.id.split("-", 1)[1])
    await page.goto(f"{stack.credentials['console_url']}requests/?id={request.hex}")
    line = page.locator("table.requests tbody tr")
    await expect(line).to_have_count(1)
    await expect(line.locator("td[data-label='Tenant']")).to_have_text("alpha")
    await expect(line.locator("td[data-label='Tier']")).to_have_text("interactive")
    await expect(line.locator("td[data-label='Price']")).to_contain_text("USD")
    assert answer.usage is not None
    await expect(line.locator("td[data-label='Output']")).to_have_text(str(answer.usage.completion_tokens))


async def test_a_wrong_password_shows_an_error(stack: Stack, page: Page) -> None:
    await page.goto(stack.credentials["console_url"])
    await page.get_by_label("User name").fill("nobody")
    await page.get_by_label("Password").fill("not the password")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_be_visible()
