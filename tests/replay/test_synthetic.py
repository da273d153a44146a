"""Made-up traces keep the rules of real ones."""

from __future__ import annotations

import pytest

from anaphora.replay.synthetic import GENERATORS


@pytest.mark.parametrize("name", GENERATORS)
def test_ids_are_chained_and_times_in_order(name: str) -> None:
    parents: dict[int, int | None] = {}
    latest = 0.0
    requests = list(GENERATORS[name](2500, 4))
    assert len(requests) == 2500
    for request in requests:
        assert request.arrival >= latest
        latest = request.arrival
        assert request.hash_ids is not None
        assert request.input_length == 512 * len(request.hash_ids)
        parent = None
        for block in request.hash_ids:
            assert parents.setdefault(block, parent) == parent
            parent = block


@pytest.mark.parametrize("name", ["zipf", "shifting", "chat", "agents", "mixed"])
def test_the_seed_decides(name: str) -> None:
    make = GENERATORS[name]
    assert list(make(200, 1)) == list(make(200, 1)) != list(make(200, 2))


def test_agents_take_thirty_turns() -> None:
    sessions: dict[str, int] = {}
    for request in GENERATORS["agents"](3000, 1):
        sessions[request.session] = sessions.get(request.session, 0) + 1
    assert max(sessions.values()) == 30
