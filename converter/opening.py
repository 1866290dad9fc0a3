"""Opens a checkpoint of any format: detection, config, table, names, slots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..mappings import FAMILIES, table
from ..mappings.megatron_args import config_from_args
from ..mappings.schema import Row, Table, skeleton
from ..mappings.torch_dist import INDEXED, global_rows
from .checkpoint import (
    Checkpoint,
    Matched,
    check_total,
    dropped,
    family_of,
    find_config,
    lay_down,
    match_names,
    not_a_checkpoint,
    sizes,
)
from .errors import ConfigError, NotACheckpoint, SourceError, printable
from .formats import dcp, hf, mp_rank, torch_dist
from .formats.base import Found
from .formats.dcpfile import read as read_index
from .layout import View, atoms_of
from .manifest import read as read_manifest
from .ranks import check_ranks
from .remote.mounts import Meter, anything_mounted, forget, mount
from .roots import ROOTS, group_of, unwrap

FORMATS = ("hf", "torch_dist", "mp_rank", "dcp", "archon")
ALIASES = {"megatron": "torch_dist"}


def format_name(text: str) -> str:
    """The format that a user means. Raises ConfigError for a name that is none."""
    name = ALIASES.get(text, text)
    if name not in FORMATS:
        raise ConfigError(
            f"There is no format {text!r}.", hint=f"Formats: {', '.join(FORMATS)} (megatron = torch_dist)."
        )
    return name


@cache
def naming_keys() -> dict[str, frozenset[str]]:
    """Every tensor name that the tables know, by naming: what tells two DCP directories apart."""
    keys: dict[str, set[str]] = {"dcp": set(), "archon": set(), "torch_dist": set()}
    for family in FAMILIES:
        t = table(family)
        keys["dcp"] |= {r.key for r in t.hf}
        keys["archon"] |= {r.key for r in t.archon}
        for stacked in (True, False):
            keys["torch_dist"] |= {r.key for r in global_rows(t.megatron, stacked=stacked)}
    return {name: frozenset(found) for name, found in keys.items()}


def naming_of(names: Sequence[str]) -> str | None:
    """Whose names these are: `dcp` (Hugging Face's), `archon`, `torch_dist` (Megatron's), or None."""
    known = naming_keys()
    scores: Counter[str] = Counter()
    for name in names:
        plain = unwrap(name)
        for root in ROOTS:
            if plain.startswith(root):
                key = skeleton(plain.removeprefix(root))[0]
                scores.update(n for n, keys in known.items() if key in keys)
    return scores.most_common(1)[0][0] if scores else None


def detect(path: Path) -> str | None:
    """The format of a directory, from what is in it."""
    if torch_dist.detect(path):
        return "torch_dist"
    if mp_rank.detect(path):
        return "mp_rank"
    if dcp.detect(path):
        return "dcp"
    return "hf" if hf.detect(path) else None


def read_headers(path: Path, also: Sequence[Path] = ()) -> Found:
    """What is on disk, whatever the format. Raises NotACheckpoint when it is none."""
    try:
        return _read_headers(path, also)
    except OSError as error:
        raise SourceError(f"{error.filename or path}: cannot be read: {error.strerror or error}.") from error


def _read_headers(path: Path, also: Sequence[Path]) -> Found:
    if "\0" in str(path) or any(len(part.encode(errors="surrogateescape")) > 255 for part in path.parts):
        raise NotACheckpoint(f"{str(path)!r} is no path.")
    _check_tracker(path)
    check_ranks(path)
    name = detect(path)
    if name == "torch_dist":
        return torch_dist.read_checkpoint(path, also)
    if name == "mp_rank":
        return mp_rank.read_checkpoint(path)
    if name == "hf":
        return hf.read_checkpoint(path)
    if name is None:
        raise not_a_checkpoint(path, FORMATS)
    where = dcp.detect(path) or path
    naming = naming_of(list(read_index(where, also, only=dcp.is_weight).tensors)) or "dcp"
    if naming == "torch_dist":
        return torch_dist.read_checkpoint(where, also)
    return dcp.read_checkpoint(path, naming, also)


def _check_tracker(path: Path) -> None:
    """A run's root whose tracker names a checkpoint that is not there, or none that is read."""
    if not (path / torch_dist.TRACKER).is_file():
        return
    named = torch_dist.tracked(path)
    if named is None:
        raise NotACheckpoint(
            f"{path / torch_dist.TRACKER} names no iteration; a number or `release` was expected.",
            hint="Give the path of the checkpoint itself.",
        )
    if not named.is_dir():
        others = ", ".join(sorted(p.name for p in path.glob("iter_*"))) or "none"
        raise NotACheckpoint(
            f"{path / torch_dist.TRACKER} names {named.name}, which is not there.",
            hint=f"Checkpoints here: {others}. Give the path of one of them.",
        )
    if (named / torch_dist.BACKEND).is_file():
        _check_backend(named)
    if detect(named) is None:
        raise NotACheckpoint(f"{named} (named by {path / torch_dist.TRACKER}) holds no checkpoint that is read.")


