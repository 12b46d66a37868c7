"""The engine process: pulls work, runs the step loop, pushes tokens, keeps its leases, drains.

It must not know how a decision is made (scheduler) or carried out (backend), nor who reads the replies.
"""
