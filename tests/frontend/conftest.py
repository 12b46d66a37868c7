"""A real console: uvicorn in a process of its own on the test database and real Redis, and a real browser."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import django
import httpx
import pytest
import pytest_asyncio
from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.db import connection
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright
from redis import Redis

django.setup()  # conftest files are imported before pytest-django does it; the environment is already the tests' own

from tenants.models import Membership, Tenant, Tier, User  # noqa: E402

from .records import add_outcome, add_usage, new_id  # noqa: E402

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


@pytest.fixture(scope="session")
def password_hash() -> str:
    """Hashing is slow on purpose: once is enough for all."""
    return make_password(PASSWORD)


def make_people(password_hash: str) -> People:
    tiers = [
        Tier.objects.get_or_create(name=name, defaults={"rank": rank, "ttft_ms": ttft, "tpot_ms": 100})[0]
        for rank, (name, ttft) in enumerate([("interactive", 1000), ("standard", 5000), ("batch", 60_000)])
    ]
    alpha, _ = Tenant.objects.get_or_create(slug="alpha", defaults={"name": "Alpha", "tier": tiers[0]})
    Tenant.objects.get_or_create(slug="beta", defaults={"name": "Beta", "tier": tiers[1]})
    owner, viewer, stranger, admin = (
        User.objects.create(username=name, password=password_hash, is_staff=name == "admin")
        for name in ("olive", "victor", "sam", "admin")
    )
    Membership.objects.create(user=owner, tenant=alpha, role=Membership.Role.OWNER)
    Membership.objects.create(user=viewer, tenant=alpha, role=Membership.Role.VIEWER)
    return People(admin=admin, owner=owner, viewer=viewer, stranger=stranger)


@pytest.fixture
def people(db: None, password_hash: str) -> People:
    return make_people(password_hash)


@pytest.fixture
def prefix(redis_prefix: str, settings: Any) -> str:
    """The console in this process reads the same keys as the test writes."""
    settings.SLUICE_REDIS_PREFIX = redis_prefix
    return redis_prefix


@dataclass
class Console:
    """A running console. It may be stopped and started again on the same port."""

    port: int
    prefix: str
    request: str
    """Id of a request of alpha's that is on record, beside two of beta's."""
    environment: dict[str, str]
    child: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "gateway.asgi:console", "--port", str(self.port)]
        command += ["--log-level", "warning", "--timeout-graceful-shutdown", "1"]
        self.child = subprocess.Popen(command, cwd=ROOT, env=self.environment)
        ends_s = time.monotonic() + 60
        while True:
            if self.child.poll() is not None or time.monotonic() > ends_s:
                raise RuntimeError(f"the console did not start (exit status {self.child.returncode})")
            try:
                httpx.get(f"{self.url}/login/", timeout=10).raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.05)

    def stop(self) -> None:
        if self.child is not None:
            self.child.terminate()
            self.child.wait(20)
            self.child = None


def _environment(redis_url: str, prefix: str) -> dict[str, str]:
    database = settings.DATABASES["default"]
    url = f"postgresql://{database['USER']}:{database['PASSWORD']}@/{database['NAME']}?host={database['HOST']}"
    if database["PORT"]:
        url += f"&port={database['PORT']}"
    return {**os.environ, "DATABASE_URL": url, "REDIS_URL": redis_url, "SLUICE_REDIS_PREFIX": prefix}


@pytest.fixture(scope="module")
def console(django_db_setup: None, django_db_blocker: Any, redis_url: str, password_hash: str) -> Iterator[Console]:
    """The control plane with committed people of its own (another process sees no open transaction)."""
    prefix = f"t{secrets.token_hex(6)}:"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    request = new_id()
    with django_db_blocker.unblock():
        make_people(password_hash)
        add_usage(request)
        add_outcome(request)
        add_usage(new_id(), tenant="beta")
        add_outcome(new_id(), tenant="beta", status=499, reason="abort", good=False, ttft_met=None, ttft_s=None)
    running = Console(port, prefix, request.hex, _environment(redis_url, prefix))
    try:
        running.start()
        yield running
    finally:
        running.stop()
        with django_db_blocker.unblock():
            for model in (Membership, User, Tenant, Tier):
                model.objects.all().delete()
            with connection.cursor() as cursor:  # history can't be deleted, but a test database can be emptied
                cursor.execute("TRUNCATE billing_usagerecord, metering_requestoutcome")
        with Redis.from_url(redis_url) as redis:
            redis.delete(*redis.scan_iter(match=f"{prefix}*"), f"{prefix}live")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser, console: Console) -> AsyncIterator[BrowserContext]:
    opened = await browser.new_context(base_url=console.url, viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(20_000)
    yield opened
    await opened.close()


@dataclass
class Watched:
    """A page, and everything it complained about or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest_asyncio.fixture(loop_scope="module")
async def watched(context: BrowserContext) -> Watched:
    watched = Watched(await context.new_page())

    def heard(said: ConsoleMessage) -> None:
        if said.type == "error":
            watched.complaints.append(said.text)

    watched.page.on("console", heard)
    watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    watched.page.on("request", lambda request: watched.requests.append(request.url))
    return watched


@pytest_asyncio.fixture(loop_scope="module")
async def page(watched: Watched) -> Page:
    return watched.page


async def sign_in(page: Page, name: str, password: str = PASSWORD) -> None:
    await page.goto("/login/")
    await page.get_by_label("User name").fill(name)
    await page.get_by_label("Password").fill(password)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url("**/")
