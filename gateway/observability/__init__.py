"""What the gateway shows of itself: logs with redaction, metrics, traces.

It must not count anything itself: figures are made from request events, and it must never let a secret out.
"""
