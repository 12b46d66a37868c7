"""`python -m gateway.bench`, which `sluice bench` becomes, so that other commands do not pay for its imports."""

from gateway.bench.cli import app

app(prog_name="sluice bench")
