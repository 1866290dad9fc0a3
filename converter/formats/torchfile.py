"""Files that `torch.save` wrote, read without torch: the tree that they hold, with a reference for each tensor.

A torch file is a zip (caffe2/serialize/inline_container.cc) of `data.pkl`, one record `data/N` per storage, and a few
words about itself (torch/serialization.py `_load`). It may stand alone (`mp_rank_*/model_optim_rng.pt`,
`pytorch_model.bin`, `common.pt`) or inside of a larger file (`.distcp`). No tensor's bytes are read here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..dtypes import DType
from ..errors import CorruptFile, SourceError
from . import pickles
from .pickle_values import Builder, Opaque
from .torch_tensors import DTensorRef, Storage, TensorRef, Tensors
from .torchfile_write import BlobPlan, TensorSpec, TorchFilePlan, blob, contiguous, patch_crc, plan
from .zip_layout import DESCRIPTOR_MAGIC, LOCAL_MAGIC
from .zip_read import Record, Window, data_offset, directory

__all__ = [
    "BlobPlan",
    "DTensorRef",
    "TensorRef",
    "TensorSpec",
    "TorchFilePlan",
    "blob",
    "contiguous",
    "locate",
    "patch_crc",
    "plan",
    "read",
    "stream_bytes",
]

# What torch.save wrote before torch 1.6: a pickle of this number comes first (torch/serialization.py MAGIC_NUMBER).
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TAR = b"ustar"
_AGAIN = "It is truncated or damaged: fetch or copy it again."


def read(
    path: str | Path,
    offset: int = 0,
    length: int | None = None,
    extra: Mapping[tuple[str, str], Builder] | None = None,
) -> Any:
    """The tree in a torch file, or in the torch file that is `length` bytes at `offset` of a larger one.

    Dicts, lists, tuples and plain values are themselves, a tensor is a `TensorRef`, a DTensor a `DTensorRef`, any
    other object an `Opaque`. `extra` allows further names, as in `pickles.load`.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    try:
        window = _window(fd, path, os.fstat(fd).st_size, offset, length)
        return _Reader(window, path).tree(extra or {})
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)


def stream_bytes(value: Any) -> bytes | None:
    """What an `io.BytesIO` in a tree held (Megatron keeps its `_extra_state` so); None for anything else."""
    if type(value) is not Opaque or value.name != "BytesIO":
        return None
    content = value.state[0] if type(value.state) is tuple and value.state else b"".join(value.args[:1])
    return content if type(content) is bytes else None


def _window(fd: int, path: Path, size: int, offset: int, length: int | None) -> Window:
    length = size - offset if length is None else length
    about = str(path) if (offset, length) == (0, size) else f"{path} (bytes {offset} to {offset + length})"
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptFile(
            f"{about} lies beyond the file's end: expected {offset + length} bytes or more, found {size}", hint=_AGAIN
        )
    if length == 0:
        raise CorruptFile(f"{about} is empty", hint="Fetch or copy it again.")
    return Window(fd, offset, length, about, path)


class _Reader(Tensors):
    """Reads one torch file. What is wrong with its tensors is collected, and raised for all of them together."""

    def __init__(self, window: Window, file: Path) -> None:
        super().__init__(file)
        self.window = window
        self._check_magic()
        self.records = self._find_records()

    def tree(self, extra: Mapping[tuple[str, str], Builder] | None = None) -> Any:
        self._check_byteorder()
        about = f"{self.window.about}, data.pkl"
        tree = pickles.load(self._content("data.pkl"), about, {**(extra or {}), **self.builders()}, self.storage)
        self.problems.raise_as(CorruptFile, f"{self.window.about} does not hold what it says", hint=_AGAIN)
        return tree

    def find(self, key: str, dtype: DType, nbytes: int) -> Storage:
        record = self.records.get(f"data/{key}")
        if record is None:
            self.problems.add(f"storage {key}", f"the record data/{key} is missing, expected {nbytes} bytes of {dtype}")
            return Storage(key, dtype, 0, nbytes)
        if record.size != nbytes:
            self.problems.add(f"storage {key}", f"expected {nbytes} bytes of {dtype}, found {record.size}")
        return Storage(key, dtype, self.window.start + data_offset(self.window, record), record.size)

    def _check_magic(self) -> None:
        head = self.window.read(0, min(512, self.window.length))
        if head[:4] == LOCAL_MAGIC:
            return
        if _LEGACY in head[:64] or _TAR in head:
            raise SourceError(
                f"{self.window.about} is in a file format that torch used before version 1.6, which is not read",
                hint="Re-save it once, in Python: torch.save(torch.load('FILE', weights_only=True), 'NEW')",
            )
        raise CorruptFile(
            f"{self.window.about} is no torch file: it begins with {head[:8]!r}, expected {LOCAL_MAGIC!r}",
            hint="If it is a Git LFS pointer or an error page, fetch the real file.",
        )

    def _find_records(self) -> dict[str, Record]:
        """The records by their name inside of the archive's folder, whatever that is called."""
        try:
            records = directory(self.window)
        except CorruptFile:
            _explain_truncation(self.window)
            raise
        roots = [record.name[: -len("data.pkl")] for record in records if record.name.endswith("/data.pkl")]
        if not roots:
            raise CorruptFile(
                f"{self.window.about} is a zip file without a data.pkl",
                hint="It was not written by torch.save; if it is an archive, unpack it.",
            )
        root = min(roots, key=len)
        inside: dict[str, Record] = {}
        for record in records:
            name = record.name.removeprefix(root)
            if name in inside:
                self.problems.add(record.name, "stands twice in the zip directory")
            inside[name] = record
        return inside

    def _content(self, name: str) -> bytes:
        record = self.records[name]
        return self.window.read(data_offset(self.window, record), record.size)

    def _check_byteorder(self) -> None:
        order = self._content("byteorder") if "byteorder" in self.records else b"little"
        if order != b"little":
            raise SourceError(
                f"{self.window.about} was written on a machine of byte order {order[:20]!r}; only little is read",
                hint="Load it with torch.load and save it again on a little-endian machine.",
            )


