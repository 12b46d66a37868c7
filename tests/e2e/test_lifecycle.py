"""Starting, killing, starting again: nothing is left behind and nothing is forgotten."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from openai import APIError

from tests.e2e.stack import Stack, sluice, until

MODEL = "simulated"
KILLED = ("celery", "metering", "console", "gateway", "valkey", "postgres")


def _ask(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=5
    )
    assert answer.choices[0].message.content


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_process_and_the_next_up_keeps_everything(data_dir: Path) -> None:
    stack = Stack(data_dir, backend="simulated")
    first = stack.up()
    _ask(stack)
    count = "SELECT COUNT(*) FROM billing_usagerecord"
    until(lambda: stack.rows(count) == [(1,)], 10, "the usage row")
    assert len(stack.processes()) >= 8  # supervisor, two servers, five of ours, and their children
    os.kill(stack.status()["supervisor"], signal.SIGKILL)
    until(lambda: not stack.processes(), 10, "no process left")

    assert stack.up() == first
    assert stack.rows(count) == [(1,)]
    _ask(stack)
    until(lambda: stack.rows(count) == [(2,)], 10, "the second usage row")

    again = sluice("up", "--detach", *stack.arguments())
    assert again.returncode == 1 and "Sluice runs already on" in again.stderr

    stack.down()
    assert not stack.processes()
    assert stack.status()["state"] == "stopped"


def test_whatever_is_killed_comes_back_and_the_service_goes_on(data_dir: Path) -> None:
    stack = Stack(data_dir, backend="simulated")
    stack.up()
    for name in KILLED:
        victim = stack.pid(name)
        os.kill(victim, signal.SIGKILL)
        until(lambda name=name, victim=victim: stack.pid(name) not in {None, victim}, 20, f"{name} is back")
    until(lambda: _answered(stack), 30, "an answer after all that")
    until(lambda: stack.rows("SELECT COUNT(*) >= 1 FROM billing_usagerecord") == [(True,)], 20, "the usage row")
    report = stack.status()
    assert report["state"] == "running"
    restarts = {p["name"]: p["restarts"] for p in report["processes"] if p["name"] != "engine-1"}
    assert restarts == dict.fromkeys(KILLED, 1), "nothing else fell over"
    log = (data_dir / "logs/supervisor.log").read_text()
    assert "valkey ended (SIGKILL); restarting in 0.5 s" in log and "valkey restarted" in log
    stack.down()
    assert not stack.processes()


@pytest.mark.slow
def test_a_start_finds_a_seeded_record_by_itself_and_mends_one_that_was_changed(data_dir: Path) -> None:
    stack = Stack(data_dir, backend="simulated")
    first = stack.up()
    log = data_dir / "logs/migrations.log"
    log.unlink()
    stack.down()
    assert stack.up() == first
    assert not log.exists(), "Django was not started to look"
    stack.rows("UPDATE tenants_apikey SET revoked_at = now() WHERE name = 'demo' RETURNING id")
    stack.down()
    again = stack.up()
    assert log.exists() and again["tenants"]["alpha"]["key"] != first["tenants"]["alpha"]["key"]
    _ask(stack)
    stack.down()


def _answered(stack: Stack) -> bool:
    try:
        _ask(stack)
    except APIError:
        return False
    return True


@pytest.mark.slow
def test_in_the_foreground_it_greets_and_ctrl_c_stops_all(data_dir: Path) -> None:
    stack = Stack(data_dir, backend="simulated")
    up = stack.foreground()
    assert up.stdout is not None
    said = ""
    for line in up.stdout:
        said += line
        if line.startswith("Ctrl-C"):
            break
    assert "Sluice is ready" in said and "curl -N http://127.0.0.1:" in said and "sk-" in said, said
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    assert not stack.processes()
    rest = up.stdout.read()
    assert "stopped" in rest and "killed" not in rest


@pytest.mark.slow
def test_an_interrupted_start_leaves_nothing(data_dir: Path) -> None:
    stack = Stack(data_dir, backend="simulated")
    up = stack.foreground()
    assert up.stdout is not None
    assert next(line for line in up.stdout if "valkey: ready" in line)
    up.send_signal(signal.SIGTERM)
    assert up.wait(30) == 1
    assert not stack.processes()
    stack.up()
    _ask(stack)
    stack.down()


@pytest.mark.slow
def test_given_servers_replace_the_embedded_ones(data_dir: Path, postgres_url: str, redis_url: str) -> None:
    stack = Stack(data_dir, backend="simulated", more={"DATABASE_URL": postgres_url, "REDIS_URL": redis_url})
    stack.up()
    _ask(stack)
    until(lambda: stack.rows("SELECT COUNT(*) FROM billing_usagerecord") == [(1,)], 10, "the usage row")
    report = stack.status()
    assert report["state"] == "running"
    assert {p["name"] for p in report["processes"]} == {"gateway", "console", "metering", "celery", "engine-1"}
    stack.down()


def test_a_taken_console_port_is_one_sentence(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = sluice("up", "--detach", "--port", "1234", "--console-port", str(port), "--data-dir", str(data_dir))
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: port {port} on 127.0.0.1 is taken by another program; stop it or choose another with --console-port."
    ]


@pytest.mark.slow
def test_a_broken_model_is_refused_with_the_reason(data_dir: Path) -> None:
    broken = data_dir / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    stack = Stack(data_dir / "var")
    done = sluice("up", "--detach", *stack.arguments(), "--model", str(broken))
    assert done.returncode == 1 and done.stdout == ""
    assert "engine-1 can't start" in done.stderr and "broken.gguf" in done.stderr
    assert not stack.processes()
