"""The two ASGI applications of one code base: `data` (the API) and `console` (console and management)."""

from __future__ import annotations

import logging
import os
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")
django.setup(set_prefix=False)

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.conf import settings  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.urls import path, re_path  # noqa: E402

from gateway.api.cors import cross_origin  # noqa: E402
from gateway.api.handler import DataHandler, DataRequest  # noqa: E402
from gateway.api.sockets import StreamConsumer, UnknownSocket  # noqa: E402
from gateway.bounded import bounded  # noqa: E402
from gateway.observability.redaction import Redact  # noqa: E402
from gateway.plane import lifespan  # noqa: E402

__all__ = ["console", "data"]

for _name in ("uvicorn.error", "uvicorn.access"):
    # uvicorn gives its loggers handlers of their own, or none to switch them off: that is left as it is.
    logging.getLogger(_name).addFilter(Redact())

_http = cross_origin(DataHandler(), settings.SLUICE_CORS_ORIGINS, DataRequest.urlconf)
_sockets = URLRouter([path("v1/stream", StreamConsumer.as_asgi()), re_path(r"", UnknownSocket.as_asgi())])


async def data(scope: Any, receive: Any, send: Any) -> None:
    """The data plane: HTTP and the socket under `/v1`, and the lifespan that starts and stops its Redis side."""
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["type"] == "http":
        await _http(scope, receive, send)
    else:
        await _sockets(scope, receive, send)


# Console and management speak HTTP; their push is server-sent events, so the router needs no socket yet.
console = ProtocolTypeRouter({"http": bounded(ASGIHandler(), settings.SLUICE_MAX_BODY_BYTES)})
