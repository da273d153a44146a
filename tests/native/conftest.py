"""The native kernels. With ANAPHORA_SANITIZED the module of that folder is tested instead of the installed one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from anaphora import native

_NAME = "anaphora._native"


def _use(folder: Path) -> None:
    (file,) = folder.glob("_native*.so")
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


if "ANAPHORA_SANITIZED" in os.environ:
    _use(Path(os.environ["ANAPHORA_SANITIZED"]))


@pytest.fixture(scope="session")
def kernels() -> Iterator[ModuleType]:
    """The module; its target and threads are as before when the tests end."""
    module = native.load()
    assert module is not None, native.missing()
    target, threads = module.target(), module.threads()
    yield module
    module.set_target(target)
    module.set_threads(threads)


@pytest.fixture(params=["baseline", "wide", "avx2", "avx512"])
def target(kernels: ModuleType, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each target that runs here, in use."""
    name: str = request.param
    if name not in kernels.targets():
        pytest.skip(f"{name} does not run here, or was not built")
    before = kernels.target()
    kernels.set_target(name)
    yield name
    kernels.set_target(before)