def _check_backend(where: Path) -> None:
    try:
        torch_dist.read_backend(where)
    except ValueError as error:
        raise SourceError(f"{where / torch_dist.BACKEND}: cannot be read as JSON: {error}.") from None


def open_checkpoint(
    path: str | Path,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    also: Sequence[str | Path] = (),
    tie: bool | None = None,
    drop: Sequence[str] = (),
) -> Checkpoint:
    """Open a checkpoint: read its headers and say where every atom of the model lies. No tensor is read.

    path       directory (or a single weights file) in any format, here or elsewhere (`hf://org/name@revision`, `s3://…`)
    hf_config  directory with the model's `config.json`, for checkpoints that carry none
    family     table to use instead of the config's `model_type`
    also       further directories over which a DCP's files are spread
    tie        whether the head is the embedding, against the config
    drop       regular expressions of stored names to leave behind

    What is wrong with the tensors is collected in `problems`; call `check()` to raise it. Raises NotACheckpoint,
    ConfigError, UnknownFamily, UnsafePickle or CorruptFile when it cannot even come that far.
    """
    root, spread = mount(path), [mount(p) for p in also]
    given = mount(hf_config) if hf_config else None
    meter = Meter([root, *spread, *([given] if given else [])])
    for directory in spread:
        if not directory.is_dir():
            raise ConfigError(f"--also {directory}: there is no such directory.")
    found = _read_anew(root, spread)
    config, origin = find_config(found, given, config_from_args)
    known = family_of(config, family)
    dims = sizes(known, config, origin)
    ckpt = Checkpoint(found, config, origin, known, View((), dims), notes=list(found.notes), problems=found.problems)
    ckpt.meter = meter
    if origin.startswith("derived"):
        ckpt.notes.append(f"no config.json: {origin}")
    if tie is not None:
        _set_tie(ckpt, tie)
    _describe(ckpt, drop)
    if anything_mounted():
        ckpt.notes[:] = [*map(printable, ckpt.notes), *meter.notes()]
    return ckpt


def _read_anew(root: Path, also: Sequence[Path]) -> Found:
    """Headers; those of a remote checkpoint are kept for the next time, unless something is wrong with them."""
    try:
        found = read_headers(root, also)
    except SourceError:
        forget([root, *also])
        raise
    if found.problems:
        forget([root, *also])
    return found


def _set_tie(ckpt: Checkpoint, tie: bool) -> None:
    ckpt.view.dims["tied"] = int(tie)  # type: ignore[index]
    if bool(ckpt.config.get("tie_word_embeddings", False)) != tie:
        ckpt.config["tie_word_embeddings"] = tie
        ckpt.dialect.setdefault("config_changes", {})["tie_word_embeddings"] = tie


def _describe(ckpt: Checkpoint, drop: Sequence[str]) -> None:
    """Match names, settle what only the tensors can tell (MTP, ties), lay the slots down, check that all is there."""
    dropped = _take_out(ckpt, drop)
    dims = dict(ckpt.view.dims)
    _count_mtp(ckpt, dims, bool(dropped))
    matched = _match(ckpt, dims)
    if any(named.row.form == "stored_tie" for named, _, _ in matched) and _untied(matched):
        ckpt.notes.append("the config ties the head to the embedding, but both are stored and differ: both are kept")
        _set_tie(ckpt, False)
        dims["tied"] = 0
        matched = _match(ckpt, dims)
    if any(stored.scale is not None for _, stored, _ in matched):
        ckpt.dialect["quantised"] = "fp8, blocks of 128 × 128"
        ckpt.dialect.setdefault("config_changes", {})["quantization_config"] = None
        ckpt.notes.append("FP8 weights are read as the bfloat16 values that they stand for (dequantised in fp32)")
    _refuse_surplus_rows(ckpt, matched)
    ckpt.atoms = ckpt.view.atoms()
    lay_down(matched, ckpt.slots)
    _leave_out(ckpt, dropped)
    _dialect(ckpt, matched)
    if not ckpt.found.incomplete:
        check_total(ckpt)


