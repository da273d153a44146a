"""What is remembered is bounded, and says what it should."""

from __future__ import annotations

import threading
from collections.abc import Callable

from anaphora.blocks.hashing import pack_tokens
from anaphora.explain.memory import Bounded, Evictions, Prefixes
from anaphora.explain.outcome import Outcome
from anaphora.explain.ring import Ring
from anaphora.types import BlockHash
from explain.conftest import Asked


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def outcome(name: str) -> Outcome:
    return Outcome(name, 0.0, 1, {}, {})


def test_the_oldest_goes_first() -> None:
    kept: Bounded[int, int] = Bounded(3)
    for i in (1, 2, 3, 1, 4):
        kept.put(i, -i)
    assert [kept.get(i) for i in (1, 2, 3, 4)] == [-1, None, -3, -4]
    kept.discard(9)
    assert len(kept) == 3


def test_room_is_counted_from_the_first_of_the_evictions_to_the_request() -> None:
    evictions = Evictions(100)
    for i in range(10):
        evictions.note(block(i), block(100 + i), float(i), "ab"[i >= 6])
    third, fifth = evictions.get(block(2)), evictions.get(block(4))
    assert third is not None
    assert fifth is not None
    assert evictions.room_for([fifth, third], "c") == 8
    assert evictions.room_for([third], "b") == 4  # its own four do not count
    assert evictions.child_of(block(103)) == block(3)
    evictions.discard(block(2))
    assert evictions.get(block(2)) is None
    for i in range(1000):
        evictions.note(block(i), block(i), 0.0, str(i))
    assert len(evictions) == 100
    assert evictions.get(block(0)) is None


def test_prefixes_of_powers_of_two_are_known_under_other_salts() -> None:
    prefixes = Prefixes(50)
    packed = [pack_tokens(range(i, i + 4)) for i in range(11)]
    assert [count for count, _ in prefixes.digests(packed)] == [1, 2, 4, 8, 11]
    prefixes.note(prefixes.digests(packed), b"one", "r1")
    longer = prefixes.digests([*packed, pack_tokens([7, 7, 7, 7])])
    found = prefixes.longest_elsewhere(longer, b"two")
    assert found is not None
    assert (found[0], found[1].request_id) == (8, "r1")
    assert prefixes.longest_elsewhere(longer, b"one") is None
    assert prefixes.digests([]) == []
    for i in range(100):
        prefixes.note(prefixes.digests([pack_tokens([i])]), b"one", "r")
    assert len(prefixes) == 50
    assert Prefixes(9).digests(packed) != prefixes.digests(packed)


def test_the_ring_drops_the_oldest_and_finds_by_answer() -> None:
    ring = Ring(4)
    for name in ("a-0", "b-0", "b-1", "c-0", "d-0"):
        ring.add(outcome(name))
    assert [o.request_id for o in ring.last(3)] == ["d-0", "c-0", "b-1"]
    assert [o.request_id for o in ring.find("b")] == ["b-0", "b-1"]
    assert [o.request_id for o in ring.find("b-1")] == ["b-1"]
    assert ring.find("a") == ring.find("") == []
    ring.add(outcome("b-0"))
    assert (len(ring), ring.last(1)[0].request_id) == (4, "b-0")


def test_the_ring_may_be_read_while_it_is_written() -> None:
    ring, stop, failures = Ring(50), threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                assert len(ring.last(100)) <= 50
                ring.find("x1")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(5000):
        ring.add(outcome(f"x{i}-0"))
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not failures


def test_an_engine_remembers_no_more_than_its_bounds(ask: Callable[..., Asked]) -> None:
    engine = ask(num_blocks=12, max_model_len=128)
    explainer = engine.engine.explainer
    for limited in (explainer._makers, explainer._evictions._blocks, explainer._prefixes._known, explainer.outcomes):
        limited.limit = 8
    for i in range(40):
        engine(f"{i:04d} and some more text to fill a few blocks of the pool")
    assert (
        len(explainer._makers) == len(explainer._evictions) == len(explainer._prefixes) == len(explainer.outcomes) == 8
    )
    assert explainer.outcomes.get("r1") is None
