"""The last committed version, kept where servers that restart can get it again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..live import export_hf
from ..peers import Peers
from .planning import Planned
from .source import CheckpointSource, LiveSource, Source, open_source

if TYPE_CHECKING:
    from ..mesh import Mesh


class Retained:
    """A directory with one snapshot, written by all ranks after a commit. A checkpoint needs none: it is its own."""

    def __init__(self, directory: Path | None, base: Any, mesh: Mesh | None, rank: int, peers: Peers) -> None:
        self.directory = directory
        self.snapshot: Path | None = None
        self.version: int | None = None
        self._how = {"base": base, "mesh": mesh, "rank": rank, "peers": peers}
        self._peers = peers

    def keep(self, source: Source, version: int, planned: Planned) -> None:
        """Write what was committed, in the servers' element type where they have but one, and drop the one before."""
        if not isinstance(source, LiveSource) or self.directory is None:
            self.version = version
            return
        types = {atom.dtype for atom in planned.atoms}
        out = self.directory / f"v{version:06d}"
        dtype = types.pop() if len(types) == 1 else None
        export_hf(source.states(), out=out, dtype=dtype, overwrite=True, verify=False, **self._how)
        old, self.snapshot, self.version = self.snapshot, out, version
        if old is not None and self._peers.rank == 0:
            shutil.rmtree(old, ignore_errors=True)

    def source_of(self, source: Source) -> Source | None:
        """What to catch up from, on the first rank; None where there is nothing."""
        if isinstance(source, CheckpointSource):
            return source if self._peers.world == 1 else open_source(source.checkpoint)
        return open_source(self.snapshot) if self.snapshot is not None else None
