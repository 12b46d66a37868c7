"""The console: server-rendered pages, the live push to browsers, sign-in.

It reads through selectors and the live snapshot only; it must not know how a request is admitted, scheduled or billed.
"""
