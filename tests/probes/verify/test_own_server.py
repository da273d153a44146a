"""`verify` on the project's own server. It reuses to the token, so the step found is 1 whatever its block size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anaphora.engine.loop import EngineLoop
from anaphora.probes.verify import report
from anaphora.probes.verify.run import Verification
from anaphora.server.settings import ServerSettings, ServerState
from support.engines import make_engine
from support.models import tiny_llama
from support.servers import running
from support.verify_runs import verified

CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=4096)


def verify_own(folder: Path, prefix_tokens: int, **engine: Any) -> Verification:
    loop = EngineLoop(make_engine(folder, max_model_len=4096, chat_template=CHAT_TEMPLATE, **engine))
    loop.start()
    with running(ServerState(ServerSettings(("tiny",)), loop)) as served:
        return verified(served.url, prefix_tokens, max_rounds=54)


@pytest.mark.parametrize("block_size", [16, 64])
def test_caching_works_to_the_token(tiny: Path, block_size: int) -> None:
    state = verify_own(tiny, 1500, block_size=block_size)
    assert state.engine.name == "anaphora"
    assert state.engine.sure == "certain"
    assert state.verdict().answer == "works", state.verdict()
    assert not state.findings()
    check = state.cross_check()
    assert check.trusted == "cached_tokens"
    assert check.cached_tokens.warm is not None
    assert check.cached_tokens.warm > 1400  # a token is a byte here, and words differ in length
    assert check.cached_tokens.warm == check.counters.warm
    assert state.granularity is not None
    assert (state.granularity.step, state.granularity.step_exact) == (1, True)
    assert "exact to the token" in state.granularity.sentence
    assert state.memory is not None
    assert report.exit_code(state) == 0


def test_caching_off_does_not_work(tiny: Path) -> None:
    state = verify_own(tiny, 1500, enable_prefix_caching=False)
    assert state.verdict().answer == "does not", state.verdict()
    assert not state.findings()  # the server says zero, and zero it is
    assert report.exit_code(state) == 1
