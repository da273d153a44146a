"""Runs the workloads turn by turn, every engine in each turn, and keeps the samples."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.process import Worker, WorkerFailed
from benchmarks.peers.registry import OURS, Peer, Places
from benchmarks.peers.server import Server, ServerFailed
from benchmarks.peers.setup import missing
from benchmarks.peers.worker import Start
from benchmarks.peers.workload import Workload, prompts

LOAD_TIMEOUT = 1200.0
"""Seconds; vLLM compiles the model at its first start."""
ANSWER_TIMEOUT = 600.0
SETTLE = 0.3
"""Seconds for the last engine's threads to fall asleep before the next one is timed."""


@dataclass
class Cell:
    """One engine's samples of one workload, or the reason why there are none."""

    samples: list[float] = field(default_factory=list)
    note: str = ""
    reason: str = ""
    spent: float = 0.0
    """Seconds, the first turn apart."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def to_json(self) -> dict[str, Any]:
        if not self.samples:
            return {"reason": self.reason or "not run"}
        quarters = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else self.samples * 3
        return {
            "median": self.median,
            "q1": quarters[0],
            "q3": quarters[2],
            "n": len(self.samples),
            "samples": self.samples,
            "note": self.note,
        }


@dataclass
class Runs:
    """`cells[workload][peer]`. `between` is called once a turn, while every engine is idle."""

    places: Places
    words: Sequence[int]
    """Ids of whole words: prompts over HTTP are made of them, so that the answer's first token shows as text."""
    rounds: int
    cell_seconds: float
    between: Callable[[], None]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    """Peak bytes of each server."""
    began: float = field(default_factory=time.perf_counter)

    def in_process(self, workloads: list[Workload], peers: list[Peer], model: Path, vocabulary: int) -> None:
        """Load every engine, then run each workload in turns. Whatever fails becomes the cell's reason."""
        workers: dict[str, Worker] = {}
        try:
            for peer in peers:
                reason = missing(peer, self.places, model)
                try:
                    if reason:
                        raise WorkerFailed(reason)
                    workers[peer.name] = self._load(peer, model, vocabulary)
                    self._say(f"{peer.name}: loaded")
                except WorkerFailed as error:
                    self._refuse(workloads, peer.name, str(error))
            for workload in workloads:

                def run(name: str, turn: int, workload: Workload = workload) -> float | None:
                    command = {"op": "run", "workload": workload.to_json(), "turn": turn}
                    answer = workers[name].ask(command, ANSWER_TIMEOUT)
                    self._cell(workload, name).note = answer["note"]
                    return None if answer["value"] is None else float(answer["value"])

                names = [peer.name for peer in self._taking_part(workload, peers) if peer.name in workers]
                self._turns(workload, names, run, warm=True)
        finally:
            for worker in workers.values():
                worker.close()

    def in_pairs(self, workload: Workload, peers: list[Peer], model: Path, vocabulary: int) -> None:
        """As `in_process`, but ours with one peer at a time: together the engines' weights do not fit in memory."""
        ours, *others = self._taking_part(workload, peers)
        for pair in [[ours, peer] for peer in others] or [[ours]]:
            self.in_process([workload], pair, model, vocabulary)

    def starts(self, workload: Workload, peers: list[Peer]) -> None:
        """A new server process for every sample."""
        prompt = prompts(Workload("", "", "start", own=8), 0, self.words)[0]

        def run(name: str, turn: int) -> float | None:
            server = self._server(serving[name])
            try:
                server.wait_ready()
                server.first_token(prompt)
                return time.perf_counter() - server.began
            finally:
                server.stop()

        serving = self._serving([workload], peers)
        self._turns(workload, list(serving), run, warm=False)

    def http(self, workloads: list[Workload], peers: list[Peer]) -> None:
        """All servers up, then TTFT in turns, then (ours) a burst of streams for the peak of memory."""
        serving, servers = self._serving(workloads, peers), {}
        try:
            for name, peer in serving.items():
                servers[name] = self._server(peer)
            for name in list(servers):
                try:
                    servers[name].wait_ready()
                except ServerFailed as error:
                    servers.pop(name).stop()
                    self._refuse(workloads, name, str(error))
            for workload in workloads:

                def run(name: str, turn: int, workload: Workload = workload) -> float | None:
                    taken = servers[name].first_token(prompts(workload, turn, self.words)[0])
                    return taken if turn else None

                self._turns(workload, list(servers), run, warm=True)
            for name, server in servers.items():
                if name == OURS:
                    server.burst(prompts(Workload("", "", "decode", 32, own=128), 0, self.words), 32)
                self.memory[name] = server.peak_rss()
        finally:
            for server in servers.values():
                server.stop()

    def _turns(
        self, workload: Workload, names: list[str], run: Callable[[str, int], float | None], *, warm: bool
    ) -> None:
        """Turn 0 (where `warm`) fills caches and is not counted. Each turn begins with another engine."""
        left = list(names)
        for turn in range(0 if warm else 1, self.rounds + 1):
            if turn == 1:
                self._say(f"{workload.name}: timing {', '.join(left)}")
            for name in _rotated(left, turn):
                cell = self._cell(workload, name)
                if name != OURS and cell.samples and cell.spent >= self.cell_seconds:
                    continue
                time.sleep(SETTLE)
                began = time.perf_counter()
                try:
                    value = run(name, turn)
                except (WorkerFailed, ServerFailed) as error:
                    cell.reason = str(error)
                    cell.samples.clear()
                    left.remove(name)
                    continue
                if value is not None:
                    cell.samples.append(value)
                    cell.spent += time.perf_counter() - began
            if turn:
                self.between()
        for name in names:
            cell = self._cell(workload, name)
            said = f"{cell.median:.3g} {workload.unit}, n={len(cell.samples)}" if cell.samples else cell.reason
            self._say(f"{workload.name}: {name}: {said}")

    def _load(self, peer: Peer, model: Path, vocabulary: int) -> Worker:
        log = self.places.log(peer.name)
        worker = Worker(peer.python(self.places), f"benchmarks.peers.{peer.module}", peer.environ(self.places), log)
        places = self.places
        start = Start(model, places.cache, places.threads, vocabulary, places.fast_bfloat16)
        fields = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(start).items()}
        try:
            worker.ask({"op": "load", "start": fields}, LOAD_TIMEOUT)
        except WorkerFailed:
            worker.close()
            raise
        return worker

    def _serving(self, workloads: Iterable[Workload], peers: list[Peer]) -> dict[str, Peer]:
        """Those with a server; the others get their reason."""
        serving = {}
        for peer in peers:
            reason = missing(peer, self.places, self.places.model) or ("" if peer.serve else "has no server here")
            if reason:
                self._refuse(workloads, peer.name, reason)
            else:
                serving[peer.name] = peer
        return serving

    def _server(self, peer: Peer) -> Server:
        return Server(
            lambda port: peer.command(self.places, port),
            peer.environ(self.places),
            self.places.log(f"serve-{peer.name}"),
        )

    def _taking_part(self, workload: Workload, peers: list[Peer]) -> list[Peer]:
        """Without those that skip it; they get their reason."""
        for peer in peers:
            if workload.name in peer.skips:
                self._refuse([workload], peer.name, peer.skips[workload.name])
        return [peer for peer in peers if workload.name not in peer.skips]

    def _refuse(self, workloads: Iterable[Workload], name: str, reason: str) -> None:
        self._say(f"{name}: {reason}")
        for workload in workloads:
            self._cell(workload, name).reason = reason

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", file=sys.stderr)

    def _cell(self, workload: Workload, name: str) -> Cell:
        return self.cells.setdefault(workload.name, {}).setdefault(name, Cell())


def _rotated(names: list[str], turn: int) -> list[str]:
    at = turn % len(names) if names else 0
    return names[at:] + names[:at]
