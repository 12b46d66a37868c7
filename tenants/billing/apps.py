"""Django application of money."""

from django.apps import AppConfig

__all__ = ["BillingConfig"]


class BillingConfig(AppConfig):
    name = "tenants.billing"
    label = "billing"
