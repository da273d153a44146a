"""Memory of a server that runs on this machine: who listens on the port, and what its process tree holds.

Linux's /proc for RAM and `nvidia-smi` for GPU memory; None where either is out of reach.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"
_NOISE = 16 << 20
"""Bytes by which a process grows and shrinks without any reason of ours."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    rss: int
    gpu: int | None = None

    def as_dict(self) -> dict[str, int | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MemoryStory:
    """Before anything was sent, after the first cold request, after the first warm one."""

    pids: tuple[int, ...]
    before: Memory
    after_cold: Memory
    after_warm: Memory

    @property
    def grew(self) -> bool:
        """Whether the second request with the same prefix took more memory."""
        gpu = (self.after_warm.gpu or 0) - (self.after_cold.gpu or 0)
        return max(self.after_warm.rss - self.after_cold.rss, gpu) > _NOISE

    @property
    def sentence(self) -> str:
        """For people."""
        rss = self.after_warm.rss - self.after_cold.rss
        gpu = (self.after_warm.gpu or 0) - (self.after_cold.gpu or 0)
        grown = " and ".join(
            f"{_mib(value)} {name}" for value, name in ((rss, "RSS"), (gpu, "GPU memory")) if value > _NOISE
        )
        first = _mib(max(0, self.after_cold.rss - self.before.rss))
        if grown:
            return f"The second request with the same prefix took {grown} more (the first took {first} RSS)."
        return f"The second request with the same prefix took no more memory (the first took {first} RSS)."

    def as_dict(self) -> dict[str, object]:
        return {
            "pids": list(self.pids),
            "before": self.before.as_dict(),
            "after_cold": self.after_cold.as_dict(),
            "after_warm": self.after_warm.as_dict(),
            "grew": self.grew,
        }


def server_pids(port: int, proc: Path = PROC) -> tuple[int, ...]:
    """Processes that listen on a TCP port of this machine, and all below them; empty where /proc does not tell."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listeners(proc / "net" / table, port)}
    if not inodes:
        return ()
    wanted = {f"socket:[{inode}]" for inode in inodes}
    parents: dict[int, int] = {}
    owners = set()
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        pid = int(folder.name)
        try:
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if any(os.readlink(link) in wanted for link in (folder / "fd").iterdir()):
                owners.add(pid)
        except (OSError, ValueError, IndexError):  # another user's, or gone already
            continue
    tree = set(owners)
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return tuple(sorted(tree))


def memory_of(pids: tuple[int, ...], proc: Path = PROC) -> Memory | None:
    """What those processes hold now; None when none of them is left."""
    sizes = [size for pid in pids if (size := _rss(proc / str(pid) / "status")) is not None]
    return Memory(sum(sizes), _gpu(pids)) if sizes else None


def _listeners(table: Path, port: int) -> list[str]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _rss(status: Path) -> int | None:
    try:
        match = re.search(r"^VmRSS:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def _gpu(pids: tuple[int, ...]) -> int | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    used = [int(mib) << 20 for pid, mib in re.findall(r"^(\d+), (\d+)$", output, re.MULTILINE) if int(pid) in pids]
    return sum(used) if used else None


def _mib(count: int) -> str:
    return f"{count:,} bytes ({count / 2**20:,.1f} MiB)"
