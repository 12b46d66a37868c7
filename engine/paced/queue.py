"""The clock behind the queue: pulls like any engine, with the same threads, and answers when it is time."""

from __future__ import annotations

import threading
import time
from queue import Empty

from engine.backends.simulated import create
from engine.paced.pace import Agenda, Pace, Stream
from engine.protocol.keys import Keys
from engine.protocol.messages import Delta, Final, ModelCard, Timeline, encode
from engine.serve.link import Abandoned, Arrived, Broken, Cancelled, DrainOrdered, Item, Link, Parcel, Refused, connect
from engine.serve.log import Log
from engine.serve.puller import Listener, Puller
from engine.serve.receiver import Receiver
from engine.serve.sender import Sender

__all__ = ["QueueFace", "card"]

_ROOM = 1_000_000
_LEASE_MS = 10_000
"""Longer than an engine that computes has it: here nothing is to be found out about its death."""
_IDLE_S = 0.2


def card() -> ModelCard:
    """A token is a byte, as the simulated backend has it."""
    return create("paced").card


class QueueFace:
    """Serves the pool `paced` until `stop`, in a thread of its own. `failed` says why it ended by itself."""

    def __init__(self, redis_url: str, prefix: str, engine: str) -> None:
        keys, self._link, log = Keys(prefix), Link(), Log("info", engine=engine)
        self._engine = engine
        self._sender = Sender(connect(redis_url), keys, "paced", self._link, log)
        self._puller = Puller(connect(redis_url), keys, card(), engine, "paced", _LEASE_MS, self._link, log)
        self._listener = Listener(connect(redis_url), keys, engine, "paced", self._link)
        self._receiver = Receiver(connect(redis_url), keys, engine, self._puller)
        self._agenda = Agenda()
        self._streams: dict[str, Stream] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self.failed = ""

    def start(self) -> None:
        self._offer()
        for thread in (self._sender, self._puller, self._listener, self._receiver, self._thread):
            thread.start()

    def stop(self) -> None:
        """What still runs ends as aborted."""
        self._stopped = True
        self._link.quiet.set()
        self._link.inbox.put(None)
        self._thread.join(5)
        self._sender.flush(5)
        for thread in (self._puller, self._sender):
            thread.stop()
        for listens in (self._listener, self._receiver):
            listens.stopped.set()

    def _run(self) -> None:
        while not self._stopped and not self.failed:
            parcel = Parcel()
            self._receive(parcel)
            for stream in self._agenda.take(time.monotonic()):
                self._say(stream, parcel)
            if not parcel.empty:
                self._sender.send(parcel)
            self._offer()
        parcel = Parcel()
        for stream in list(self._streams.values()):
            self._end(stream, parcel, "abort", "the engine was stopped")
        self._sender.send(parcel)

    def _offer(self) -> None:
        """There is always room."""
        link = self._link
        with link.lock:
            link.credit, link.tokens, link.spare = dict.fromkeys(link.tiers.values(), _ROOM), _ROOM, True

    def _receive(self, parcel: Parcel) -> None:
        """Wait until something comes or a token is due."""
        wait_s = min(_IDLE_S, self._agenda.next - time.monotonic())
        try:
            item = self._link.inbox.get(timeout=wait_s) if wait_s > 0 else self._link.inbox.get_nowait()
            while True:
                self._handle(item, parcel)
                item = self._link.inbox.get_nowait()
        except Empty:
            return

    def _handle(self, item: Item, parcel: Parcel) -> None:
        match item:
            case Arrived(work):
                prompt = bytes(t for t in work.prompts[0] if t < 256).decode("utf-8", "replace")
                stream = Stream(Pace.of(prompt), time.monotonic(), max(1, work.sampling.max_tokens), item)
                self._streams[work.request] = stream
                if len(work.prompts) * work.n > 1:
                    self._end(stream, parcel, "error", "one choice of one prompt is all that is served here")
                else:
                    self._agenda.add(stream)
            case Cancelled(request, reason):
                if (found := self._streams.get(request)) is not None:
                    self._end(found, parcel, "abort", reason)
            case Abandoned():
                for stream in self._streams.values():
                    stream.gone = True
                self._streams.clear()
            case Broken(detail) | Refused(detail):
                self.failed = detail
            case DrainOrdered():
                self._stopped = True

    def _say(self, stream: Stream, parcel: Parcel) -> None:
        work, index = stream.owner.work, stream.made - 1
        token = ord("a") + index % 26
        delta = Delta(
            work.request, 0, stream.owner.epoch, index, (token,), chr(token),
            finish="length" if stream.done else None, last=stream.done,
        )  # fmt: skip
        parcel.deltas.setdefault(work.reply_to, []).append(delta)
        if work.resumable:
            parcel.kept.setdefault(work.request, []).append(delta)
        if stream.done:
            self._leave(stream, parcel, "length", "")

    def _end(self, stream: Stream, parcel: Parcel, reason: str, detail: str) -> None:
        work, epoch = stream.owner.work, stream.owner.epoch
        code = "unsupported" if reason == "error" else ""
        delta = Delta(work.request, 0, epoch, stream.made, (), "", finish=reason, code=code, detail=detail, last=True)
        parcel.deltas.setdefault(work.reply_to, []).append(delta)
        self._leave(stream, parcel, reason, detail)

    def _leave(self, stream: Stream, parcel: Parcel, reason: str, detail: str) -> None:
        stream.gone = True
        work, epoch, era = stream.owner.work, stream.owner.epoch, stream.owner.era
        del self._streams[work.request]
        prompt = sum(len(p) for p in work.prompts)
        final = Final(
            work.request, epoch, work.pool, work.tier, work.tenant, self._engine, reason, prompt, 0, stream.made, 0,
            0.0, 0.0, Timeline(prefill_s=stream.pace.ttft_s), time.time_ns() // 1_000_000, "", detail,
        )  # fmt: skip
        parcel.finals.append((work.request, epoch, era, encode(final)))
