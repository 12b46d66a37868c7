"""Django application of measured facts."""

from django.apps import AppConfig

__all__ = ["MeteringConfig"]


class MeteringConfig(AppConfig):
    name = "gateway.metering"
    label = "metering"
