"""The management API through HTTP: who sees and changes what, and that every change is audited."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import orjson
import pytest
from django.test import Client
from django.utils import timezone

from tenants import keys, services
from tenants.billing.models import Price, PriceVersion
from tenants.billing.settle import settle
from tenants.models import ApiKey, AuditEvent, Membership, Tenant, User
from tenants.principals import load_principal
from tests.billing.build import ACTOR, COST, LONG_AGO, RATES, final, price, request_id, tenant

pytestmark = pytest.mark.django_db
Role = Membership.Role


@pytest.fixture
def acme() -> Tenant:
    owner = tenant()
    services.create_project(ACTOR, owner, "default", "Default")
    services.create_project(ACTOR, tenant("umbrella"), "default", "Default")
    return owner


class Api:
    """A signed-in user of the API."""

    def __init__(self, user: User | None) -> None:
        self.client = Client()
        if user is not None:
            self.client.force_login(user)

    def __call__(self, method: str, path: str, data: Any = None) -> Any:
        return self.client.generic(method, f"/api/{path}", _json(data), content_type="application/json")

    def get(self, path: str) -> Any:
        return self("GET", path).json()


def _json(data: Any) -> bytes:
    return b"" if data is None else orjson.dumps(data)


def member(of: Tenant, role: str) -> Api:
    user = User.objects.create_user(f"{role}-{of.slug}")
    services.grant(ACTOR, user, of, Role(role))
    return Api(user)


def operator() -> Api:
    return Api(User.objects.create_user("operator", is_staff=True))


READS = ("tenants/", "projects/", "keys/", "tiers/", "prices/", "usage/", "audit/", "tenants/acme/balance/")


@pytest.mark.parametrize("path", READS)
def test_nobody_reads_without_signing_in(acme: Tenant, path: str) -> None:
    assert Api(None)("GET", path).status_code == 403


def test_a_member_sees_its_own_tenant_and_nothing_of_another(acme: Tenant) -> None:
    price()
    for slug in ("acme", "umbrella"):
        issued = services.issue_key(ACTOR, Tenant.objects.get(slug=slug).projects.get(), slug)
    settle([final(), final(tenant="umbrella")], {})
    api = member(acme, "owner")
    assert [x["slug"] for x in api.get("tenants/")] == ["acme"]
    assert [x["tenant"] for x in api.get("projects/")] == ["acme"]
    assert [x["tenant"] for x in api.get("keys/")] == ["acme"]
    assert {x["tenant"] for x in api.get("usage/")["results"]} == {"acme"}
    assert {x["tenant"] for x in api.get("audit/")["results"]} == {"acme"}
    for path in (
        "tenants/umbrella/",
        "tenants/umbrella/balance/",
        "usage/?tenant=umbrella",
        f"keys/{issued.key.public_id}/",
        "tenants/nobody/",
    ):
        assert api("GET", path).status_code == 404, path
    assert api("DELETE", f"keys/{issued.key.public_id}/").status_code == 404
    body = {"tenant": "umbrella", "name": "mine"}
    assert api("POST", "keys/", body).status_code == 404
    assert api("POST", "projects/", body | {"slug": "mine"}).status_code == 404
    issued.key.refresh_from_db()
    assert issued.key.revoked_at is None


def test_a_key_is_issued_shown_once_rotated_and_revoked(acme: Tenant) -> None:
    api = member(acme, "admin")
    body = {"tenant": "acme", "name": "laptop", "models": ["tiny"], "ip_ranges": ["10.0.0.1/32"]}
    answer = api("POST", "keys/", body)
    assert answer.status_code == 201
    issued = answer.json()
    parsed = keys.parse(issued["secret_key"])
    assert parsed is not None and issued["key"]["public_id"] == parsed[0]
    assert parsed[1] not in api("GET", "keys/").content.decode()
    path = f"keys/{parsed[0]}/"
    rotated = api("POST", f"{path}rotate/", {"overlap_s": 60})
    assert rotated.status_code == 201 and rotated.json()["key"]["rotated_from"] == parsed[0]
    assert api.get(path)["expires_at"] is not None
    assert api("DELETE", path).status_code == 204
    found = load_principal(parsed[0])
    assert found is not None and not found[0].active
    actions = list(AuditEvent.objects.order_by("position").values_list("action", flat=True))
    assert actions[-4:] == ["key.issue", "key.issue", "key.rotate", "key.revoke"]
    assert AuditEvent.objects.order_by("-position")[0].actor_label == "admin-acme"


@pytest.mark.parametrize("role", ["viewer", "finance"])
def test_roles_limit_what_a_member_may_do(acme: Tenant, role: str) -> None:
    price()
    settle([final()], {})
    api = member(acme, role)
    key = services.issue_key(ACTOR, acme.projects.get(), "laptop").key
    assert api("POST", "keys/", {"tenant": "acme", "name": "x"}).status_code == 404
    assert api("DELETE", f"keys/{key.public_id}/").status_code == 404
    assert api("POST", "projects/", {"tenant": "acme", "slug": "x", "name": "X"}).status_code == 404
    assert api.get("audit/")["results"] == []
    for method, path in (
        ("PATCH", "tenants/acme/"),
        ("PUT", "tenants/acme/status/"),
        ("POST", "tenants/acme/top-ups/"),
    ):
        assert api(method, path, {}).status_code == 403
    money = api.get("usage/")["results"][0]["money"]
    balance = api("GET", "tenants/acme/balance/")
    if role == "finance":
        assert money == f"{COST:f}00000000" and balance.json()["amount"] == f"-{money}"
    else:
        assert money is None and balance.status_code == 404
    assert ApiKey.objects.count() == 1


def test_an_operator_makes_tenants_tiers_prices_and_top_ups(acme: Tenant) -> None:
    api = operator()
    tier = {"name": "express", "rank": 9, "ttft_ms": 100, "tpot_ms": 10}
    assert api("POST", "tiers/", tier).status_code == 201
    assert api("PATCH", "tiers/express/", {"ttft_ms": 200}).json()["ttft_ms"] == 200
    assert api("PATCH", "tiers/express/", {"rank": 3}).status_code == 400
    body = {"slug": "initech", "name": "Initech", "tier": "interactive", "lower_tiers": ["batch"]}
    assert api("POST", "tenants/", body).status_code == 201
    limits = [{"name": "tokens", "capacity": 9, "per_minute": 9}]
    changed = api("PATCH", "tenants/initech/", {"rate_limits": limits, "billing": "prepaid", "floor": "-1.5"}).json()
    assert (changed["rate_limits"], changed["floor"], changed["lower_tiers"]) == (limits, "-1.500000000", ["batch"])
    assert api("PUT", "tenants/initech/status/", {"status": "suspended"}).json()["status"] == "suspended"
    topped = api("POST", "tenants/initech/top-ups/", {"amount": "2.5", "note": "wire"})
    assert (topped.status_code, topped.json()) == (201, {"amount": "2.500000000000000", "currency": "USD"})
    assert api("POST", "prices/", {"price_class": "big/model-7b"}).status_code == 201
    assert api.get("prices/big/model-7b/") == {"price_class": "big/model-7b", "currency": "USD"}
    first = api("POST", "prices/big/model-7b/versions/", {**RATES, "valid_from": "2020-01-01T00:00:00Z"})
    assert first.status_code == 201, first.json()
    late = api("POST", "prices/big/model-7b/versions/", {**RATES, "valid_from": "2021-01-01T00:00:00Z"})
    assert late.status_code == 400
    start = (timezone.now() + timedelta(days=1)).isoformat()
    assert api("POST", "prices/big/model-7b/versions/", {**RATES, "valid_from": start}).status_code == 201
    assert [x["number"] for x in api.get("prices/big/model-7b/versions/")] == [2, 1]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "tenants/", {"slug": "Bad Slug", "name": "x", "tier": "interactive"}),
        ("POST", "tenants/", {"slug": "acme", "name": "again", "tier": "interactive"}),
        ("POST", "tenants/", {"slug": "x", "name": "x", "tier": "interactive", "lower_tiers": ["interactive"]}),
        ("POST", "tenants/", {"slug": "x", "name": "x", "tier": "no-such"}),
        ("POST", "keys/", {"tenant": "acme", "name": "x", "ip_ranges": ["10.0.0.1/8"]}),
        ("POST", "keys/", {"tenant": "acme", "name": "x", "scopes": ["root"]}),
        ("POST", "projects/", {"tenant": "acme", "slug": "default", "name": "again"}),
        ("POST", "tenants/acme/top-ups/", {"amount": "-1", "note": "x"}),
        ("PATCH", "tenants/acme/", {"rate_limits": [{"name": "x"}]}),
        ("PATCH", "tenants/acme/", {"slug": "other"}),
        ("GET", "usage/?before=zzz", None),
        ("GET", "usage/?size=0", None),
        ("GET", "audit/?size=x", None),
    ],
)
def test_nonsense_is_a_400_with_words(acme: Tenant, method: str, path: str, body: Any) -> None:
    answer = operator()(method, path, body)
    assert answer.status_code == 400 and answer.json()


def test_a_version_that_would_overlap_is_a_conflict(acme: Tenant) -> None:
    api = operator()
    api("POST", "prices/", {"price_class": "tiny"})
    start = timezone.now() + timedelta(days=1)
    assert api("POST", "prices/tiny/versions/", {**RATES, "valid_from": start.isoformat()}).status_code == 201
    PriceVersion.objects.create(
        price=Price.objects.get(), number=9, valid_from=LONG_AGO, valid_to=start, published_at=start, **RATES
    )
    current = PriceVersion.objects.get(number=1)
    current.valid_to = start + timedelta(days=1)
    current.save()
    answer = api("POST", "prices/tiny/versions/", {**RATES, "valid_from": start.isoformat()})
    assert answer.status_code == 409 and "contradicts" in answer.json()["detail"]


def test_usage_pages_follow_each_other_without_gap_or_overlap(acme: Tenant) -> None:
    price()
    requests = [request_id() for _ in range(25)]
    settle([final(r) for r in requests], {})
    api, seen, following = member(acme, "finance"), [], ""
    for _ in range(3):
        page = api.get(f"usage/?tenant=acme&size=10{following}")
        seen += [x["request"] for x in page["results"]]
        following = f"&before={page['next']}"
    assert seen == sorted(requests, reverse=True) and page["next"] is None


def test_the_schema_names_every_operation_and_is_open_to_all() -> None:
    answer = Api(None)("GET", "schema?format=json")
    assert answer.status_code == 200
    paths = answer.json()["paths"]
    assert {"/api/keys/{public_id}/rotate/", "/api/usage/", "/api/tenants/{slug}/top-ups/"} <= set(paths)


@pytest.mark.parametrize("capacity", ["1" + "0" * 23, "1000000000001", "0", "-1", "true", "1.5", '"5"', "null"])
def test_a_rate_limit_the_queue_could_not_count_is_refused(acme: Tenant, capacity: str) -> None:
    body = f'{{"rate_limits": [{{"name": "requests", "capacity": {capacity}, "per_minute": 60}}]}}'
    answer = operator().client.generic("PATCH", f"/api/tenants/{acme.slug}/", body, content_type="application/json")
    assert answer.status_code == 400
    acme.refresh_from_db()
    assert acme.rate_limits == []


def test_a_body_nested_too_deep_is_the_clients_mistake() -> None:
    answer = operator().client.generic("POST", "/api/tenants/", b"[" * 100_000, content_type="application/json")
    assert answer.status_code == 400
