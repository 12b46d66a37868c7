"""Workloads, a cost model and virtual time around the real scheduler and the queue's twin; replay and shadow mode.

It must not know torch, Redis or the wall clock (but to measure itself), and nothing imports it but the command line.
"""