def _explain_truncation(window: Window) -> None:
    """Raise a better error for a file cut short: its pickle, at the front, tells how large it must have been."""
    tensors = Tensors(Path())
    try:
        at, pickle = _walk(window.read(0, min(window.length, 1 << 26)))
        pickles.load(pickle, window.about, tensors.builders(), tensors.storage)
    except (ValueError, IndexError, struct.error, SourceError):
        return
    needed = at + sum(storage.nbytes for storage in tensors.storages.values())
    if needed > window.length:
        raise CorruptFile(
            f"{window.about} is truncated: its {len(tensors.storages)} storages need more than {needed} bytes, "
            f"found {window.length}",
            hint="Fetch or copy it again.",
        ) from None


_PROBE = 1024
_LOCAL_FIELDS = struct.Struct("<4s2xH14xI2H")


def locate(fd: int, offset: int, length: int, file: Path) -> TensorRef:
    """The one tensor of the torch file that is `length` bytes at `offset` of an open file; the fast way for thousands.

    Reads about a kilobyte: the local headers from the front, without the directory. A blob that looks in any way
    different from what torch writes goes through the whole reader instead.
    """
    try:
        at, pickle = _walk(os.pread(fd, min(_PROBE, length), offset))
        dtype, shape, strides, start, nbytes = _single(pickle)
    except (ValueError, IndexError, OverflowError, OSError, struct.error, SourceError):
        return _locate_slowly(fd, offset, length, file)
    if at + nbytes > length:
        raise CorruptFile(
            f"{file} holds a tensor at byte {offset} that ends at byte {offset + at + nbytes}, "
            f"but its entry ends at byte {offset + length}",
            hint=_AGAIN,
        )
    data = offset + at
    return TensorRef(dtype, shape, strides, file, data + start, (data, nbytes))


def probe(offset: int, length: int) -> tuple[int, int]:
    """The bytes of an entry that `locate` reads."""
    return offset, offset + min(_PROBE, length)


def locate_in(file: Path, offset: int, length: int) -> TensorRef:
    """`locate` in a file that is not open."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return locate(fd, offset, length, file)
    finally:
        os.close(fd)


def confirm(head: bytes, offset: int, ref: TensorRef) -> bool:
    """Whether the entry at `offset` whose first bytes these are, up to its tensor's, holds just this tensor."""
    try:
        at, pickle = _walk(head)
        dtype, shape, strides, start, nbytes = _single(pickle)
    except (ValueError, IndexError, OverflowError, struct.error, SourceError):
        return False
    data = offset + at
    found = TensorRef(dtype, shape, strides, ref.file, data + start, (data, nbytes))
    return found == ref


def _walk(head: bytes) -> tuple[int, bytes]:
    """The pickle in these first bytes of a torch file, and where the data of `data/0` begins."""
    at, pickle = 0, b""
    while True:
        magic, flags, size, name_length, extra_length = _LOCAL_FIELDS.unpack_from(head, at)
        name_at = at + 30
        data = name_at + name_length + extra_length
        name = head[name_at : name_at + name_length]
        if magic != LOCAL_MAGIC:
            raise ValueError("no local header")
        if name.endswith(b"/data/0"):
            return data, pickle
        end = data + size
        if flags & 8:
            end = head.index(DESCRIPTOR_MAGIC, data)
            while int.from_bytes(head[end + 8 : end + 12], "little") != end - data:
                end = head.index(DESCRIPTOR_MAGIC, end + 1)
        if name.endswith(b"/data.pkl"):
            pickle = head[data:end]
        elif name.endswith(b"/byteorder") and head[data:end] != b"little":
            raise ValueError("byte order")
        at = end + 16 if flags & 8 else end


@lru_cache(maxsize=4096)
def _single(pickle: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...], int, int]:
    """Type, shape, strides, first byte and storage size of the one tensor that a pickle describes.

    Every tensor of a model's layers has the same pickle, so few are ever parsed.
    """
    tensors = Tensors(Path())
    found = pickles.load(pickle, "a tensor's pickle", tensors.builders(), tensors.storage)
    if type(found) is not TensorRef or tensors.problems or list(tensors.storages) != ["0"]:
        raise ValueError("not one plain tensor")
    return found.dtype, found.shape, found.strides, found.offset, found.storage[1]


def _locate_slowly(fd: int, offset: int, length: int, file: Path) -> TensorRef:
    window = _window(fd, file, os.fstat(fd).st_size, offset, length)
    found = _Reader(window, file).tree()
    if type(found) is not TensorRef:
        raise CorruptFile(
            f"{window.about} holds a {type(found).__name__} where a tensor was expected",
            hint="Is it the entry of an object, or of a tensor subclass?",
        )
    return found
