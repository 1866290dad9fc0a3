"""What a delta leaves as it is: hashed again in the second copy while the changes come, so that the whole target is
verified, and not only what is new of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from ..codecs import Array
from .ledger import DIGEST
from .wire import Manifest

if TYPE_CHECKING:
    from .blocks import Blocks
    from .views import Memory

WORKERS = 2
AT_ONCE = 128
"""Blocks after which a thread looks whether anybody still wants to know."""


class Unchanged:
    """Blocks of a copy that nobody is to write to, and their digests as they should be (a row for every block of the
    manifest). Threads begin to hash at once; a block that is written to meanwhile is the ledger's affair."""

    def __init__(self, memory: Memory, manifest: Manifest, blocks: Blocks, numbers: Array, digests: Array) -> None:
        self._memory, self._manifest, self._blocks = memory, manifest, blocks
        self._numbers, self._digests = numbers, digests
        self._stopped = False
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="areal-unchanged")
        parts = [numbers[at : at + AT_ONCE] for at in range(0, len(numbers), AT_ONCE)]
        self._found: list[Future[Array]] = [pool.submit(self._look, part) for part in parts]
        pool.shutdown(wait=False)

    def _look(self, numbers: Array) -> Array:
        """Which of these blocks are not what they should be."""
        if self._stopped:
            return numbers[:0]
        found = self._memory.digests(self._manifest, self._blocks, numbers)
        wrong: Array = numbers[np.any(found != self._digests[numbers].reshape(-1, DIGEST), axis=1)]
        return wrong

    def wait(self, timeout: float) -> bool:
        """Until all are hashed; False when it takes longer."""
        return not wait(self._found, timeout).not_done

    def wrong(self, came: Array) -> Array:
        """Numbers of the blocks that are wrong, and did not come either."""
        found = np.concatenate([future.result() for future in self._found] or [self._numbers[:0]])
        left: Array = found[~came[found]]
        return left

    def stop(self) -> None:
        """Nobody wants to know any more."""
        self._stopped = True
