"""One-machine mode: embedded Postgres and Valkey, the data folder and the supervisor behind `sluice up`.

It must not know what the processes it supervises do, and it imports neither Django nor torch.
"""
