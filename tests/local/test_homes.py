"""Where embedded servers can live: any user, unreachable parents, long paths, leftovers, strange data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from gateway.local import folder as folder_module
from gateway.local.folder import DataFolder
from gateway.local.lifeline import server_owner
from gateway.local.postgres import PostgresServer
from gateway.local.server import EmbeddedServer, ServerError
from gateway.local.valkey import ValkeyServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place() -> Iterator[Path]:
    """A short folder that other users may pass through (pytest's own are 0700)."""
    path = Path(tempfile.mkdtemp(prefix="slh-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _postgres(home: Path) -> PostgresServer:
    return PostgresServer(home, home / "run", "secret", home.parent / "postgres.log", server_owner())


def _valkey(home: Path) -> ValkeyServer:
    return ValkeyServer(home, home / "run", "secret", home.parent / "valkey.log", server_owner())


def test_a_restart_keeps_the_data(place: Path) -> None:
    postgres, valkey = _postgres(place / "pg"), _valkey(place / "vk")
    for server in (postgres, valkey):
        server.start()
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    redis.Redis.from_url(valkey.url).set("kept", "42")
    for server in (postgres, valkey):
        server.stop()
        server.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    assert redis.Redis.from_url(valkey.url).get("kept") == b"42"
    for server in (postgres, valkey):
        server.stop()


@pytest.mark.parametrize("make", [_postgres, _valkey])
def test_a_leftover_server_is_stopped_before_the_next_starts(place: Path, make: type[EmbeddedServer]) -> None:
    first, second = make(place / "home"), make(place / "home")  # type: ignore[call-arg]
    first.start()
    assert first.child is not None and second.child is None
    second.start()
    assert first.child.wait(5) is not None
    assert second.child is not None and second.child.poll() is None
    second.stop()


def test_a_stale_pid_file_that_names_a_living_process_does_not_block(place: Path) -> None:
    postgres = _postgres(place / "pg")
    postgres.start()
    postgres.stop()
    pid_file = postgres.data / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n{postgres.data}\n1\n5432\n{postgres.sockets}\n\n\nready   \n")
    postgres.start()
    postgres.stop()


def test_a_cluster_of_another_major_version_is_refused_in_one_sentence(place: Path) -> None:
    (place / "pg/data").mkdir(parents=True)
    (place / "pg/data/PG_VERSION").write_text("15\n")
    with pytest.raises(ServerError, match=r"holds a Postgres 15 database and this Sluice brings Postgres 18"):
        _postgres(place / "pg").start()


def test_another_password_is_explained(place: Path) -> None:
    postgres = _postgres(place / "pg")
    postgres.start()
    postgres.stop()
    postgres.password = "other"
    with pytest.raises(ServerError, match="another password"):
        postgres.start()
    postgres.stop()


def test_a_path_too_long_for_a_socket_gets_a_short_one(place: Path) -> None:
    home = place / ("long-" * 20)
    postgres = _postgres(home)
    postgres.start()
    assert not str(postgres.sockets).startswith(str(home))
    assert postgres.sockets.stat().st_mode & 0o777 == 0o700
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    postgres.stop()
    shutil.rmtree(postgres.sockets)


@needs_root
def test_a_folder_under_a_closed_parent_works_and_the_parent_stays_closed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(folder_module, "_SYSTEM_HOMES", place / "system")
    folder = DataFolder(closed / "var")
    folder.open()
    home = folder.server_home("postgres", server_owner())
    postgres = _postgres(home)
    postgres.start()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    postgres.stop()
    assert closed.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "postgres").resolve().parent == place / "system"
    assert folder.server_home("postgres", server_owner()) == home


@needs_root
def test_unreachable_binaries_are_copied_beside_the_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.local import postgres as postgres_module
    from gateway.local import valkey as valkey_module

    servers = [_postgres(place / "pg"), _valkey(place / "vk")]
    for module in (postgres_module, valkey_module):
        # What `reachable` answers for a virtual environment under a closed home.
        monkeypatch.setattr(module, "reachable", lambda path, owner: False)
    for server in servers:
        server.start()
        assert server.child is not None
        assert server.home.resolve() in Path(f"/proc/{server.child.pid}/exe").resolve().parents
        server.stop()


_AS_USER = """
import os, sys
from pathlib import Path
import psycopg
from gateway.local.postgres import PostgresServer
from gateway.local.valkey import ValkeyServer
root = Path(sys.argv[1])
assert os.geteuid() == 65534
postgres = PostgresServer(root / "pg", root / "pg/run", "secret", root / "postgres.log")
valkey = ValkeyServer(root / "vk", root / "vk/run", "secret", root / "valkey.log")
for server in (postgres, valkey):
    server.start()
assert psycopg.connect(postgres.url).execute("SELECT 1").fetchone() == (1,)
assert valkey.ready()
for server in (valkey, postgres):
    server.stop()
print("done")
"""


def _open_to_nobody(python: str) -> bool:
    """Can another user start it, and is it of our version (extension modules)?"""
    version = "import sys; print(sys.version_info[:2])"
    try:
        found = subprocess.run(
            [python, "-c", version], user=65534, group=65534, cwd="/", capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return found.stdout.strip() == str(sys.version_info[:2])


@needs_root
def test_an_ordinary_user_runs_them_as_itself(place: Path) -> None:
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _open_to_nobody(p)), None)
    if python is None:
        pytest.skip("no Python of this version is open to other users")
    own = place / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    done = subprocess.run(
        [python, "-c", _AS_USER, str(own)],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd=own,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "HOME": str(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_a_killed_launcher_takes_its_servers_along(place: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom gateway.local.lifeline import server_owner\n"
        "from gateway.local.postgres import PostgresServer\nfrom gateway.local.valkey import ValkeyServer\n"
        "root = Path(sys.argv[1])\n"
        "for kind in (PostgresServer, ValkeyServer):\n"
        "    server = kind(root / kind.name, root / kind.name / 'run', 'pw', root / 'log', server_owner())\n"
        "    server.start()\n    print(server.child.pid, flush=True)\ntime.sleep(60)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, str(place)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    watched = [os.pidfd_open(pid) for pid in pids]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    for handle in watched:
        _await_end(handle, 5)
        os.close(handle)


def _await_end(pidfd: int, timeout_s: float) -> None:
    import select

    ready, _, _ = select.select([pidfd], [], [], timeout_s)
    assert ready, "a server outlived its launcher"
