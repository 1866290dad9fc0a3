"""An opened checkpoint: what its files hold, said in atoms.

`open_checkpoint` reads headers, finds the family's table, matches every name and shape against it, and turns what it
found into slots. Nothing of a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..mappings import FAMILIES, table
from ..mappings.schema import AXES, Atom, Row, Table
from .dtypes import BY_NAME
from .errors import ConfigError, NotACheckpoint, Problems, SourceError, UnknownFamily
from .layout import Named, View, slots_in
from .remote import mounts
from .roots import best_root, group_of, unwrap
from .scaled import VALUES
from .sidefiles import find_hf, read_config
from .slots import Ints, Scale, Slot, row_major, tiles
from .workdir import JOURNAL

ALTERNATE = 1 << 16
"""Copies of an atom that stand under another name are numbered from here on (a stored tied head, an MTP copy)."""


@dataclass
class Checkpoint:
    """A checkpoint that was opened, or a plan's view of one.

    found    what the format's reader saw
    config   the model's `config.json`; `config_from` says where it came from
    table    the family's table; `view` its rows for this format, with the model's sizes
    slots    atom name → every home of it; `atoms` atom name → (atom, shape)
    drops    stored names that are left behind → why
    left_out atoms that the user left behind with `drop`
    meter    counts what is fetched, where it lies elsewhere
    dialect  how the tensors are written down: forms, root, padded vocabulary, mesh
    """

    found: Any
    config: dict[str, Any]
    config_from: str
    table: Table
    view: View
    atoms: dict[str, tuple[Atom, Ints]] = field(default_factory=dict)
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    drops: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dialect: dict[str, Any] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    left_out: frozenset[str] = frozenset()
    meter: mounts.Meter | None = None

    @property
    def format(self) -> str:
        return self.found.format

    @property
    def path(self) -> Path | str:
        """Where it lies: a path, or the URL with its commit. `found.root` is the directory that stands for it."""
        return mounts.named(self.found.root)

    def fetched(self) -> dict[str, int]:
        """Bytes, requests and retries since it was opened; empty for one that lies on this machine."""
        return self.meter.report() if self.meter is not None else {}

    def load_into(self, target: Any, mesh: Any = None, rank: int = 0, **options: Any) -> Any:
        """Fill a module or a state dict in place, reading only what this rank needs; see `loading.load_into`."""
        from .loading import load_into

        return load_into(self, target, mesh, rank, **options)

    def read(self, name: str, dtype: str | None = None) -> Any:
        """One tensor, whole, by its stored name or as an atom; see `loading.read`."""
        from .loading import read

        return read(self, name, dtype)

    def check(self) -> Checkpoint:
        """Raise SourceError with everything that is wrong; return self when nothing is."""
        self.problems.raise_as(SourceError, f"{self.path} ({self.format}) cannot be used:")
        return self

    def dtypes(self) -> dict[str, str]:
        """Element type of every atom (of its first home)."""
        return {name: slots[0].dtype for name, slots in self.slots.items()}


def family_of(config: Mapping[str, Any], given: str | None = None) -> Table:
    """The table for a config. Raises UnknownFamily, listing the known ones."""
    name = given or str(config.get("model_type", ""))
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownFamily(
            f"There is no table for model_type {name!r}." if name else "config.json has no model_type.",
            hint=f"Known families: {known}. A new one is one file in mappings/; see CONTRIBUTING.md.",
        )
    return table(name)


def sizes(family: Table, config: Mapping[str, Any], where: str) -> dict[str, int]:
    """The model's sizes. Raises ConfigError naming the field that is missing or no number."""
    try:
        dims = family.dims(config)
    except KeyError as error:
        raise ConfigError(
            f"{where}: the field {error.args[0]!r} is missing; the family {family.name} needs it."
        ) from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"{where}: a size is no sensible number: {error}") from None
    _check_sizes(family, dims, where)
    if dims["n"] % dims["g"]:
        raise ConfigError(f"{where}: {dims['n']} attention heads do not divide into {dims['g']} KV groups.")
    return dims


_LARGEST = {"layers": 10_000, "mtp": 100, "e": 100_000}
_MAY_BE_ZERO = {"f", "mtp", "tied", "e", "m", "a", "s", "q_lora", "moe_first"}


