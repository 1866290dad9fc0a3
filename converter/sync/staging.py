"""What a receiver puts a push into, whichever kind it is: a `Stage` for whole models, an `AdapterStage` for LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..codecs import Array
from ..errors import Problems
from .wire import Manifest

if TYPE_CHECKING:
    from .blocks import Blocks, Run
    from .ledger import Ledger

WINDOW = 64
"""Senders from which a server receives at the same time; one that has to wait longer than the transport's timeout would
give up. They are taken in order, so that servers never wait for each other in a circle: the first sender that is not
done with is in everybody's window."""


def buffers_of(manifest: Manifest) -> int:
    """Bytes of receive buffers: one for every sender in the window, and one more that is being applied."""
    return (min(len(manifest.senders), WINDOW) + 1) * manifest.bucket


class Staging(Protocol):
    """What a receiver puts a push into: a `Stage` for whole models, `AdapterStage` for LoRA."""

    version: int
    root: str | None

    def check(self, manifest: Manifest, problems: Problems) -> None:
        """Compare the manifest with what is here; whatever does not fit joins the problems."""
        ...

    def begin(self, manifest: Manifest, blocks: Blocks, timeout: float) -> Ledger:
        """Make room for a push. Raises Refused (`memory`, `busy`, `base_mismatch`)."""
        ...

    def where(self, run: Run) -> Array | None:
        """The memory of a whole run (uint8, row-major, exactly its bytes), to be written to in place; None where it is
        not in one piece, or not the CPU's. Only between `begin` and `finish`."""
        ...

    def put(self, number: int, data: Array) -> None:
        """Write a block's bytes (uint8, row-major) to wherever they belong. For several threads."""
        ...

    def wait(self, timeout: float) -> bool:
        """After the last block: until `finish` can tell of what no block came for. False when it takes longer."""
        ...

    def finish(self, root: str) -> None:
        """Everything that was to come is there and verified: what is staged may be installed. Raises Refused
        (`base_mismatch`) when something else is not what it was."""
        ...

    def install(self) -> None:
        """Let what is staged serve. Raises nothing halfway: either all of it serves afterwards, or none."""
        ...

    def undo(self) -> None:
        """Take the last `install` back: what it installed is staged again."""
        ...

    def drop(self, settled: Callable[[float], bool] | None = None) -> None:
        """Forget the push, staged or not, or (after `install`) that it can be undone. Idempotent.

        settled  tells, waiting so long for it, whether nothing is written any more to what `where` gave
        """
        ...

    def digests(self, staged: bool) -> dict[str, str]:
        """xxh3_128 of every atom, of what serves or of what is staged."""
        ...
