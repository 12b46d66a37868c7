"""Tables partitioned by month on a UUIDv7 key, whose first 48 bits are milliseconds since 1970."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, migrations, transaction
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.utils import timezone

__all__ = ["CREATE_FLOOR", "DROP_FLOOR", "CreatePartitionedModel", "ensure_months", "uuid_floor", "uuid_time"]

log = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AHEAD = 3
"""Months created ahead. A row of a month without a partition goes to the default one: late, never lost."""

CREATE_FLOOR = """
CREATE FUNCTION sluice_uuid_floor(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;
CREATE FUNCTION sluice_uuid_time(id uuid) RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT timestamptz 'epoch'
        + ('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint * interval '1 millisecond'
$$;
"""
DROP_FLOOR = "DROP FUNCTION IF EXISTS sluice_uuid_floor(timestamptz); DROP FUNCTION IF EXISTS sluice_uuid_time(uuid);"


def uuid_floor(at: datetime) -> UUID:
    """Smallest key of that millisecond; keys of [a, b) are between the floors of a and b."""
    # Integer arithmetic: a float of seconds times 1000 can fall just short of its millisecond.
    return UUID(int=((at - _EPOCH) // timedelta(milliseconds=1)) << 80)


def uuid_time(key: UUID) -> datetime:
    """The time in a UUIDv7, in UTC. Raises ValueError for another version, whose bits mean something else."""
    if key.version != 7:
        raise ValueError(f"{key} is not a UUIDv7")
    milliseconds = key.int >> 80
    return datetime.fromtimestamp(milliseconds // 1000, UTC).replace(microsecond=milliseconds % 1000 * 1000)


class CreatePartitionedModel(migrations.CreateModel):
    """CreateModel for a table partitioned by range of `request_id`, with its default and first monthly partitions."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        table = to_state.apps.get_model(app_label, self.name)._meta.db_table
        plain = schema_editor.sql_create_table
        schema_editor.sql_create_table = f"{plain} PARTITION BY RANGE (request_id)"
        try:
            super().database_forwards(app_label, schema_editor, from_state, to_state)
        finally:
            schema_editor.sql_create_table = plain
        schema_editor.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")
        for first in _months(timezone.now(), AHEAD):
            schema_editor.execute(_create(table, first), None)


def ensure_months(table: str, now: datetime | None = None, ahead: int = AHEAD) -> list[str]:
    """Create the partitions of this month and the next ones; returns the names of the new ones. Idempotent.

    A month whose rows are already in the default partition stays there: moving them would need a DELETE (I2).
    """
    made = []
    for first in _months(now or timezone.now(), ahead):
        name = _name(table, first)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [table])
            cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [name])
            if cursor.fetchone()[0]:
                continue
            bounds = [uuid_floor(first), uuid_floor(_next(first))]
            cursor.execute(
                f"SELECT EXISTS (SELECT FROM {table}_default WHERE request_id >= %s AND request_id < %s)",  # noqa: S608
                bounds,
            )
            if cursor.fetchone()[0]:
                log.warning("%s: rows of %s are in the default partition and stay there", table, first.date())
                continue
            cursor.execute(_create(table, first))
            made.append(name)
    return made


def _create(table: str, first: datetime) -> str:
    low, high = uuid_floor(first), uuid_floor(_next(first))
    return f"CREATE TABLE {_name(table, first)} PARTITION OF {table} FOR VALUES FROM ('{low}') TO ('{high}')"


def _name(table: str, first: datetime) -> str:
    return f"{table}_{first:%Y_%m}"


def _next(first: datetime) -> datetime:
    return first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)


def _months(now: datetime, ahead: int) -> list[datetime]:
    """First instants (UTC) of this month and the following ones."""
    first = now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    months = [first]
    for _ in range(ahead):
        months.append(_next(months[-1]))
    return months
