"""Memory for what is fetched ahead. Large blocks come from the system, apart from the heap, and are used again.

The C library would keep freed blocks of megabytes for each thread (1 GB in windows, a budget of 192 MiB: 430 MiB of
memory instead of 270), and fresh ones for every window cost a page fault each 4 KiB (a tenth of a conversion's CPU).
"""

from __future__ import annotations

import threading
from mmap import mmap

from .windows import WINDOW

LARGE = 1024 * 1024
"""Bytes: smaller windows lie on the heap, as any object."""

Block = bytearray | mmap


def cost(size: int) -> int:
    """Bytes of memory that a block for so many takes."""
    return WINDOW if WINDOW // 2 < size <= WINDOW else size


class Memory:
    """Gives blocks of at least the size that is asked for, and takes them back. For several threads."""

    def __init__(self) -> None:
        self._spare: list[mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        if size < LARGE:
            return bytearray(size)
        if cost(size) == WINDOW:
            with self._lock:
                if self._spare:
                    return self._spare.pop()
        return mmap(-1, cost(size))

    def give(self, block: Block) -> None:
        """Nobody looks at it any more."""
        if isinstance(block, mmap) and len(block) == WINDOW:
            with self._lock:
                self._spare.append(block)
