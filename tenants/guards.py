"""SQL of the triggers that keep history as it was. Used by migrations only."""

from __future__ import annotations

__all__ = ["CREATE_REFUSE", "DROP_REFUSE", "append_only", "mutable_again"]

CREATE_REFUSE = """
CREATE FUNCTION sluice_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Test databases are emptied between tests; Django names them so.
    IF TG_OP = 'TRUNCATE' AND current_database() LIKE 'test\\_%' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
"""
DROP_REFUSE = "DROP FUNCTION IF EXISTS sluice_refuse_change();"


def append_only(table: str) -> str:
    """Refuse UPDATE, DELETE and TRUNCATE of the table (and of its partitions, for the first two)."""
    return f"""
CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table}
    FOR EACH ROW EXECUTE FUNCTION sluice_refuse_change();
CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION sluice_refuse_change();
"""


def mutable_again(table: str) -> str:
    """Reverse of `append_only`."""
    return f"""
DROP TRIGGER IF EXISTS {table}_append_only ON {table};
DROP TRIGGER IF EXISTS {table}_no_truncate ON {table};
"""
