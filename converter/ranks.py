"""Some ranks' files only: `convert --rank 3` on one node, `--rank 4` on the next.

Such a directory is no checkpoint before the other ranks' directories were copied into it. Each of its ranks has a
manifest of its own, which says what the whole needs and from which conversion it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, MeshError, SourceError
from .formats.base import TargetFile
from .human import parse_ranks, ranks_text
from .mesh import Mesh
from .sidefiles import MANIFEST, above, rank_manifests, read_json


def check_wanted(ranks: Sequence[int], form: str, mesh: Mesh) -> tuple[int, ...]:
    """The ranks that a user wants, in order. Raises ConfigError where there are no ranks, MeshError for one that the
    mesh does not have."""
    if form == "hf":
        raise ConfigError(
            "hf has no ranks: its files are cut by size, not by who holds what.",
            hint="Drop --rank, or write a format with ranks.",
        )
    if not ranks:
        raise ConfigError("No ranks were named.", hint="None, or no --rank at all, means all of them.")
    world = mesh.fsdp_world if form in ("dcp", "archon") else mesh.world
    beyond = [rank for rank in ranks if not 0 <= rank < world]
    if beyond:
        raise MeshError(
            f"There is no rank {ranks_text(beyond)} in this mesh ({mesh}); it has {world}, counted from 0.",
            hint="Data-parallel replicas hold the same weights and count once.",
        )
    return tuple(sorted(set(ranks)))


def files_of(ranks: Iterable[int], files: Sequence[TargetFile]) -> list[TargetFile]:
    """The files of these ranks."""
    wanted = set(ranks)
    return [file for file in files if file.rank in wanted]


def without_files(ranks: Iterable[int], files: Sequence[TargetFile]) -> str:
    """What to tell of ranks that have no file of their own; empty when each has one."""
    holders = {file.rank for file in files}
    absent = set(ranks) - holders
    if not absent:
        return ""
    verb = "has no file of its own" if len(absent) == 1 else "have no files of their own"
    return f"rank {ranks_text(absent)} {verb}: all weights are in the files of rank {ranks_text(holders)}"


# ------------------------------------------------------------------------------------------------ reading it again


def check_ranks(path: Path) -> None:
    """Refuse a directory that holds some ranks' files only, or ranks of different conversions.

    Raises SourceError that says which ranks are there and which are missing.
    """
    place = next((place for place in (path, *above(path)) if rank_manifests(place)), None)
    if place is None:
        return
    found = {file.name: _read(file) for file in rank_manifests(place)}
    whole = place / MANIFEST
    if whole.is_file():
        found[whole.name] = _read(whole)
    _check_same(place, found)
    held = {manifest["rank"] for name, manifest in found.items() if name != MANIFEST}
    wanted = {rank for name, manifest in found.items() if name != MANIFEST for rank in parse_ranks(manifest["ranks"])}
    missing = wanted - held
    if missing and not whole.is_file():
        raise SourceError(
            f"{place} holds the files of rank {ranks_text(held)} only; the files of rank {ranks_text(missing)} are "
            "missing.",
            hint="Copy the directories that `convert --rank` made for them into this one.",
        )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        manifest = read_json(file)
        if file.name != MANIFEST:
            parse_ranks(manifest["ranks"])
            int(manifest["rank"])
        if not isinstance(manifest["atoms"], dict):
            raise ValueError("its atoms are none")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{file}: is no manifest: {error}.", hint="Copy it again.") from None
    return manifest


def _check_same(place: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """All of one source and plan, and what several ranks hold must be equal."""
    (first, head), *others = found.items()
    content: dict[str, tuple[str, Any]] = {}
    for name, manifest in ((first, head), *others):
        same = all(manifest.get(key) == head.get(key) for key in ("plan", "source", "format", "digest"))
        differing = [
            atom for atom, entry in manifest["atoms"].items() if content.setdefault(atom, (name, entry))[1] != entry
        ]
        if not same or differing:
            what = f"{differing[0]} has other values" if same else "another source, mesh or other options"
            raise SourceError(
                f"{place}: {first} and {name} are from different conversions: {what}.",
                hint="Convert all ranks from the same source, with the same options and version.",
            )
