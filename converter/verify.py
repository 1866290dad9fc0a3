"""Are two checkpoints the same weights? Content digests of every atom, whatever the formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .execute import Limits, Shared, digest_all
from .opening import open_checkpoint
from .plan import copies_of


def copies_digests(
    ckpt: Checkpoint, limits: Limits, advance: Callable[[int], None] = lambda n: None
) -> dict[str, list[str]]:
    """Digest of every copy of every atom of a checkpoint."""
    copies = {name: list(copies_of(slots).values()) for name, slots in ckpt.slots.items() if name in ckpt.atoms}
    shapes = {name: shape for name, (_, shape) in ckpt.atoms.items()}
    return digest_all(copies, shapes, limits, Shared(advance=advance))


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
