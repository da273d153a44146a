"""Every cause of a miss, brought about in a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Gemma2Config

from anaphora.engine.params import SamplingParams
from anaphora.engine.tiering.prefill import PrefillEstimate
from anaphora.explain.outcome import Cause, as_dict, from_dict
from anaphora.tiers.break_even import PrefillSpeed
from anaphora.tiers.store import Outcome
from explain.conftest import Asked
from support.engines import make_engine, run_all
from support.models import save_byte_tokenizer, save_tiny_model

Ask = Callable[..., Asked]
RULES = "You are a helpful assistant. Answer briefly, and say so when you do not know. "
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_never_seen(ask: Ask) -> None:
    miss = ask().miss("Something quite new")
    assert (miss.cause, miss.position, miss.tokens) == (Cause.NEVER_SEEN, 0, 19)
    assert miss.other_request is None


def test_the_next_turn_goes_on_where_nobody_was(ask: Ask) -> None:
    engine = ask()
    engine(RULES + "Hi!")
    miss = engine.miss(RULES + "Hi! And more")
    assert (miss.cause, miss.position, miss.tokens) == (Cause.NEVER_SEEN, len(RULES) + 3, 9)


def test_the_last_token_is_below_the_granularity(ask: Ask) -> None:
    engine = ask()
    engine(RULES)
    outcome = engine(RULES)
    assert outcome.miss is not None
    assert (outcome.miss.cause, outcome.miss.tokens) == (Cause.BELOW_GRANULARITY, 1)
    assert outcome.reused == {"pool": len(RULES) - 1}


PAIRS = {
    "timestamp": ("Now: 2026-11-29 10:15:03 UTC. ", "Now: 2026-11-29 10:15:09 UTC. ", "2026-11-29 10:15:09"),
    "uuid": (
        "Session 123e4567-e89b-12d3-a456-426614174000. ",
        "Session 9f3b2c1d-e89b-42d3-a456-426614174000. ",
        "9f3b2c1d-e89b-42d3-a456-426614174000",
    ),
    "counter": ("This is request 17 today. ", "This is request 18 today. ", "18"),
    "whitespace": ("Rules:  be kind. ", "Rules: be kind. ", " "),
    "billing_header": (
        "x-anthropic-billing-header: cc_version=2.1; cch=ab12f;\n",
        "x-anthropic-billing-header: cc_version=2.1; cch=99c01;\n",
        "x-anthropic-billing-header: cc_version=2.1; cch=99c01;",
    ),
    "random_id": ("[trace a8Xk29dkq1] ", "[trace b9Zk29dkq1] ", "b9Zk29dkq1"),
    "text": ("Be a pirate. ", "Be a lawyer. ", "lawyer."),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("lead", ["", "#" * 29])
def test_diverged(ask: Ask, kind: str, lead: str) -> None:
    """Wherever in a block the point lies; the text only when it may be kept."""
    first, second, differs = PAIRS[kind]
    engine = ask()
    head = lead + "<system>"
    engine(head + first + RULES)
    miss = engine.miss(head + second + RULES)
    at = next(i for i, (a, b) in enumerate(zip(head + first, head + second, strict=False)) if a != b)
    assert (miss.cause, miss.position, miss.other_request) == (Cause.DIVERGED, at, "r1")
    assert miss.difference is not None
    assert (miss.difference.kind, miss.difference.exact) == (kind, True)
    assert miss.difference.before is miss.difference.mine is miss.difference.theirs is miss.difference.after is None

    engine = ask()
    engine.engine.explainer.keep_text = True
    engine(head + first + RULES)
    kept = engine.miss(head + second + RULES).difference
    assert kept is not None
    assert kept.mine == differs
    assert kept.before is not None
    assert kept.after is not None
    assert kept.before + kept.mine + kept.after in head + second + RULES


def test_diverged_in_the_order_of_tools(ask: Ask) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "description": f"The {name} of a place.", "parameters": {
            "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
        for name in ("weather", "time", "map")
    ]  # fmt: skip
    listed = [json.dumps(tool) for tool in tools]
    engine = ask()
    engine("<tools>\n" + "\n".join(listed) + "\n</tools>" + RULES)
    miss = engine.miss("<tools>\n" + "\n".join((listed[0], listed[2], listed[1])) + "\n</tools>" + RULES)
    assert miss.cause is Cause.DIVERGED
    assert miss.difference is not None
    assert miss.difference.kind == "tools_reordered"
    other = listed[1].replace("time", "date")
    miss = engine.miss("<tools>\n" + "\n".join((listed[0], other)) + "\n</tools>" + RULES)
    assert miss.difference is not None
    assert miss.difference.kind == "tools_changed"


def test_evicted(ask: Ask) -> None:
    """By whom, and how much more room would have kept it: with so much it is kept, with a block less it is not."""
    prompts = [letter * 64 for letter in "abcd"]

    def missed(num_blocks: int) -> Asked:
        engine = ask(num_blocks=num_blocks, max_model_len=128, eviction_policy="lru")
        for prompt in prompts:
            engine(prompt)
        return engine

    engine = missed(12)
    miss = engine.miss(prompts[0])
    assert (miss.cause, miss.position, miss.tokens) == (Cause.EVICTED, 0, 64)
    assert (miss.known_tokens, miss.other_request) == (64, "r4")
    assert miss.seconds_ago is not None
    assert 0 <= miss.seconds_ago < 60
    assert miss.more_blocks is not None
    assert miss.more_bytes == miss.more_blocks * engine.engine.config.block_bytes
    kept = missed(12 + miss.more_blocks)(prompts[0])
    assert kept.reused == {"pool": 63}
    nearly = missed(12 + miss.more_blocks - 1)(prompts[0])
    assert nearly.reused_tokens < 63


def test_diverged_from_what_was_evicted_is_known_to_the_block(ask: Ask) -> None:
    engine = ask(num_blocks=12, max_model_len=192, eviction_policy="lru")
    head = "h" * 32
    engine(head + "x" * 64)
    engine(head)
    engine("y" * 150)
    miss = engine.miss(head + "z" * 32)
    assert (miss.cause, miss.position, miss.other_request) == (Cause.DIVERGED, 32, "r1")
    assert miss.difference is not None
    assert (miss.difference.kind, miss.difference.exact) == ("unknown", False)


def test_other_salt(ask: Ask) -> None:
    engine = ask()
    engine(RULES, salt="one")
    miss = engine.miss(RULES, salt="two")
    assert (miss.cause, miss.position, miss.other_request) == (Cause.OTHER_NAMESPACE, 0, "r1")
    assert miss.known_tokens == len(RULES) // 16 * 16
    assert engine.miss(RULES, salt="two").cause is Cause.BELOW_GRANULARITY


def test_concurrent_identical_prompts(ask: Ask) -> None:
    """The second waits for the first; what it has to compute itself lies in a block that is not whole yet."""
    engine = ask(max_num_batched_tokens=32, max_num_seqs=4)
    prompt = engine.ids(RULES + "tail")
    assert len(prompt) % 16 > 1
    engine.engine.add("first", prompt, LONG)
    engine.engine.add("second", prompt, LONG)
    run_all(engine.engine)
    first, second = engine.outcome("first"), engine.outcome("second")
    assert first.waited_for is None
    assert first.miss is not None
    assert first.miss.cause is Cause.NEVER_SEEN
    assert second.waited_for == "first"
    assert second.reused == {"pool": len(prompt) // 16 * 16}
    assert second.miss is not None
    assert (second.miss.cause, second.miss.other_request) == (Cause.IN_PROGRESS, "first")
    assert second.seconds["queue"] > first.seconds["queue"]


def test_a_load_that_fails(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on disk are damaged after the tier has said that it has them."""
    monkeypatch.setattr(PrefillEstimate, "speed", lambda self: PrefillSpeed(0.05))  # worth loading for
    engine = ask(disk_cache=f"{tmp_path}:8MiB")
    engine(RULES)
    tiers = engine.engine.tiers
    assert tiers is not None
    assert tiers.wait(20)
    engine.engine.reset_prefix_cache()
    (disk,) = [tier.store for tier in tiers._hierarchy.tiers]
    monkeypatch.setattr(disk, "load", lambda blocks, into: [Outcome.CORRUPT] * len(blocks))
    miss = engine.miss(RULES)
    assert (miss.cause, miss.position, miss.tokens) == (Cause.LOAD_FAILED, 0, len(RULES))
    assert miss.known_tokens == (len(RULES) - 1) // 16 * 16
    engine.engine.close()


