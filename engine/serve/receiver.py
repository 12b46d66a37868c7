"""The thread that hears what admissions have pulled for this engine: a request comes in without a round trip."""

from __future__ import annotations

import threading

from redis import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.protocol.functions import Handed
from engine.protocol.keys import Keys
from engine.serve.link import Accounted, Broken, Channel
from engine.serve.puller import Puller

__all__ = ["Receiver"]

_LISTEN_S = 0.5
_PING_TURNS = 10
"""Turns without a message after which the server is asked whether it is there; it has as many to answer."""


class Receiver(threading.Thread):
    """Listens to the engine's channel. Whatever is lost on it Redis counts among what the engine runs: the puller looks
    there after each loss, and once a second."""

    def __init__(self, redis: Redis, keys: Keys, engine: str, puller: Puller) -> None:
        super().__init__(name="receiver", daemon=True)
        self._channel, self._puller, self._link = Channel(redis, keys.hand(engine), _LISTEN_S), puller, puller.link
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._listen()
            except RedisError:  # the puller notices the same and says so
                self._puller.look_for_lost()
                self.stopped.wait(0.2)
            except Exception as error:  # an engine that others think is handed requests must not look alive
                self._link.inbox.put(Broken(f"receiver: {type(error).__name__}: {error}"[:300]))
                return

    def _listen(self) -> None:
        self._channel.subscribe()
        silent = 0
        while not self.stopped.is_set():
            if (message := self._channel.next()) is not None:
                silent = 0
                if message:
                    self._take(message)
                continue
            silent += 1
            if silent == _PING_TURNS:
                self._channel.ping()
            elif silent > 2 * _PING_TURNS:
                raise RedisTimeoutError("the server does not answer")

    def _take(self, message: bytes) -> None:
        link = self._link
        try:
            handed = Handed.read(message)
        except (ValueError, KeyError):
            self._puller.look_for_lost()
            return
        link.unspent += 1  # before it is known; no other thread writes it
        work = self._puller.accept(handed.pulled)
        if work is not None:
            link.inbox.put(Accounted(handed.accounts))
            with link.lock:  # a pull may be under way; the loop has the work already
                link.spend(work)
        link.unspent -= 1
