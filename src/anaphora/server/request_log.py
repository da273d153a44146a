"""From outcomes to the request log: lengths, times, causes and names of blocks; never a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anaphora.explain.outcome import Outcome, as_dict
from anaphora.replay.request_log import RequestLogWriter, RequestRecord
from anaphora.types import BlockHash


def log_to(writer: RequestLogWriter, outcome: Outcome, blocks: Sequence[BlockHash]) -> None:
    """Leave a complete outcome for the log, without text, also where the server keeps text for GET /explain."""
    miss = outcome.miss
    if miss is not None and (seen := miss.difference) is not None:
        seen = replace(seen, before=None, mine=None, theirs=None, after=None)
        outcome = replace(outcome, miss=replace(miss, difference=seen))
    facts = as_dict(outcome)
    writer.write(
        RequestRecord(
            time=outcome.time,
            input_length=outcome.prompt_tokens,
            output_length=outcome.output_tokens,
            blocks=blocks,
            hit=outcome.reused,
            outcome=outcome.finish_reason or "abort",
            ttft=outcome.seconds.get("ttft"),
            e2e=outcome.seconds.get("e2e"),
            more={name: facts[name] for name in ("request_id", "miss", "waited_for", "pinned_tokens", "seconds")},
        )
    )
