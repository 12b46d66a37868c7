"""Telling the data plane, after commit, that what its caches hold of a tenant is no longer true."""

from __future__ import annotations

import logging
from functools import lru_cache

from django.conf import settings
from django.db import transaction
from django.db.models import F
from redis import Redis
from redis.exceptions import RedisError

from engine.protocol.functions import Functions
from engine.protocol.keys import Keys
from tenants.models import Tenant

__all__ = ["changed", "publish"]

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _functions() -> Functions:
    redis = Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)
    return Functions(redis, Keys(settings.SLUICE_REDIS_PREFIX))


def changed(tenant: Tenant) -> None:
    """Raise the tenant's generation in this transaction; publish it when the transaction commits (T4)."""
    Tenant.objects.filter(pk=tenant.pk).update(generation=F("generation") + 1)
    tenant.refresh_from_db(fields=["generation"])
    transaction.on_commit(lambda: publish(tenant.slug, tenant.generation))


def publish(slug: str, generation: int, balance_nano: int | None = None, sequence: int = 0) -> None:
    """Set the generation (and balance, if newer) that `admit` checks, and wake the caches.

    Redis away is no reason to fail a committed change: caches also expire by age, and the settler republishes.
    """
    try:
        functions = _functions()
        functions.account(slug, generation, balance_nano, sequence)
        functions.redis.publish(functions.keys.invalidate, slug)
    except RedisError as error:
        log.warning("tenant %s changed but the data plane could not be told: %s", slug, error)
