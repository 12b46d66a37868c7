"""The live snapshot as typed values, and what of it one viewer may see."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.protocol.messages import Heartbeat

__all__ = ["EVERYTHING", "EngineLine", "Scope", "Snapshot", "TenantLine", "TierLine", "read", "scoped"]


class TenantLine(msgspec.Struct, frozen=True):
    """Figures of one tenant in one tier. None: not known in this window, which is not the same as zero."""

    tenant: str
    name: str
    queued: int | None = None
    oldest_wait_s: float | None = None
    running: int | None = None
    tokens_per_s: float | None = None
    ttft_p95_ms: float | None = None
    compliance: float | None = None
    """Share of the window's finished requests that met every target, 0 to 1."""
    money: str | None = None
    requests: int | None = None


class TierLine(msgspec.Struct, frozen=True):
    """Figures of one tier over all its tenants, and the targets they are judged by."""

    tier: str
    rank: int
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    queued: int | None = None
    oldest_wait_s: float | None = None
    running: int | None = None
    tokens_per_s: float | None = None
    ttft_p95_ms: float | None = None
    compliance: float | None = None
    money: str | None = None
    currency: str | None = None
    tenants: tuple[TenantLine, ...] = ()


class EngineLine(Heartbeat, frozen=True, kw_only=True):
    """An engine's last heartbeat and how old it was when the snapshot was taken."""

    age_ms: float


class Snapshot(msgspec.Struct, frozen=True):
    """What the metering worker publishes once a second."""

    at_ms: int
    window_s: float | None = None
    tiers: tuple[TierLine, ...] = ()
    engines: tuple[EngineLine, ...] = ()
    events_lag_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose figures a viewer may see: everyone's (staff), or those of the tenants the viewer is a member of.

    `money`: the tenants whose amounts may be seen too, a part of `tenants`.
    """

    staff: bool
    tenants: frozenset[str] = frozenset()
    money: frozenset[str] = frozenset()

    def sees(self, tenant: str) -> bool:
        return self.staff or tenant in self.tenants

    def sees_money(self, tenant: str) -> bool:
        return self.staff or tenant in self.money


EVERYTHING = Scope(staff=True)
_decoder = msgspec.json.Decoder(Snapshot)


def read(data: bytes | str) -> Snapshot:
    """Decode and validate. Raises `msgspec.DecodeError` (or its `ValidationError`) on anything else."""
    return _decoder.decode(data)


def scoped(snapshot: Snapshot, scope: Scope) -> Snapshot:
    """The part of the snapshot that `scope` may see.

    A member gets no tier totals: they are made of other tenants' figures too. Nor engines, which serve everybody.
    """
    if scope.staff:
        return snapshot
    tiers = []
    for tier in snapshot.tiers:
        own = tuple(_line(line, scope) for line in tier.tenants if scope.sees(line.tenant))
        if own:
            tiers.append(
                TierLine(
                    tier=tier.tier,
                    rank=tier.rank,
                    ttft_target_ms=tier.ttft_target_ms,
                    tpot_target_ms=tier.tpot_target_ms,
                    currency=tier.currency,
                    tenants=own,
                )
            )
    return Snapshot(at_ms=snapshot.at_ms, window_s=snapshot.window_s, tiers=tuple(tiers))


def _line(line: TenantLine, scope: Scope) -> TenantLine:
    return line if scope.sees_money(line.tenant) else msgspec.structs.replace(line, money=None)
