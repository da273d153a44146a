"""What a study found, summed up: intervals over texts, one recommendation, the file that `plan` and `serve` read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anaphora.errors import ConfigError
from anaphora.probes.statistics import Interval, bootstrap, quantile

if TYPE_CHECKING:
    from anaphora.engine.quality.results import Measured, Result

SCHEMA_VERSION = 1
DEFAULT_MAX_KL = 0.01
_GIB = 2**30
_BINS = 8
_SEED = 0


@dataclass(frozen=True, slots=True)
class Form:
    """One stored form, against the reference. KL in nats a token."""

    name: str
    keys: str
    values: str
    bytes_per_token: int
    tokens_per_gib: int
    capacity: float
    """Tokens in the same memory, as a multiple of the reference's."""
    mean_kl: Interval
    p99_kl: float
    agreement: Interval
    """Share of tokens of which both think the same next one likeliest."""
    perplexity: float
    kl_by_kind: dict[str, float]
    kl_by_position: list[tuple[int, float]]
    """(first position behind a stretch of the context, mean KL within it)."""
    first_difference: list[int | None]
    """By prompt: the first greedy token, from 0, that differs; None: all were the same."""
    answered: list[bool]
    """By question."""
    ttft_seconds: float
    decode_tokens_per_second: float
    streams: int


@dataclass(frozen=True, slots=True)
class Recommendation:
    name: str
    why: str
    met: bool
    """Whether any form smaller than the reference is within the limit."""


def forms(result: Result) -> list[Form]:
    """The reference first."""
    return [_form(result, each) for each in result.forms]


def recommend(found: Sequence[Form], max_kl: float) -> Recommendation:
    """The smallest form whose mean KL is surely within `max_kl`, and that answers whatever the reference answers."""
    reference, *others = found
    fit = [form for form in others if not _objection(form, reference, max_kl)]
    best = min(fit, key=lambda form: (form.bytes_per_token, form.mean_kl.estimate), default=reference)
    if best.bytes_per_token >= reference.bytes_per_token:
        reasons = "; ".join(f"{form.name}: {_objection(form, reference, max_kl) or 'not smaller'}" for form in others)
        return Recommendation(reference.name, f"no smaller form is within the limit ({reasons})", met=False)
    why = (
        f"{best.capacity:.2f}x the tokens of {reference.name} in the same memory, at a mean KL of "
        f"{best.mean_kl.estimate:.2g} nats a token (at most {best.mean_kl.high:.2g}; the limit is {max_kl:g})"
    )
    smaller = [form for form in others if form.bytes_per_token < best.bytes_per_token]
    if smaller:
        why += "; " + "; ".join(f"{form.name} {_objection(form, reference, max_kl)}" for form in smaller)
    return Recommendation(best.name, why, met=True)


def as_dict(result: Result, found: Sequence[Form], advice: Recommendation, max_kl: float) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "quality",
        "model": result.model,
        "backend": result.backend,
        "dtype": result.dtype,
        "reference": found[0].name,
        "context": result.context,
        "prompts": result.prompts,
        "texts": [name for name, _ in result.texts],
        "tokens": len(result.text),
        "greedy_tokens": result.greedy_tokens,
        "question_depths": result.depths,
        "forms": [asdict(form) for form in found],
        "kl_by_layer_skipped": {
            name: {"none": result.skipped_baseline[name], "layers": layers} for name, layers in result.skipped.items()
        },
        "max_kl": max_kl,
        "recommendation": asdict(advice),
    }


@dataclass(frozen=True, slots=True)
class QualityFile:
    """What `anaphora quality --output` wrote, as far as other commands show it."""

    model: str
    measured: dict[str, str]
    """By form: 'mean KL 0.00012, 99.4 % same choice'."""


def read_quality(path: Path) -> QualityFile:
    """Raises ConfigError for what is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["command"] != "quality" or found["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}")
        measured = {
            str(form["name"]): f"mean KL {float(form['mean_kl']['estimate']):.2g}, "
            f"{float(form['agreement']['estimate']):.1%} same choice"
            for form in found["forms"]
        }
        return QualityFile(str(found["model"]), measured)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--quality {path}: {error}; give a file that can be read") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--quality {path} is not what `anaphora quality MODEL --output FILE` writes ({error!r}); write it again"
        ) from None


def _objection(form: Form, reference: Form, max_kl: float) -> str:
    """Why a form is not recommended; empty when it may be."""
    lost = sum(was and not now for was, now in zip(reference.answered, form.answered, strict=True))
    if not form.mean_kl.estimate <= max_kl:
        return f"has a mean KL of {form.mean_kl.estimate:.2g}"
    if form.mean_kl.high > max_kl:
        return f"may have a mean KL of up to {form.mean_kl.high:.2g}"
    return f"misses {lost} of the answers that {reference.name} gives" if lost else ""


def _form(result: Result, form: Measured) -> Form:
    assert form.speed is not None
    reference, scores = result.reference, form.scores
    return Form(
        name=form.name,
        keys=form.key,
        values=form.value,
        bytes_per_token=form.bytes_per_token,
        tokens_per_gib=_GIB // form.bytes_per_token,
        capacity=reference.bytes_per_token / form.bytes_per_token,
        mean_kl=_mean(result, scores.kl),
        p99_kl=quantile(scores.kl.tolist(), 0.99),
        agreement=_mean(result, scores.same),
        perplexity=math.exp(float(scores.surprise.mean())),
        kl_by_kind=_by_kind(result, form),
        kl_by_position=_by_position(result, form),
        first_difference=form.first_difference,
        answered=form.answered,
        ttft_seconds=form.speed.ttft_seconds,
        decode_tokens_per_second=form.speed.decode_tokens_per_second,
        streams=form.speed.streams,
    )


def _mean(result: Result, values: Any) -> Interval:
    """Over all tokens; the bootstrap draws whole texts, because tokens of one text err alike."""
    sums, counts = (each.tolist() for each in result.by_text(values))

    def ratio(drawn: Sequence[float]) -> float:
        chosen = [int(number) for number in drawn]
        return float(sum(sums[i] for i in chosen) / sum(counts[i] for i in chosen))

    return bootstrap([range(len(counts))], ratio, seed=_SEED)


def _by_kind(result: Result, form: Measured) -> dict[str, float]:
    sums, counts = (each.tolist() for each in result.by_text(form.scores.kl))
    totals: dict[str, tuple[float, int]] = {}
    for (_, kind), one, count in zip(result.texts, sums, counts, strict=True):
        total, number = totals.get(kind, (0.0, 0))
        totals[kind] = (total + one, number + count)
    return {kind: total / number for kind, (total, number) in totals.items()}


def _by_position(result: Result, form: Measured) -> list[tuple[int, float]]:
    longest = int(result.position.max()) + 1
    stops = sorted({-(-longest * n // _BINS) for n in range(1, _BINS + 1)})
    found = []
    for begin, stop in zip([0, *stops], stops, strict=False):
        within = (result.position >= begin) & (result.position < stop)
        if within.any():
            found.append((stop, float(form.scores.kl[within].mean())))
    return found
