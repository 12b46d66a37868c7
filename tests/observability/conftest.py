"""Django is set up before the tests here are imported: they use its settings."""

from __future__ import annotations

import django

django.setup()
