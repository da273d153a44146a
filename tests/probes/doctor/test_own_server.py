"""The project's own server, with a real engine and a tiny model: healthy, so nothing is found."""

from __future__ import annotations

from pathlib import Path

from anaphora.engine.loop import EngineLoop
from anaphora.server.settings import ServerSettings, ServerState
from support.diagnoses import codes, diagnose, step
from support.engines import make_engine
from support.models import tiny_llama
from support.servers import running

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_our_own_server_is_healthy(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, max_position=8192)
    loop = EngineLoop(make_engine(folder, max_model_len=4096, num_blocks=1024, chat_template=CHAT_TEMPLATE))
    loop.start()
    with running(ServerState(ServerSettings(("tiny",)), loop)) as served:
        found = diagnose(served.url)
    assert codes(found) == []
    assert found.exit_code == 0
    assert "Anaphora" in step(found, "http")
    assert "as it should be" in step(found, "context")
    assert "cached tokens: yes" in step(found, "usage")
