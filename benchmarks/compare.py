"""Ours and other engines in one run, taking turns, against what the machine allows.

    python benchmarks/compare.py --setup                          # once: environments, llama.cpp's build, weights
    python benchmarks/compare.py --json compare.json --markdown compare.md
    python benchmarks/compare.py --only decode-1,decode-8 --peers vllm,llama.cpp --rounds 9

Every engine is a process of its own in an environment of its own; all are loaded, and in each turn every one of them
runs the workload once while the others sleep. The limits (read bandwidth, matrix products) are measured between the
turns. Nothing else should run meanwhile. The table can be taken in parts with --only; a part is a run of its own.
On x86 Linux the public registry's torch is the CUDA build (several GB); for the CPU build set, during --setup,
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.peers.limits import Geometry, Meter
from benchmarks.peers.random_model import GEOMETRY
from benchmarks.peers.registry import OURS, PEERS, Peer, Places
from benchmarks.peers.runs import Runs
from benchmarks.peers.setup import set_up
from benchmarks.peers.table import limit_of, limits_json, markdown, row
from benchmarks.peers.workload import WORKLOADS, Workload
from benchmarks.serve import machine
from tokenizers import Tokenizer

from anaphora.engine.sources.cache import cache_root
from anaphora.engine.sources.resolve import resolve_model
from anaphora.errors import AnaphoraError

SCHEMA_VERSION = 1
SPARE_MEMORY = 400_000_000
"""What the server may take beyond weights and KV pool."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make what the peers need, then end")
    parser.add_argument("--only", type=_names(WORKLOADS), default=list(WORKLOADS), help="workloads, by comma")
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help="engines, by comma; ours always")
    parser.add_argument("--rounds", type=_positive, default=5, help="turns that count (5)")
    parser.add_argument(
        "--cell-seconds",
        type=_seconds,
        default=12.0,
        help="a peer gets no further turns of a workload that took it this long (12); ours gets all",
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache", type=Path, default=cache_root() / "peers", help="for environments and builds")
    parser.add_argument("--json", type=Path, dest="json_file", help="write the report here")
    parser.add_argument("--markdown", type=Path, dest="markdown_file", help="write the table here")
    args = parser.parse_args(argv)
    for path in (args.json_file, args.markdown_file):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: its folder does not exist; make it first")
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines' processes end too
    args = arguments()
    try:
        model = resolve_model(args.model).path
    except AnaphoraError as error:
        raise SystemExit(str(error)) from None
    workloads = [WORKLOADS[name] for name in args.only]
    peers = [PEERS[name] for name in dict.fromkeys([OURS, *args.peers])]
    places = Places(
        cache=args.cache.expanduser().absolute(),
        model=model,
        threads=len(os.sched_getaffinity(0)),
        fast_bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    )
    if args.setup:
        failed = set_up(peers, places, large=any(w.large for w in workloads))
        for name, reason in failed.items():
            print(f"{name}: {reason}", file=sys.stderr)
        raise SystemExit(1 if failed else 0)
    report = measure(workloads, peers, places, args)
    table = markdown(report)
    if args.json_file:
        args.json_file.write_text(json.dumps(report, indent=2) + "\n")
    if args.markdown_file:
        args.markdown_file.write_text(table)
    print(table)
    if report["ended_early"]:
        raise SystemExit(130)


def measure(workloads: list[Workload], peers: list[Peer], places: Places, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object. Takes minutes."""
    began, load_before = time.perf_counter(), os.getloadavg()
    config = json.loads((places.model / "config.json").read_text())
    meter = Meter(Geometry.of(config), places.threads)
    ended_early = False
    runs = Runs(places, word_ids(places.model), args.rounds, args.cell_seconds, meter.measure)
    try:
        meter.measure()
        small = [w for w in workloads if not w.large]
        if inside := [w for w in small if w.in_process]:
            runs.in_process(inside, peers, places.model, config["vocab_size"])
        if over_http := [w for w in small if w.kind == "http-ttft"]:
            runs.http(over_http, peers)
        for workload in (w for w in small if w.kind == "start"):
            runs.starts(workload, peers)
        for workload in (w for w in workloads if w.large):
            runs.in_pairs(workload, peers, places.large_model, GEOMETRY["vocab_size"])
    except (KeyboardInterrupt, SystemExit):
        if not runs.cells:
            raise
        ended_early = True
        print("ended early; the report holds what was measured", file=sys.stderr)
    finally:
        meter.close()
    limits = limits_json(meter.bandwidths, meter.method, meter.gemms)
    geometry = {False: meter.geometry, True: Geometry.of(GEOMETRY)}
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "compare",
        "machine": machine(),
        "threads": places.threads,
        "model": args.model,
        "rounds": args.rounds,
        "ended_early": ended_early,
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "seconds": time.perf_counter() - began,
        "limits": limits,
        "engines": [peer.name for peer in peers],
        "workloads": [row(w, runs.cells.get(w.name, {}), limit_of(w, limits, geometry[w.large])) for w in workloads],
        "memory": {name: _memory(name, peak, places) for name, peak in runs.memory.items()},
    }


def word_ids(model: Path) -> list[int]:
    """Ids of the tokens that are a whole lower-case word after a space."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    return sorted(number for text, number in vocabulary.items() if re.fullmatch("[Ġ▁][a-z]{3,}", text))


def _memory(name: str, peak: int, places: Places) -> dict[str, int]:
    """A server's peak, and for ours what it may be at most."""
    if name != OURS:
        return {"peak_bytes": peak}
    command = [*PEERS[OURS].command(places, 0), "--print-config"]
    config = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    pool = config["num_blocks"] * config["block_bytes"]
    return {
        "peak_bytes": peak,
        "weight_bytes": config["weight_bytes"],
        "kv_pool_bytes": pool,
        "bound_bytes": config["weight_bytes"] + pool + SPARE_MEMORY,
    }


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `known`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 up")
    return value


if __name__ == "__main__":
    main()
