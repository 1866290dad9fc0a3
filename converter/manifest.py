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
from .sidefiles import MANIFEST, above, read_json

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

SCHEMA = 1


def tool_version() -> str:
    """The installed version of this package."""
    try:
        return version("areal-convert")
    except PackageNotFoundError:
        return "unknown"


def build(
    source: Checkpoint, target: str, dialect: Mapping[str, Any], plan_digest: str, atoms: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """The manifest of a target. `atoms`: name → (dtype, digest)."""
    earlier = read(source.path) or {}
    return {
        "schema": SCHEMA,
        "tool": f"areal-convert {tool_version()}",
        "format": target,
        "family": source.table.name,
        "source": {
            "name": source.path.resolve().name,
            "format": source.format,
            "revision": revision_of(source.path),
            "dialect": {k: v for k, v in source.dialect.items() if not k.startswith("_")},
            "origin": earlier.get("source"),
        },
        "dialect": dict(dialect),
        "plan": plan_digest,
        "digest": ALGORITHM,
        "left_out": sorted(source.left_out),
        "drops": dict(sorted(Counter(source.drops.values()).items())),
        "atoms": {name: list(entry) for name, entry in sorted(atoms.items())},
    }


def revision_of(path: Path) -> str | None:
    """The commit, when the source is a snapshot in Hugging Face's cache (`…/snapshots/<commit>`)."""
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
    if not (where / MANIFEST).is_file() and where.name != "release":
        return None
    return {k: v for k, v in manifest["atoms"].items() if isinstance(v, list) and len(v) == 2}


def read(directory: Path) -> dict[str, Any] | None:
    """The manifest in a directory or just above it, or None (also when it is none of ours)."""
    for place in (directory, *above(directory)):
        path = place / MANIFEST
        try:
            manifest = read_json(path)
        except ValueError:
            continue
        if path.is_file() and isinstance(manifest, dict) and isinstance(manifest.get("atoms"), dict):
            return manifest
    return None
