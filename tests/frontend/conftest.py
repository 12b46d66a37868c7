"""A real console: uvicorn in a process of its own on the test database and real Redis, and a real browser."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import django
import httpx
import pytest
from django.conf import settings
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

django.setup()  # conftest files are imported before pytest-django does it; the environment is already the tests' own

from tenants.models import Membership, Tenant, Tier, User  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse battery staple"
CHROMIUM = "/usr/bin/chromium"
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class People:
    """Who signs in: an operator, a member of alpha, one who may not see alpha's money, and one without a tenant."""

    admin: User
    owner: User
    viewer: User
    stranger: User


@pytest.fixture
def people(transactional_db: None) -> People:
    tiers = [
        Tier.objects.get_or_create(name=name, defaults={"rank": rank, "ttft_ms": ttft, "tpot_ms": 100})[0]
        for rank, (name, ttft) in enumerate([("interactive", 1000), ("standard", 5000), ("batch", 60_000)])
    ]
    alpha, _ = Tenant.objects.get_or_create(slug="alpha", defaults={"name": "Alpha", "tier": tiers[0]})
    Tenant.objects.get_or_create(slug="beta", defaults={"name": "Beta", "tier": tiers[1]})
    owner = User.objects.create_user("olive", password=PASSWORD)
    viewer = User.objects.create_user("victor", password=PASSWORD)
    Membership.objects.create(user=owner, tenant=alpha, role=Membership.Role.OWNER)
    Membership.objects.create(user=viewer, tenant=alpha, role=Membership.Role.VIEWER)
    return People(
        admin=User.objects.create_user("admin", password=PASSWORD, is_staff=True),
        owner=owner,
        viewer=viewer,
        stranger=User.objects.create_user("sam", password=PASSWORD),
    )


@pytest.fixture
def prefix(redis_prefix: str, settings: object) -> str:
    """The console in this process reads the same keys as the test writes."""
    settings.SLUICE_REDIS_PREFIX = redis_prefix  # type: ignore[attr-defined]
    return redis_prefix


@dataclass
class Console:
    """A running console. It may be stopped and started again on the same port."""

    port: int
    environment: dict[str, str]
    child: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "gateway.asgi:console", "--port", str(self.port)]
        command += ["--log-level", "warning", "--timeout-graceful-shutdown", "1"]
        self.child = subprocess.Popen(command, cwd=ROOT, env=self.environment)
        ends_s = time.monotonic() + 30
        while True:
            if self.child.poll() is not None or time.monotonic() > ends_s:
                raise RuntimeError(f"the console did not start (exit status {self.child.returncode})")
            try:
                httpx.get(f"{self.url}/login/", timeout=5).raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.05)

    def stop(self) -> None:
        if self.child is not None:
            self.child.terminate()
            self.child.wait(10)
            self.child = None


@pytest.fixture
def console(people: People, redis_url: str, prefix: str) -> Iterator[Console]:
    """The control plane on the test database, under the test's Redis prefix."""
    database = settings.DATABASES["default"]
    url = f"postgresql://{database['USER']}:{database['PASSWORD']}@/{database['NAME']}?host={database['HOST']}"
    if database["PORT"]:
        url += f"&port={database['PORT']}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "DATABASE_URL": url, "REDIS_URL": redis_url, "SLUICE_REDIS_PREFIX": prefix}
    running = Console(port, environment)
    running.start()
    yield running
    running.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        await chromium.close()


@pytest.fixture
async def context(browser: Browser, console: Console) -> AsyncIterator[BrowserContext]:
    opened = await browser.new_context(base_url=console.url, viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(10_000)
    yield opened
    await opened.close()


@pytest.fixture
async def page(context: BrowserContext) -> Page:
    """A page that remembers everything it complained about, in `complaints`."""
    opened = await context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.complaints = complaints  # type: ignore[attr-defined]
    return opened


async def sign_in(page: Page, name: str, password: str = PASSWORD) -> None:
    await page.goto("/login/")
    await page.get_by_label("User name").fill(name)
    await page.get_by_label("Password").fill(password)
    await page.get_by_role("button", name="Sign in").click()
