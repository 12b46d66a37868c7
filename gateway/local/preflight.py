"""What `up` checks before it starts anything; each failure is one sentence."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

__all__ = ["PreflightError", "check_port", "check_python", "cores"]


class PreflightError(RuntimeError):
    """The machine isn't fit; the message is one sentence."""


def check_python() -> None:
    """Refuse a Python that is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the check is for whoever starts us with another Python)
        raise PreflightError(f"Sluice needs Python 3.11 or later; this is {sys.version.split()[0]}.")


def check_port(host: str, port: int, option: str) -> None:
    """Refuse a port that something listens on, or that we may not bind."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise PreflightError(f"{host} is not an address of this machine; choose another --host.") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PreflightError(_explain(error, host, port, option)) from None


def _explain(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another program; stop it or choose another with {option}."
    if error.errno == errno.EACCES:
        return f"port {port} may only be opened by root; choose one above 1023 with {option}."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; choose another --host."
    return f"can't listen on {host}:{port}: {error.strerror}."


def cores() -> int:
    """Cores this process may use: its affinity, and the control group's quota (containers)."""
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return available
    return available if quota == "max" else max(1, min(available, int(quota) // int(period)))
