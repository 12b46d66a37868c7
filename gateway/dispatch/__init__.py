"""The gateway's side of Redis: replies, cancel, lease, model cards, and the record of what clients saw.

It must not know HTTP, JSON shapes, keys or prices: it moves `Work` one way and `Delta` the other.

Invariants: I1 a delta of an older epoch or a repeated index never reaches a client · I2 every admitted request leaves
exactly one `Outcome` · I3 a stream's buffer is bounded; over it, that stream alone ends · I4 a request whose client is
gone is cancelled wherever it is · I5 a request that Redis forgot ends with a retryable error, never in silence.
"""
