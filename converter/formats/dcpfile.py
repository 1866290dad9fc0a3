"""torch distributed checkpoints (DCP): which bytes of which file hold which box of which tensor.

A checkpoint is a pickle `.metadata` (torch/distributed/checkpoint/metadata.py) and `.distcp` files (filesystem.py), in
which each entry is a torch file of its own. Megatron-Core writes the same, with fields of its own that we skip.
Everything that is wrong with a directory is found and raised together; no entry is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

from ..dtypes import BY_NAME
from ..errors import CorruptFile, NotACheckpoint, Problem, Problems, SourceError
from ..remote.mounts import ensure
from . import pickles
from .dcp_boxes import cover_problem
from .dcp_write import encode_metadata
from .pickle_values import Opaque
from .torch_tensors import torch_dtype

__all__ = ["METADATA", "DcpChunk", "DcpIndex", "DcpObject", "DcpTensor", "encode_metadata", "read"]

METADATA = ".metadata"


class DcpChunk(NamedTuple):
    """A box of a tensor, and the torch file that holds it: `length` bytes at `offset` of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class DcpObject(NamedTuple):
    """An entry that is no tensor: what `torch.save` made of some Python object."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A whole tensor, and the boxes that it is stored as; they cover it, each element once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[DcpChunk]


@dataclass(slots=True)
class DcpIndex:
    """What a checkpoint holds, under the names that it uses.

    `planner_data` maps a flattened name to its path in the state dict that was saved, where the saver kept it.
    `mcore_shapes` are the true shapes of flattened optimizer tensors that Megatron-Core stored in another one; versions
    up to 0.15 noted them as `mcore_data[name]["nd_reformulated_orig_global_shape"]`.
    `skipped` are the names that the caller did not want. `warnings` hold what is odd but hurts nothing.
    """

    path: Path
    tensors: dict[str, DcpTensor]
    objects: dict[str, DcpObject]
    planner_data: dict[str, tuple[Any, ...]] | None
    mcore_shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]
    skipped: list[str] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def read(directory: str | Path, also: Sequence[str | Path] = (), only: Callable[[str], bool] | None = None) -> DcpIndex:
    """The index of a checkpoint; `also` are further directories over which its files are spread.

    Names for which `only` says no (an optimizer's, say) are not looked at: they, and the files that hold nothing else,
    may be damaged or missing.
    """
    roots = [Path(directory), *map(Path, also)]
    return _Reader(roots, only).index()


class _Reader:
    """Collects the entries of one checkpoint, and what is wrong with them."""

    def __init__(self, roots: list[Path], only: Callable[[str], bool] | None) -> None:
        self.roots = roots
        self.only = only
        self.skipped: list[str] = []
        self.reach: dict[str, int] = {}
        self.problems = Problems()
        self.files: dict[str, Path | None] = {}
        self.needed: dict[str, int] = {}
        self.held: dict[str, list[str]] = {}

    def index(self) -> DcpIndex:
        path = self._metadata_path()
        metadata = self._metadata(path)
        storage = self._storage(metadata)
        entries = metadata.get("state_dict_metadata")
        if type(entries) is not dict:
            raise CorruptFile(f"{path} has no state_dict_metadata", hint="It was not written by torch's checkpointing.")
        tensors: dict[str, DcpTensor] = {}
        objects: dict[str, DcpObject] = {}
        for name, entry in entries.items():
            if type(name) is str and not self._wanted(name):
                self.skipped.append(name)
                continue
            try:
                self._entry(name, entry, storage, tensors, objects)
            except (TypeError, ValueError) as error:
                self.problems.add(name if type(name) is str else f"a {type(name).__name__}", str(error)[:300])
        self._check_files()
        self.problems.raise_as(
            CorruptFile,
            f"{path.parent} is not a complete checkpoint",
            hint="Fetch or copy the files again; name further directories that hold some of them with --also DIR.",
        )
        files = {name: file for name, file in self.files.items() if file is not None}
        return DcpIndex(
            path=self.roots[0],
            tensors=tensors,
            objects=objects,
            planner_data=_planner_data(metadata.get("planner_data")),
            mcore_shapes=_mcore_shapes(metadata.get("mcore_data")),
            files=files,
            skipped=self.skipped,
            warnings=list(self._stale()),
        )

    def _wanted(self, name: str) -> bool:
        return self.only is None or self.only(name)

    def _metadata_path(self) -> Path:
        for root in self.roots:
            if (root / METADATA).is_file():
                return root / METADATA
        folders = [root for root in self.roots if root.is_dir()]
        strays = sum(1 for root in folders for _ in root.glob("*.distcp"))
        found = f", only {strays} .distcp files" if strays else ""
        hint = "Is the path right?"
        if any(True for root in folders for _ in root.glob("__*" + METADATA)):
            hint = "Each rank saved for itself (no_dist or use_collectives=False); load it in torch and save it as one."
        elif strays:
            hint = "It is written last: the save was cut short, or it lies on another node (name that with --also DIR)."
        raise NotACheckpoint(f"{self.roots[0]} has no {METADATA}{found}", hint=hint)

    def _metadata(self, path: Path) -> Opaque:
        ensure(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from None
        found = pickles.load(data, str(path), check_depth=False)
        if type(found) is not Opaque or type(found.state) is not dict:
            raise CorruptFile(f"{path} holds no checkpoint's metadata", hint="It was not written by torch.")
        return found

    def _storage(self, metadata: Opaque) -> dict[Any, tuple[str, int, int]]:
        """Where each entry lies, by name, or by name and offsets for a tensor's chunks."""
        found = metadata.get("storage_data")
        if type(found) is not dict:
            raise CorruptFile(f"{self.roots[0]}/{METADATA} has no storage_data", hint="It was not written by torch.")
        out: dict[Any, tuple[str, int, int]] = {}
        for key, value in found.items():
            try:
                name, offsets = _text(_state(key), "fqn"), _state(key).get("offset")
                self._note_reach(_state(value))
                if not self._wanted(name):
                    continue
                place = self._place(name, _state(value))
                index = name if offsets is None else (name, _extents(offsets))
            except (TypeError, ValueError) as error:
                self.problems.add(METADATA, f"has a damaged storage entry: {error}")
                continue
            if out.setdefault(index, place) != place:
                self.problems.add(name, f"the same part of it is stored twice, in {out[index][0]} and in {place[0]}")
        return out

    def _note_reach(self, info: dict[Any, Any]) -> None:
        """How far a file's entries reach, whoever wants them: what lies beyond is odd."""
        file = _text(info, "relative_path")
        end = info["offset"] + info["length"] if _natural(info.get("offset")) and _natural(info.get("length")) else 0
        self.reach[file] = max(self.reach.get(file, 0), end)

    def _place(self, name: str, info: dict[Any, Any]) -> tuple[str, int, int]:
        file, offset, length = _text(info, "relative_path"), info.get("offset"), info.get("length")
        if not _natural(offset) or not _natural(length):
            raise ValueError(f"{name[:200]} has no plain offset and length")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name[:200]} is stored through stream extensions (compression, say), which are not read")
        return file, offset, length

    def _entry(
        self,
        name: Any,
        entry: Any,
        storage: dict[Any, tuple[str, int, int]],
        tensors: dict[str, DcpTensor],
        objects: dict[str, DcpObject],
    ) -> None:
        if type(name) is not str or type(entry) is not Opaque:
            raise ValueError("is not described as torch describes tensors and objects")
        if entry.name == "BytesStorageMetadata":
            place = storage.get(name)
            if place is None:
                raise ValueError(f"has no place in the storage_data of {METADATA}")
            objects[name] = DcpObject(self._use(name, *place), *place[1:])
        elif entry.name == "TensorStorageMetadata":
            tensors[name] = self._tensor(name, _state(entry), storage)
        else:
            raise ValueError(f"is of the unknown kind {entry.module}.{entry.name}")

    def _tensor(self, name: str, entry: dict[Any, Any], storage: dict[Any, tuple[str, int, int]]) -> DcpTensor:
        dtype = torch_dtype(_properties(entry)[0])
        shape = _extents(entry.get("size"))
        chunks: list[DcpChunk] = []
        for chunk in _list(entry, "chunks"):
            fields = _state(chunk)
            offsets, sizes = _extents(fields.get("offsets")), _extents(fields.get("sizes"))
            place = storage.get((name, offsets))
            if place is None:
                self.problems.add(name, f"its chunk at {list(offsets)} has no place in the storage_data of {METADATA}")
                continue
            if place[2] < math.prod(sizes) * dtype.size:
                self.problems.add(
                    name,
                    f"its chunk at {list(offsets)} needs {math.prod(sizes) * dtype.size} bytes, {place[2]} are stored",
                )
            chunks.append(DcpChunk(offsets, sizes, self._use(name, *place), place[1], place[2]))
        wrong = cover_problem(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        if wrong:
            self.problems.add(name, wrong)
        if dtype.name not in BY_NAME:
            self.problems.add(name, f"has the type {dtype.torch}, which is not converted")
        return DcpTensor(dtype.name, shape, chunks)

    def _use(self, name: str, file: str, offset: int, length: int) -> Path:
        """Note that `name` needs these bytes, and say where the file is, if anywhere."""
        self.needed[file] = max(self.needed.get(file, 0), offset + length)
        self.held.setdefault(file, []).append(name)
        if file not in self.files:
            self.files[file] = self._find(file)
        return self.files[file] or self.roots[0] / file

    def _find(self, file: str) -> Path | None:
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or "\0" in file:
            raise ValueError(f"is stored in {file[:200]!r}, outside of the checkpoint")
        return next((root / file for root in self.roots if (root / file).is_file()), None)

    def _check_files(self) -> None:
        for file, found in self.files.items():
            if found is None:
                self.problems.add(file, f"is missing; it holds {_some(self.held[file])}")
                continue
            size = found.stat().st_size
            if size < self.needed[file]:
                self.problems.add(str(found), f"is truncated: expected {self.needed[file]} bytes or more, found {size}")

    def _stale(self) -> Iterator[Problem]:
        for root in self.roots:
            for path in sorted(root.glob("__*_*.distcp")):
                if path.name not in self.reach:
                    yield Problem(str(path), f"is not named in {METADATA}", "left over from another save; ignored")
        for file, found in self.files.items():
            surplus = found.stat().st_size - self.reach[file] if found is not None else 0
            if surplus > 0:
                yield Problem(str(found), f"is {surplus} bytes longer than its entries reach", "appended to?")


def _state(value: Any) -> dict[Any, Any]:
    if type(value) is not Opaque or type(value.state) is not dict:
        raise ValueError("a record without fields")
    return value.state


def _properties(entry: dict[Any, Any]) -> tuple[Any, ...]:
    """TensorProperties pickles as a tuple that begins with the dtype, in every version."""
    properties = entry.get("properties")
    if type(properties) is not Opaque or type(properties.state) is not tuple or not properties.state:
        raise ValueError("has no properties")
    return properties.state


def _text(fields: dict[Any, Any], key: str) -> str:
    value = fields.get(key)
    if type(value) is not str:
        raise ValueError(f"a record without {key}")
    return value


def _list(fields: dict[Any, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if type(value) is not list:
        raise ValueError(f"has no {key}")
    return value


def _planner_data(value: Any) -> dict[str, tuple[Any, ...]] | None:
    """Names with their paths. A planner may keep anything here; what is not this is not passed on."""
    if type(value) is not dict or not all(type(path) is tuple and type(name) is str for name, path in value.items()):
        return None
    return value if all(type(step) in (str, int) for path in value.values() for step in path) else None


def _mcore_shapes(value: Any) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for name, notes in value.items() if type(value) is dict else ():
        shape = notes.get("nd_reformulated_orig_global_shape") if type(notes) is dict else None
        if type(name) is str and type(shape) is tuple and all(_natural(extent) for extent in shape):
            out[name] = shape
    return out


def _natural(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _extents(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple:
        raise ValueError("has a shape or offsets that are none")
    for extent in value:
        if type(extent) is not int or not 0 <= extent < 1 << 62:
            raise ValueError("has a shape or offsets that are no plain, non-negative integers")
    return value


def _some(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 3} more" if len(unique) > 3 else ""
    return ", ".join(unique[:3]) + more
