"""The OpenAPI document is true: whatever is sent, right or wrong, the answer is a declared one and never a 5xx."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from anaphora.engine.loop import EngineLoop
from anaphora.server.app import create_app
from anaphora.server.auth import hash_keys
from anaphora.server.settings import ServerSettings, ServerState
from support.servers import running

KEY = {"Authorization": "Bearer the-key"}
SETTINGS = ServerSettings(("tiny",), api_key_digests=hash_keys(["the-key"]))
SCHEMA = schemathesis.openapi.from_dict(create_app(ServerState(SETTINGS)).openapi())


@pytest.fixture(scope="module")
def url(tiny_loop: Callable[..., EngineLoop]) -> Iterator[str]:
    """Of a server whose context is so short that every generation soon ends."""
    loop = tiny_loop(max_model_len=48)
    with running(ServerState(SETTINGS, loop)) as served:
        yield served.url
    assert loop.failure is None
    assert loop.stats.blocks_active == 0


@SCHEMA.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_a_declared_one(case: schemathesis.Case, url: str) -> None:
    # A schema cannot say that a prompt must fit the context, or which models there are.
    case.call_and_validate(base_url=url, headers=KEY, excluded_checks=[positive_data_acceptance])
