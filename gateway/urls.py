"""Addresses of the control plane: the console at the root, the management API below `/api/`."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("api/", include("gateway.manage.urls")), path("", include("frontend.urls"))]
