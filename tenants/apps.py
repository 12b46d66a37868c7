"""Django application of the business record."""

from django.apps import AppConfig

__all__ = ["TenantsConfig"]


class TenantsConfig(AppConfig):
    name = "tenants"
    label = "tenants"
