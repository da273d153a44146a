"""RemoteTier over a real Valkey: what is saved is loaded, and nothing that was tampered with ever is."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from anaphora.tiers.format import header_bytes, pack_header
from anaphora.tiers.remote.breaker import Circuit, CircuitBreaker
from anaphora.tiers.remote.hot import HotKeys
from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.tier import RemoteTier
from anaphora.tiers.remote.valkey import KEY_PREFIX, ValkeyStore
from anaphora.tiers.remote.valkey_url import parse
from anaphora.tiers.store import BlockMeta, Outcome, StoreError
from support.remote import until, valkey
from support.stored_blocks import OTHER_SPACE, SIZE, chain, payload, payloads, room


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with valkey() as running:
        yield running


@pytest.fixture
def tier(server: Any) -> Iterator[RemoteTier]:
    server.client().flushall()
    tier = RemoteTier(open_remote(f"valkey://127.0.0.1:{server.port}"))
    yield tier
    tier.close()


def raw_name(block: BlockMeta) -> bytes:
    return KEY_PREFIX + block.key.hex().encode()


def loaded(tier: RemoteTier, blocks: list[BlockMeta]) -> list[Outcome]:
    """Load, and compare every byte of what is said to be OK."""
    views = room(len(blocks))
    outcomes = tier.load(blocks, views)
    for block, view, outcome in zip(blocks, views, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


def test_what_one_server_saves_another_loads(tier: RemoteTier, server: Any) -> None:
    blocks = chain("shared", 20)
    assert tier.contains([block.key for block in blocks]) == [False] * 20
    assert loaded(tier, blocks) == [Outcome.MISS] * 20
    assert tier.save(blocks[:15], payloads(blocks[:15])) == [Outcome.OK] * 15
    other = RemoteTier(open_remote(f"redis://127.0.0.1:{server.port}"))
    assert other.contains([block.key for block in blocks]) == [True] * 15 + [False] * 5
    assert loaded(other, blocks) == [Outcome.OK] * 15 + [Outcome.MISS] * 5
    stats = other.stats()
    assert (stats.hits, stats.misses, stats.bytes_loaded, stats.off) == (15, 5, 15 * SIZE, "")
    other.close()


def test_a_block_that_is_there_is_not_written_again(tier: RemoteTier) -> None:
    blocks = chain("again", 4)
    tier.save(blocks[:2], payloads(blocks[:2]))
    assert tier.save(blocks, payloads(blocks)) == [Outcome.OK] * 4
    assert tier.stats().bytes_saved == 4 * SIZE


def test_discard(tier: RemoteTier) -> None:
    blocks = chain("gone", 3)
    tier.save(blocks, payloads(blocks))
    tier.discard([blocks[1].key, chain("never", 1)[0].key])
    assert loaded(tier, blocks) == [Outcome.OK, Outcome.MISS, Outcome.OK]


def test_one_flipped_byte_anywhere_is_never_served(tier: RemoteTier, server: Any) -> None:
    block = chain("flip", 1)[0]
    client = server.client()
    tier.save([block], payloads([block]))
    good = client.get(raw_name(block))
    head = header_bytes(16)
    draw = random.Random(7)
    for at in [*range(head), *(draw.randrange(head, len(good)) for _ in range(200)), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        client.set(raw_name(block), bytes(bad))
        assert loaded(tier, [block]) == [Outcome.CORRUPT], at
        assert not client.exists(raw_name(block)), "what is corrupt is removed"
        client.set(raw_name(block), good)
        assert loaded(tier, [block]) == [Outcome.OK]
    assert tier.circuit is Circuit.CLOSED


@pytest.mark.parametrize("cut", [0, 1, 15, 100, 127, 128, 200, 207, 208, 209, 5000, -1])
def test_a_value_cut_short_or_grown(tier: RemoteTier, server: Any, cut: int) -> None:
    block = chain("cut", 1)[0]
    client = server.client()
    tier.save([block], payloads([block]))
    good = client.get(raw_name(block))
    for bad in (good[:cut], good + b"x" * (abs(cut) + 1)):
        client.set(raw_name(block), bad)
        assert loaded(tier, [block]) == [Outcome.CORRUPT]


def test_another_keys_value(tier: RemoteTier, server: Any) -> None:
    """Whole, with the right checksums, but under the wrong key; or of other tokens, another model or parent."""
    blocks = chain("swap", 2)
    client = server.client()
    tier.save(blocks, payloads(blocks))
    client.set(raw_name(blocks[0]), client.get(raw_name(blocks[1])))
    assert loaded(tier, blocks) == [Outcome.CORRUPT, Outcome.OK]
    for changed in (
        replace(blocks[0], tokens=struct.pack("<16I", *range(100, 116))),
        replace(blocks[0], parent=blocks[1].key),
        replace(blocks[0], depth=9),
        replace(blocks[0], space=OTHER_SPACE),
        replace(blocks[0], space=replace(blocks[0].space, codec="fp8/1")),
    ):
        data = payload(blocks[0])
        client.set(raw_name(blocks[0]), pack_header(changed, data) + bytes(data))
        assert loaded(tier, blocks) == [Outcome.CORRUPT, Outcome.OK]


def test_an_old_version(tier: RemoteTier, server: Any) -> None:
    """A header of another version whose own checksum is right."""
    block = chain("old", 1)[0]
    data = payload(block)
    for version in (0, 2):
        head = bytearray(pack_header(block, data))
        head[8:10] = version.to_bytes(2, "little")
        head[-16:] = xxh3_128_digest(head[:-16])
        server.client().set(raw_name(block), bytes(head) + bytes(data))
        assert loaded(tier, [block]) == [Outcome.CORRUPT]


def test_chunks_of_two_writers_do_not_mix(server: Any) -> None:
    server.client().flushall()
    tier = RemoteTier(ValkeyStore(parse(f"valkey://127.0.0.1:{server.port}"), chunk_bytes=1000))
    blocks = chain("mixed", 2)
    tier.save(blocks, payloads(blocks))
    assert loaded(tier, blocks) == [Outcome.OK] * 2
    client = server.client()
    client.set(raw_name(blocks[0]) + b":4", client.get(raw_name(blocks[1]) + b":4"))
    assert loaded(tier, blocks) == [Outcome.CORRUPT, Outcome.OK]
    assert len(client.keys()) == 1 + 9
    client.delete(raw_name(blocks[1]) + b":2")
    assert loaded(tier, blocks) == [Outcome.MISS] * 2
    assert client.keys() == []
    tier.close()


def test_a_full_store_drops() -> None:
    with valkey(maxmemory="4mb", maxmemory_policy="noeviction") as server:
        tier = RemoteTier(open_remote(f"valkey://127.0.0.1:{server.port}"))
        blocks = chain("full", 6)
        saved = [tier.save([block], [payload(block, 1 << 20)])[0] for block in blocks]
        assert saved[0] is Outcome.OK
        assert saved[-1] is Outcome.DROPPED
        assert tier.circuit is Circuit.CLOSED
        assert tier.load(blocks[:1], room(1, 1 << 20)) == [Outcome.OK]
        tier.close()


def test_a_store_full_of_lies_is_left_alone(tier: RemoteTier, server: Any, caplog: pytest.LogCaptureFixture) -> None:
    blocks = chain("lies", 4)
    for block in blocks:
        server.client().set(raw_name(block), b"x" * (header_bytes(16) + SIZE))
    assert [loaded(tier, [block])[0] for block in blocks] == [Outcome.CORRUPT] * 3 + [Outcome.FAILED]
    assert "corrupt" in tier.stats().off
    assert [record.message for record in caplog.records] == [
        "the remote cache is left alone until it answers again, requests go on without it: "
        "every block it gave was corrupt"
    ]
    assert server.client().dbsize() == 1


def test_a_store_that_comes_back_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = Outsider(StoreError("10.0.0.5:6379: connection refused"))
    tier = RemoteTier(store, breaker=CircuitBreaker(failures=2, pause=0.01))
    for _ in range(3):
        tier.contains([b"key"])
    store.answer = [True]
    until(lambda: tier.contains([b"key"]) == [True], 5)
    tier.contains([b"key"])
    assert [record.message for record in caplog.records] == [
        "the remote cache is left alone until it answers again, requests go on without it: "
        "10.0.0.5:6379: connection refused",
        "the remote cache answers again",
    ]


def test_what_is_read_often_is_to_be_kept(server: Any) -> None:
    tier = RemoteTier(open_remote(f"valkey://127.0.0.1:{server.port}"), hot=HotKeys(threshold=2))
    keys = [block.key for block in chain("hot", 3)]
    assert tier.keep_locally(keys[:2]) == [False, False]
    assert tier.keep_locally(keys) == [True, True, False]
    tier.close()


class Outsider:
    """A store of an outside package that breaks every rule."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0

    def _do(self) -> Any:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return list(self._do())

    def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> Iterable[int | None]:
        return list(self._do())

    def write(self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        return list(self._do())

    def delete(self, keys: Sequence[bytes]) -> None:
        self._do()

    def register(self, memory: memoryview) -> None:
        self._do()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("answer", [RuntimeError("bug"), KeyError(), [], [True] * 9, None, ["?", "?"]])
def test_an_outside_store_cannot_raise_or_fool(answer: Any) -> None:
    store = Outsider(answer)
    tier = RemoteTier(store)
    blocks = chain("outside", 2)
    tier.register(memoryview(bytearray(10)))
    assert set(tier.load(blocks, room(2))) <= {Outcome.FAILED, Outcome.CORRUPT}
    assert len(tier.contains([block.key for block in blocks])) == 2
    assert len(tier.save(blocks, payloads(blocks))) == 2
    tier.discard([blocks[0].key])


def test_batches_before_a_failure_count() -> None:
    """A store that fails in the middle: the blocks before are there, those after are not asked."""

    class Halfway(Outsider):
        def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> list[int | None]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("no more")
            return [None] * len(keys)

    store = Halfway(None)
    blocks = chain("halfway", 5)
    views = [memoryview(bytearray(24 << 20))] * 5
    assert RemoteTier(store).load(blocks, views) == [Outcome.MISS] * 2 + [Outcome.FAILED] * 3
    assert store.calls == 2


def test_blocks_before_a_failure_count_within_a_batch() -> None:
    """A store that gives its answers one by one, and fails after the second."""
    blocks = chain("cut off", 4)
    values = [pack_header(block, payload(block)) + bytes(payload(block)) for block in blocks]

    class CutOff(Outsider):
        def read(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]) -> Iterator[int | None]:
            for index, (head, body) in enumerate(into):
                if index == 2:
                    raise StoreError("gone")
                head[:], body[:] = values[index][: len(head)], values[index][len(head) :]
                yield len(values[index])

        def delete(self, keys: Sequence[bytes]) -> None:
            deleted.extend(keys)

    deleted: list[bytes] = []
    tier = RemoteTier(CutOff(None))
    assert loaded(tier, blocks) == [Outcome.OK] * 2 + [Outcome.FAILED] * 2
    stats = tier.stats()
    assert (stats.hits, stats.failed) == (2, 2)
    values[1] = values[1][:-1] + bytes([values[1][-1] ^ 1])
    assert loaded(tier, blocks) == [Outcome.OK, Outcome.CORRUPT] + [Outcome.FAILED] * 2
    assert not deleted, "a store that has just failed is asked for nothing more"


def test_what_is_written_is_made_when_it_is_asked_for() -> None:
    """So that a checksum is computed while the store is busy with the value before."""
    blocks = chain("lazy", 3)
    data = [bytearray(payload(block)) for block in blocks]
    got: list[bytes] = []

    class Slow(Outsider):
        def write(
            self, keys: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Sequence[memoryview]]
        ) -> list[bool]:
            assert len(keys) == len(sizes) == len(parts) == 3
            data[2][7] ^= 1  # after the call began, before the last one is asked for
            got.extend(b"".join(parts[index]) for index in range(3))
            assert [len(value) for value in got] == list(sizes)
            return [True] * 3

    assert RemoteTier(Slow([False] * 3)).save(blocks, [memoryview(each) for each in data]) == [Outcome.OK] * 3
    assert got == [pack_header(block, memoryview(each)) + bytes(each) for block, each in zip(blocks, data, strict=True)]
