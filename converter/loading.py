"""Fill a live module or state dict from a checkpoint of any format, reading only what its rank holds.

What a state dict holds is only another layout: its tensors are matched with the family's table as a file's are, and
every box is read from wherever it lies, straight into its place.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoint import Checkpoint
from .codecs import Array, cast, exactness, widest
from .dtypes import BY_NAME, BY_TORCH, parse
from .errors import ConfigError, PlanError, Problems
from .execute import Limits, Shared, chunks, gather, reads, run_all
from .layout import Named, atoms_of, slots_in
from .loading_targets import Held, Matched, match, state_dicts
from .mesh import Mesh
from .naming import naming_for, resolve
from .plan import copies_of
from .rawio import Files
from .remote.mounts import Meter, note_of
from .slots import Box, Buffer, Ints, Slot, whole

if TYPE_CHECKING:
    import torch

    from .loading_targets import Target


@dataclass
class Loaded:
    """What `load_into` did.

    bytes_read  of the checkpoint's tensors: what this rank holds of them, not what the whole has
    fetched     bytes, requests and retries, where the checkpoint lies elsewhere
    filled      bytes of padding in the target that were set to zero
    casts       `BF16 → F32` → tensors
    missing     (not strict) atoms that this rank should hold and for which the target has no tensor
    unknown     (not strict) tensors of the target that the family does not have, left as they were
    skipped     names of the target that are no weights → why
    """

    naming: str
    tensors: int = 0
    bytes_read: int = 0
    filled: int = 0
    seconds: float = 0.0
    casts: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fetched: dict[str, int] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return vars(self)


def load_into(
    ckpt: Checkpoint,
    target: Target,
    mesh: Mesh | None = None,
    rank: int = 0,
    *,
    naming: str | None = None,
    strict: bool = True,
    allow_cast: bool = False,
    skip: Sequence[str] = (),
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Loaded:
    """Fill the tensors of a module or a state dict in place.

    target      a module, a state dict, or a list of them: the virtual pipeline chunks of a Megatron rank. Plain tensors
                hold what `mesh` gives to `rank` (all of it on a mesh of one rank); DTensors know their own part
    mesh, rank  as the trainer has them, data-parallel replicas counted once
    naming      `hf` (with transformers' fused experts or without), `archon` or `megatron`; None: by the names
    strict      every tensor of the target must be known, and every atom that the rank holds must have a tensor
    allow_cast  round values where the target's type is narrower; widening needs no leave
    skip        regular expressions of atoms for which the target may have no tensor

    Raises PlanError with everything that does not fit, before anything is written, and SourceError when the checkpoint
    itself is unusable. A failed read leaves the target half filled.
    """
    start = time.perf_counter()
    ckpt.check()
    parts = state_dicts(target)
    naming = naming or naming_for(ckpt, [name for part in parts for name in part])
    problems = Problems()
    matched = match(ckpt, parts, naming, mesh or Mesh(), rank, problems)
    result = Loaded(naming, skipped=matched.skipped)
    _check_names(ckpt, matched, strict, skip, problems, result)
    held = _without_aliases(matched.held, ckpt, problems)
    _check_types(ckpt, held, allow_cast, problems, result)
    problems.raise_as(PlanError, f"{ckpt.path} does not fit what it should be loaded into:")
    result.tensors = len(held)
    meter = Meter([ckpt.found.where])
    _fill(ckpt, held, limits or Limits(), progress, result)
    result.fetched = meter.report()
    if note := note_of(result.fetched):
        result.notes.append(note)
    result.seconds = time.perf_counter() - start
    return result


def read(ckpt: Checkpoint, name: str, dtype: str | None = None) -> torch.Tensor:
    """One tensor, whole, on the CPU.

    name   an atom (it comes with its factored axes: `layers.0.attn.q` is g × r × d × h), a tensor as the checkpoint
           calls it, or one by its name in any naming of the family, whatever the checkpoint's format: put together from
           its parts, without padding
    dtype  element type; None: as stored (the type to which all widen, where the parts have several)

    Raises ConfigError when there is no such tensor, and SourceError when the checkpoint is unusable.
    """
    import torch

    ckpt.check()
    named = None if name in ckpt.atoms else resolve(ckpt, name)
    if named is None and name not in ckpt.atoms:
        raise ConfigError(f"There is no tensor {name!r} in {ckpt.path}, in any naming of {ckpt.table.name}.")
    names = [name] if named is None else [a for a in atoms_of(named) if a in ckpt.slots]
    if not names:
        raise ConfigError(f"{name} is not in {ckpt.path}.")
    wanted = parse(dtype).name if dtype else widest({ckpt.slots[n][0].dtype for n in names})
    shape = ckpt.atoms[name][1] if named is None else named.geometry.shape
    memory = torch.empty(shape, dtype=getattr(torch, BY_NAME[wanted].torch))
    files, counter = Files(), _Count(lambda count: None)
    try:
        for atom, slot in _whole_slots(ckpt, name, named, memory, wanted):
            _copy_slot(ckpt, files, atom, slot, memory, Limits().chunk, counter)
    finally:
        files.close()
    return memory


def _whole_slots(
    ckpt: Checkpoint, name: str, named: Named | None, memory: torch.Tensor, dtype: str
) -> list[tuple[str, Slot]]:
    buffer = Buffer("", 0, memory.numel(), name)
    if named is None:
        return [(name, Slot(whole(tuple(memory.shape)), buffer, 0, memory.stride(), dtype))]
    lo = (0,) * memory.dim()
    return list(slots_in(named, lo, tuple(memory.shape), buffer, 0, memory.stride(), dtype))


# ------------------------------------------------------------------------------------------------ checks


def _check_names(
    ckpt: Checkpoint, matched: Matched, strict: bool, skip: Sequence[str], problems: Problems, result: Loaded
) -> None:
    """Every tensor of the target must be known, every atom of the rank must have one."""
    dims = ckpt.view.dims
    absent = matched.expected - matched.meant
    beyond = {name for name in absent if _layer(name) >= dims["layers"]}
    if beyond and not any(_layer(name) >= dims["layers"] for name in matched.meant):
        result.notes.append(f"the target has no MTP layers: {len(beyond)} atoms are left out")
        absent -= beyond
    missing = sorted(absent)
    missing = [name for name in missing if not any(re.fullmatch(pattern, name) for pattern in skip)]
    if not strict:
        result.missing, result.unknown = missing, matched.unknown
        return
    for name in missing:
        problems.add(
            name, "the target has no tensor for it", "skip=[…] leaves it out, strict=False whatever is missing"
        )
    for name, why in matched.unknown.items():
        problems.add(name, f"nothing in the checkpoint is this tensor: {why}")


def _layer(atom: str) -> int:
    match = re.match(r"layers\.(\d+)\.", atom)
    return int(match.group(1)) if match else -1


def _without_aliases(held: Sequence[Held], ckpt: Checkpoint, problems: Problems) -> list[Held]:
    """Tensors that share memory (a tied head) are filled once; they must be the same tensor in the checkpoint too."""
    kept: dict[tuple[Any, ...], Held] = {}
    for one in held:
        memory = one.memory
        key = (memory.device, memory.data_ptr(), memory.storage_offset(), tuple(memory.shape), memory.stride())
        first = kept.setdefault(key if memory.numel() else (id(one),), one)
        if first is not one and _content(first, ckpt) != _content(one, ckpt):
            problems.add(
                one.name,
                f"shares its memory with {first.name}, but the checkpoint has two different tensors",
                "untie them",
            )
    return list(kept.values())


def _content(held: Held, ckpt: Checkpoint) -> tuple[Any, ...]:
    return tuple(atoms_of(held.named)), tuple(held.pieces)


def _check_types(ckpt: Checkpoint, held: Sequence[Held], allow: bool, problems: Problems, result: Loaded) -> None:
    casts: Counter[str] = Counter()
    for one in held:
        wanted = BY_TORCH.get(str(one.memory.dtype).removeprefix("torch."))
        if wanted is None:
            problems.add(one.name, f"has the element type {one.memory.dtype}, which is not converted")
            continue
        stored = {ckpt.slots[a][0].dtype for a in atoms_of(one.named) if a in ckpt.slots}
        for dtype in sorted(stored - {wanted.name}):
            casts[f"{dtype} → {wanted.name}"] += 1
            if exactness(dtype, wanted.name) == "narrow" and not allow:
                what = f"is {wanted.name} and the checkpoint has {dtype}: values would be rounded"
                problems.add(one.name, what, "allow_cast=True does it")
    result.casts = dict(casts)


# ------------------------------------------------------------------------------------------------ moving


class _Count:
    """Adds up bytes from several threads and passes the sum on."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.total, self._lock, self._report = 0, Lock(), report

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count
            self._report(self.total)


def _fill(
    ckpt: Checkpoint,
    held: Sequence[Held],
    limits: Limits,
    progress: Callable[[str, int, int], None] | None,
    result: Loaded,
) -> None:
    jobs: list[tuple[tuple[str, int], int, Callable[[], None], tuple[str, Box]]] = []
    files, shared = Files(), Shared()
    counter = _Count(lambda done: progress("load", done, total) if progress is not None else None)
    total = 0
    for one in held:
        result.filled += _zero_padding(one)
        for atom, slot in _slots(one):
            first = ckpt.slots[atom][0]
            count = slot.box.volume * BY_NAME[first.dtype].size
            total += count

            def action(atom: str = atom, slot: Slot = slot, memory: torch.Tensor = one.memory) -> None:
                _copy_slot(ckpt, files, atom, slot, memory, limits.chunk, counter)

            place = (first.buffer.file, first.buffer.begin + first.offset)
            jobs.append((place, count, action, (atom, slot.box)))
    jobs.sort(key=lambda job: job[0])
    try:
        files.expect(_reads(ckpt, [job[3] for job in jobs], limits.chunk), limits, shared.stop)
        run_all(((count, action) for _, count, action, _ in jobs), limits.workers, shared.stop)
    finally:
        files.close()
    result.bytes_read = counter.total


def _reads(ckpt: Checkpoint, wanted: Sequence[tuple[str, Box]], limit: int) -> Iterator[tuple[Slot, Box]]:
    """Every box that filling these boxes of atoms will read."""
    for atom, box in wanted:
        yield from reads([next(iter(copies_of(ckpt.slots[atom]).values()))], box, limit)


def _slots(held: Held) -> Iterator[tuple[str, Slot]]:
    """Where every atom of a target tensor lies in its memory. Offsets and strides count elements, not bytes."""
    memory = held.memory
    dtype = BY_TORCH[str(memory.dtype).removeprefix("torch.")].name
    buffer = Buffer("", 0, memory.numel(), held.name)
    for piece in held.pieces:
        hi = tuple(map(min, piece.hi, held.named.geometry.shape))
        if any(a >= b for a, b in zip(piece.lo, hi, strict=True)):
            continue
        offset = sum(a * s for a, s in zip(piece.at, memory.stride(), strict=True))
        yield from slots_in(held.named, piece.lo, hi, buffer, offset, tuple(memory.stride()), dtype)


def _zero_padding(held: Held) -> int:
    """Set rows beyond the true vocabulary to zero; returns their bytes."""
    d, filled = held.named.geometry.pad_dim, 0
    for piece in held.pieces if d >= 0 else ():
        true = held.named.geometry.shape[d]
        first = max(piece.lo[d], true)
        if first < piece.hi[d]:
            rows = held.memory.narrow(d, piece.at[d] + first - piece.lo[d], piece.hi[d] - first)
            rows.zero_()
            filled += rows.numel() * rows.element_size()
    return filled


def _copy_slot(
    ckpt: Checkpoint, files: Files, atom: str, slot: Slot, memory: torch.Tensor, limit: int, counter: _Count
) -> None:
    """Read one box of an atom into the live tensor, a chunk at a time."""
    import torch

    source = next(iter(copies_of(ckpt.slots[atom]).values()))
    dtype = source[0].dtype
    view = torch.as_strided(memory, slot.box.sizes, slot.strides, memory.storage_offset() + slot.offset)
    for part in chunks(slot.box.sizes, BY_NAME[dtype].size, limit):
        box = Box(_plus(part.lo, slot.box.lo), _plus(part.hi, slot.box.lo))
        data = gather(files, source, box)
        region = view[tuple(slice(a, b) for a, b in zip(part.lo, part.hi, strict=True))]
        region.copy_(_tensor(cast(data, dtype, slot.dtype), memory.dtype))
        counter.add(data.nbytes)


def _plus(a: Ints, b: Ints) -> Ints:
    return tuple(x + y for x, y in zip(a, b, strict=True))


_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""torch knows the unsigned types of these sizes only in part; the bits are the same."""


def _tensor(data: Array, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.from_numpy(data.view(_SIGNED[data.itemsize])).view(dtype)
