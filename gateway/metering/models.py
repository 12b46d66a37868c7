"""Rows of measured facts. Outcomes are append-only; rollups are derived and may be recomputed at any time."""

from __future__ import annotations

from django.db import models

__all__ = ["DirtyMinute", "MinuteRollup", "RefusalTally", "RequestOutcome", "StreamCursor"]


class RequestOutcome(models.Model):
    """What the client saw of one admitted request, and the verdict against the targets in force at its admission.

    Partitioned by month on its UUIDv7 key. Durations in seconds; None: never reached.
    """

    request_id = models.UUIDField(primary_key=True)
    tenant = models.CharField(max_length=48)
    project = models.CharField(max_length=48)
    key = models.CharField(max_length=16)
    tier = models.CharField(max_length=48)
    pool = models.CharField(max_length=200)
    model = models.CharField(max_length=200)
    kind = models.CharField(max_length=16)
    stream = models.BooleanField()
    status = models.IntegerField()
    reason = models.CharField(max_length=32)
    code = models.CharField(max_length=64, blank=True)
    client_request_id = models.CharField(max_length=200, blank=True)
    received_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    ttft_s = models.FloatField(null=True)
    tpot_s = models.FloatField(null=True)
    stall_s = models.FloatField(null=True)
    total_s = models.FloatField()
    delivered_tokens = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    ttft_target_ms = models.IntegerField(null=True)
    tpot_target_ms = models.IntegerField(null=True)
    ttft_met = models.BooleanField(null=True)
    tpot_met = models.BooleanField(null=True)
    good = models.BooleanField()

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "-request_id"], name="outcome_by_tenant"),
            models.Index(fields=["finished_at"], name="outcome_by_finish"),
        ]


class RefusalTally(models.Model):
    """Refusals of one read of their stream, by what was refused. Summed by the rollup, never changed."""

    minute = models.DateTimeField()
    tenant = models.CharField(max_length=48, blank=True)
    tier = models.CharField(max_length=48, blank=True)
    pool = models.CharField(max_length=200, blank=True)
    status = models.IntegerField()
    code = models.CharField(max_length=64)
    count = models.IntegerField()

    class Meta:
        indexes = [models.Index(fields=["minute"], name="refusals_by_minute")]


class StreamCursor(models.Model):
    """How far a stream without acknowledgements was read; moved in the transaction of what was read."""

    stream = models.CharField(max_length=100, primary_key=True)
    last_id = models.CharField(max_length=48)


class DirtyMinute(models.Model):
    """A mark: rows of this minute changed. Many marks may name one minute; a rollup removes those it has seen.

    One row a minute would lose the mark of a transaction that commits while the minute is recomputed.
    """

    minute = models.DateTimeField(db_index=True)


class MinuteRollup(models.Model):
    """One admission minute of one tenant, tier and pool. `requests` were admitted; offered = requests + refused."""

    minute = models.DateTimeField()
    tenant = models.CharField(max_length=48, blank=True)
    tier = models.CharField(max_length=48, blank=True)
    pool = models.CharField(max_length=200, blank=True)
    requests = models.IntegerField()
    refused = models.IntegerField()
    errors = models.IntegerField()
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    completion_tokens = models.BigIntegerField()
    wasted_tokens = models.BigIntegerField()
    currency = models.CharField(max_length=3, blank=True)
    money = models.DecimalField(max_digits=38, decimal_places=15)
    ttft_met = models.IntegerField()
    ttft_missed = models.IntegerField()
    tpot_met = models.IntegerField()
    tpot_missed = models.IntegerField()
    good = models.IntegerField()
    judged = models.IntegerField()
    """Outcomes seen so far; requests settled without one (their gateway died) are misses of goodput."""
    ttft_p50_s = models.FloatField(null=True)
    ttft_p95_s = models.FloatField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["minute", "tenant", "tier", "pool"], name="rollup_once")]
        indexes = [models.Index(fields=["tenant", "minute"], name="rollup_by_tenant")]
