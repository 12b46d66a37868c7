"""Addresses of the management API, below `/api/`."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.views import SpectacularAPIView
from rest_framework.routers import SimpleRouter

from gateway.manage import views

__all__ = ["urlpatterns"]

router = SimpleRouter()
router.register("tenants", views.TenantViews, "tenant")
router.register("projects", views.ProjectViews, "project")
router.register("keys", views.KeyViews, "key")
router.register("tiers", views.TierViews, "tier")
router.register("prices", views.PriceViews, "price")

urlpatterns = [
    *router.urls,
    path("usage/", views.UsageView.as_view(), name="usage"),
    path("audit/", views.AuditView.as_view(), name="audit"),
    path("schema", SpectacularAPIView.as_view(), name="schema"),
]
