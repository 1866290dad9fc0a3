"""What a directory is: its format and dialect, the model in it, how it is stored, and everything that is wrong with it.

Headers are read, no tensor is. Nothing that a source can have wrong makes `inspect` fail, as long as its format is
known: what is wrong is listed, and what could be found out is told all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .dtypes import BY_NAME, FLOATS, parse
from .errors import ConvertError, NotACheckpoint, Problem
from .formats.base import Found, Stored
from .opening import detect, open_checkpoint, read_headers
from .remote.mounts import mount, named, shown
from .scaled import VALUES
from .sidefiles import collect


@dataclass
class Held:
    """Tensors of one element type: how many, elements and bytes (padding and replicas included)."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, stored: Stored) -> None:
        elements = sum(prod(hi - lo for lo, hi in zip(box.lo, box.hi, strict=True)) for box in stored.boxes)
        self.tensors += 1
        self.elements += elements
        self.bytes += elements * BY_NAME[stored.dtype].size


@dataclass
class Left:
    """Stored names that are no weights of this model, for one reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.examples) < 5:
            self.examples.append(name)


@dataclass
class Inspection:
    """What `inspect` found.

    path, where   what was asked for, and the directory in it that holds the weights (an `iter_*` of the root, say)
    format        its format; `because` names the files and tensor names that tell it from the others
    family        the table that fits, or None; `config_from` where the config came from
    model         sizes by name: layers, hidden, heads, …
    parameters    elements of all atoms, tied ones counted once; None when the model is not known
    dtypes        element type → what of the weights is stored in it
    quantization  what the config or the trainer's arguments say about it, apart from how the tensors are stored
    dialect       how the tensors are written down: forms, root, padded vocabulary, mesh, stacked or indexed layers
    left          reason → stored names that are no weights of this model
    problems      everything that stands in the way of using it; empty when it can be converted
    """

    path: Path | str
    where: Path | str
    format: str
    because: list[str]
    family: str | None = None
    config_from: str | None = None
    model: dict[str, int] = field(default_factory=dict)
    atoms: int = 0
    parameters: int | None = None
    dtypes: dict[str, Held] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    dialect: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    files: int = 0
    file_bytes: int = 0
    largest_files: list[tuple[str, int]] = field(default_factory=list)
    side_files: list[str] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    left: dict[str, Left] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it can be converted as it is."""
        return not self.problems

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "path": str(self.path),
            "where": str(self.where),
            "format": self.format,
            "because": self.because,
            "family": self.family,
            "config_from": self.config_from,
            "model": self.model,
            "atoms": self.atoms,
            "parameters": self.parameters,
            "dtypes": {name: vars(held) for name, held in self.dtypes.items()},
            "quantization": self.quantization,
            "dialect": self.dialect,
            "facts": self.facts,
            "files": self.files,
            "file_bytes": self.file_bytes,
            "largest_files": [{"name": name, "bytes": size} for name, size in self.largest_files],
            "side_files": self.side_files,
            "not_carried": self.not_carried,
            "left": {reason: vars(left) for reason, left in self.left.items()},
            "notes": self.notes,
            "problems": [{"about": p.about, "what": p.what, "hint": p.hint} for p in self.problems],
            "ok": self.ok,
        }


def inspect(
    path: str | Path,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    also: Sequence[str | Path] = (),
    tie: bool | None = None,
    drop: Sequence[str] = (),
) -> Inspection:
    """Find out what a checkpoint is. The arguments are those of `open_checkpoint`.

    Raises NotACheckpoint when it is none of the known formats; whatever else is wrong joins `problems`.
    """
    try:
        ckpt = open_checkpoint(path, hf_config=hf_config, family=family, also=also, tie=tie, drop=drop)
    except NotACheckpoint:
        raise
    except ConvertError as error:
        return _half_opened(mount(path), [mount(p) for p in also], error)
    return inspect_checkpoint(ckpt)


def inspect_checkpoint(ckpt: Checkpoint) -> Inspection:
    """The same for a checkpoint that is open already."""
    result = _from_found(ckpt.found, set(ckpt.drops))
    result.family, result.config_from = ckpt.table.name, ckpt.config_from
    result.model = _model(ckpt.view.dims)
    held = [shape for name, (_, shape) in ckpt.atoms.items() if name in ckpt.slots]
    result.atoms, result.parameters = len(held), sum(map(prod, held))
    result.quantization = _quantization(ckpt.config, ckpt.found.args, result.dtypes)
    if any(slot.scale is not None for slots in ckpt.slots.values() for slot in slots[:1]):
        result.quantization["read_as"] = VALUES
    result.dialect = {k: v for k, v in ckpt.dialect.items() if not k.startswith("_") and v not in ("", [], {})}
    for name, reason in ckpt.drops.items():
        result.left.setdefault(reason, Left()).add(name)
    result.notes = [*ckpt.notes, *_dtype_note(ckpt.config, result.dtypes)]
    result.problems = list(ckpt.problems.found)
    return result


