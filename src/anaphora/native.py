"""The native kernels, if this installation has them: why not, how many threads, which instructions.

The module is built when the package is installed; without a compiler the package works all the same, on the
reference backend. Environment: ANAPHORA_THREADS (how many), ANAPHORA_TARGET (one of `targets()`).
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from anaphora.errors import ConfigError

_MODULE = "anaphora._native"
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@cache
def load() -> ModuleType | None:
    """The module, its threads set; None when it is missing. Raises ConfigError for a wrong environment variable."""
    if missing() is not None:
        return None
    native = import_module(_MODULE)
    target = os.environ.get("ANAPHORA_TARGET")
    if target is not None and target not in native.targets():
        runs = ", ".join(native.targets())
        raise ConfigError(f"ANAPHORA_TARGET={target}: this processor runs {runs}; name one of them, or unset it")
    native.set_threads(threads())
    return native


@cache
def missing() -> str | None:
    """Why there are no native kernels, and what to do; None when there are."""
    try:
        import_module(_MODULE)
    except ModuleNotFoundError:
        reason = "they were not built when the package was installed"
    except ImportError as error:
        reason = str(error)
    else:
        return None
    return f"no native kernels ({reason}): install a C++20 compiler (Debian: apt-get install g++), then anaphora again"


def threads() -> int:
    """ANAPHORA_THREADS, else one per core this process may use. Raises ConfigError when the variable is no count."""
    given = os.environ.get("ANAPHORA_THREADS")
    if given is None:
        return usable_cores()
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= 1024:
        raise ConfigError(f"ANAPHORA_THREADS={given}: give a number of threads from 1 to 1024, or unset it")
    return int(given)


def usable_cores() -> int:
    """Cores in the affinity mask, hyperthreads of one core counted once, and no more than the cgroup's quota."""
    try:
        processors = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {_siblings(processor) for processor in processors}
    return max(1, min(len(cores), _quota()))


def _siblings(processor: int) -> str:
    try:
        return (_CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(processor)


def _quota() -> int:
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1 << 30
