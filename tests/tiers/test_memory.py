"""Page-aligned memory, copies, and pages that are there before they are needed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from anaphora.tiers.memory import PAGE, copy, is_paged, page_buffer, populate


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_populated_memory_is_there_and_keeps_its_bytes() -> None:
    size = 32 << 20
    area = memoryview(mmap.mmap(-1, size))
    area[:5], area[-5:] = b"first", b"last."
    before = resident_pages()
    populate(area[7:-7])
    taken = resident_pages() - before
    if not taken:
        pytest.skip("this kernel does not know MADV_POPULATE_WRITE")
    assert taken >= (size - 4 * PAGE) // PAGE * 0.9
    assert bytes(area[:5]) == b"first"
    assert bytes(area[-5:]) == b"last."


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_small_memory_may_be_populated(size: int) -> None:
    memory = memoryview(bytearray(b"x" * size))
    populate(memory)
    assert memory == b"x" * size


def test_whole_pages_are_told_from_others() -> None:
    buffer = page_buffer(4 * PAGE)
    assert is_paged(buffer)
    assert is_paged(buffer[PAGE : 3 * PAGE])
    assert not is_paged(buffer[8 : PAGE + 8])
    assert not is_paged(buffer[: PAGE - 1])
    assert not is_paged(memoryview(bytes(PAGE)))


@pytest.mark.parametrize("size", [0, 10, 1 << 17])
def test_copies(size: int) -> None:
    data, into = memoryview(bytes(range(256)) * (size // 256 + 1))[:size], memoryview(bytearray(size))
    copy(into, data)
    assert into == data
    with pytest.raises(ValueError, match="do not fill"):
        copy(into, memoryview(b"x" * (size + 1)))