def _half_opened(path: Path, also: Sequence[Path], error: ConvertError) -> Inspection:
    """What can be told of a checkpoint whose config, family or files are not as they should be."""
    problems = list(error.problems) or [Problem(shown(path), error.what, error.hint)]
    try:
        found = read_headers(path, also)
    except NotACheckpoint:
        raise
    except ConvertError:
        format_name = detect(path) or "unknown"
        return Inspection(named(path), named(path), format_name, _because(path, format_name, ()), problems=problems)
    result = _from_found(found, set())
    result.notes = list(found.notes)
    known = {(p.about, p.what) for p in problems}
    result.problems = problems + [p for p in found.problems.found if (p.about, p.what) not in known]
    return result


def _from_found(found: Found, dropped: set[str]) -> Inspection:
    result = Inspection(
        named(found.root), named(found.where), found.format, _because(found.where, found.format, found.tensors)
    )
    for stored in found.tensors:
        if stored.name not in dropped:
            result.dtypes.setdefault(stored.dtype, Held()).add(stored)
    result.dtypes = dict(sorted(result.dtypes.items(), key=lambda item: -item[1].bytes))
    result.facts = {k: v for k, v in found.facts.items() if k != "coordinates"}
    result.facts |= _trained_on(found.args)
    result.files, result.file_bytes = len(found.files), sum(found.files.values())
    largest = sorted(found.files.items(), key=lambda item: (-item[1], item[0]))[:5]
    result.largest_files = [(_relative(name, found.root), size) for name, size in largest]
    if found.hf is not None:
        files, result.not_carried = collect(found.hf)
        result.side_files = sorted(files)
    return result


def _relative(name: str, root: Path) -> str:
    path = Path(name)
    return str(path.relative_to(root)) if path.is_relative_to(root) else name


# ------------------------------------------------------------------------------------------------ why this format


def _because(where: Path, format_name: str, tensors: Iterable[Stored]) -> list[str]:
    """What tells the format from those that look like it."""
    if not where.is_dir():
        return [where.name]
    names = sorted(p.name for p in where.iterdir())
    shards = [n for n in names if n.endswith(".distcp")]
    seen = [n for n in (".metadata", "metadata.json", "common.pt") if n in names]
    if shards:
        seen.append(f"{len(shards)} .distcp files")
    if format_name == "hf":
        weights = [n for n in names if n.endswith((".safetensors", ".bin"))]
        index = [n for n in names if n.endswith(".index.json")]
        return [*index, weights[0] if len(weights) == 1 else f"{len(weights)} files of weights"]
    if format_name == "mp_rank":
        return [f"{sum(n.startswith('mp_rank_') for n in names)} mp_rank_* directories"]
    if format_name in ("dcp", "archon"):
        seen.append("neither metadata.json nor common.pt, as Megatron would write")
        example = next(iter(tensors), None)
        whose = {"dcp": "Hugging Face's names", "archon": "Archon's names"}[format_name]
        seen += [f"{whose} ({example.name})"] if example else []
    return seen


# ------------------------------------------------------------------------------------------------ the model

_SIZES = {
    "layers": "layers",
    "mtp": "mtp_layers",
    "h": "hidden",
    "n": "heads",
    "g": "kv_groups",
    "d": "head_dim",
    "f": "ffn",
    "e": "experts",
    "m": "expert_ffn",
    "s": "shared_expert_ffn",
    "v": "vocabulary",
    "tied": "tied_head",
}


def _model(dims: Mapping[str, int]) -> dict[str, int]:
    """The model's sizes under readable names; what it does not have is left out."""
    return {text: dims[name] for name, text in _SIZES.items() if dims.get(name) or name in ("layers", "tied")}


def _trained_on(args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The mesh of the run that saved it, by Megatron's arguments."""
    if not args:
        return {}
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    mesh = {short: args[name] for short, name in names.items() if isinstance(args.get(name), int)}
    return {"saved_on": mesh} if mesh else {}


def _quantization(
    config: Mapping[str, Any], args: Mapping[str, Any] | None, dtypes: Mapping[str, Held]
) -> dict[str, Any]:
    """Quantisation is what was done to the values, the element type how they are stored; users mix the two up."""
    found: dict[str, Any] = {}
    stored = ", ".join(dtypes)
    given = config.get("quantization_config")
    if isinstance(given, Mapping):
        found["config"] = dict(given)
        found["says"] = f"config.json announces {given.get('quant_method', 'a quantisation')}; stored is {stored}"
    trained = {
        str(k): v if isinstance(v, bool | int | float | str) else str(v)
        for k, v in (args or {}).items()
        if str(k).startswith(("fp8", "fp4")) and v
    }
    if (args or {}).get("fp8") or (args or {}).get("fp4"):
        how = "fp8" if (args or {}).get("fp8") else "fp4"
        found["training"] = trained
        found["says"] = f"trained with {how} compute; what is stored, and what an export will hold, is {stored}"
    return found


def _dtype_note(config: Mapping[str, Any], dtypes: Mapping[str, Held]) -> list[str]:
    """The config's dtype is a wish; the files decide."""
    said = config.get("dtype") or config.get("torch_dtype")
    floats = [name for name in dtypes if name in FLOATS]
    if not isinstance(said, str) or said == "auto" or not floats or config.get("quantization_config"):
        return []
    try:
        wanted = parse(said).name
    except ValueError:
        return [f"config.json says dtype {said!r}, which is no element type"]
    if wanted == floats[0]:
        return []
    return [f"config.json says dtype {said}, most of the weights are stored as {floats[0]}; the files count"]
