"""The data folder and the checks before anything starts: one sentence each."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.local.folder import DataFolder, FolderError
from gateway.local.preflight import PreflightError, check_port, cores
from gateway.local.stack import Options


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "var")
    folder.open()
    first = folder.secret("secret-key")
    assert len(first) == 64
    assert DataFolder(tmp_path / "var").secret("secret-key") == first
    assert folder.secret("key-pepper") != first
    assert stat.S_IMODE((folder.path / "secrets/secret-key").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder.path / "secrets").stat().st_mode) == 0o700


def test_written_json_is_private_and_whole(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "var")
    folder.open()
    folder.write(folder.credentials, {"a": 1})
    assert stat.S_IMODE(folder.credentials.stat().st_mode) == 0o600
    assert folder.read(folder.credentials) == {"a": 1}
    folder.credentials.write_text('{"torn')
    assert folder.read(folder.credentials) == {}


def test_another_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("999\n")
    with pytest.raises(FolderError, match=r"made by another version of Sluice \(layout 999"):
        DataFolder(tmp_path).open()


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "manage.py").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / ".git").mkdir()
    for detach in ([], ["--detach"]):
        done = _sluice("up", *detach, "--data-dir", str(tmp_path))
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.strip().splitlines() == [
            f"error: {tmp_path} is no data folder of Sluice and isn't empty (.git, manage.py); "
            "choose a new or an empty folder as --data-dir."
        ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".git", "manage.py", "models"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_marker_that_leads_elsewhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1\n")
    (tmp_path / "version").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="is no data folder of Sluice"):
        DataFolder(tmp_path).open()


def test_a_folder_from_before_the_marker_is_adopted(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.open()
    kept = folder.secret("secret-key")
    folder.write(folder.credentials, {"tenants": {}})
    for made_by_others in ("models", "bench", "lost+found", ".cache"):
        (tmp_path / made_by_others).mkdir()
    (tmp_path / "version").unlink()
    DataFolder(tmp_path).open()
    assert (tmp_path / "version").read_text() == "1\n"
    assert folder.secret("secret-key") == kept


def test_a_folder_where_others_may_write_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "real"
    path.mkdir()
    path.chmod(0o777)
    (tmp_path / "link").symlink_to(path)
    DataFolder(tmp_path / "link").open()
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "var").write_text("")
    with pytest.raises(FolderError, match="is a file, not a folder"):
        DataFolder(tmp_path / "var").open()


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    with pytest.raises(FolderError, match="has 10 MiB left"):
        DataFolder(tmp_path).open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.open()
    os.chown(tmp_path / "version", 65534, 65534)
    with pytest.raises(FolderError, match="belongs to user 65534"):
        folder.open()


def test_only_one_holds_the_lock(tmp_path: Path) -> None:
    holder, other = DataFolder(tmp_path), DataFolder(tmp_path)
    assert not other.locked()
    assert holder.lock()
    assert other.locked()
    assert not other.lock(patience_s=0.1)


def test_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"port {port} on 127.0.0.1 is taken .* --port\."):
            check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")


def test_an_address_of_another_machine_is_one_sentence() -> None:
    with pytest.raises(PreflightError, match="is not an address of this machine"):
        check_port("192.0.2.1", 8000, "--port")


def test_engine_threads_leave_a_core_for_the_gateway() -> None:
    assert Options().engine_threads == max(1, cores() - 1)
    assert Options(engines=1000).engine_threads == 1
    assert Options(threads=7).engine_threads == 7


@pytest.mark.parametrize(
    ("model", "pool"), [("smollm2-135m", "smollm2-135m"), (__file__, "test-folder.py"), ("Qwen 2", "qwen-2")]
)
def test_the_pool_is_named_after_the_model(model: str, pool: str) -> None:
    assert Options(model=model).pool == pool


def test_an_embedding_model_has_a_pool_of_its_own() -> None:
    assert Options(embedding_model="all-minilm-l6-v2").pools == ["smollm2-135m", "all-minilm-l6-v2"]
    assert Options(engines=0, embedding_model=str(Path(__file__).parent)).pools == ["local"]
    assert Options().pools == ["smollm2-135m"] and Options(engines=0).pools == []


def _sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("command", [[], ["up"], ["down"], ["status"], ["models"]])
def test_help_is_there_and_light(command: list[str]) -> None:
    done = _sluice(*command, "--help")
    assert done.returncode == 0 and "Usage:" in done.stdout
    script = "import sys, gateway.cli; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    loaded = subprocess.run(
        [sys.executable, "-c", f"import json; {script}"], capture_output=True, text=True, check=True
    )
    assert {"torch", "django", "redis", "psycopg"}.isdisjoint(json.loads(loaded.stdout))


def test_status_and_down_without_a_stack(tmp_path: Path) -> None:
    status = _sluice("status", "--json", "--data-dir", str(tmp_path))
    assert status.returncode == 3 and json.loads(status.stdout)["state"] == "stopped"
    down = _sluice("down", "--data-dir", str(tmp_path))
    assert down.returncode == 0 and down.stdout.startswith("nothing runs on")


def test_up_names_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for detach in ([], ["--detach"]):
            done = _sluice("up", *detach, "--port", port, "--data-dir", str(tmp_path / "var"))
            assert done.returncode == 1 and done.stdout == ""
            assert done.stderr.strip().splitlines() == [
                f"error: port {port} on 127.0.0.1 is taken by another program; stop it or choose another with --port."
            ]
    done = _sluice("up", "--backend", "magic")
    assert done.returncode == 2 and "must be causal_lm or simulated" in done.stderr
    done = _sluice("up", "--model", "/nowhere/x.gguf", "--data-dir", str(tmp_path / "var"))
    assert done.returncode == 2 and "no file or folder" in done.stderr
