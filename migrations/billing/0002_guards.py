from django.db import migrations

from tenants.guards import append_only, mutable_again

# I4: no two versions of one price at the same instant; half-open intervals, so one may end where the next begins.
NO_OVERLAP = """
CREATE EXTENSION IF NOT EXISTS btree_gist;
ALTER TABLE billing_priceversion ADD CONSTRAINT price_version_no_overlap EXCLUDE USING gist
    (price_id WITH =, tstzrange(valid_from, valid_to) WITH &&) WHERE (published_at IS NOT NULL);
"""
OVERLAP = "ALTER TABLE billing_priceversion DROP CONSTRAINT price_version_no_overlap;"

# I4: the one change a published version may see is that its open end gets a date, and not one in the past: a request
# rated a moment ago would have been rated otherwise.
IMMUTABLE = """
CREATE FUNCTION billing_price_version_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.published_at IS NULL THEN
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END IF;
    IF TG_OP = 'UPDATE' AND OLD.valid_to IS NULL AND NEW.valid_to >= clock_timestamp() THEN
        OLD.valid_to := NEW.valid_to;
        IF OLD IS NOT DISTINCT FROM NEW THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'price version % is published: % refused', OLD.id, TG_OP
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER billing_price_version_guard BEFORE UPDATE OR DELETE ON billing_priceversion
    FOR EACH ROW EXECUTE FUNCTION billing_price_version_guard();
"""
MUTABLE = """
DROP TRIGGER billing_price_version_guard ON billing_priceversion;
DROP FUNCTION billing_price_version_guard();
"""

# I1, checked at commit: the entries of a transaction balance in each currency.
BALANCED = """
CREATE FUNCTION billing_transaction_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    off record;
BEGIN
    SELECT a.currency, sum(e.amount) AS total INTO off
        FROM billing_ledgerentry e JOIN billing_ledgeraccount a ON a.id = e.account_id
        WHERE e.transaction_id = NEW.transaction_id
        GROUP BY a.currency HAVING sum(e.amount) <> 0 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger transaction % is off by % %', NEW.transaction_id, off.total, off.currency
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER billing_transaction_balanced AFTER INSERT ON billing_ledgerentry
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION billing_transaction_balanced();
"""
UNBALANCED = """
DROP TRIGGER billing_transaction_balanced ON billing_ledgerentry;
DROP FUNCTION billing_transaction_balanced();
"""

# I2
HISTORY = (
    "billing_ledgeraccount",
    "billing_ledgertransaction",
    "billing_ledgerentry",
    "billing_settlement",
    "billing_usagerecord",
)


class Migration(migrations.Migration):
    dependencies = [("billing", "0001_initial"), ("tenants", "0002_guards")]

    operations = [
        migrations.RunSQL(NO_OVERLAP, OVERLAP),
        migrations.RunSQL(IMMUTABLE, MUTABLE),
        migrations.RunSQL(BALANCED, UNBALANCED),
        *(migrations.RunSQL(append_only(table), mutable_again(table)) for table in HISTORY),
    ]
