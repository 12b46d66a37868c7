"""Minute rollups: recomputed from the rows of their minute, never incremented (M2)."""

from __future__ import annotations

from datetime import datetime

from django.db import connection, transaction

from tenants.billing.retry import retrying

__all__ = ["roll_up"]

_LOCK = 0x5_1C1_4011
_MINUTES = 60

# A model that a client asked for in vain is the pool of its refusal: by default a pool is named after its model.
_RECOMPUTE = """
WITH m AS (
    SELECT minute, sluice_uuid_floor(minute) AS low, sluice_uuid_floor(minute + interval '1 minute') AS high
    FROM unnest(%s::timestamptz[]) AS t (minute)
), u AS (
    SELECT m.minute, u.* FROM m JOIN billing_usagerecord u ON u.request_id >= m.low AND u.request_id < m.high
), o AS (
    SELECT m.minute, o.* FROM m JOIN metering_requestoutcome o ON o.request_id >= m.low AND o.request_id < m.high
), requests AS (
    SELECT coalesce(o.minute, u.minute) AS minute, coalesce(o.tenant, u.tenant) AS tenant,
           coalesce(o.tier, u.tier) AS tier, coalesce(o.pool, u.pool) AS pool,
           o.request_id IS NOT NULL AS judged, o.status, o.ttft_s, o.stream, o.ttft_met, o.tpot_met, o.good,
           o.reason AS seen, u.reason AS ended,
           u.prompt_tokens, u.cached_tokens, u.completion_tokens, u.wasted_tokens, u.currency, u.money
    FROM u FULL JOIN o ON o.request_id = u.request_id
), served AS (
    SELECT minute, tenant, tier, pool, count(*) AS requests,
           count(*) FILTER (WHERE status >= 500 OR seen = 'error' OR ended IN ('error', 'lost')) AS errors,
           coalesce(sum(prompt_tokens), 0) AS prompt_tokens, coalesce(sum(cached_tokens), 0) AS cached_tokens,
           coalesce(sum(completion_tokens), 0) AS completion_tokens, coalesce(sum(wasted_tokens), 0) AS wasted_tokens,
           coalesce(max(currency), '') AS currency, coalesce(sum(money), 0) AS money,
           count(*) FILTER (WHERE ttft_met) AS ttft_met, count(*) FILTER (WHERE NOT ttft_met) AS ttft_missed,
           count(*) FILTER (WHERE tpot_met) AS tpot_met, count(*) FILTER (WHERE NOT tpot_met) AS tpot_missed,
           count(*) FILTER (WHERE good) AS good, count(*) FILTER (WHERE judged) AS judged,
           percentile_cont(0.50) WITHIN GROUP (ORDER BY ttft_s) FILTER (WHERE stream) AS ttft_p50_s,
           percentile_cont(0.95) WITHIN GROUP (ORDER BY ttft_s) FILTER (WHERE stream) AS ttft_p95_s
    FROM requests GROUP BY minute, tenant, tier, pool
), turned_away AS (
    SELECT minute, tenant, tier, pool, sum(count) AS refused
    FROM metering_refusaltally WHERE minute = ANY (%s) GROUP BY minute, tenant, tier, pool
)
INSERT INTO metering_minuterollup
    (minute, tenant, tier, pool, requests, refused, errors, prompt_tokens, cached_tokens, completion_tokens,
     wasted_tokens, currency, money, ttft_met, ttft_missed, tpot_met, tpot_missed, good, judged, ttft_p50_s, ttft_p95_s)
SELECT minute, tenant, tier, pool, coalesce(requests, 0), coalesce(refused, 0), coalesce(errors, 0),
       coalesce(prompt_tokens, 0), coalesce(cached_tokens, 0), coalesce(completion_tokens, 0),
       coalesce(wasted_tokens, 0), coalesce(currency, ''), coalesce(money, 0), coalesce(ttft_met, 0),
       coalesce(ttft_missed, 0), coalesce(tpot_met, 0), coalesce(tpot_missed, 0), coalesce(good, 0),
       coalesce(judged, 0), ttft_p50_s, ttft_p95_s
FROM served FULL JOIN turned_away USING (minute, tenant, tier, pool)
"""


def roll_up(limit: int = _MINUTES) -> list[datetime]:
    """Recompute up to `limit` of the marked minutes, oldest first; returns them. A second run meanwhile gets none."""
    return retrying(lambda: _roll_up(limit))


@transaction.atomic
def _roll_up(limit: int) -> list[datetime]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
        if not cursor.fetchone()[0]:
            return []
        # First take the marks that can be seen, then read the rows: what commits in between leaves its own mark.
        cursor.execute(
            "DELETE FROM metering_dirtyminute WHERE minute IN "
            "(SELECT DISTINCT minute FROM metering_dirtyminute ORDER BY minute LIMIT %s) RETURNING minute",
            [limit],
        )
        minutes = sorted({minute for (minute,) in cursor.fetchall()})
        if minutes:
            cursor.execute("DELETE FROM metering_minuterollup WHERE minute = ANY (%s)", [minutes])
            cursor.execute(_RECOMPUTE, [minutes, minutes])
    return minutes
