"""`seed_demo`: makes the demonstration record, prints what is new and keeps it where `up` keeps its credentials."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import transaction

from gateway.local.folder import DataFolder
from tenants.demo import seed

__all__ = ["Command"]


class Command(BaseCommand):
    help = "Create the demonstration tenants, tiers, prices and administrator; print what is new."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
        parser.add_argument("--rotate", action="store_true", help="new password and keys for what exists already")

    def handle(self, *args: Any, **options: Any) -> None:
        folder = DataFolder(settings.SLUICE_DATA_DIR)
        with transaction.atomic():
            facts = seed(rotate=options["rotate"])
            if folder.made:
                folder.keep(facts)  # a secret that can't be kept is not made
        self.stdout.write(json.dumps(facts, indent=None if options["json"] else 2))
