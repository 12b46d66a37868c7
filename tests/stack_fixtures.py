"""Fixtures of the running data plane, for every room that tests through HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.harness import Gateway, Stack
from tests.harness import stack as run_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, postgres_url: str, redis_url: str) -> Iterator[Stack]:
    """Tables, tenants and keys; no process yet. One for the whole test session."""
    with run_stack(tmp_path_factory.mktemp("stack"), postgres_url, redis_url) as made:
        yield made


@pytest.fixture(scope="session")
def gateway(stack: Stack) -> Gateway:
    """A data plane with a fast simulated engine (model `sim`)."""
    stack.engine("decode_tps=400,prefill_tps=0")
    return stack.gateway(SLUICE_FIRST_BYTE_WAIT_S="0.5")


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    """Tenant alpha."""
    with gateway.client() as opened:
        yield opened


@pytest.fixture
async def aclient(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """Tenant alpha."""
    async with gateway.async_client() as opened:
        yield opened
