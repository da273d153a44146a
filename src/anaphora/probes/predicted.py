"""What `anaphora plan --json` predicted, against what a sweep found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError
from anaphora.probes.figures import StepResult
from anaphora.probes.knee import Knee
from anaphora.probes.limits import Limit


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What is read of a plan."""

    model: str
    engine: str
    context: int
    kv_tokens: int
    block_size: int
    fit: int
    fit_low: int
    fit_high: int
    """Requests of `context` tokens."""
    max_num_seqs: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`predicted`: requests of this sweep's length at once, with the plan's own interval."""

    predicted: float
    low: float
    high: float
    by: str
    found: float | None
    found_by: str
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_plan(path: Path) -> PlanFile:
    """Raises ConfigError for what is no plan, or one of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"--plan {path} is not JSON ({error}); write it with `anaphora plan ... --json`") from None
    if not isinstance(found, dict) or found.get("command") != "plan" or found.get("schema_version") != 1:
        raise ConfigError(f"--plan {path} is no plan of this version; write it with `anaphora plan ... --json`")
    try:
        fit = found["requests_that_fit"]
        return PlanFile(
            str(found["model"]),
            str(found["engine"]),
            int(found["workload"]["context"]),
            int(found["kv"]["tokens"]),
            int(found["kv"]["block_size"]),
            int(fit["likely"]),
            int(fit["low"]),
            int(fit["high"]),
            found["settings"].get("max_num_seqs"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--plan {path} lacks {error}; write it anew with `anaphora plan ... --json`") from None


def compare(plan: PlanFile, steps: Sequence[StepResult], knee: Knee | None, limit: Limit) -> Comparison | None:
    """None where no step has an answer."""
    answered = [step for step in steps if step.e2e is not None]
    if not answered or not plan.kv_tokens:
        return None
    top = max(answered, key=lambda step: step.level)
    tokens = (top.prompt_tokens or 0) + (top.output_tokens or 0)
    if not tokens:
        return None
    held = -(-tokens // plan.block_size) * plan.block_size  # a request takes whole blocks
    by_memory = plan.kv_tokens / held
    places = plan.max_num_seqs
    predicted = min(by_memory, places) if places else by_memory
    by = "max_num_seqs" if places and places < by_memory else "KV memory"
    low, high = (predicted * bound / plan.fit if plan.fit else predicted for bound in (plan.fit_low, plan.fit_high))
    if by == "max_num_seqs":
        low, high = min(by_memory * plan.fit_low / plan.fit, predicted) if plan.fit else predicted, predicted
    found, found_by = _found(answered, knee, limit)
    return Comparison(predicted, low, high, by, found, found_by, _said(predicted, low, high, by, held, found, found_by))


def _found(steps: Sequence[StepResult], knee: Knee | None, limit: Limit) -> tuple[float | None, str]:
    """The requests that ran at once when they were limited, else the knee of a closed loop."""
    running = max((step.engine.running for step in steps if step.engine.running), default=None)
    if limit.kind in ("KV full", "batch limit") and running:
        return running, "the engine's running requests"
    if knee is not None and steps[0].kind == "concurrency":
        return knee.load, "the knee"
    return None, "nothing: no limit on requests was reached"


def _said(predicted: float, low: float, high: float, by: str, held: float, found: float | None, found_by: str) -> str:
    head = f"The plan predicts {predicted:,.0f} requests of {held:,.0f} tokens at once (limited by {by})"
    if found is None:
        return f"{head}; the sweep did not get there."
    off = found / predicted - 1 if predicted else 0.0
    tail = f"found: {found:,.0f}, by {found_by} ({off:+.0%})."
    if low * 0.9 <= found <= high * 1.1:
        return f"{head}; {tail} They agree."
    if found < low:
        return f"{head}; {tail} Something else limits the server first, or it has less KV memory than planned."
    return f"{head}; {tail} The server does better: shared prefixes, shorter requests or more memory than planned."
