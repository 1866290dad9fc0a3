"""State directories as files: names, the marker that makes one complete, which is the latest, which go.

A directory is written under another name (`step-000012.partial`), and renamed when its marker is on disk. One that is
removed or replaced is renamed first, so at every moment a name without suffix is a whole state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...converter.errors import CorruptFile, NotACheckpoint, Problems, SourceError, TargetError
from ...converter.execute import ALGORITHM
from ...converter.sidefiles import read_json
from ...converter.workdir import sync_file

SCHEMA = 1
MARKER, TRAINER, CONFIG, DCP, RNG = "COMPLETE", "trainer.json", "config.yaml", "dcp", "rng"
PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"

_STEP = re.compile(r"step-\d{6,}")
_AWAY = re.compile(rf"(step-\d{{6,}}){re.escape(REPLACED)}")
_LEFT = re.compile(rf"step-\d{{6,}}({re.escape(PARTIAL)}|{re.escape(DELETED)})")


@dataclass(frozen=True)
class Marker:
    """What `COMPLETE` says. `serial` counts the saves of a run: a resumed run may save an earlier step later."""

    step: int
    serial: int
    files: Mapping[str, tuple[int, str]]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def encode(marker: Marker) -> bytes:
    """The bytes of the marker."""
    files = {name: list(entry) for name, entry in sorted(marker.files.items())}
    head = {"schema": SCHEMA, "step": marker.step, "serial": marker.serial, "digest": ALGORITHM}
    return (json.dumps(head | {"files": files}, indent=1) + "\n").encode()


def read_marker(path: Path) -> Marker:
    """The marker of a state directory. Raises NotACheckpoint or CorruptFile saying why it is none."""
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: there is no such directory.", hint="Is the path right?")
    unfinished = path.name.endswith((PARTIAL, DELETED))
    if unfinished or not (path / MARKER).is_file():
        unfinished = unfinished or (path / DCP).is_dir()
        what = "a save that was cut short" if unfinished else "no training state"
        raise NotACheckpoint(
            f"{path} is {what}: it has no {MARKER}, or not its own name yet.",
            hint="Give a step directory that is complete, or the run's root.",
        )
    try:
        raw = read_json(path / MARKER)
        schema = raw["schema"]
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in raw["files"].items()}
        marker = Marker(int(raw["step"]), int(raw["serial"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path / MARKER}: is no marker of a training state: {error!r}.") from None
    if schema != SCHEMA:
        raise SourceError(
            f"{path}: has schema {schema!r}; this version reads {SCHEMA}.", hint="Use the version that saved it."
        )
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise CorruptFile(f"{path / MARKER}: names files outside of the directory.")
    return marker


def check_files(path: Path, marker: Marker, digests_of: Iterable[str] = ()) -> None:
    """Every file must be there with its size, those of `digests_of` with their content. Raises CorruptFile."""
    problems = Problems()
    wanted = set(digests_of)
    for name, (size, digest) in marker.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            problems.add(name, "is missing")
        elif found != size:
            problems.add(name, f"has {found} bytes, {size} were saved")
        elif name in wanted and (now := digest_of(file)) != digest:
            problems.add(name, f"has another content than was saved ({ALGORITHM} {now}, expected {digest})")
    problems.raise_as(CorruptFile, f"{path} is damaged:", "Resume from another step.")


def digest_of(file: Path) -> str:
    """Content digest of a file."""
    h = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            h.update(block)
    return h.hexdigest()


# ------------------------------------------------------------------------------------------------ a run's root


def complete(root: Path) -> list[tuple[Path, Marker]]:
    """Every complete state of a run, the last saved last. One that was moved aside by a replacement that was killed
    counts as long as its name is free."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        away = _AWAY.fullmatch(path.name)
        named = away is not None and not (root / away[1]).exists()
        if (named or _STEP.fullmatch(path.name)) and (path / MARKER).is_file():
            try:
                found.append((path, read_marker(path)))
            except SourceError:
                continue  # not one that this version could load
    return sorted(found, key=lambda item: (item[1].serial, item[1].step))


def latest(root: str | Path) -> Path | None:
    """The state that was saved last and is whole, or None."""
    found = complete(Path(root))
    return found[-1][0] if found else None


def resolve(path: str | Path) -> Path:
    """A state directory, given it or the root of a run. Raises NotACheckpoint where there is none."""
    path = Path(path)
    if (path / MARKER).is_file() or not path.is_dir():
        return path
    return latest(path) or path


def settle(target: Path) -> None:
    """Finish what a kill between two renames left, and clear away unfinished saves beside the target."""
    for path in list(target.parent.iterdir()):
        away = _AWAY.fullmatch(path.name)
        name = away[1] if away else target.name if path.name == target.name + REPLACED else None
        if name is not None and path.with_name(name).exists():
            shutil.rmtree(path)
        elif name is not None:
            os.rename(path, path.with_name(name))
    for path in list(target.parent.iterdir()):
        ours = _LEFT.fullmatch(path.name) or path.name == target.name + PARTIAL
        if ours and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def check_replaceable(target: Path) -> None:
    """Raise TargetError unless the name is free, an empty directory, or a state of ours."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise TargetError(f"{target} is in the way: no directory.", hint="Choose another path.")
    if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise TargetError(f"{target} is in the way, and no training state.", hint="Choose another path.")


def publish(partial: Path, target: Path) -> None:
    """The state appears under its name; one that had it before goes only then."""
    sync_tree(partial)
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    sync_file(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` states that were saved last; returns those that went."""
    gone = [path for path, _ in complete(root)[:-keep]]
    for path in gone:
        away = path.with_name(path.name + DELETED)
        os.rename(path, away)
        shutil.rmtree(away)
    return gone


def sync_tree(path: Path) -> None:
    """Every directory of a tree on disk; its files are already."""
    for directory in [path, *(p for p in path.rglob("*") if p.is_dir())]:
        sync_file(directory)


def write_file(path: Path, data: bytes) -> tuple[int, str]:
    """A small file, on disk; returns its size and digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    sync_file(path)
    return len(data), xxhash.xxh3_128(data).hexdigest()


def json_bytes(value: Any, about: str) -> bytes:
    """JSON text. Raises TargetError naming the value that is none."""
    try:
        return (json.dumps(value, indent=1) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{about} cannot be saved as JSON: {error}.", hint="Give plain numbers, texts, lists, dicts."
        ) from None
