"""Files that `torch.load` reads, laid out before any tensor's bytes exist.

A caller creates the file at its final size, writes `segments`, and then each tensor's bytes at its offset, in any
order and from any process. The container is `zip_layout`'s; the pickle is what `torch.save` makes of the same tree
(torch/serialization.py `_save`, torch/_tensor.py `_reduce_ex_internal`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..dtypes import BY_NAME, DType
from . import zip_layout
from .pickle_write import Emitter, integer, integers, text
from .zip_layout import ALIGNMENT, ZipLayout, lay_out


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a file shall hold. Specs of one `key` share their bytes (tied weights), and must agree.

    Without a key the tensor has its own bytes, and is known by its place in the tree, `model.embedding.weight`.
    """

    dtype: str
    shape: tuple[int, ...]
    key: Hashable = None
    parameter: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].size


@dataclass(frozen=True, slots=True)
class TorchFilePlan:
    """A file of `size` bytes: `segments` with their offsets, and where the bytes of each tensor belong."""

    size: int
    segments: list[tuple[int, bytes]]
    tensors: dict[Hashable, int]
    nbytes: dict[Hashable, int]
    records: dict[Hashable, str]
    layout: ZipLayout


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """One tensor as a file of its own, such as a `.distcp` file holds many of: head, `data_nbytes` bytes, tail.

    `crc_at` are the two places, from the blob's start, where the CRC-32 of the data may be written (4 bytes, little
    endian); they hold zero. A tensor without elements has none.
    """

    head: bytes
    data_nbytes: int
    tail: bytes
    crc_at: tuple[int, ...]

    @property
    def data_offset(self) -> int:
        return len(self.head)

    @property
    def size(self) -> int:
        return len(self.head) + self.data_nbytes + len(self.tail)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor, with torch's way to treat empty dimensions."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def plan(tree: Any, archive: str = "archive", alignment: int = ALIGNMENT) -> TorchFilePlan:
    """Lay out the file that holds `tree`: dicts, lists, tuples, plain values, `Global`, `Opaque`, `TensorSpec`.

    `archive` is the folder inside of the zip; torch takes the file's stem for it.
    """
    storages = _Storages()
    storages.name(tree, ())
    pickle = storages.dump(tree)
    sizes = [(f"data/{index}", spec.nbytes) for index, spec in enumerate(storages.specs.values())]
    layout = lay_out(_records(pickle, sizes, alignment), archive, alignment)
    records = {key: f"data/{index}" for index, key in enumerate(storages.specs)}
    return TorchFilePlan(
        size=layout.size,
        segments=layout.segments,
        tensors={key: layout.offsets[record] for key, record in records.items()},
        nbytes={key: spec.nbytes for key, spec in storages.specs.items()},
        records=records,
        layout=layout,
    )


def patch_crc(plan: TorchFilePlan, crcs: Mapping[Hashable, int]) -> list[tuple[int, bytes]]:
    """The writes that put the CRC-32 of these tensors' bytes where unzip looks for them. torch never looks."""
    return zip_layout.patch_crc(plan.layout, {plan.records[key]: crc for key, crc in crcs.items()})


def _records(pickle: bytes, data: list[tuple[str, int]], alignment: int) -> list[tuple[str, bytes | int]]:
    """The records of a torch file in torch's order. The id is a fingerprint; ours depends on the content alone."""
    digest = hashlib.sha256(pickle + repr(data).encode()).digest()
    identity = f"{int.from_bytes(digest, 'little') % 10**40:040d}"
    return [
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", str(alignment).encode()),
        ("byteorder", b"little"),
        *data,
        ("version", b"3\n"),
        (".data/serialization_id", identity.encode()),
    ]


