"""The OpenAI surface: routes, request schemas, error shape, event streams.

It must not know Redis, prices or limits: it validates, asks admission, and turns deltas into bytes. Whatever a client
sends wrongly is a 4xx in OpenAI's error shape, and is said before anything is admitted.
"""
