"""How a body becomes work for the engine."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.engine.loop import EngineLoop
from anaphora.server.calls import choices
from anaphora.server.requests import CompletionRequest


def test_choices_share_what_may_be_large(tiny_loop: Callable[..., EngineLoop]) -> None:
    body = CompletionRequest(prompt="a", n=3, seed=5, stop_token_ids=[1, 2, 1] * 100, logit_bias={"3": 1.0})
    loop = tiny_loop()
    first, second, third = choices(body, loop, max_tokens=4, logprobs=None)
    loop.shutdown(0)
    assert sorted(first.stop_token_ids) == [1, 2]
    assert first.logit_bias == {3: 1.0}
    for other in (second, third):
        assert other.stop_token_ids is first.stop_token_ids
        assert other.logit_bias is first.logit_bias
    assert (first.seed, second.seed, third.seed) == (5, 6, 7)