class _Storages:
    """Numbers the tensors of a tree in the order in which the pickle meets them."""

    def __init__(self) -> None:
        self.specs: dict[Hashable, TensorSpec] = {}
        self.keys: dict[int, Hashable] = {}
        self.unnamed: list[Hashable] = []

    def name(self, value: Any, path: tuple[str, ...]) -> None:
        """Walk the tree as the emitter will, and give each tensor its key."""
        if isinstance(value, TensorSpec):
            self._add(".".join(path) if value.key is None else value.key, value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.name(item, (*path, str(key)))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.name(item, (*path, str(index)))

    def _add(self, key: Hashable, spec: TensorSpec) -> None:
        other = self.specs.setdefault(key, spec)
        if (other.dtype, math.prod(other.shape)) != (spec.dtype, math.prod(spec.shape)):
            raise ValueError(f"two tensors share the key {key!r} but not their size: {other} and {spec}")
        self.unnamed.append(key)

    def dump(self, tree: Any) -> bytes:
        numbers = {key: index for index, key in enumerate(self.specs)}
        order = iter(self.unnamed)

        def write(out: Emitter, spec: TensorSpec) -> None:
            _emit_tensor(out, spec, numbers[next(order)])

        out = Emitter({TensorSpec: write})
        out.emit(tree)
        return out.finish()


def _emit_tensor(out: Emitter, spec: TensorSpec, number: int) -> None:
    """`_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())`, or `_v3` with the dtype behind it."""
    dtype = BY_NAME[spec.dtype]
    untyped = dtype.storage == "UntypedStorage"
    if spec.parameter:
        out.name("torch._utils", "_rebuild_parameter")
    out.name("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
    out.raw(b"((")
    out.emit("storage")
    out.name("torch.storage" if untyped else "torch", dtype.storage)
    out.raw(text(str(number)))
    out.emit("cpu")
    out.raw(integer(spec.nbytes if untyped else math.prod(spec.shape)) + b"tQK\x00")
    out.raw(integers(spec.shape) + integers(contiguous(spec.shape)) + b"\x89")
    _emit_no_hooks(out)
    if untyped:
        out.name("torch", dtype.torch)
    out.raw(b"tR")
    if spec.parameter:
        out.raw(b"\x88")
        _emit_no_hooks(out)
        out.raw(b"\x87R")


def _emit_no_hooks(out: Emitter) -> None:
    out.name("collections", "OrderedDict")
    out.raw(b")R")


@lru_cache(maxsize=4096)
def blob(dtype: str, shape: tuple[int, ...]) -> BlobPlan:
    """The file that `torch.save` makes of one tensor. Equal tensors' plans are one object, so thousands cost little."""
    kind = BY_NAME[dtype]
    nbytes = math.prod(shape) * kind.size
    layout = lay_out(_records(single_pickle(kind, shape), [("data/0", nbytes)], ALIGNMENT))
    (_, head), (_, tail) = layout.segments
    return BlobPlan(head, nbytes, tail, layout.crc_at.get("data/0", ()))


def single_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The pickle of one contiguous tensor, with the memo opcodes exactly as Python's pickler places them."""
    untyped = dtype.storage == "UntypedStorage"
    memo = iter(range(256))

    def put(code: bytes) -> bytes:
        return code + b"q" + bytes((next(memo),))

    def name(module: str, name: str) -> bytes:
        return put(f"c{module}\n{name}\n".encode())

    def extents(values: tuple[int, ...]) -> bytes:
        return put(integers(values)) if values else b")"

    count = math.prod(shape) * (dtype.size if untyped else 1)
    parts = [
        b"\x80\x02",
        name("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2"),
        b"((",
        put(text("storage")),
        name("torch.storage" if untyped else "torch", dtype.storage),
        put(text("0")),
        put(text("cpu")),
        put(integer(count) + b"t"),
        b"QK\x00",
        extents(shape),
        extents(contiguous(shape)),
        b"\x89",
        name("collections", "OrderedDict"),
        put(b")R"),
    ]
    if untyped:
        parts.append(name("torch", dtype.torch))
    parts += [put(b"t"), put(b"R"), b"."]
    return b"".join(parts)
