"""The load client: workloads, arrivals, an HTTP client for any OpenAI-compatible server, and the latency definitions.

It must know nothing of Django, Redis or the engine: what it can measure of ours it can measure of any other server.
"""

from gateway.bench.client import Ask, Target
from gateway.bench.drive import run_closed, run_open
from gateway.bench.metrics import Report, Slo, Trace
from gateway.bench.workload import Prompt, arrivals, load

__all__ = ["Ask", "Prompt", "Report", "Slo", "Target", "Trace", "arrivals", "load", "run_closed", "run_open"]
