"""Every Redis key Sluice uses, in one place. All start with the installation's prefix (default "sluice:")."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_PREFIX", "GROUP", "Keys"]

DEFAULT_PREFIX = "sluice:"
GROUP = "engines"
"""Consumer group of the queue streams; the settler's groups are named after what they do."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix. Functions get the prefix and build the same names in Lua."""

    prefix: str = DEFAULT_PREFIX

    def queue(self, pool: str, tier: str, tenant: str) -> str:
        """Stream of `Work` (fields `r`: request id, `w`), one per tenant and tier; entry ids are arrival numbers."""
        return f"{self.prefix}q:{pool}:{tier}:{tenant}"

    def tiers(self, pool: str) -> str:
        """Sorted set: tier names of the pool by rank."""
        return f"{self.prefix}tiers:{pool}"

    def ready(self, pool: str, tier: str) -> str:
        """Sorted set: tenants with queued work in the tier, by the arrival number of their oldest request."""
        return f"{self.prefix}ready:{pool}:{tier}"

    def depth(self, pool: str) -> str:
        """Hash: queued requests by tier, and by `tier:tenant`."""
        return f"{self.prefix}depth:{pool}"

    def counters(self, pool: str) -> str:
        """Hash: virtual token counters in thousandths, field `tier:tenant`."""
        return f"{self.prefix}vtc:{pool}"

    def deficits(self, pool: str) -> str:
        """Hash: tier deficits in thousandths of token cost."""
        return f"{self.prefix}deficit:{pool}"

    def weights(self, pool: str) -> str:
        """Hash: the tenants' weights in thousandths."""
        return f"{self.prefix}weight:{pool}"

    def active(self, pool: str, tier: str) -> str:
        """Sorted set: the tier's tenants that have any open request, by counter."""
        return f"{self.prefix}active:{pool}:{tier}"

    def asked(self, pool: str) -> str:
        """Hash: rows that open requests ask for, one for each choice, by `tier:tenant`."""
        return f"{self.prefix}asked:{pool}"

    def rows(self, pool: str) -> str:
        """Hash: rows in use, by tier."""
        return f"{self.prefix}rows:{pool}"

    def passed(self, pool: str) -> str:
        """Hash: requests pulled since a late one was, by tier; and the part of light ones (`+`, thousandths)."""
        return f"{self.prefix}passed:{pool}"

    def drain(self, pool: str) -> str:
        """Hash: moving average of the time between two pulls (`tier:gap`, ms) and the last one (`tier:last`)."""
        return f"{self.prefix}drain:{pool}"

    def wake(self, name: str) -> str:
        """List that wakes an idle engine: of a pool, or of one engine."""
        return f"{self.prefix}wake:{name}"

    def standing(self, pool: str) -> str:
        """Sorted set: engines that an admission may pull for, by turn."""
        return f"{self.prefix}standing:{pool}"

    def credit(self, pool: str) -> str:
        """Hash: by engine, JSON of what it would take: `credit`, `tokens`, `until` (ms)."""
        return f"{self.prefix}credit:{pool}"

    def hand(self, engine: str) -> str:
        """Pub/sub channel: requests that admissions have pulled for the engine."""
        return f"{self.prefix}hand:{engine}"

    def request(self, request: str) -> str:
        """Hash: state of one admitted request until it is closed."""
        return f"{self.prefix}req:{request}"

    def open_by_tenant(self, tenant: str) -> str:
        """Set of the tenant's requests that occupy a concurrency slot."""
        return f"{self.prefix}open:{tenant}"

    def account(self, tenant: str) -> str:
        """Hash: generation, balance, sequence, held (nano-units)."""
        return f"{self.prefix}acct:{tenant}"

    def bucket(self, tenant: str, name: str) -> str:
        """Hash: token bucket of a rate limit (`level`, `at`)."""
        return f"{self.prefix}rl:{tenant}:{name}"

    @property
    def arrivals(self) -> str:
        """Counter: the arrival number of the newest admitted request."""
        return f"{self.prefix}arrivals"

    @property
    def expiry(self) -> str:
        """Sorted set: queued requests by the time they expire (ms)."""
        return f"{self.prefix}expiry"

    @property
    def dead(self) -> str:
        """Capped stream of poison requests (fields `r`, `w`, `engine`)."""
        return f"{self.prefix}dead"

    @property
    def layout(self) -> str:
        """String: number of the layout that all these keys are in, set by the first function call."""
        return f"{self.prefix}layout"

    @property
    def era(self) -> str:
        """String, set once by the first engine to register: a change means that Redis lost its data."""
        return f"{self.prefix}era"

    @property
    def tick(self) -> str:
        """Hash: when `reap` last ran (`at`) and from when on it acts (`armed`)."""
        return f"{self.prefix}tick"

    @property
    def reaped(self) -> str:
        """Sorted set: gateways whose lapse `renew` has not told them yet."""
        return f"{self.prefix}reaped"

    def idempotency(self, tenant: str, key: str) -> str:
        """Hash: digest, request, state (in_flight, finished), expires (ms); the gateway adds the result."""
        return f"{self.prefix}idem:{tenant}:{key}"

    def result(self, request: str) -> str:
        """String: the answer of a request that had an Idempotency-Key, as sent, for as long as its claim."""
        return f"{self.prefix}result:{request}"

    def resume(self, request: str) -> str:
        """Hash: owner of a resumable request and what was asked (`tenant`, `gateway`, `turn`, `ask`, `told`)."""
        return f"{self.prefix}resume:{request}"

    def out(self, request: str) -> str:
        """Capped stream: all deltas of a resumable request (field `d`: list of Delta)."""
        return f"{self.prefix}out:{request}"

    @property
    def grace(self) -> str:
        """Sorted set: resumable requests without a client, by the time they end (ms)."""
        return f"{self.prefix}grace"

    def replies(self, gateway: str) -> str:
        """Stream: one entry (field `d`: list of Delta) per engine step and gateway."""
        return f"{self.prefix}replies:{gateway}"

    @property
    def gateways(self) -> str:
        """Sorted set: gateway id by lease expiry (ms)."""
        return f"{self.prefix}gateways"

    def gateway_requests(self, gateway: str) -> str:
        """Set: requests owned by a gateway."""
        return f"{self.prefix}gwreq:{gateway}"

    def engines(self, pool: str) -> str:
        """Sorted set: engine id by lease expiry (ms)."""
        return f"{self.prefix}engines:{pool}"

    def engine_requests(self, engine: str) -> str:
        """Set: requests an engine has pulled and not finished."""
        return f"{self.prefix}engreq:{engine}"

    def engine(self, engine: str) -> str:
        """String: latest `Heartbeat`."""
        return f"{self.prefix}engine:{engine}"

    def control(self, engine: str) -> str:
        """Stream of `Control` (field `c`) to one engine."""
        return f"{self.prefix}ctl:{engine}"

    @property
    def pools(self) -> str:
        """Hash: pool name -> card hash."""
        return f"{self.prefix}pools"

    def card(self, pool: str) -> str:
        """String: the pool's `ModelCard`."""
        return f"{self.prefix}card:{pool}"

    @property
    def usage(self) -> str:
        """Stream of `Final` (field `f`), read by the settlers' group."""
        return f"{self.prefix}usage"

    @property
    def outcomes(self) -> str:
        """Stream of `Outcome` (field `o`)."""
        return f"{self.prefix}outcomes"

    def set_aside(self, stream: str) -> str:
        """Stream: entries of `usage` or `outcomes` that can't be read (fields `reason`, `id` and the entry's own)."""
        return f"{self.prefix}aside:{stream}"

    @property
    def refusals(self) -> str:
        """Capped stream of `Refusal` (field `r`)."""
        return f"{self.prefix}refusals"

    @property
    def events(self) -> str:
        """Capped stream of request events (field `e`: list of Event)."""
        return f"{self.prefix}events"

    @property
    def live(self) -> str:
        """String: JSON snapshot of the live view, refreshed at 1 Hz; the same bytes are published on this channel."""
        return f"{self.prefix}live"

    @property
    def invalidate(self) -> str:
        """Pub/sub channel: tenant ids whose principals changed."""
        return f"{self.prefix}invalidate"
