"""Run a verification against a URL, as the command does, without its terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from anaphora.probes.client import ProbeClient
from anaphora.probes.endpoint import Endpoint
from anaphora.probes.verify.own_prompts import OwnPrompts, load_requests, measure_own
from anaphora.probes.verify.run import Verification, measure


def nothing(_stage: str, _done: int, _total: int | None) -> None:
    """No progress display."""


def verified(url: str, prefix_tokens: int, *, seed: int = 7, max_rounds: int = 24) -> Verification:
    state = Verification(seed, prefix_tokens, max_rounds)

    async def main() -> None:
        async with ProbeClient(Endpoint.parse(url, environ={})) as client:
            await measure(state, client, nothing)

    asyncio.run(main())
    return state


def replayed(url: str, path: Path) -> OwnPrompts:
    state = OwnPrompts(load_requests(path))

    async def main() -> None:
        async with ProbeClient(Endpoint.parse(url, environ={})) as client:
            await measure_own(state, client, nothing)

    asyncio.run(main())
    return state
