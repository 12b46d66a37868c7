"""Plug-ins behind one small contract: causal language models, one-shot models, upstream servers, the simulator.

A backend must not know tiers, tenants, Redis or money; it executes step plans for sequences it was given.
"""
