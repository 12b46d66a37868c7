"""ACTS: turns a `StepPlan` into tensors, runs the model, samples, and reports a `StepOutcome`.

It must not know policies, tiers, tenants, Redis or why a slice was chosen.
"""

from engine.runner.runner import Runner

__all__ = ["Runner"]
