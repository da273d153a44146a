"""This machine, as the system itself counts it."""

from __future__ import annotations

import os

import psutil
import pytest

from anaphora.engine.config import free_memory
from anaphora.errors import ConfigError
from anaphora.geometry.model import ModelGeometry
from anaphora.planning import machine as module
from anaphora.planning.ask import Wishes, ask
from anaphora.planning.hardware import Device, find_device
from anaphora.planning.machine import Machine, this_machine
from anaphora.planning.plan import answer

QWEN = "Qwen/Qwen2.5-7B-Instruct"
GIB = 1 << 30


def test_memory_and_cores_are_those_of_the_system() -> None:
    here = this_machine()
    assert here.cores == len(os.sched_getaffinity(0))
    assert 0 < here.free_bytes <= (here.cpu.memory_bytes or 0) <= psutil.virtual_memory().total
    # what serve takes as free, give or take what other processes do between the two looks
    assert abs(here.free_bytes - free_memory()) < GIB
    assert here.cpu.kind == "cpu"
    assert len(here.gpus) == len(here.gpu_free)


def machine(*gpus: Device, used: int = 0) -> Machine:
    here = this_machine()
    return Machine(gpus, tuple((gpu.memory_bytes or 0) - used for gpu in gpus), here.cpu, 8, 64 * GIB)


def test_no_hardware_means_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_machine", machine)
    question, remarks = ask(QWEN, ModelGeometry.from_catalog(QWEN), Wishes(context=4096))
    assert question.engine.name == "anaphora"
    assert question.situation.free_bytes == 64 * GIB
    assert remarks == ["no --hardware: planned for this machine"]
    now = answer(question)
    weights = now.budget.part("weights").likely
    assert now.available_bytes == (64 * GIB - weights) // 2


def test_its_gpus_are_used_together(monkeypatch: pytest.MonkeyPatch) -> None:
    card = find_device("rtx-4090")
    monkeypatch.setattr(module, "this_machine", lambda: machine(card, card, used=3 * GIB))
    geometry = ModelGeometry.from_catalog(QWEN)
    question, remarks = ask(QWEN, geometry, Wishes(context=4096))
    assert (question.engine.name, question.settings.tensor_parallel_size) == ("vllm", 2)
    assert "2 x GeForce RTX 4090" in remarks[0]
    assert remarks[1].startswith("3.0 GiB of it are in use")
    assert ask(QWEN, geometry, Wishes(context=4096, tp=1))[0].situation.devices == 1
    with pytest.raises(ConfigError, match="this machine has 2 x GeForce RTX 4090"):
        ask(QWEN, geometry, Wishes(context=4096, count=4))