def _check_sizes(family: Table, dims: Mapping[str, int], where: str) -> None:
    """Sizes that no model has end here, and not in a table of 10⁸ layers."""
    problems = Problems()
    for name, size in dims.items():
        smallest = 0 if name in _MAY_BE_ZERO or "_" in name or "." in name else 1
        largest = _LARGEST.get(name, 1 << 40)
        if not smallest <= size <= largest:
            problems.add(AXES.get(name, name), f"is {size}; between {smallest} and {largest} was expected")
    if not dims.get("moe_step", 1):
        problems.add("decoder_sparse_step", "is 0")
    problems.raise_as(ConfigError, f"{where}: sizes that the family {family.name} cannot have:")


Matched = tuple[Named, Any, int]
"""A tensor of the view, the `Stored` that holds it, and its copy number."""


def match_names(view: View, family: Table, found: Any, problems: Problems) -> tuple[list[Matched], dict[str, str], str]:
    """Give every stored tensor its meaning. Returns matches, drops (name → reason) and the root that was removed."""
    scales = block_scales(found, problems)
    plain = {t.name: unwrap(t.name) for t in found.tensors}
    root = best_root(plain.values(), lambda n: view.resolve(n, ())[0] is not None)
    matched: list[Matched] = []
    drops: dict[str, str] = {}
    for stored in found.tensors:
        if stored.name in scales:
            continue
        name = plain[stored.name]
        inside = name.removeprefix(root)
        named, fault = view.resolve(inside, stored.shape) if name.startswith(root) else (None, "is outside the weights")
        if named is not None:
            if fault:
                problems.add(stored.name, fault)
            else:
                matched.append((named, stored, 0))
            continue
        reason = group_of(name) or dropped(family, inside)
        if reason:
            drops[stored.name] = reason
        else:
            problems.add(stored.name, fault, "not a tensor of this family; is model_type right?")
    for name, kind in found.others.items():
        drops[name] = group_of(unwrap(name)) or f"no tensor ({kind})"
    return matched, drops, root


SCALES = ("_scale_inv", "_scale")
"""Suffixes of a weight's block scales: DeepSeek's, and the same under Quark's name. Both multiply."""

BLOCK = 128
"""Rows and columns to one factor where the config does not say (`quantization_config.weight_block_size`)."""


