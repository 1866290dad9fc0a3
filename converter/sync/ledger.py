"""Which blocks of a push have come, and their digests: what makes a stage whole, and its root."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ..codecs import Array
from .wire import Manifest, ProtocolError

if TYPE_CHECKING:
    from .blocks import Blocks

DIGEST = 16
"""Bytes of an xxh3_128."""


def layout_key(manifest: Manifest) -> str:
    """Equal for two manifests whose blocks are cut alike, so that block numbers and roots mean the same."""
    h = xxhash.xxh3_128(f"{manifest.block}".encode())
    for atom in manifest.atoms:
        h.update(f"{atom.name!r} {tuple(atom.shape)} {atom.dtype};".encode())
    for sender in manifest.senders:
        h.update(b"|")
        for number, lo, hi in sender:
            h.update(f"{number} {tuple(lo)} {tuple(hi)};".encode())
    return h.hexdigest()


def root_of(digests: Array) -> str:
    """The digest of all blocks' digests in order."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(digests).data)


def bucket_digest(numbers: Array, digests: Array) -> bytes:
    """What a bucket's header says of its payload: the numbers, then the digests of these blocks."""
    h = xxhash.xxh3_128()
    h.update(np.ascontiguousarray(numbers).data)
    h.update(np.ascontiguousarray(digests).data)
    return h.digest()


class Ledger:
    """The blocks of one push. For several threads; a block is written by the one that claimed it.

    digests  one row a block: of what came, and (delta) of the base's for the others
    came     which blocks were applied; `claimed` also those that are being applied
    """

    def __init__(self, blocks: Blocks, base: Array | None = None) -> None:
        self.blocks, self.delta = blocks, base is not None
        self.digests = np.zeros((blocks.count, DIGEST), np.uint8) if base is None else base.copy()
        self.came = np.zeros(blocks.count, np.bool_)
        self.claimed = np.zeros(blocks.count, np.bool_)
        self._lock = threading.Lock()

    def claim(self, sender: int, numbers: Array) -> None:
        """These blocks are about to be applied. Raises ProtocolError when one is not the sender's, or came before."""
        mine = self.blocks.of_sender(sender)
        wrong = numbers[(numbers < mine.start) | (numbers >= mine.stop)]
        if wrong.size:
            raise ProtocolError(
                f"Block {int(wrong[0])} is none of sender {sender}, whose blocks are {mine.start} to {mine.stop - 1}."
            )
        with self._lock:
            twice = numbers[self.claimed[numbers]]
            if not twice.size and numbers.size > 1 and np.unique(numbers).size != numbers.size:
                values, counts = np.unique(numbers, return_counts=True)
                twice = values[counts > 1]
            if twice.size:
                raise ProtocolError(f"Block {int(twice[0])} came twice (sender {sender}).")
            self.claimed[numbers] = True

    def record(self, numbers: Array, digests: Array) -> None:
        """These blocks are applied."""
        self.digests[numbers] = digests
        self.came[numbers] = True

    @property
    def missing(self) -> int:
        """How many blocks have yet to come; none where a push brings only what changed."""
        return 0 if self.delta else int(self.came.size - np.count_nonzero(self.came))

    def first_missing(self) -> int:
        return int(np.argmin(self.came))

    def root(self) -> str:
        """Of the whole target. Raises ProtocolError unless everything is there."""
        if self.missing:
            n = self.first_missing()
            raise ProtocolError(f"{self.missing} of {self.came.size} blocks did not come; the first is {n}.")
        if not np.array_equal(self.came, self.claimed):
            raise ProtocolError("Some blocks are still being applied.")
        return root_of(self.digests)
