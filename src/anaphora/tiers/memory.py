"""Page-aligned memory and copies, without NumPy."""

from __future__ import annotations

import ctypes
import mmap
import sys

PAGE = 4096
"""Bytes; what direct I/O wants addresses, offsets and lengths to be multiples of."""
_POPULATE_WRITE = 23
"""Linux: MADV_POPULATE_WRITE, which the module mmap does not know."""
_WORTH_LETTING_GO = 1 << 15
"""Bytes from which a copy is worth giving up the interpreter's lock for."""


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


def page_buffer(size: int) -> memoryview:
    """Zeroed memory that starts at a page; taken from the system when first touched, in huge pages if it has them."""
    area = mmap.mmap(-1, round_up(max(size, 1)))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)[:size]


def is_paged(view: memoryview) -> bool:
    """Whether direct I/O may use this memory as it is: starts at a page and covers whole ones."""
    if view.readonly or view.nbytes % PAGE or not view.nbytes:
        return False
    return _address(view) % PAGE == 0


def populate(memory: memoryview) -> None:
    """Have the system find pages for writable memory now, so that no read waits for them. Keeps what is there.

    Does nothing where the system cannot (Linux before 5.14, and others). The interpreter's lock is let go meanwhile.
    """
    start = round_up(_address(memory)) if memory.nbytes else 0
    size = (_address(memory) + memory.nbytes - start) // PAGE * PAGE if memory.nbytes else 0
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE)


def copy(into: memoryview, data: memoryview) -> None:
    """Copy between views of equal length; large ones without holding the interpreter's lock."""
    if into.nbytes != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes do not fill {into.nbytes}")
    if into.nbytes < _WORTH_LETTING_GO or data.readonly:
        into[:] = data
    else:
        ctypes.memmove(_address(into), _address(data), into.nbytes)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
