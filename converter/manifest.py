"""`areal_manifest.json`: what a target is, where it came from, and a content digest of every atom.

Nothing in it depends on when or where it was made, so that the same conversion gives the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .execute import ALGORITHM
from .human import ranks_text
from .remote.mounts import mounted
from .sidefiles import MANIFEST, RANK_MANIFEST, above, rank_manifests, read_json

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .convert import Planned

SCHEMA = 1


def tool_version() -> str:
    """The installed version of this package."""
    try:
        return version("areal-convert")
    except PackageNotFoundError:
        return "unknown"


def manifests(planned: Planned, digests: Mapping[str, str]) -> dict[str, bytes]:
    """The manifest of what a plan wrote; where only some ranks' files were made, one for each of these ranks, the same
    whoever made it together with which others."""
    entries = {a.key: (a.target_dtype, digests[a.key]) for a in planned.moves.atoms}
    whole = build(planned.source, planned.format, planned.dialect, planned.plan.digest, entries)
    if not planned.ranks:
        return {MANIFEST: encode(whole)}
    every = ranks_text(file.rank for file in planned.target.files)
    result = {}
    for rank in planned.ranks:
        files = {file.name for file in planned.files if file.rank == rank}
        held = {a.key for a in planned.moves.atoms if any(s.buffer.file in files for s in a.target)}
        head = {"rank": rank, "ranks": every, "files": sorted(files)}
        atoms = {key: entry for key, entry in whole["atoms"].items() if key in held}
        result[RANK_MANIFEST.format(rank=rank)] = encode(whole | head | {"atoms": atoms})
    return result


def build(
    source: Checkpoint, target: str, dialect: Mapping[str, Any], plan_digest: str, atoms: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """The manifest of a target. `atoms`: name → (dtype, digest)."""
    earlier = read(source.found.root) or {}
    return {
        "schema": SCHEMA,
        "tool": f"areal-convert {tool_version()}",
        "format": target,
        "family": source.table.name,
        "source": {
            "name": name_of(source.found.root),
            "format": source.format,
            "revision": revision_of(source.found.root),
            "dialect": _mesh_of(source) | {k: v for k, v in source.dialect.items() if not k.startswith("_")},
            "origin": earlier.get("source"),
        },
        "dialect": dict(dialect),
        "plan": plan_digest,
        "digest": ALGORITHM,
        "left_out": sorted(source.left_out),
        "drops": dict(sorted(Counter(source.drops.values()).items())),
        "atoms": {name: list(entry) for name, entry in sorted(atoms.items())},
    }


def _mesh_of(source: Checkpoint) -> dict[str, Any]:
    """The mesh that a source was made for, where only its manifest tells: files of a `torch_dist` are of any mesh."""
    beside = read_beside(source.found.where, source.format) is not None
    dialect = (read(source.found.where) or {}).get("dialect") if beside else None
    mesh = dialect.get("mesh") if isinstance(dialect, dict) else None
    return {"mesh": mesh} if isinstance(mesh, str) else {}


def name_of(path: Path) -> str:
    """A source's name: the directory's, or the repository's (`org/name`), the bucket's with the directory in it."""
    place = mounted(path)
    return place[0].store.name if place is not None else path.resolve().name


def revision_of(path: Path) -> str | None:
    """The commit, when the source is on the Hub, or a snapshot in Hugging Face's cache (`…/snapshots/<commit>`)."""
    place = mounted(path)
    if place is not None:
        return place[0].store.revision
    resolved = path.absolute()
    return resolved.name if resolved.parent.name == "snapshots" else None


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of the file, one atom a line."""
    head = {k: v for k, v in manifest.items() if k != "atoms"}
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in manifest["atoms"].items())
    return f'{text},\n "atoms": {{\n{lines}\n }}\n}}\n'.encode(errors="backslashreplace")


def read_beside(where: Path, form: str) -> dict[str, list[str]] | None:
    """Dtype and digest of every atom as the manifest of these very weights has them, or None.

    Megatron's weights lie in `release/` below it; another iteration that a run saved there later is not meant.
    """
    manifest = read(where)
    if manifest is None or manifest.get("format") != form or manifest.get("digest") != ALGORITHM:
        return None
    if not (where / MANIFEST).is_file() and not rank_manifests(where) and where.name != "release":
        return None
    return {k: v for k, v in manifest["atoms"].items() if isinstance(v, list) and len(v) == 2}


def read(directory: Path) -> dict[str, Any] | None:
    """The manifest in a directory or just above it, or None (also when it is none of ours). Those of single ranks
    count as one together."""
    for place in (directory, *above(directory)):
        for paths in ([place / MANIFEST], rank_manifests(place)):
            found = [manifest for path in paths if (manifest := _read(path)) is not None]
            if found:
                return found[0] | {"atoms": {k: v for manifest in found for k, v in manifest["atoms"].items()}}
    return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        manifest = read_json(path)
    except ValueError:
        return None
    known = path.is_file() and isinstance(manifest, dict) and isinstance(manifest.get("atoms"), dict)
    return manifest if known else None
