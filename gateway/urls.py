"""Addresses of the control plane: the console at the root."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("", include("frontend.urls"))]
