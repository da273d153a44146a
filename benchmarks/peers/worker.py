"""The side that runs inside a peer's environment: load once, then answer one JSON line per command on stdin.

Commands: {"op": "load", "model": folder, "cache": folder} -> {"note": ...};
{"op": "run", "workload": {...}, "turn": n} -> {"value": ..., "note": ...}; either may answer {"error": ...} instead.
Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.workload import Workload, plain_ids, prompts

Times = list[list[float]]
"""Per stream, the seconds between the call and each of its tokens."""


class Unsupported(Exception):
    """This engine cannot run this workload; the message is shown in the table."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where the model is, where converted files may lie, and the threads to use."""

    model: Path
    cache: Path
    threads: int
    vocabulary: int
    fast_bfloat16: bool
    """Whether this CPU has bfloat16 instructions (as torch sees it)."""


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], new_tokens: int) -> Times:
        """Greedy, every stream to exactly `new_tokens` (end-of-sequence ignored), all asked for at once."""

    def note(self, workload: Workload) -> str:
        """How it was run: dtype, variant."""


def measure(workload: Workload, times: Times) -> float:
    """Tokens per second, or seconds.

    Decode counts what all streams make between the moment the last one has its first token and the first one's end.
    """
    if workload.kind == "ttft":
        return times[0][0]
    if workload.kind == "prefill":
        return workload.own / times[0][0]
    begin, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    if end <= begin:
        raise Unsupported("its streams never ran all together: the first ended before the last one's first token")
    return sum(begin < t <= end for stream in times for t in stream) / (end - begin)


def serve(load: Callable[[Start], Engine]) -> None:
    """Answer commands until stdin ends. Whatever the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    state: dict[str, Any] = {}

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        if command["op"] == "load":
            fields = command["start"]
            state["start"] = Start(**{**fields, "model": Path(fields["model"]), "cache": Path(fields["cache"])})
            state["engine"] = load(state["start"])
            return {}
        workload, engine = Workload(**command["workload"]), state["engine"]
        asked = prompts(workload, command["turn"], plain_ids(state["start"].vocabulary))
        if workload.shared and not command["turn"] and len(asked) > 1:
            engine.generate(asked[:1], 1)  # else engines that cache a prompt when it has ended compute it once a stream
        times = engine.generate(asked, workload.new)
        if any(len(stream) != workload.new for stream in times):
            raise RuntimeError(f"asked for {workload.new} tokens a stream, got {[len(s) for s in times]}")
        # The first turn only fills caches: there the streams start one after another.
        value = measure(workload, times) if command["turn"] else None
        return {"value": value, "note": engine.note(workload)}

    for line in sys.stdin:
        try:
            answer = obey(json.loads(line))
        except Unsupported as reason:
            answer = {"error": str(reason)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
