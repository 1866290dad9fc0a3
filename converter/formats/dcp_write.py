"""The `.metadata` of a torch distributed checkpoint, written without torch.

The pickle of `torch.distributed.checkpoint.metadata.Metadata` as torch 2.6 and later write it: the same classes, fields
and order of fields (`torch/distributed/checkpoint/metadata.py`, `filesystem.py`). Names and words that repeat are put
into the memo first, so that a chunk costs a few dozen bytes and no call of a pickler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..dtypes import BY_NAME
from .pickle_write import integer, integers

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py CURRENT_DCP_VERSION

Chunk = tuple[tuple[int, ...], tuple[int, ...], str, int, int]


class TensorEntry(NamedTuple):
    """A tensor and its chunks, each `(offsets, sizes, file relative to the checkpoint, offset, length)`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Chunk]


class ObjectEntry(NamedTuple):
    """An entry that is no tensor: the torch file of `length` bytes at `offset` of `file`."""

    name: str
    file: str
    offset: int
    length: int


class _Memo:
    """Opcodes of values that repeat: written once, recalled afterwards. Protocol 4 numbers the memo by itself."""

    def __init__(self) -> None:
        self.count = 0
        self.codes: dict[Any, bytes] = {}

    def keep(self, key: Any, code: bytes) -> bytes:
        """`code` the first time, the recall of its value ever after."""
        known = self.codes.get(key)
        if known is not None:
            return known
        index = self.count
        self.count += 1
        self.codes[key] = b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little")
        return code + b"\x94"

    def text(self, value: str) -> bytes:
        return self.codes.get(value) or self.keep(value, _text(value))

    def name(self, module: str, name: str) -> bytes:
        key = (module, name)
        return self.codes.get(key) or self.keep(key, self.text(module) + self.text(name) + b"\x93")

    def size(self, values: tuple[int, ...]) -> bytes:
        """`torch.Size(values)`."""
        key = ("Size", values)
        return self.codes.get(key) or self.keep(key, self.name("torch", "Size") + integers(values) + b"\x85R")

    def call(self, module: str, name: str, argument: str | int) -> bytes:
        """`module.name(argument)`, made once and shared."""
        key = (module, name, argument)
        known = self.codes.get(key)
        if known is not None:
            return known
        code = self.name(module, name)
        code += self.text(argument) if isinstance(argument, str) else integer(argument)
        return self.keep(key, code + b"\x85R")


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    if len(raw) < 256:
        return b"\x8c" + bytes((len(raw),)) + raw
    return b"X" + len(raw).to_bytes(4, "little") + raw


def encode_metadata(
    tensors: Iterable[TensorEntry | tuple[str, str, tuple[int, ...], Iterable[Chunk]]],
    objects: Iterable[ObjectEntry | tuple[str, str, int, int]] = (),
    planner_data: Mapping[str, tuple[Any, ...]] | None = None,
) -> bytes:
    """The bytes of `.metadata` for these entries.

    `planner_data` maps each name to its path in the state dict, as `DefaultSavePlanner` notes it; loaders that build
    the state dict themselves (`dcp_to_torch_save`) unflatten by it. Megatron-Core has none.
    """
    memo = _Memo()
    entries = [(name, dtype, shape, list(chunks)) for name, dtype, shape, chunks in tensors]
    others = list(objects)
    parts = [b"\x80\x04", memo.name(_METADATA, "Metadata"), b")\x81}("]
    parts += [memo.text("state_dict_metadata"), b"}("]
    for name, dtype, shape, chunks in entries:
        _describe_tensor(parts, memo, name, dtype, shape, chunks)
    for name, *_ in others:
        parts += [memo.text(name), memo.name(_METADATA, "BytesStorageMetadata"), b")\x81"]
    parts += [b"u", memo.text("planner_data")]
    _write_planner_data(parts, memo, planner_data)
    parts += [memo.text("storage_data"), b"}("]
    for name, _, _, chunks in entries:
        for index, (offsets, _, file, offset, length) in enumerate(chunks):
            _place(parts, memo, (name, offsets, index), (file, offset, length))
    for name, file, offset, length in others:
        _place(parts, memo, (name, None, None), (file, offset, length))
    parts += [b"u", memo.text("storage_meta"), memo.name(_METADATA, "StorageMeta"), b")\x81}("]
    for key in ("checkpoint_id", "save_id", "load_id"):
        parts += [memo.text(key), b"N"]
    parts += [memo.text("modules"), b"]ub", memo.text("version"), memo.text(VERSION), b"ub."]
    return b"".join(parts)


def _describe_tensor(
    parts: list[bytes], memo: _Memo, name: str, dtype: str, shape: tuple[int, ...], chunks: list[Chunk]
) -> None:
    """`name: TensorStorageMetadata(properties, size, chunks)`."""
    parts += [
        memo.text(name),
        memo.name(_METADATA, "TensorStorageMetadata"),
        b")\x81}(",
        memo.text("properties"),
        memo.name(_METADATA, "TensorProperties"),
        b")\x81(",  # the state: dtype, layout, requires_grad, memory format, pin_memory
        memo.name("torch", BY_NAME[dtype].torch),
        memo.call("torch.serialization", "_get_layout", "torch.strided"),
        b"\x89",
        memo.call(_METADATA, "_MEM_FORMAT_ENCODING", 0),
        b"\x89tb",
        memo.text("size"),
        memo.size(shape),
        memo.text("chunks"),
        b"](",
    ]
    for offsets, sizes, *_ in chunks:
        parts += [
            memo.name(_METADATA, "ChunkStorageMetadata"),
            b")\x81}(",
            memo.text("offsets"),
            memo.size(offsets),
            memo.text("sizes"),
            memo.size(sizes),
            b"ub",
        ]
    parts.append(b"eub")


def _write_planner_data(parts: list[bytes], memo: _Memo, data: Mapping[str, tuple[Any, ...]] | None) -> None:
    if data is None:
        parts.append(b"N")
        return
    parts.append(b"}(")
    for name, path in data.items():
        parts += [memo.text(name), b"("]
        parts += [memo.text(step) if isinstance(step, str) else integer(step) for step in path]
        parts.append(b"t")
    parts.append(b"u")


def _place(
    parts: list[bytes],
    memo: _Memo,
    key: tuple[str, tuple[int, ...] | None, int | None],
    place: tuple[str, int, int],
) -> None:
    """`MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length)`."""
    name, offsets, index = key
    parts += [memo.name(_METADATA, "MetadataIndex"), b")\x81}(", memo.text("fqn"), memo.text(name), memo.text("index")]
    parts.append(b"N" if index is None else integer(index))
    if offsets is not None:  # left out, not None, for what is no tensor
        parts += [memo.text("offset"), memo.size(offsets)]
    file, offset, length = place
    parts += [
        b"ub",
        memo.name(_FILESYSTEM, "_StorageInfo"),
        b")\x81}(",
        memo.text("relative_path"),
        memo.text(file),
        memo.text("offset"),
        integer(offset),
        memo.text("length"),
        integer(length),
        b"ub",
    ]
