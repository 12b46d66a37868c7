"""The Celery application: short idempotent work only (rollups, invoices, exports, webhooks, retention, reconcile)."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")

from django.conf import settings

__all__ = ["app"]

app = Celery("sluice")


def _broker(url: str) -> str:
    """Celery spells a unix socket `redis+socket://`, redis-py spells it `unix://`."""
    if not url.startswith("unix://"):
        return url
    rest = url.removeprefix("unix://").replace("?db=", "?virtual_host=")
    return f"redis+socket://{rest}"


app.conf.update(
    broker_url=_broker(settings.REDIS_URL),
    broker_transport_options={
        "global_keyprefix": f"{settings.SLUICE_REDIS_PREFIX}celery:",
        # Longer than any task may run: what outlasts the visibility timeout is delivered again.
        "visibility_timeout": 3600,
    },
    task_ignore_result=True,
    task_acks_late=True,
    task_time_limit=600,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    timezone="UTC",
    beat_schedule={"rollups": {"task": "gateway.metering.tasks.roll_up", "schedule": 5.0, "options": {"expires": 30}}},
)
app.autodiscover_tasks(["gateway.metering", "tenants.billing"])
