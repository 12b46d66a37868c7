"""Loaded by the Celery worker (`--include`): its pool processes and its embedded beat die with it.

Killed, the worker can't tell them; the kernel can.
"""

from __future__ import annotations

from celery.signals import beat_embedded_init, worker_process_init

from gateway.local.lifeline import die_with_parent

__all__ = ["hold_on"]


@worker_process_init.connect
@beat_embedded_init.connect
def hold_on(**_: object) -> None:
    """Runs in the child, right after its fork."""
    die_with_parent()