def test_what_a_tier_brings_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillEstimate, "speed", lambda self: PrefillSpeed(0.05))
    engine = ask(ram_cache=1 << 20, num_blocks=12, max_model_len=192, eviction_policy="lru")
    engine("t" * 64)
    for other in "ab":
        engine(other * 150)
    assert engine.engine.tiers is not None
    assert engine.engine.tiers.wait(20)
    outcome = engine("t" * 64)
    assert outcome.reused == {"ram": 48}
    assert outcome.miss is not None
    assert (outcome.miss.cause, outcome.miss.tokens) == (Cause.BELOW_GRANULARITY, 16)
    engine.engine.close()


def test_a_window_needs_the_blocks_before(tmp_path: Path) -> None:
    """Where windowed layers' blocks went first, what full layers still have is of no use."""
    config = Gemma2Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=24, query_pre_attn_scalar=8,
        eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    folder = save_byte_tokenizer(save_tiny_model(tmp_path, config))
    engine = Asked(make_engine(folder, num_blocks=24, max_model_len=192, eviction_policy="lru"))
    engine("w" * 128)
    engine("w" * 128 + "and then a longer text that goes on for long")
    engine("v" * 128)
    outcome = engine("w" * 64 + "another way")
    assert outcome.miss is not None
    assert outcome.miss.cause in (Cause.EVICTED, Cause.BELOW_GRANULARITY), outcome
    assert outcome.miss.known_tokens > 0


