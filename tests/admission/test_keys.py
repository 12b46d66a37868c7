"""Who may come in: keys, their limits, and what a wrong one costs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import httpx
import pytest
from django.db import OperationalError

from gateway.admission.identity import FRESH_S, OUTAGE_S, UNKNOWN_S, Identity
from gateway.admission.tiers import choose_tier
from gateway.errors import ApiError
from tenants import keys as key_text
from tenants.principals import Principal, TierFacts
from tests.api.test_chat import ASK, ask
from tests.api.test_errors import check
from tests.harness import Gateway


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer sk-wrong-key-000000000000",
        "Basic YWxhZGRpbjpvcGVuc2VzYW1l",
        "Bearer sk-0123456789abcdef-" + "x" * 43,
        "Bearer ' OR 1=1 --",
        "Bearer \xff\xfe",
        "x" * 8000,
    ],
)
def test_no_key_or_a_wrong_one(gateway: Gateway, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for path in ("chat/completions", "completions"):
        response = httpx.post(f"{gateway.base}/{path}", json=ASK, headers=headers)
        error = check(response, 401)
        assert error["code"] == ("invalid_api_key" if header else "missing_api_key")
        assert header is None or len(header) < 20 or header[7:] not in response.text
    assert httpx.get(f"{gateway.base}/models", headers=headers).status_code == 401
    assert httpx.get(f"{gateway.base}/models/sim", headers=headers).status_code == 401


def test_a_wrong_secret_for_a_real_key(gateway: Gateway) -> None:
    public_id, _ = key_text.parse(gateway.stack.keys["alpha"])  # type: ignore[misc]
    headers = {"authorization": f"Bearer sk-{public_id}-{'A' * 43}"}
    check(httpx.get(f"{gateway.base}/models", headers=headers), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("expired", 401, "api_key_expired"),
        ("revoked", 401, "invalid_api_key"),
        ("suspended", 401, "invalid_api_key"),
        ("no-scope", 403, "scope_not_allowed"),
        ("elsewhere", 403, "ip_not_allowed"),
        ("other-model", 404, "model_not_found"),
    ],
)
def test_a_key_that_may_not(gateway: Gateway, name: str, status: int, code: str) -> None:
    with gateway.client(name) as client:
        check(ask(client), status, code)


def test_a_key_used_from_where_it_may(gateway: Gateway) -> None:
    with gateway.client("here") as client:
        assert ask(client).status_code == 200


def test_models_a_key_may_not_use_are_not_listed(gateway: Gateway) -> None:
    with gateway.client("other-model") as client:
        assert client.get("/models").json()["data"] == []


def test_a_tier_may_only_be_lowered(gateway: Gateway) -> None:
    with gateway.client("beta") as client:
        assert ask(client, service_tier="batch").json()["service_tier"] == "batch"
        assert ask(client, service_tier="auto").json()["service_tier"] == "standard"
        assert ask(client, service_tier="flex").json()["service_tier"] == "batch"
        check(ask(client, service_tier="interactive"), 403, "tier_not_allowed")
        for name in ("warp", "", "Batch"):
            error = check(ask(client, service_tier=name), 400, "invalid_value")
            assert error["param"] == "service_tier" and "'auto'" in error["message"] and "'batch'" in error["message"]


def test_a_suspension_is_seen_at_once(gateway: Gateway) -> None:
    with gateway.client("changing") as client:
        assert ask(client).status_code == 200
        tenant = "Tenant.objects.get(slug='changing')"
        gateway.stack.change(f"services.set_status(actor, {tenant}, Tenant.Status.SUSPENDED)")
        check(ask(client), 401, "invalid_api_key")
        gateway.stack.change(f"services.set_status(actor, {tenant}, Tenant.Status.ACTIVE)")
        assert ask(client).status_code == 200


TIER = TierFacts("standard", 1, 1000, 100, 10, 1.0, False)
PRINCIPAL = Principal(
    "t", "T", "p", "k", 1, (TIER,), None, frozenset({"inference"}), (), -1, -1, (), 1.0, None, "USD", None, True, "s"
)
PEPPER = b"p" * 32


class Record:
    """A record of one key that counts how often it is asked and can be away."""

    def __init__(self) -> None:
        self.public_id, self.secret, self.key = key_text.mint()
        self.reached = asyncio.Event()
        self.principal, self.asked, self.away = replace(PRINCIPAL, key_id=self.public_id), 0, False

    async def find(self, public_id: str) -> tuple[Principal, bytes] | None:
        self.asked += 1
        self.reached.set()
        await asyncio.sleep(0)
        if self.away:
            raise OperationalError("away")
        if public_id != self.public_id:
            return None
        return self.principal, key_text.digest(self.secret, PEPPER)


@pytest.fixture
def record() -> Record:
    return Record()


async def test_the_record_is_asked_once_for_many(record: Record) -> None:
    identity = Identity(record.find, PEPPER)
    found = await asyncio.gather(*(identity.authenticate(f"Bearer {record.key}") for _ in range(50)))
    assert record.asked == 1 and set(found) == {record.principal}


async def test_wrong_keys_do_not_reach_the_record_each_time(record: Record) -> None:
    now = 0.0
    identity = Identity(record.find, PEPPER, lambda: now)
    unknown = key_text.mint()[2]
    wrong = f"sk-{record.public_id}-{'x' * 43}"
    for key in [unknown, wrong, "sk-nonsense"] * 20:
        with pytest.raises(ApiError) as caught:
            await identity.authenticate(f"Bearer {key}")
        assert caught.value.code == "invalid_api_key"
    assert record.asked == 2
    now += UNKNOWN_S + 1
    with pytest.raises(ApiError):
        await identity.authenticate(f"Bearer {unknown}")
    assert record.asked == 3


async def test_known_keys_outlive_an_outage_of_the_record(record: Record) -> None:
    now = 0.0
    identity = Identity(record.find, PEPPER, lambda: now)
    await identity.authenticate(f"Bearer {record.key}")
    record.away = True
    now = OUTAGE_S - 1
    assert await identity.authenticate(f"Bearer {record.key}") == record.principal
    now = OUTAGE_S + 1
    for key in (record.key, key_text.mint()[2]):
        with pytest.raises(ApiError) as caught:
            await identity.authenticate(f"Bearer {key}")
        assert caught.value.code == "identity_unavailable" and caught.value.status == 503


async def test_a_change_is_read_after_it_was_told_or_grown_old(record: Record) -> None:
    now = 0.0
    identity = Identity(record.find, PEPPER, lambda: now)
    await identity.authenticate(f"Bearer {record.key}")
    record.principal = replace(record.principal, generation=2)
    assert (await identity.authenticate(f"Bearer {record.key}")).generation == 1
    identity.invalidate("another")
    assert (await identity.authenticate(f"Bearer {record.key}")).generation == 1
    identity.invalidate("t")
    assert (await identity.authenticate(f"Bearer {record.key}")).generation == 2
    record.principal = replace(record.principal, generation=3)
    now += FRESH_S + 1
    assert (await identity.authenticate(f"Bearer {record.key}")).generation == 3


async def test_what_was_read_before_a_change_is_not_kept(record: Record) -> None:
    identity = Identity(record.find, PEPPER)
    reading = asyncio.create_task(identity.authenticate(f"Bearer {record.key}"))
    await record.reached.wait()
    identity.invalidate("t")
    await reading
    await identity.authenticate(f"Bearer {record.key}")
    assert record.asked == 2


async def test_expiry_is_checked_on_every_use(record: Record) -> None:
    identity = Identity(record.find, PEPPER)
    record.principal = replace(record.principal, expires_ms=int(time.time() * 1000) + 150)
    await identity.authenticate(f"Bearer {record.key}")
    await asyncio.sleep(0.2)
    with pytest.raises(ApiError) as caught:
        await identity.authenticate(f"Bearer {record.key}")
    assert caught.value.code == "api_key_expired"


def test_openais_words_for_tiers_never_raise_one() -> None:
    low = replace(TIER, name="batch", rank=2)
    principal = replace(PRINCIPAL, tiers=(TIER, low))
    for word in (None, "auto", "default", "priority", "scale", "standard"):
        assert choose_tier(principal, word) is TIER
    assert choose_tier(principal, "flex") is low and choose_tier(principal, "batch") is low
