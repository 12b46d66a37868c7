"""What a change of the record does to the principals of the data plane (T4), and what it refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from redis import Redis

from engine.protocol.keys import Keys
from tenants import selectors, services
from tenants.models import ApiKey, Membership, Tenant, User
from tenants.principals import Principal, find_principal, load_principal
from tenants.threads import off_loop
from tests.billing.build import ACTOR, tenant, tiers


def issue(slug: str = "acme", **fields: Any) -> ApiKey:
    owner = Tenant.objects.filter(slug=slug).first() or tenant(slug)
    project = services.create_project(ACTOR, owner, "default", "Default")
    return services.issue_key(ACTOR, project, "laptop", **fields).key


def principal(key: ApiKey) -> Principal:
    found = load_principal(key.public_id)
    assert found is not None
    return found[0]


@pytest.mark.django_db
def test_a_principal_says_what_the_record_says() -> None:
    limits = [{"name": "tokens", "capacity": 500, "per_minute": 60}]
    _, standard, batch = tiers()
    owner = services.create_tenant(
        ACTOR, "acme", "Acme", standard, [batch], billing="prepaid", floor="-2.5", max_concurrent=3, rate_limits=limits
    )
    p = principal(issue(models=["tiny"], ip_ranges=["10.0.0.0/8"]))
    assert [(t.name, t.rank) for t in p.tiers] == [("standard", 1), ("batch", 2)]
    assert (p.tenant, p.project, p.models, p.ip_ranges) == ("acme", "default", ("tiny",), ("10.0.0.0/8",))
    assert (p.floor_nano, p.max_concurrent, p.limits) == (-2_500_000_000, 3, (("tokens", 500, 60),))
    assert p.active and p.expires_ms is None and p.salt == owner.salt != ""
    assert load_principal("0" * 16) is None


@pytest.mark.django_db(transaction=True)
async def test_a_principal_can_be_found_from_the_event_loop() -> None:
    key = await off_loop(issue)()
    found = await find_principal(key.public_id)
    assert found is not None and found[0].key_id == key.public_id and len(found[1]) == 32


@pytest.mark.django_db
def test_revoked_suspended_and_closed_are_inactive() -> None:
    key = issue()
    for change, undo in (
        (lambda o: services.set_status(ACTOR, o, Tenant.Status.SUSPENDED), True),
        (lambda o: services.set_status(ACTOR, o, Tenant.Status.CLOSED), True),
        (lambda o: services.close_project(ACTOR, key.project), False),
        (lambda o: services.revoke_key(ACTOR, key), False),
    ):
        assert principal(key).active or not undo
        change(key.project.tenant)
        assert not principal(key).active
        if undo:
            services.set_status(ACTOR, key.project.tenant, Tenant.Status.ACTIVE)


@pytest.mark.django_db
def test_rotation_keeps_the_rights_and_ends_the_old_key_after_the_overlap() -> None:
    key = issue(models=["tiny"], scopes=["inference"], ip_ranges=["10.0.0.0/8"])
    issued = services.rotate_key(ACTOR, key, timedelta(hours=1))
    old, new = principal(key), principal(issued.key)
    assert (new.models, new.scopes, new.ip_ranges) == (old.models, old.scopes, old.ip_ranges)
    assert issued.key.rotated_from == key and new.expires_ms is None
    assert old.active and old.expires_ms is not None
    assert 0 < old.expires_ms / 1000 - timezone.now().timestamp() <= 3600


@pytest.mark.django_db(transaction=True)
def test_t4_a_change_raises_the_generation_and_is_told_on_commit(redis_url: str) -> None:
    redis, keys = Redis.from_url(redis_url), Keys(settings.SLUICE_REDIS_PREFIX)
    key = issue()
    before = principal(key).generation
    with redis.pubsub() as listener:
        listener.subscribe(keys.invalidate)
        assert listener.get_message(timeout=5)["type"] == "subscribe"
        with transaction.atomic():
            services.revoke_key(ACTOR, key)
            assert listener.get_message(timeout=0.05) is None
        told = listener.get_message(timeout=5)
    assert told is not None and told["data"] == b"acme"
    assert principal(key).generation == before + 1
    assert int(redis.hget(keys.account("acme"), "generation") or 0) == before + 1
    redis.delete(keys.account("acme"))


@pytest.mark.django_db(transaction=True)
def test_t4_a_change_rolled_back_is_not_told(redis_url: str) -> None:
    redis, keys = Redis.from_url(redis_url), Keys(settings.SLUICE_REDIS_PREFIX)
    key = issue("quiet")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        services.revoke_key(ACTOR, key)
        _ = 1 / 0
    assert principal(key).active
    assert redis.hget(keys.account("quiet"), "generation") is None


@pytest.mark.django_db
def test_only_worse_tiers_may_be_asked_for_and_only_known_fields_changed() -> None:
    interactive, standard, _ = tiers()
    with pytest.raises(ValueError, match="worse"):
        services.create_tenant(ACTOR, "acme", "Acme", standard, [interactive])
    acme = tenant()
    with pytest.raises(TypeError, match="slug"):
        services.update_tenant(ACTOR, acme, slug="other")
    for bad in ([{"name": "requests"}], [{"name": "x", "capacity": 1, "per_minute": 1}]):
        with pytest.raises(ValidationError):
            services.update_tenant(ACTOR, acme, rate_limits=bad)
    for slug in ("Acme", "-a", "a b", "a:b", ""):
        with pytest.raises(ValidationError):
            tenant(slug)


@pytest.mark.django_db
def test_a_user_sees_only_the_tenants_it_is_a_member_of() -> None:
    issue("acme"), issue("umbrella")
    acme = Tenant.objects.get(slug="acme")
    member, staff = User.objects.create_user("m"), User.objects.create_user("s", is_staff=True)
    services.grant(ACTOR, member, acme, Membership.Role.VIEWER)
    assert selectors.visible_slugs(member) == {"acme"}
    assert selectors.visible_slugs(staff) == {"acme", "umbrella"}
    assert {k.project.tenant.slug for k in selectors.api_keys(member)} == {"acme"}
    assert {p.tenant.slug for p in selectors.projects(member)} == {"acme"}
    assert not selectors.audit_events(member).exists()
    services.grant(ACTOR, member, acme, Membership.Role.OWNER)
    assert set(selectors.audit_events(member).values_list("tenant", flat=True)) == {"acme"}
    assert selectors.may(member, acme, selectors.MANAGES)
    assert not selectors.may(member, Tenant.objects.get(slug="umbrella"), selectors.SEES)
    member.is_active = False
    member.save()
    assert selectors.visible_slugs(member) == frozenset()


@pytest.mark.django_db
def test_targets_in_force_are_those_of_the_time() -> None:
    interactive = tiers()[0]
    start = timezone.now()
    services.update_tier(ACTOR, interactive, ttft_ms=500)
    history = selectors.TargetHistory.load(["interactive", "nothing"])
    assert history.at("interactive", start - timedelta(days=1)) == (2000, 150)
    assert history.at("interactive", start) == (2000, 150)
    assert history.at("interactive", timezone.now()) == (500, 150)
    assert history.at("nothing", start) is None
