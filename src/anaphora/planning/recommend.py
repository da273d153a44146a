"""The four settings people ask for, with why; and the 1.2x rule of thumb put to the test."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.planning.overhead import GIB
from anaphora.planning.plan import Answer, Question, answer, model_limit

_RULE = 1.2
_STEP = 256
_RESERVE = GIB // 4
"""Left free for what no estimate holds: the display, fragmentation."""
_HIGHEST_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Setting:
    """One value to set, and the reason."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """max_model_len = 1.2 x the longest request: what it costs here."""

    max_model_len: int
    requests: int
    """Full-length requests that fit then."""
    verdict: str


def rule_of_thumb(question: Question, now: Answer) -> RuleOfThumb:
    """Judge the rule on this model and engine. Raises ConfigError."""
    context = question.workload.context
    if not now.weights_fit:
        return RuleOfThumb(context, 0, "cannot be judged: nothing is left for KV")
    limit = model_limit(question.geometry)
    wanted = -(-int(context * _RULE) // _STEP) * _STEP
    longer = min(wanted, limit) if limit else wanted
    if limit and longer <= context:
        return RuleOfThumb(context, now.requests, f"the model ends at {limit:,} tokens: there is no room above it")
    then = answer(question.changed(context=longer)).requests
    if not question.engine.shares_prefixes:
        verdict = f"costs memory here: every slot is allotted at start, {now.requests:,} -> {then:,} slots"
    elif then >= question.workload.concurrency:
        verdict = f"costs nothing here: even {then:,} requests of {longer:,} tokens fit"
    else:
        verdict = (
            f"is free until requests really grow: blocks are taken as they are filled, but only {then:,} requests of "
            f"{longer:,} tokens fit at once, and beyond that requests are preempted"
        )
    return RuleOfThumb(longer, then, verdict)


def recommend(question: Question, now: Answer) -> list[Setting]:
    """max_model_len, max_num_seqs, the share and the block size; nothing where the weights do not fit."""
    if not now.weights_fit:
        return []
    context, wanted = question.workload.context, question.workload.concurrency
    rule = rule_of_thumb(question, now)
    room = rule.requests >= wanted
    length = rule.max_model_len if room else context
    why = "1.2 x the asked context, and it still fits" if room and length > context else "the asked context"
    found = [Setting("max_model_len", str(length), why)]
    if now.fits:
        found.append(Setting("max_num_seqs", str(wanted), "the asked concurrency; all of it fits at full length"))
    elif now.requests:
        text = f"as many as fit at full length; {wanted} are asked, and shorter requests leave room for more"
        found.append(Setting("max_num_seqs", str(now.requests), text))
    share = question.engine.share(question.situation)
    if share is not None:
        found.append(_share(question, now, share))
    if question.engine.name in ("vllm", "sglang", "anaphora", "transformers"):
        found.append(_block(question, now))
    return found


def _share(question: Question, now: Answer, share: float) -> Setting:
    """The engine's share: lower where what lies beside it would not fit."""
    total = now.budget.device_bytes
    safe = int((total - now.budget.beside - _RESERVE) / total * 100) / 100 if total else share
    name = question.engine.share_name
    if question.engine.name == "sglang" or safe >= share:
        return Setting(name, f"{share:g}", f"{now.budget.allowed_rule}; the rest stays free for what is not counted")
    beside = f"{now.budget.beside / GIB:.2f} GiB"
    return Setting(name, f"{min(safe, _HIGHEST_SHARE):g}", f"graphs take about {beside} beside the share")


def _block(question: Question, now: Answer) -> Setting:
    size, step = now.capacity.block_size, now.capacity.reuse_step
    if step > 64:
        why = f"set by the engine for this model; a shared prefix under {step:,} tokens is never reused"
    elif step == 0:
        why = "prefixes are not reused for this model"
    else:
        why = f"prefixes are reused in steps of {step} token{'s' if step > 1 else ''}"
    return Setting("block_size" if question.engine.name != "sglang" else "page_size", str(size), why)
