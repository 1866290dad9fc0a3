"""Are two checkpoints the same weights? Is what was written what was read? Content digests of every atom, whatever the
formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .errors import Problems, VerifyError
from .execute import Limits, Shared, atom_bytes, digest_all
from .opening import open_checkpoint
from .plan import copies_of
from .rawio import Files
from .slots import whole

if TYPE_CHECKING:
    from .convert import Planned


def copies_digests(
    ckpt: Checkpoint, limits: Limits, advance: Callable[[int], None] = lambda n: None
) -> dict[str, list[str]]:
    """Digest of every copy of every atom of a checkpoint."""
    copies = {name: list(copies_of(slots).values()) for name, slots in ckpt.slots.items() if name in ckpt.atoms}
    boxes = {name: whole(shape) for name, (_, shape) in ckpt.atoms.items()}
    return digest_all(copies, boxes, limits, Shared(advance=advance))


@dataclass
class Comparison:
    """What `verify` found. `same` when every atom of both is there with equal type and content."""

    a: Checkpoint
    b: Checkpoint
    equal: int = 0
    differ: list[str] = field(default_factory=list)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    inconsistent: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not (self.differ or self.dtypes or self.only_a or self.only_b or self.inconsistent)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "same": self.same,
            "a": {"path": str(self.a.path), "format": self.a.format},
            "b": {"path": str(self.b.path), "format": self.b.format},
            "equal": self.equal,
            "differ": self.differ,
            "dtypes": {k: list(v) for k, v in self.dtypes.items()},
            "only_a": self.only_a,
            "only_b": self.only_b,
            "inconsistent_copies": self.inconsistent,
        }


def verify(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    *,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    hf_config: str | Path | None = None,
) -> Comparison:
    """Compare two checkpoints, of any formats, atom by atom, reading all of both.

    Raises SourceError when one of them cannot be read as a whole model.
    """
    left, right = (
        (x if isinstance(x, Checkpoint) else open_checkpoint(x, hf_config=hf_config)).check() for x in (a, b)
    )
    limits = limits or Limits()
    total = sum(s.buffer.size for c in (left, right) for slots in c.slots.values() for s in slots)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("verify", min(done, total), total)

    found = [copies_digests(c, limits, advance) for c in (left, right)]
    return compare(left, right, *found)


def compare(a: Checkpoint, b: Checkpoint, of_a: dict[str, list[str]], of_b: dict[str, list[str]]) -> Comparison:
    """Put two sets of digests side by side."""
    result = Comparison(a, b)
    types_a, types_b = a.dtypes(), b.dtypes()
    result.only_a = sorted(of_a.keys() - of_b.keys())
    result.only_b = sorted(of_b.keys() - of_a.keys())
    for name in sorted(of_a.keys() & of_b.keys()):
        if len(set(of_a[name])) > 1 or len(set(of_b[name])) > 1:
            result.inconsistent.append(name)
        if types_a[name] != types_b[name]:
            result.dtypes[name] = (types_a[name], types_b[name])
        elif of_a[name][0] != of_b[name][0]:
            result.differ.append(name)
        else:
            result.equal += 1
    return result


# ------------------------------------------------------------------------------------------------ what was written

Counter = Callable[[int], Callable[[int], None]]
"""Given the bytes in all, what is called with the bytes of every step."""


def read_back(planned: Planned, path: Path, digests: Mapping[str, str], limits: Limits, counter: Counter) -> None:
    """Read what was written, and compare the content of every copy of every atom with what was read before.

    A whole target is opened with its format's own reader; of some ranks' files, which no reader takes, the boxes are
    read where they were laid out. Raises VerifyError with everything that differs.
    """
    problems = Problems()
    read = _read_ranks if planned.ranks else _read_whole
    found = read(planned, path, limits, counter)
    for atom in planned.moves.atoms:
        seen, wanted = found.get(atom.key, []), len(copies_of(atom.target))
        if len(seen) < wanted:
            problems.add(atom.key, f"{len(seen)} copies were read back, {wanted} were written")
        if any(digest != digests[atom.key] for digest in seen):
            what = "reads back with another content than was written"
            problems.add(atom.key, what, "check the disk; please report this")
    problems.raise_as(VerifyError, "What was written is not what was read:")


def _read_whole(planned: Planned, path: Path, limits: Limits, counter: Counter) -> dict[str, list[str]]:
    written = open_checkpoint(path, family=planned.source.table.name)
    problems = Problems(list(written.problems.found))
    problems.raise_as(VerifyError, "What was written cannot be read back:")
    compare_segments(planned, path)
    return copies_digests(written, limits, counter(sum(atom_bytes(s) for s in written.slots.values())))


def _read_ranks(planned: Planned, path: Path, limits: Limits, counter: Counter) -> dict[str, list[str]]:
    compare_segments(planned, path)
    atoms = planned.moves.atoms
    copies = {atom.key: [[slot] for slot in atom.target] for atom in atoms}
    advance = counter(sum(atom_bytes(atom.target) for atom in atoms))
    return digest_all(copies, {atom.key: atom.box for atom in atoms}, limits, Shared(advance=advance), path)


def compare_segments(planned: Planned, path: Path) -> None:
    """What stands between the tensors (headers, pickles) must be as it was laid out, too."""
    files, problems = Files(path), Problems()
    try:
        for file in planned.files:
            fd = files.fd(file.name)
            if any(os.pread(fd, len(data), offset) != data for offset, data in file.segments):
                problems.add(file.name, "its header reads back otherwise than it was written", "check the disk")
    finally:
        files.close()
    problems.raise_as(VerifyError, "What was written is not what was read:")
