from __future__ import annotations

import multiprocessing
import threading
from types import ModuleType

import pytest
import torch

from anaphora import native
from anaphora.errors import ConfigError
from support.native_programs import linear, numbers


def test_several_callers_and_changing_threads_at_once(kernels: ModuleType) -> None:
    x, weights = numbers(1, 7, 64), kernels.Weights(numbers(2, 200, 64))
    expected = linear(kernels, x, weights)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(60):
            kernels.set_threads((number + turn) % 4 + 1)
            if not torch.equal(linear(kernels, x, weights), expected):
                wrong.append(number)

    before = kernels.threads()
    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    kernels.set_threads(before)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def _in_child(x: torch.Tensor, expected: torch.Tensor, answer: multiprocessing.Queue[bool]) -> None:
    module = native.load()
    assert module is not None
    answer.put(bool(torch.equal(linear(module, x, module.Weights(torch.ones(40, 64))), expected)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(kernels: ModuleType) -> None:
    before = kernels.threads()
    kernels.set_threads(3)
    x = numbers(1, 7, 64)
    expected = linear(kernels, x, kernels.Weights(torch.ones(40, 64)))
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_in_child, args=(x, expected, answer))
    child.start()
    try:
        assert answer.get(timeout=60)
    finally:
        child.join(10)
        child.kill()
        kernels.set_threads(before)


def test_the_environment_chooses_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANAPHORA_THREADS", raising=False)
    assert native.threads() == native.usable_cores() >= 1
    monkeypatch.setenv("ANAPHORA_THREADS", "7")
    assert native.threads() == 7
    for wrong in ("0", "-1", "many", "2.5", "٣", ""):
        monkeypatch.setenv("ANAPHORA_THREADS", wrong)
        with pytest.raises(ConfigError, match="ANAPHORA_THREADS"):
            native.threads()


def test_the_environment_chooses_the_target(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_TARGET", "z80")
    with pytest.raises(ConfigError, match="baseline"):
        native.load.__wrapped__()