def test_caching_off(ask: Ask) -> None:
    engine = ask(enable_prefix_caching=False)
    engine(RULES)
    miss = engine.miss(RULES)
    assert (miss.cause, miss.tokens) == (Cause.CACHING_OFF, len(RULES))


def test_after_a_reset_nothing_was_ever_seen(ask: Ask) -> None:
    engine = ask()
    engine(RULES, salt="one")
    engine.engine.reset_prefix_cache()
    assert engine.miss(RULES, salt="one").cause is Cause.NEVER_SEEN
    engine.engine.reset_prefix_cache()
    assert engine.miss(RULES, salt="two").cause is Cause.NEVER_SEEN


def test_what_was_never_computed_names_nobody(ask: Ask) -> None:
    engine = ask()
    engine.engine.add("gone", engine.ids(RULES), LONG)
    engine.engine.abort("gone")
    assert engine.engine.explainer.outcomes.get("gone") is None
    assert engine.miss(RULES).other_request is None


def test_an_outcome_is_whole_and_comes_back_from_json(ask: Ask) -> None:
    engine = ask()
    engine(RULES + "1")
    outcome = engine(RULES + "2 and 3", params=LONG)
    assert (outcome.output_tokens, outcome.finish_reason) == (40, "length")
    assert {"queue", "ttft", "e2e", "pool", "computed"} <= outcome.seconds.keys()
    assert outcome.prompt_tokens == outcome.reused_tokens + (outcome.miss.tokens if outcome.miss else 0)
    assert from_dict(json.loads(json.dumps(as_dict(outcome)))) == outcome
