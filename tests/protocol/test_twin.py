"""The Lua and its twin give equal answers and equal state, whatever the order of calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis import Redis

from engine.protocol.functions import Admission, Claim, Handed
from engine.protocol.keys import Keys
from engine.protocol.messages import Final, Timeline, encode
from engine.protocol.twin import Twin
from tests.protocol.conftest import ClockedFunctions
from tests.protocol.observe import of_redis, of_twin

POOLS, TENANTS, GATEWAYS, ENGINES = ("m", "k"), ("a", "b", "c"), ("g1", "g2"), ("e1", "e2", "e3")
TIERS = {"interactive": 0, "standard": 1, "batch": 2}
pools, tenants, gateways, engines = (st.sampled_from(names) for names in (POOLS, TENANTS, GATEWAYS, ENGINES))
tiers = st.sampled_from(sorted(TIERS))
some_credit = st.sampled_from((*sorted(TIERS), "+", "+standard"))
some_pool = st.sampled_from(("m", "m", "m", "m", "k"))
few = st.integers(-1, 3)
claims = st.sampled_from((None, None, Claim("k1", "d1", 30_000), Claim("k1", "d2"), Claim("k2", "d1")))
RPM, TPM = ("rpm", 3, 60, 1), ("tpm", 100, 700, 33)
limits = st.sampled_from(((), (RPM,), (RPM, TPM), (("x", -1, 0, 1),), (("rpm", 0, 0, 1),)))


class Interleavings(RuleBasedStateMachine):
    """Every rule makes the same call on both sides."""

    redis: Redis

    @initialize()
    def start(self) -> None:
        self.functions = ClockedFunctions(self.redis, Keys(f"t{secrets.token_hex(6)}:"))
        self.twin = Twin()
        self.now = 1_000_000
        self.functions.set_clock(self.now)
        self.count = 0
        self.admitted: list[str] = []
        self.channels = {engine: self.redis.pubsub() for engine in ENGINES}
        self.heard: dict[str, list[Handed]] = {engine: [] for engine in ENGINES}
        for engine in ("e1", "e2"):
            self.both("register", "m", engine, "h1", b"h1", 20_000)
            self.listen(engine, True)

    def teardown(self) -> None:
        if hasattr(self, "functions"):
            for channel in self.channels.values():
                channel.close()
            keys = list(self.redis.scan_iter(match=f"{self.functions.keys.prefix}*", count=1000))
            self.redis.delete(*keys, "-")

    def both(self, name: str, *args: Any) -> Any:
        ours: Callable[..., Any] = getattr(self.functions, name)
        twins: Callable[..., Any] = getattr(self.twin, name)
        answer = ours(*args)
        assert answer == twins(self.now, *args), name
        return answer

    def request(self, which: int) -> str:
        """One of the admitted requests, or one that never was."""
        return self.admitted[which % len(self.admitted)] if self.admitted else "r0000"

    def epoch(self, request: str, off: int) -> int:
        """The request's true epoch, or one beside it."""
        r = self.twin.requests.get(request)
        return (r.epoch if r else 0) + off

    @rule(by=st.sampled_from((1, 10, 100, 499, 1000, 2999, 3001, 7000, 31_000)))
    def advance_clock(self, by: int) -> None:
        self.now += by
        self.functions.set_clock(self.now)

    @rule(pool=pools, engine=engines, card=st.sampled_from(("h1", "h1", "h1", "h2")))
    def register(self, pool: str, engine: str, card: str) -> None:
        self.both("register", pool, engine, card, card.encode(), 20_000)

    @rule(pool=pools, engine=engines, rarely=st.integers(0, 3))
    def leave(self, pool: str, engine: str, rarely: int) -> None:
        if rarely == 0:
            self.both("leave", pool, engine)

    @rule(
        pool=some_pool,
        tenant=tenants,
        tier=tiers,
        gateway=gateways,
        money=st.sampled_from(((0, None), (40, None), (40, -50), (40, 0), (0, 0))),
        bounds=st.tuples(few, few, few),
        choices=st.integers(1, 3),
        generation=st.sampled_from((9, 9, 1)),
        expires=st.sampled_from((0, 0, 500, 5000)),
        claim=claims,
        limits=limits,
        again=st.booleans(),
    )
    def admit(
        self,
        pool: str,
        tenant: str,
        tier: str,
        gateway: str,
        money: tuple[int, int | None],
        bounds: tuple[int, int, int],
        choices: int,
        generation: int,
        expires: int,
        claim: Claim | None,
        limits: Any,
        again: bool,
    ) -> None:
        (hold, floor), (concurrent, queued, queued_tier) = money, bounds
        self.count += 1
        admission = Admission(
            request=f"r{self.count:04}", tenant=tenant, pool=pool, tier=tier, tier_rank=TIERS[tier], gateway=gateway,
            generation=generation, hold_nano=hold, floor_nano=floor, max_concurrent=concurrent,
            max_queued_tier=queued_tier, max_queued_tenant=queued, choices=choices,
            prompt_tokens=(7, 700, 9000)[self.count % 3], weight=(1.0, 0.5, 3.0, 0.0)[self.count % 4],
            ttft_ms=(0, 100, 1000)[self.count % 3], sheddable=self.count % 2 == 0, claim=claim,
            expires_ms=self.now + expires if expires else 0, limits=limits, lease_ms=20_000,
            ask="ask" if self.count % 3 else "",
        )  # fmt: skip
        work = f"work {self.count}".encode()
        verdict = self.both("admit", admission, work)
        if verdict.ok:
            self.admitted.append(admission.request)
        if again and verdict.ok:
            self.both("admit", admission, work)

    @rule(
        pool=some_pool,
        tenant=tenants,
        tier=tiers,
        times=st.integers(1, 3),
        expires=st.sampled_from((0, 500)),
    )
    def admit_freely(self, pool: str, tenant: str, tier: str, times: int, expires: int) -> None:
        for _ in range(times):
            self.admit(pool, tenant, tier, "g1", (40, None), (-1, -1, -1), 1, 9, expires, None, (), False)

    @rule(
        pool=some_pool,
        engine=engines,
        credit=st.dictionaries(some_credit, st.integers(0, 3)),
        tokens=st.sampled_from((0, 0, 8, 1000, 20_000)),
        known=st.sampled_from((None, 0, 1, 2)),
    )
    def pull(self, pool: str, engine: str, credit: dict[str, int], tokens: int = 0, known: int | None = None) -> None:
        """`known`: of those that it runs, how many the engine has heard of."""
        self.both("pull", pool, engine, credit, 20_000, tokens, known)

    @rule(engine=engines, listens=st.sampled_from((True, True, False)))
    def listen(self, engine: str, listens: bool) -> None:
        """The engine's connection to its channel is made, or is lost."""
        if listens is (engine in self.twin.listeners):
            return
        channel = self.functions.keys.hand(engine)
        if listens:
            self.channels[engine].subscribe(channel)
            self.twin.listeners.add(engine)
        else:
            self.channels[engine].unsubscribe(channel)
            self.twin.listeners.discard(engine)
        self.hear(engine, "subscribe" if listens else "unsubscribe")

    def hear(self, engine: str, kind: str) -> None:
        """Read an engine's channel up to a message of this kind."""
        message = self.channels[engine].get_message(timeout=30)
        while message is not None and message["type"] != kind:
            assert message["type"] == "message"
            self.heard[engine].append(Handed.read(message["data"]))
            message = self.channels[engine].get_message(timeout=30)
        assert message is not None, kind
        if kind == "message":
            self.heard[engine].append(Handed.read(message["data"]))

    @rule(
        pool=some_pool,
        slots=st.dictionaries(engines, st.integers(1, 3), min_size=1),
        express=st.sampled_from(({}, {"+": 1}, {"+": 2}, {"+standard": 2}, {"+": 1, "+standard": 1})),
        tokens=st.sampled_from((8, 5000, 20_000)),
        later=st.sampled_from((0, 130, 399, 400)),
        tenant=tenants,
        tier=tiers,
    )
    def stand_and_admit(
        self, pool: str, slots: dict[str, int], express: dict[str, int], tokens: int, later: int, tenant: str, tier: str
    ) -> None:
        """Engines wait, and more is admitted than they would take."""
        self.rejoin()
        for engine, most in slots.items():
            self.pull(pool, engine, {**dict.fromkeys(TIERS, most), **express}, tokens)
        self.advance_clock(later)
        self.admit_freely(pool, tenant, tier, 3, 500)

    @rule(engine=engines, slots=st.integers(0, 3), express=st.integers(0, 2))
    def pull_any(self, engine: str, slots: int, express: int = 0) -> None:
        self.pull("m", engine, {**dict.fromkeys(TIERS, slots), "+": express})

    @rule(engine=engines)
    def floors_come_due(self, engine: str) -> None:
        """Every tier has work queued while another is served: its floor saves up until it goes first."""
        for tier in TIERS:
            self.admit_freely("m", "a", tier, 1, 0)
        self.both("charge", "m", [(min(TIERS, key=TIERS.__getitem__), "b", 25_000)])
        self.pull("m", engine, dict.fromkeys(TIERS, 1))

    @rule(pool=pools, tier=tiers, tenant=tenants, cost=st.sampled_from((1, 0.1, 2.7, 333.3, -50.5, 30_000)))
    def charge(self, pool: str, tier: str, tenant: str, cost: float) -> None:
        self.both("charge", pool, [(tier, tenant, cost), (tier, tenant, 2 * cost)])

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        self.both("cancel", self.request(which), "client_gone")

    @rule(
        which=st.integers(0, 30),
        off=st.sampled_from((0, 0, 0, 1, -1)),
        reason=st.sampled_from(("stop", "length", "abort")),
    )
    def finish(self, which: int, off: int, reason: str) -> None:
        request = self.request(which)
        epoch = self.epoch(request, off)
        final = Final(request, epoch, "m", "batch", "a", "e1", reason, 7, 0, 3, 0, 0.25, 0.0, Timeline(0.5), self.now)
        self.both("finish", request, epoch, encode(final))

    @rule(
        which=st.integers(0, 30),
        off=st.sampled_from((0, 0, 0, 1)),
        how=st.sampled_from(("park", "park", "drop", "told")),
    )
    def release(self, which: int, off: int, how: str) -> None:
        request = self.request(which)
        kept = self.twin.resumable.get(request)
        gateway, turn = (kept.gateway, kept.turn) if kept else ("g1", 0)
        self.both("release", request, gateway, turn + off, how)

    @rule(which=st.integers(0, 30), tenant=tenants, rightly=st.booleans(), gateway=gateways)
    def adopt(self, which: int, tenant: str, rightly: bool, gateway: str) -> None:
        request = self.request(which)
        kept = self.twin.resumable.get(request)
        self.both("adopt", request, kept.tenant if kept and rightly else tenant, gateway)

    @rule(gateway=gateways, tenant=tenants, adopted=st.booleans())
    def outlive_a_gateway(self, gateway: str, tenant: str, adopted: bool) -> None:
        """A resumable request runs, its gateway lapses, and somebody goes on with it or nobody does."""
        self.admit_and_pull("e1", tenant, "interactive", 3, 0)
        self.lapse(False, True)
        if adopted:
            for request in [r for r, kept in self.twin.resumable.items() if not kept.gateway]:
                self.both("adopt", request, self.twin.resumable[request].tenant, gateway)
        for _ in range(2):
            self.lapse(False, gateway != "g1")

    @rule(which=st.integers(0, 30))
    def declare(self, which: int) -> None:
        request = self.request(which)
        final = Final(request, 0, "m", "batch", "a", "e1", "stop", 7, 0, 3, 0, 0.25, 0.0, Timeline(), self.now)
        self.both("declare", request, encode(final))

    @rule(
        which=st.integers(0, 30), tenant=tenants, balance=st.sampled_from((None, 10, 1000)), sequence=st.integers(1, 4)
    )
    def close(self, which: int, tenant: str, balance: int | None, sequence: int) -> None:
        self.both("close", self.request(which), tenant, balance, sequence)

    @rule(which=st.integers(0, 30), off=st.sampled_from((0, 0, 0, 1)), most=st.integers(1, 3))
    def requeue(self, which: int, off: int, most: int) -> None:
        request = self.request(which)
        self.both("requeue", request, self.epoch(request, off), b"again", most)

    @rule(most=st.integers(1, 3))
    def requeue_lost(self, most: int) -> None:
        for request, r in list(self.twin.requests.items()):
            if r.state == "lost":
                self.both("requeue", request, r.epoch, b"again", most)

    @rule(
        tenant=tenants,
        generation=st.integers(0, 2),
        balance=st.sampled_from((None, 30, 1000)),
        sequence=st.integers(0, 4),
    )
    def account(self, tenant: str, generation: int, balance: int | None, sequence: int) -> None:
        self.both("account", tenant, generation, balance, sequence)

    @rule(gateway=gateways, lease_ms=st.sampled_from((3000, 20_000, 60_000)))
    def renew(self, gateway: str, lease_ms: int) -> None:
        self.both("renew", gateway, lease_ms)

    @rule()
    def rejoin(self) -> None:
        for engine in ("e1", "e2"):
            if engine not in self.twin.engines["m"]:
                self.both("register", "m", engine, self.twin.pools["m"], b"h", 20_000)

    @rule(engine=engines, tenant=tenants, tier=tiers, slots=st.integers(1, 3), wait_ms=st.sampled_from((0, 7, 130)))
    def admit_and_pull(self, engine: str, tenant: str, tier: str, slots: int, wait_ms: int) -> None:
        """Requests that run, so that the other rules find some."""
        self.rejoin()
        self.admit_freely("m", tenant, tier, slots, 0)
        self.advance_clock(wait_ms)
        self.pull_any(engine, slots)

    @rule(state=st.sampled_from(("running", "running", "lost", "finished")), reason=st.sampled_from(("stop", "abort")))
    def end_one(self, state: str, reason: str) -> None:
        """Finish or close a request that is ready for it."""
        for request, r in self.twin.requests.items():
            if r.state == state == "finished":
                self.both("close", request, r.a.tenant, 500, self.count)
                return
            if r.state == state:
                final = Final(
                    request, r.epoch, "m", "batch", "a", "e1", reason, 7, 0, 3, 0, 0.25, 0.0, Timeline(), self.now
                )
                self.both("finish", request, r.epoch, encode(final))
                return

    @rule(engine=st.booleans(), gateway=st.booleans())
    def lapse(self, engine: bool, gateway: bool) -> None:
        """Half a minute of silence, but for those who renew."""
        for _ in range(9):
            self.advance_clock(2900)
            if not engine:
                self.pull("m", "e1", {})
            if not gateway:
                self.both("renew", "g1", 20_000)
            self.both("reap")

    @rule()
    def reap(self) -> None:
        self.both("reap")

    @rule()
    def reap_armed(self) -> None:
        """The reaper of a quiet second: it has run often enough to be armed."""
        for _ in range(2):
            self.both("reap")
            self.advance_clock(2999)
        self.both("reap")

    @invariant()
    def same_handed(self) -> None:
        if hasattr(self, "twin"):
            for engine, heard in self.heard.items():
                while len(heard) < len(self.twin.handed[engine]):
                    self.hear(engine, "message")
                assert heard == self.twin.handed[engine]

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "twin"):
            assert of_redis(self.redis, self.functions.keys.prefix) == of_twin(self.twin)


@pytest.mark.parametrize("examples", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_any_interleaving_gives_equal_answers_and_state(redis: Redis, examples: int) -> None:
    machine = type("Machine", (Interleavings,), {"redis": redis})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck), database=None,
        ),
    )  # fmt: skip