def _take_out(ckpt: Checkpoint, patterns: Sequence[str]) -> list[Any]:
    """Remove the stored tensors that the user wants to leave behind. Raises ConfigError for a pattern that is none, or
    that no name matches."""
    taken: list[Any] = []
    for pattern in patterns:
        try:
            matches = re.compile(pattern).fullmatch
        except re.error as error:
            raise ConfigError(f"--drop {pattern!r} is no regular expression: {error}.") from None
        hit = [t for t in ckpt.found.tensors if matches(t.name) or matches(unwrap(t.name))]
        if not hit:
            raise ConfigError(
                f"--drop {pattern!r}: no tensor's whole name matches it.", hint="`inspect` shows the names."
            )
        taken += hit
    gone = {id(t) for t in taken}
    ckpt.found.tensors = [t for t in ckpt.found.tensors if id(t) not in gone]
    return taken


def _leave_out(ckpt: Checkpoint, dropped: Sequence[Any]) -> None:
    """Atoms that stood in dropped tensors only are no longer part of the model, nor are those that were left behind
    when this checkpoint was made."""
    gone: set[str] = set()
    for stored in dropped:
        ckpt.drops[stored.name] = "asked for"
        named, _ = ckpt.view.resolve(unwrap(stored.name).removeprefix(ckpt.dialect.get("root", "")), stored.shape)
        gone |= {a for a in atoms_of(named) if a not in ckpt.slots} if named is not None else set()
    manifest = read_manifest(ckpt.found.where) or {}
    said = manifest.get("left_out") if manifest.get("format") == ckpt.format else None
    earlier = {str(a) for a in said if a not in ckpt.slots} if isinstance(said, list) else set()
    ckpt.left_out = frozenset((gone | earlier) & ckpt.atoms.keys())
    if ckpt.left_out and len(ckpt.left_out) == len(ckpt.atoms):
        raise ConfigError("--drop leaves nothing of the model.")
    if ckpt.left_out:
        some = ", ".join([*sorted(ckpt.left_out)[:4], *(["…"] if len(ckpt.left_out) > 4 else [])])
        ckpt.notes.append(f"not a whole model: {len(ckpt.left_out)} atoms are left out ({some})")
    for atom in ckpt.left_out:
        del ckpt.atoms[atom]


def _count_mtp(ckpt: Checkpoint, dims: dict[str, int], dropped: bool) -> None:
    """The number of MTP layers is what is stored, whatever the config says: transformers announces layers that it does
    not save, and trainers share one layer between several steps. The target's config says what there is; only a config
    that came announcing layers without any stays as it is, byte for byte."""
    said, layers = dims["mtp"], dims["layers"]
    view = _view(ckpt, dims)
    found = 0
    for stored in ckpt.found.tensors:
        key, numbers = skeleton(unwrap(stored.name))
        for row in _rows_under_any_root(view, key):
            if numbers and "j" in row.indices:
                found = max(found, numbers[0] + 1)
            elif numbers and row.indices[:1] == ("i",) and ckpt.format != "mp_rank":
                found = max(found, numbers[0] + 1 - layers)
    has_rows = any(a.name.endswith("mtp.project") for r in ckpt.table.hf for a in r.atoms)
    if found == said or not has_rows or found > 100:
        return
    dims["mtp"] = found
    if found == 0 and not dropped:
        ckpt.notes.append("the config announces MTP layers, none are stored: the model is taken without them")
        return
    ckpt.notes.append(f"{found} MTP layers are stored, the config says {said}: the config of the target says {found}")
    ckpt.config["num_nextn_predict_layers"] = found
    ckpt.dialect.setdefault("config_changes", {})["num_nextn_predict_layers"] = found


def _rows_under_any_root(view: View, key: str) -> list[Row]:
    for root in ROOTS:
        if key.startswith(root) and (rows := view.rows_of(key.removeprefix(root))):
            return rows
    return []


