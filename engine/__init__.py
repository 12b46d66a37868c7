"""The engine: one process that turns pulled requests into tokens, plus everything it needs to do so.

It must not know the gateway, Django or any business record; the only thing it shares with them is `engine.protocol`.
"""
