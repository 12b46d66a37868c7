"""The requests page: the newest requests, only those one may see, page after page without loss or doubles."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from tenants.models import User
from tenants.partitions import uuid_floor

from .conftest import People
from .records import add_outcome, add_usage, new_id

IDS = re.compile(r'class="id"><a href="\?id=([0-9a-f]{32})"')


def get(name: str, path: str = "/requests/") -> str:
    client = Client()
    client.force_login(User.objects.get(username=name))
    response = client.get(path)
    assert response.status_code == 200
    return response.content.decode()


def test_a_request_just_sent_is_the_first_line(people: People) -> None:
    add_usage(new_id(), tenant="beta")
    mine = new_id()
    add_usage(mine)
    add_outcome(mine)
    html = get("admin")
    assert IDS.findall(html)[0] == mine.hex
    row = html.split(mine.hex)[2].split("</tr>")[0]
    for figure in (
        "alpha",
        "interactive",
        ">31 ",
        ">64<",
        "16 cached",
        "212 ms",
        "met",
        "0.000123456",
        "USD",
        ">stop<",
    ):
        assert figure in row, figure


def test_a_member_sees_only_its_own_tenants_and_money_only_by_role(people: People) -> None:
    mine, other = new_id(), new_id()
    add_usage(mine)
    add_usage(other, tenant="beta")
    add_outcome(other, tenant="beta")
    for name in ("olive", "victor"):
        html = get(name)
        assert IDS.findall(html) == [mine.hex]
        assert "beta" not in html
        assert ("0.000123456" in html) == (name == "olive")
        assert other.hex not in IDS.findall(get(name, f"/requests/?id={other.hex}"))
    assert IDS.findall(get("sam")) == []
    assert set(IDS.findall(get("admin"))) == {mine.hex, other.hex}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttft_met": False, "good": False}, "TTFT missed"),
        ({"tpot_met": False, "good": False}, "TPOT missed"),
        ({"ttft_met": False, "tpot_met": False, "good": False}, "TTFT and TPOT missed"),
        ({"ttft_met": None, "tpot_met": None, "ttft_s": None, "good": False, "status": 499}, "client left"),
        ({"ttft_met": None, "tpot_met": None, "good": False, "status": 503}, "failed (503)"),
    ],
)
def test_a_missed_slo_says_what_was_missed(people: People, fields: dict[str, Any], words: str) -> None:
    request = new_id()
    add_usage(request)
    add_outcome(request, **fields)
    assert words in get("admin")


def test_records_that_came_without_the_other_are_shown(people: People) -> None:
    settled, seen = new_id(), new_id()
    add_usage(settled)
    add_outcome(seen)
    html = get("admin")
    assert IDS.findall(html) == [seen.hex, settled.hex]
    assert "no verdict yet" in html


def test_pages_cover_every_request_once_in_order(people: People) -> None:
    """Usage and outcome rows end at different places, so pages of the two never line up by chance."""
    ids = [new_id() for _ in range(120)]
    for index, request in enumerate(ids):
        if index % 3:
            add_usage(request)
        if index % 4 or not index % 3:
            add_outcome(request)
    found: list[str] = []
    path = "/requests/"
    for _ in range(4):
        html = get("admin", path)
        found += IDS.findall(html)
        older = re.search(r'href="(\?before=[0-9a-f]{32})"', html)
        if older is None:
            break
        path = f"/requests/{older[1]}"
    assert found == [request.hex for request in sorted(ids, reverse=True)]


def test_older_than_an_hour_is_left_to_the_search(people: People) -> None:
    floor = uuid_floor(timezone.now() - timedelta(minutes=61))
    old = UUID(int=floor.int | 0x7 << 76 | 0x8 << 60 | 1)
    add_usage(old)
    assert IDS.findall(get("admin")) == []
    for spelling in (old.hex, str(old), f"chatcmpl-{old.hex}", f"  {old.hex.upper()} "):
        assert IDS.findall(get("admin", f"/requests/?id={spelling}")) == [old.hex]


@pytest.mark.parametrize("wanted", ["nonsense", "'; drop table x", "0" * 32, "f" * 32, "é" * 300])
def test_an_unknown_id_is_a_sentence_not_an_error(people: People, wanted: str) -> None:
    assert "No request with that id" in get("admin", f"/requests/?id={wanted}")


def test_a_cursor_nobody_made_is_not_found(people: People) -> None:
    client = Client()
    client.force_login(people.admin)
    assert client.get("/requests/?before=zzz").status_code == 404
    assert client.post("/requests/").status_code == 405


@pytest.mark.slow
@pytest.mark.parametrize("name", ["admin", "olive"])
def test_a_million_rows_in_the_hour_do_not_slow_the_page(people: People, name: str) -> None:
    """Under 200 ms, the first page and one deep inside, for all tenants and for one of many."""
    facts = (
        "tier, pool, engine, epoch, reason, code, prompt_tokens, cached_tokens, completion_tokens, wasted_tokens, "
        "engine_s, joules, parked_s, parks, finished_at, currency, money"
    )
    key = "(lpad(to_hex(ms), 12, '0') || '7' || '000' || '8' || lpad(to_hex(i), 15, '0'))::uuid"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO billing_usagerecord (request_id, tenant, {facts}) SELECT {key}, "  # noqa: S608
            "CASE i % 1000 WHEN 0 THEN 'alpha' ELSE 't' || i % 50 END, 'batch', 'p', 'e', 0, 'stop', '', 1, 0, 1, 0, "
            "0, 0, 0, 0, now(), 'USD', 0 FROM (SELECT i, (extract(epoch from now()) * 1000)::bigint - i * 3 AS ms "
            "FROM generate_series(1, 1000000) i) rows"
        )
        cursor.execute("ANALYZE billing_usagerecord")
    client = Client()
    client.force_login(User.objects.get(username=name))
    middle = uuid_floor(timezone.now() - timedelta(minutes=30)).hex
    client.get("/requests/")  # templates are compiled once
    for path in ("/requests/", f"/requests/?before={middle}"):
        times = []
        for _ in range(5):
            started_s = time.perf_counter()
            html = client.get(path).content.decode()
            times.append(time.perf_counter() - started_s)
            assert len(IDS.findall(html)) == 50
        assert min(times) < 0.2, times
