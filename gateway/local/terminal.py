"""What a person sees in the foreground: the screen of the steps, then how to talk to what runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gateway.local.screen import Screen, terminal_screen

__all__ = ["TerminalScreen", "greeting"]


def greeting(credentials: Mapping[str, Any]) -> str:
    """The ready lines: a curl to paste, the console, every tenant's key."""
    tenants: Mapping[str, Mapping[str, Any]] = credentials.get("tenants") or {}
    key = next((t["key"] for t in tenants.values() if t.get("key")), "YOUR_KEY")
    admin = credentials.get("admin") or {}
    body = (
        f'{{"model": "{credentials["model"]}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    )
    lines = [
        f"Sluice is ready: {credentials['api_base']} (model {credentials['model']})",
        "",
        f"  curl -N {credentials['api_base']}/chat/completions \\",
        f"    -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        "",
        f"  console   {credentials['console_url']}  (user {admin.get('username')}, password {admin.get('password')})",
    ]
    lines += [f"  {name:<9} {t.get('tier', ''):<12} {t.get('key')}" for name, t in tenants.items()]
    return "\n".join([*lines, "", "Ctrl-C stops everything."])


class TerminalScreen:
    """A terminal screen that greets when the stack is ready."""

    def __init__(self) -> None:
        self._screen: Screen = terminal_screen()

    def begin(self, step: str) -> None:
        self._screen.begin(step)

    def progress(self, step: str, done: float, total: float) -> None:
        self._screen.progress(step, done, total)

    def done(self, step: str, detail: str = "") -> None:
        self._screen.done(step, detail)

    def note(self, text: str) -> None:
        self._screen.note(text)

    def error(self, text: str) -> None:
        self._screen.error(text)

    def ready(self, credentials: Mapping[str, Any]) -> None:
        self._screen.ready(credentials)
        sys.stdout.write(greeting(credentials) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        self._screen.close()
