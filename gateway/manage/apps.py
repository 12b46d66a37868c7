"""Django application of the management API; it has no tables of its own."""

from django.apps import AppConfig

__all__ = ["ManageConfig"]


class ManageConfig(AppConfig):
    name = "gateway.manage"
    label = "manage"