def block_scales(found: Any, problems: Problems) -> dict[str, Any]:
    """Tensors that are another's block scales, by name. Their weights are told of them (`Stored.scale`)."""
    by_name = {t.name: t for t in found.tensors}
    scales: dict[str, Any] = {}
    for n, weight in enumerate(found.tensors):
        if not weight.dtype.startswith("F8_"):
            continue
        scale = next((by_name[weight.name + s] for s in SCALES if weight.name + s in by_name), None)
        if scale is None:
            problems.add(weight.name, f"is {weight.dtype} without scales", f"no {weight.name}{SCALES[0]} is stored")
            continue
        blocks = tuple(-(-length // BLOCK) for length in weight.shape)
        if len(weight.shape) != 2 or scale.shape != blocks or len(scale.boxes) != 1:
            problems.add(scale.name, f"has shape {list(scale.shape)}; blocks of {BLOCK} × {BLOCK} make {list(blocks)}")
        scales[scale.name] = scale
        found.tensors[n] = replace(weight, scale=scale)
    return scales


def dropped(family: Table, name: str) -> str | None:
    """The table's reason to leave a name behind, if it has one."""
    for pattern, reason in family.drops:
        if re.fullmatch(pattern, name):
            return reason
    return None


def lay_down(matched: Iterable[Matched], slots: dict[str, list[Slot]]) -> None:
    """Turn matched tensors into slots. An atom's homes under several names become numbered copies."""
    homes: dict[str, list[tuple[str, str]]] = {}
    for named, stored, copy in matched:
        key = (named.name, named.row.place)
        for atom, slot in _slots(named, stored, copy):
            known = homes.setdefault(atom, [key])
            if key not in known:
                known.append(key)
            base = known.index(key) * ALTERNATE
            if base:
                slot = replace(slot, copy=base + copy)
            slots.setdefault(atom, []).append(slot)


def _slots(named: Named, stored: Any, copy: int) -> Iterator[tuple[str, Slot]]:
    if stored.scale is not None:
        yield from scaled_slots(named, stored, copy)
        return
    size = BY_NAME[stored.dtype].size
    for box in stored.boxes:
        hi = tuple(map(min, box.hi, named.geometry.shape))
        if any(a >= b for a, b in zip(box.lo, hi, strict=True)):
            continue  # padding only
        strides = box.strides or row_major(tuple(b - a for a, b in zip(box.lo, box.hi, strict=True)), size)
        yield from slots_in(named, box.lo, hi, box.buffer, 0, strides, stored.dtype, copy)


def scaled_slots(named: Named, stored: Any, copy: int) -> Iterator[tuple[str, Slot]]:
    """Slots of a block-scaled matrix: bytes as they are stored, values as bfloat16."""
    source, (box,) = stored.scale, stored.boxes
    strides = row_major(stored.shape, 1)
    places = {p.atom.name.format(i=named.layer, e=named.expert): p for p in named.geometry.places}
    for atom, slot in slots_in(named, box.lo, box.hi, box.buffer, 0, strides, VALUES, copy):
        place = places[atom]
        rows, cols = (
            tuple(s if d == dim else 0 for s, d in zip(place.stride, place.dim, strict=True)) for dim in (0, 1)
        )
        buffer = source.boxes[0].buffer
        scale = Scale(buffer, source.shape, source.dtype, stored.dtype, (BLOCK, BLOCK), rows, cols, place.base)  # type: ignore[arg-type]
        yield atom, replace(slot, scale=scale)


def check_total(ckpt: Checkpoint) -> None:
    """Every atom of the model must have a home, whole. Missing ones and holes join the problems."""
    for name, (_, shape) in ckpt.atoms.items():
        held = ckpt.slots.get(name)
        if not held:
            ckpt.problems.add(name, "no stored tensor holds it", _missing_hint(ckpt, name))
            continue
        first = [s for s in held if s.copy == min(x.copy for x in held)] if held[-1].copy != held[0].copy else held
        if not tiles([s.box for s in first], shape):
            volume = sum(s.box.volume for s in first)
            total = 1
            for length in shape:
                total *= length
            ckpt.problems.add(name, f"{volume} of its {total} elements are stored ({first[0].buffer.name})")


def _missing_hint(ckpt: Checkpoint, name: str) -> str:
    if name != "head":
        return f"{wanted_name(ckpt.view, name)} is missing"
    return (
        f"{wanted_name(ckpt.view, name)} is missing and the config says that the head is not tied to the embedding; "
        'if it is, set "tie_word_embeddings": true in config.json'
    )


def wanted_name(view: View, atom: str) -> str:
    """The stored name under which a reader would expect an atom."""
    template = re.sub(r"(?<=\.)\d+(?=\.)", "{}", atom)
    for r in view.rows:
        for a in r.atoms:
            if re.sub(r"\{\w\}", "{}", a.name) == template:
                numbers = [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", atom)]
                ids = dict(zip(re.findall(r"\{(\w)\}", a.name), numbers, strict=False))
                layer = ids.get("i", -1)
                if view.exists(r, layer if r.indices or layer >= 0 else -1):
                    return r.name.format(i=layer, j=layer - view.dims["layers"], e=ids.get("e", -1))
    return atom


RowTest = Callable[[Row], bool]


def find_config(
    found: Any, hf_config: Path | None, derive: Callable[[Any], tuple[dict[str, Any], str] | None]
) -> tuple[dict[str, Any], str]:
    """The model's config: given by hand, travelling with the checkpoint, or derived from Megatron's arguments."""
    if hf_config is not None:
        place = find_hf(hf_config)
        if place is None:
            raise ConfigError(
                f"{hf_config}: no config.json there.", hint="--hf-config wants a directory with a config.json."
            )
        found.hf = place
    if found.hf is not None:
        return read_config(found.hf), mounts.shown(found.hf / "config.json")
    try:
        derived = derive(found)
    except ValueError as error:
        raise ConfigError(
            f"{found.root} ({found.format}) has no config.json. {error}.",
            hint="Pass --hf-config DIR, a directory with the model's config.json.",
        ) from None
    if derived is not None:
        return derived
    raise ConfigError(
        f"{found.root} ({found.format}) has no config.json, and nothing from which to derive one.",
        hint="Pass --hf-config DIR, a directory with the model's config.json (no weights are needed).",
    )


def not_a_checkpoint(path: Path, formats: Iterable[str]) -> NotACheckpoint:
    """The error for a path that no format knows, saying what is there instead."""
    if not path.exists():
        return NotACheckpoint(f"{path}: there is no such file or directory.")
    found = (p.name for p in path.iterdir() if p.name != JOURNAL) if path.is_dir() else (path.name,)
    names = sorted(found)[:8]
    return NotACheckpoint(
        f"{path} is none of the formats {', '.join(formats)}.", hint=f"It holds: {', '.join(names) or 'nothing'}."
    )
