"""llama.cpp's own q8_0 and q4_0 KV caches on the texts of benchmarks/formats.py: what they really lose.

    python benchmarks/compare.py --setup --peers llama.cpp     # once
    python benchmarks/formats_llama.py FOLDER [--out formats_llama.json]

Same tokens and method as formats.py: four texts of 1,024 tokens, teacher-forced, KL against llama.cpp's own bfloat16
cache, float32 weights, its Hadamard rotation on, as it is by default. `f16` against bf16 shows the floor of noise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.formats import LENGTH, TEXTS
from benchmarks.peers.process import Worker, WorkerFailed
from benchmarks.peers.registry import PEERS, Places

from anaphora.engine.sources.cache import cache_root
from anaphora.engine.tokenizer import Tokenizer

PAIRS = [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")]
TIMEOUT = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=cache_root() / "peers", help="as of compare.py --setup")
    parser.add_argument("--weights", default="f32", choices=("f32", "f16", "bf16"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    places = Places(options.cache.expanduser().absolute(), folder, len(os.sched_getaffinity(0)), False)
    gguf = places.gguf(folder, options.weights)
    if not gguf.exists():
        raise SystemExit(f"{gguf} is not there; run python benchmarks/compare.py --setup --peers llama.cpp first")
    tokenizer = Tokenizer.from_folder(folder)
    texts = [tokenizer.encode(path.read_text())[:LENGTH] for path in sorted(TEXTS.glob("*.txt"))]
    peer = PEERS["llama.cpp"]
    worker = Worker(peer.python(places), "benchmarks.peers.llama_kv", peer.environ(places), places.log("llama-kv"))
    command = {"gguf": str(gguf), "texts": texts, "pairs": PAIRS, "threads": places.threads}
    try:
        rows = worker.ask(command, TIMEOUT)["rows"]
    except WorkerFailed as error:
        raise SystemExit(str(error)) from None
    finally:
        worker.close()
    print("| llama.cpp keys | values | mean KL | p99 | top-1 |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['keys']} | {row['values']} | {row['mean']:.5f} | {row['p99']:.4f} | {row['top1']:.1%} |")
    if options.out:
        options.out.write_text(json.dumps({"model": str(folder), "weights": options.weights, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
