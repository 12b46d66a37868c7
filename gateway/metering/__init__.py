"""What happened to each request, durably: settled usage, outcomes, SLO verdicts, minute rollups and the live view.

It must not know HTTP or how a request is admitted; it reads the streams that engines and gateways leave behind.

Invariants (tests cite the numbers)
M1 a stream entry is acknowledged only after its Postgres transaction committed; delivered twice, it counts once
M2 rollups are recomputed from rows, never incremented
M3 a record that can't be read is set aside with its reason and blocks nothing behind it
M4 while Postgres or Redis are away nothing is lost: work waits in the streams
"""
