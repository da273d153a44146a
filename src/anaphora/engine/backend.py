"""Which kernels run a model: `native` (the C++ extension, on CPUs) or `torch` (the reference, anywhere)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from anaphora.errors import ConfigError

Backend = Literal["native", "torch"]
CHOICES = ("auto", *get_args(Backend))

NUMERICS: dict[Backend, int] = {"native": 1, "torch": 1}
"""Versions of what a backend computes, to the last bit: raise one, and cached blocks of before match no more."""

ASKED = "asked for"
"""The reason, where the user gave it."""

_STEP = 16
"""Tokens of a block that a kernel reads at a time."""


@dataclass(frozen=True, slots=True)
class NativeNeeds:
    """What the kernels' limits are checked against."""

    device: str
    missing: str
    """Why the extension cannot be used here; empty when it can."""
    block_size: int
    dtype: str
    """As asked for: float16 is the one that the kernels do not have."""


_LIMITS: tuple[tuple[Callable[[NativeNeeds], bool], Callable[[NativeNeeds], str]], ...] = (
    (lambda n: n.device != "cpu", lambda n: f"the native kernels run on CPUs, not on {n.device}"),
    (lambda n: bool(n.missing), lambda n: n.missing),
    (
        lambda n: n.block_size % _STEP != 0,
        lambda n: f"the native kernels need a --block-size that is a multiple of {_STEP}, and it is {n.block_size}",
    ),
    (
        lambda n: n.dtype == "float16",
        lambda n: "the native kernels have no float16 weights; use --dtype auto, bfloat16 or float32",
    ),
)


def choose_backend(asked: str, needs: NativeNeeds) -> tuple[Backend, str]:
    """(backend, why). auto = native where it can run.

    Raises ConfigError for an unknown name, and when native is asked for and cannot run.
    """
    if asked not in CHOICES:
        raise ConfigError(f"--backend is {asked!r}; it must be one of {', '.join(CHOICES)}")
    if asked == "torch":
        return "torch", ASKED
    obstacle = next((say(needs) for hinders, say in _LIMITS if hinders(needs)), None)
    if obstacle is None:
        return "native", ASKED if asked == "native" else "the fastest here"
    if asked == "native":
        raise ConfigError(f"--backend native: {obstacle}. Or leave --backend at auto")
    return "torch", obstacle
