"""The last committed version, kept where servers that restart can get it again.

What a hub reads now need not be that: a later checkpoint may have been opened, and its push called off.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..live import export_hf
from ..peers import Peers
from ..source_state import file_states
from .planning import Planned
from .source import CheckpointSource, Source, open_source
from .source_live import LiveSource

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..mesh import Mesh


class Retained:
    """A directory with one snapshot, written by all ranks after a commit. A checkpoint needs none: it is its own for as
    long as nobody writes to it. `version` is that of what is kept; None: this hub has pushed nothing yet."""

    def __init__(
        self,
        directory: Path | None,
        base: Any,
        mesh: Mesh | None,
        rank: int,
        peers: Peers,
        *,
        allow_nan: bool = False,
    ) -> None:
        self.directory = directory
        self.snapshot: Path | None = None
        self.version: int | None = None
        self._kept: tuple[Checkpoint, Mapping[str, str]] | None = None
        self._how = {"base": base, "mesh": mesh, "rank": rank, "peers": peers, "allow_nan": allow_nan}
        self._peers = peers

    def keep(self, source: Source, version: int, planned: Planned) -> None:
        """Write what was committed, in the servers' element type where they have but one, and drop the one before."""
        source.let_go()
        if not isinstance(source, LiveSource) or self.directory is None:
            self.version, self.snapshot, self._kept = version, None, None
            if isinstance(source, CheckpointSource):
                with suppress(SourceError):  # it has gone already: nobody can catch up from it
                    self._kept = source.checkpoint, file_states(source.checkpoint)
            return
        types = {atom.dtype for atom in planned.atoms}
        out = self.directory / f"v{version:06d}"
        dtype = types.pop() if len(types) == 1 else None
        export_hf(source.states(), out=out, dtype=dtype, overwrite=True, verify=False, **self._how)
        old, self.snapshot, self.version, self._kept = self.snapshot, out, version, None
        if old is not None and self._peers.rank == 0:
            shutil.rmtree(old, ignore_errors=True)

    def source_of(self, source: Source) -> Source | None:
        """What to catch up from, for the first rank to read and close; None where there is nothing. `source`: that of a
        hub that has pushed nothing yet. Raises SourceError when the checkpoint is not as it was any more."""
        if self._kept is not None:
            checkpoint, states = self._kept
            if file_states(checkpoint) != states:
                raise SourceError(
                    f"{checkpoint.path} was changed since it was pushed as version {self.version}.",
                    hint="Push it again.",
                )
            return open_source(checkpoint)
        if self.snapshot is not None:
            return open_source(self.snapshot)
        unpushed = self.version is None and isinstance(source, CheckpointSource)
        return open_source(source.checkpoint) if unpushed else None
