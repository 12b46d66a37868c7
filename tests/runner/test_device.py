"""The order of copies, with a twin of a device whose copies are late until a fence asks for them."""

from __future__ import annotations

import pytest
import torch

from engine.attention import HeadShape
from engine.backends.causal_lm import CausalLM
from engine.runner.device import CpuDevice, open_device
from engine.runner.memory import KVMemory
from engine.text import Tokenizer
from tests.models.prompts import SHORT
from tests.runner.driver import Driver, greedy


class LateDevice(CpuDevice):
    """Copies nothing before the fence, then in order: the latest that a stream beside the kernels may do it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.waiting.append((source, target))

    def fence(self) -> None:
        for source, target in self.waiting:
            target.copy_(source)
        self.waiting.clear()


def test_late_copies_change_neither_text_nor_order(
    backend: CausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [tokenizer.encode(text) for text in SHORT[:3]]
    wanted = [one.output for one in Driver(backend).run(ids, [greedy(6)] * 3)]
    late = LateDevice()
    monkeypatch.setattr(backend._live()._memory, "device", late)
    parked = Driver(backend, park_every=2).run(ids, [greedy(6)] * 3)
    assert [one.output for one in parked] == wanted
    assert not late.waiting


def test_a_block_comes_back_as_it_went_and_others_stay() -> None:
    memory = KVMemory(6, 4, 2, HeadShape(2, 1, 8), 4, torch.float32, LateDevice())
    memory.store.data.copy_(torch.randn_like(memory.store.data))
    before = memory.store.data.clone()
    memory.park((0, 3), (2, 1))
    memory.fence()
    memory.store.data[[0, 3]] = float("nan")
    memory.restore((2, 1), (5, 0))
    memory.copy([(5, 3), (3, 4)])
    memory.fence()
    data = memory.store.data
    for block, source in enumerate((3, 1, 2, 0, 0, 0)):
        assert torch.equal(data[block], before[source])
    with pytest.raises(ValueError, match="2 blocks can't be copied to 1"):
        memory.park((0, 1), (2,))


def test_a_sequence_may_come_back_with_room_to_grow() -> None:
    memory = KVMemory(4, 2, 2, HeadShape(2, 1, 8), 4, torch.float32, LateDevice())
    memory.store.data.copy_(torch.randn_like(memory.store.data))
    before = memory.store.data.clone()
    memory.park((0,), (1,))
    memory.restore((1,), (2, 3))
    memory.fence()
    assert torch.equal(memory.store.data, before[[0, 1, 0, 3]])
    with pytest.raises(ValueError, match="2 blocks can't be copied to 1"):
        memory.restore((0, 1), (2,))


def test_a_device_that_is_not_there_is_refused_with_the_reason() -> None:
    assert open_device("cpu").name == "cpu"
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        open_device("tpu")
    if not torch.cuda.is_available():
        assert open_device("auto").name == "cpu"
        with pytest.raises(ValueError, match="sees no GPU"):
            open_device("cuda:1")
