"""`settle`: run the metering worker until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from engine.protocol.keys import Keys
from gateway.metering.worker import Worker, connect, readers

__all__ = ["Command"]


class Command(BaseCommand):
    help = "Settle usage, record outcomes, reap what was lost and publish the live view."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--restore-aside",
            action="store_true",
            help="put entries that were set aside back into their streams, then end",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["restore_aside"]:
            for reader in readers(connect(), Keys(settings.SLUICE_REDIS_PREFIX), "restore"):
                self.stdout.write(f"{reader.stream}: {reader.restore_aside()} put back")
            return
        worker = Worker()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        sys.exit(worker.run())
