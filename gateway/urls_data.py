"""Routes of the data plane. The last pattern answers everything else, so that no page of Django's own is ever shown."""

from __future__ import annotations

from django.urls import path, re_path

from gateway.api import classify, embeddings, generate, listing, openapi, tokens
from gateway.api.routes import route

_any = dict.fromkeys(("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"), listing.not_found)

urlpatterns = [
    path("v1/chat/completions", route(POST=generate.chat_completions)),
    path("v1/completions", route(POST=generate.completions)),
    path("v1/embeddings", route(POST=embeddings.embeddings)),
    path("v1/classify", route(POST=classify.classify)),
    path("v1/tokenize", route(POST=tokens.tokenize)),
    path("v1/detokenize", route(POST=tokens.detokenize)),
    path("v1/models", route(GET=listing.models)),
    path("v1/models/<path:model>", route(GET=listing.one_model)),
    path("v1/openapi.json", route(GET=openapi.describe)),
    path("healthz", route(GET=listing.health)),
    path("readyz", route(GET=listing.ready)),
    path("metrics", route(GET=listing.metrics)),
    re_path(r"", route(**_any)),
]
