"""`seed_demo`: makes the demonstration record, prints what is new and keeps it where `up` keeps its credentials."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection, transaction
from django.db.migrations.recorder import MigrationRecorder

from gateway.local import seeded
from gateway.local.folder import DataFolder
from tenants.demo import seed, traces

__all__ = ["Command"]


class Command(BaseCommand):
    help = "Create the demonstration tenants, tiers, prices and administrator; print what is new."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
        parser.add_argument("--migrate", action="store_true", help="first bring the tables up to date")
        parser.add_argument("--rotate", action="store_true", help="new password and keys for what exists already")

    def handle(self, *args: Any, **options: Any) -> None:
        folder = DataFolder(settings.SLUICE_DATA_DIR)
        _check_database(folder)
        if options["migrate"]:
            call_command("migrate", interactive=False, skip_checks=True, stdout=self.stderr)  # ours is for the answer
        with transaction.atomic():
            facts = seed(rotate=options["rotate"])
            if folder.made:
                folder.keep(facts)  # a secret that can't be kept is not made
        if folder.made and options["migrate"]:
            applied = MigrationRecorder(connection).migration_qs.order_by("app", "name").values_list("app", "name")
            asked = [(*query.query.sql_with_params(), query) for query in (applied, *traces())]
            seeded.remember(folder, os.environ["DATABASE_URL"], asked)
        self.stdout.write(json.dumps(facts, indent=None if options["json"] else 2))


def _check_database(folder: DataFolder) -> None:
    """Keys of another database would replace those that the folder's own stack knows, which no one has elsewhere."""
    own = folder.read(folder.environment).get("DATABASE_URL")
    if folder.made and own and own != os.environ.get("DATABASE_URL"):
        raise CommandError(
            f"DATABASE_URL is not that of {folder.path}, whose credentials.json would be overwritten; nothing was "
            "changed. Set SLUICE_DATA_DIR to another folder, or leave DATABASE_URL to 'sluice manage seed_demo'."
        )
