"""The business record: tenants, projects, keys, tiers, members and the audit trail, all in Postgres.

It must not know the gateway, HTTP or how a request is computed; it speaks to the data plane in plain frozen facts only.

Invariants (tests cite the numbers)
T1 every change of the record is written together with its audit row, in one transaction, or not at all
T2 audit rows are never updated or deleted, and each carries the hash of the one before it
T3 a secret is never stored, only its HMAC; it is shown once
T4 a change of what a key may do raises its tenant's generation, so that no cache outlives it
"""
