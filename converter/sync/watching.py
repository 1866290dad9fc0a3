"""Which checkpoints of a training directory are new and whole: what `sync --watch` pushes.

A training state (`step-000100`) is whole when it has its marker, a Megatron one (`iter_0000100`) when the tracker has
come as far, a directory that we wrote when it has its manifest: all of these appear at once. Any other directory with
weights (`checkpoint-500` of a trainer that writes in place) is whole when it opens without a problem and nothing in it
has changed for some seconds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConvertError
from ..formats.torch_dist import tracked
from ..opening import detect, open_checkpoint
from ..sidefiles import MANIFEST, find_hf
from ..workdir import PARTIAL, REPLACED

MARKER = "COMPLETE"
"""Of a training state: its last file."""

BELOW = ("checkpoints",)
"""Where a run keeps its states, seen from its root."""

_UNFINISHED = re.compile(rf".*(\.partial|\.deleted|\.replaced|\.tmp|{re.escape(PARTIAL)}|{re.escape(REPLACED)})|\..*")
_STATE = re.compile(r"step-\d{6,}")
_ITER = re.compile(r"iter_\d{7}")
_NUMBER = re.compile(r"(\d+)$")

Fingerprint = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of the files by which a change shows."""


@dataclass(frozen=True)
class Appeared:
    """A checkpoint that is whole and was not there before. `number` is the step in its name."""

    path: Path
    number: int | None
    at: float


@dataclass
class _Seen:
    fingerprint: Fingerprint
    since: float
    over: bool = False
    """Whether there is nothing more to do about it, until it changes."""


class Watch:
    """Looks at a directory again and again.

    root    a run's directory, its `checkpoints`, or any directory of checkpoints; or a checkpoint that is replaced
    settle  seconds for which a directory without marker must not have changed
    """

    def __init__(self, root: str | Path, settle: float = 3.0) -> None:
        self.root, self.settle = Path(root), settle
        self._seen: dict[Path, _Seen] = {}

    def poll(self) -> list[Appeared]:
        """Those that are whole now and were not at the last call, in the order in which they were completed."""
        now, found = time.monotonic(), []
        candidates = list(self._candidates())
        for gone in self._seen.keys() - set(candidates):
            del self._seen[gone]
        for path in candidates:
            fingerprint, marked = _fingerprint(path)
            seen = self._seen.get(path)
            if seen is None or seen.fingerprint != fingerprint:
                seen = self._seen[path] = _Seen(fingerprint, now)
            if seen.over or not fingerprint or not (marked or now - seen.since >= self.settle):
                continue
            seen.over = True
            if _whole(path):
                found.append(Appeared(path, _number(path), max(time_ for *_, time_ in fingerprint) / 1e9))
        return sorted(found, key=lambda one: (one.at, -1 if one.number is None else one.number))

    def _candidates(self) -> Iterator[Path]:
        """Directories that may be checkpoints, no matter whether they are whole."""
        for folder in (self.root, *(self.root / name for name in BELOW)):
            with suppress(OSError):
                below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
                counted = any(_STATE.fullmatch(name) or _ITER.fullmatch(name) for name in below)
                if folder == self.root and not counted and _has_weights(folder):
                    yield folder
                    return
                for name in below:
                    if not _UNFINISHED.fullmatch(name) and name not in BELOW:
                        yield folder / name


def _has_weights(path: Path) -> bool:
    return find_hf(path) is not None and detect(path) is not None


def _number(path: Path) -> int | None:
    found = _NUMBER.search(path.name)
    return int(found[1]) if found else None


def _fingerprint(path: Path) -> tuple[Fingerprint, bool]:
    """By which a change shows, and whether a marker says that it is whole. Empty: it is not, or is gone."""
    with suppress(OSError):
        if _STATE.fullmatch(path.name):
            return _of([path / MARKER]), True
        if _ITER.fullmatch(path.name):
            return (_of([path]), True) if _reached(path) else ((), False)
        marks = [path / name for name in (MARKER, MANIFEST) if (path / name).is_file()]
        if marks:
            return _of(marks), True
        return _of([Path(e.path) for e in sorted(os.scandir(path), key=lambda e: e.name) if e.is_file()]), False
    return (), False


def _of(files: list[Path]) -> Fingerprint:
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats)


def _reached(path: Path) -> bool:
    """Whether Megatron's tracker beside it is at this iteration, or further: it is written when a save is complete."""
    last = tracked(path.parent)
    return last is not None and (_number(path) or 0) <= (_number(last) or 0)


def _whole(path: Path) -> bool:
    try:
        return not open_checkpoint(path).problems
    except ConvertError:
        return False