def _refuse_surplus_rows(ckpt: Checkpoint, matched: list[Matched]) -> None:
    """Only Megatron pads a vocabulary. Elsewhere rows beyond the config's mean that one of both is wrong; and
    Megatron's arguments, where they say the true size, must say the same."""
    if ckpt.format in ("torch_dist", "mp_rank"):
        said, size = (ckpt.found.args or {}).get("vocab_size"), ckpt.view.dims["v"]
        if isinstance(said, int) and said > size:
            what = f"says vocab_size {said}, the config says {size}: rows would be cut off"
            ckpt.problems.add(str(ckpt.found.where), what, "which is right? --hf-config DIR gives another config")
        return
    for named, stored, _ in matched:
        pad = named.geometry.pad_dim
        if pad >= 0 and stored.shape[pad] > named.geometry.shape[pad]:
            what = f"has {stored.shape[pad]} rows, the config's vocab_size is {named.geometry.shape[pad]}"
            ckpt.problems.add(stored.name, what, "correct vocab_size, or trim the tensor")


def _view(ckpt: Checkpoint, dims: dict[str, int]) -> View:
    t: Table = ckpt.table
    if ckpt.format in ("hf", "dcp"):
        return View(t.hf, dims)
    if ckpt.format == "archon":
        return View(t.archon, dims)
    if ckpt.format == "mp_rank":
        return View(t.megatron, dims)
    stacked = not any(skeleton(s.name)[0].startswith(INDEXED) for s in ckpt.found.tensors)
    ckpt.dialect["layers"] = "stacked" if stacked else "indexed"
    return View(global_rows(t.megatron, stacked=stacked), dims)


def _match(ckpt: Checkpoint, dims: dict[str, int]) -> list[Matched]:
    ckpt.view = view = _view(ckpt, dims)
    ckpt.drops.clear()
    ckpt.problems.found[:] = ckpt.problems.found[: ckpt.dialect.setdefault("_read_problems", len(ckpt.problems.found))]
    family = ckpt.table
    if ckpt.format != "mp_rank":
        matched, drops, root = match_names(view, family, ckpt.found, ckpt.problems)
        ckpt.drops.update(drops)
        ckpt.dialect["root"] = root
        return matched
    try:
        matched, unmatched, mesh = mp_rank.match(ckpt.found, view)
    except SourceError as error:
        ckpt.problems.add(str(ckpt.path), error.what, error.hint)
        return []
    ckpt.dialect["mesh"] = str(mesh)
    for stored, fault in unmatched:
        reason = group_of(stored.name) or dropped(family, unwrap(stored.name))
        if reason:
            ckpt.drops[stored.name] = reason
        else:
            ckpt.problems.add(stored.name, fault or "the family's table has no tensor of this name on this rank")
    ckpt.drops.update({name: group_of(name) or f"no tensor ({kind})" for name, kind in ckpt.found.others.items()})
    return matched


def _untied(matched: list[Matched]) -> bool:
    """Whether a stored head and the embedding that it should equal differ in any byte."""
    by_form: dict[bool, Any] = {}
    for named, stored, _ in matched:
        if any(a.name == "embed" for a in named.row.atoms) and named.row.place != "mtp_first":
            by_form.setdefault(named.row.form == "stored_tie", stored)
    a, b = by_form.get(False), by_form.get(True)
    if a is None or b is None or len(a.boxes) != len(b.boxes):
        return a is not None and b is not None
    return (a.dtype, a.shape) != (b.dtype, b.shape) or not all(
        hf.same_bytes(x.buffer, y.buffer) for x, y in zip(a.boxes, b.boxes, strict=True)
    )


def _dialect(ckpt: Checkpoint, matched: list[Matched]) -> None:
    """How the tensors are written down, for the report and for the way back."""
    ckpt.dialect.pop("_read_problems", None)
    forms = Counter(named.row.form for named, _, _ in matched if named.row.form)
    ckpt.dialect["forms"] = sorted(forms)
    for named, stored, _ in matched:
        if named.row.pad and named.geometry.pad_dim >= 0:
            ckpt.dialect["vocab"] = {"true": ckpt.view.dims["v"], "stored": stored.shape[named.geometry.pad_dim]}
            break
