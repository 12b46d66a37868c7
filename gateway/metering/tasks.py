"""Celery tasks of the measured facts: short, idempotent, safe to run twice."""

from __future__ import annotations

from celery import shared_task

from gateway.metering import rollups

__all__ = ["roll_up"]

_ROUNDS = 50


@shared_task(name="gateway.metering.tasks.roll_up")
def roll_up() -> int:
    """Recompute the marked minutes; returns how many. What is left after the rounds waits for the next run."""
    done = 0
    for _ in range(_ROUNDS):
        minutes = rollups.roll_up()
        if not minutes:
            break
        done += len(minutes)
    return done
