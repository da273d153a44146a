"""How good the plans are, and how fast: predictions against public start-up reports, and seconds of `anaphora plan`.

    python benchmarks/plan.py [--trials 20] [--out plan.json]

The reports (../shared/data/sizing_logs/reports.jsonl beside the checkout) are read only for their settings; the
figures they print are compared with, never used. The constants of planning/overhead*.py were read off reports of this
kind, each explained where it stands; none is fitted to a row. Nothing else should run during the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.reports import FILE, Prediction, left_out, needs, predict, reports

COMMAND = ("plan", "Qwen/Qwen2.5-7B-Instruct", "--hardware", "rtx-4090", "--context", "32768", "--concurrency", "16")
GOALS = {"median": 0.04, "p90": 0.12, "inside": 0.9, "seconds": 0.3}


def summary(found: Sequence[Prediction]) -> dict[str, float]:
    """Median and 90th percentile of the absolute error, and the part of rows inside the stated interval."""
    errors = sorted(abs(item.error) for item in found)
    rank = 0.9 * (len(errors) - 1)
    low = errors[int(rank)]
    high = errors[min(int(rank) + 1, len(errors) - 1)]
    return {
        "rows": len(errors),
        "median": statistics.median(errors),
        "p90": low + (high - low) * (rank - int(rank)),
        "inside": sum(item.inside for item in found) / len(found),
    }


def by(found: Sequence[Prediction], key: Callable[[Prediction], str]) -> dict[str, dict[str, float]]:
    """The summary of each group."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for item in found:
        groups[key(item)].append(item)
    return {name: summary(rows) for name, rows in sorted(groups.items())}


def _minor(item: Prediction) -> str:
    return f"{item.engine} {'.'.join(item.version.split('.')[:2])}"


def predictions() -> dict[str, Any]:
    """Every row, the summaries, what was left out and why, and the figures that must be exact."""
    found = list(predict())
    exact = list(needs())
    return {
        "all": summary(found),
        "by_version": by(found, _minor),
        "by_family": by(found, lambda item: item.family),
        "left_out": dict(Counter(reason for report in reports() if (reason := left_out(report)) is not None)),
        "exact_figures": {"rows": len(exact), "exact": sum(need.exact for need in exact)},
        "rows": [
            {
                "row": item.row,
                "engine": f"{item.engine} {item.version}",
                "model": item.model,
                "device": item.device,
                "ranks": item.ranks,
                "predicted": item.tokens,
                "low": item.low,
                "high": item.high,
                "reported": item.truth,
                "error": round(item.error, 4),
                "inside": item.inside,
            }
            for item in found
        ],
        "needs": [
            {"row": n.row, "model": n.model, "what": n.what, "computed_gib": n.computed, "printed_gib": n.printed}
            for n in exact
        ],
    }


def seconds(trials: int) -> dict[str, Any]:
    """Wall time of the whole command in a fresh process, and what it must not import."""
    taken = []
    with tempfile.TemporaryDirectory() as compiled:  # bytecode is kept, as it is where the package is installed
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = compiled
        for _ in range(trials + 1):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "anaphora", *COMMAND], capture_output=True, check=False, env=env)
            taken.append(time.perf_counter() - began)
    code = (
        f"import sys; sys.argv = {['anaphora', *COMMAND]!r}\n"
        "from anaphora.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {
        "median": statistics.median(taken[1:]),
        "best": min(taken[1:]),
        "trials": trials,
        "heavy_imports": result.stdout.rsplit("HEAVY", 1)[1].strip(),
    }


def _line(name: str, found: dict[str, float]) -> str:
    return (
        f"  {name:<28} {found['rows']:>4.0f} rows   median {found['median']:6.2%}   p90 {found['p90']:6.2%}   "
        f"inside {found['inside']:4.0%}"
    )


def main() -> None:
    """Print the report; write it as JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "schema_version": 1,
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
        "goals": GOALS,
        "seconds": seconds(options.trials),
    }
    timed = result["seconds"]
    print(f"anaphora plan: median {timed['median']:.3f} s of {timed['trials']}, best {timed['best']:.3f} s")
    print(f"  heavy packages imported: {timed['heavy_imports']}")
    if FILE.exists():
        result["predictions"] = found = predictions()
        print("\nKV tokens predicted from the names of hardware and model, against public start-up reports")
        for row in found["rows"]:
            mark = "" if row["inside"] else "   OUTSIDE"
            print(
                f"  {row['row']:>3} {row['engine']:<18} {row['model'][-44:]:<44} {row['device']:<11} x{row['ranks']}"
                f"  {row['predicted']:>9,} of {row['reported']:>9,}  {row['error']:+7.2%}{mark}"
            )
        print(_line("all", found["all"]))
        for title in ("by_version", "by_family"):
            print(f"{title.replace('_', ' ')}:")
            for name, group in found[title].items():
                print(_line(name, group))
        print("left out: " + ", ".join(f"{count} {reason}" for reason, count in found["left_out"].items()))
        exact = found["exact_figures"]
        print(f"figures that must be exact: {exact['exact']} of {exact['rows']}")
        for need in found["needs"]:
            print(
                f"  {need['row']:>3} {need['model']:<36} {need['what']:<16} {need['computed_gib']:.4f} GiB, printed "
                f"{need['printed_gib']}"
            )
    else:
        print(f"no reports at {FILE}: only the timing was done")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
