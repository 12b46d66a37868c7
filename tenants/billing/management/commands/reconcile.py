"""`reconcile`: prove that usage, ledger and balances agree, or show the rows where they don't."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from tenants import audit
from tenants.billing.reconcile import reconcile

__all__ = ["Command"]


class Command(BaseCommand):
    help = "Prove that usage, ledger, balances and the audit chain hold; exit 1 with the rows that don't."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
        parser.add_argument("--limit", type=int, default=1000, help="rows shown of each check")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = reconcile(limit=options["limit"])
        broken = audit.broken_at()
        if options["json"]:
            rows = [{"check": f.check, "row": [str(x) for x in f.row]} for f in findings]
            self.stdout.write(json.dumps({"findings": rows, "audit_broken_at": broken}))
        else:
            for finding in findings:
                self.stdout.write(f"{finding.check}: {', '.join(map(str, finding.row))}")
            if broken is not None:
                self.stdout.write(f"audit chain: broken at position {broken}")
            if not findings and broken is None:
                self.stdout.write("usage, ledger, balances and the audit chain agree")
        if findings or broken is not None:
            sys.exit(1)
