"""Strided boxes in and out of files, against numpy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_convert.converter import rawio
from areal_convert.converter.errors import CorruptFile
from areal_convert.converter.rawio import Files, read_box, read_exactly, write_box
from areal_convert.converter.slots import Box, Buffer, Slot, whole

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}
KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

WAYS = {"as it is": (rawio.BLOCK, rawio.SMALL), "rows": (1, 1), "span": (1 << 30, 1 << 30), "mapping": (1 << 30, 0)}
"""The thresholds that lead every box, however small, through one of the three ways of reading."""


@contextmanager
def way(name: str) -> Iterator[None]:
    before = rawio.BLOCK, rawio.SMALL
    rawio.BLOCK, rawio.SMALL = WAYS[name]
    try:
        yield
    finally:
        rawio.BLOCK, rawio.SMALL = before


class Case:
    """A file with a strided tensor somewhere in it, and a box of that tensor."""

    def __init__(self, itemsize: int, sizes: tuple[int, ...], order: list[int], gap: int, begin: int, box: Box) -> None:
        self.itemsize, self.sizes, self.begin, self.box = itemsize, sizes, begin, box
        strides, extent = [0] * len(sizes), itemsize
        for axis in order:  # the innermost first
            strides[axis] = extent
            extent = extent * sizes[axis] + gap * itemsize
        self.strides = tuple(strides)
        self.size = begin + extent + 5
        self.raw = np.random.default_rng(0).integers(0, 256, self.size, dtype=np.uint8)

    def slot(self, file: str) -> Slot:
        head = min(self.begin, 3)  # part of the way in the buffer's begin, part in the slot's offset
        buffer = Buffer(file, self.begin - head, self.size - self.begin + head, "x")
        return Slot(whole(self.sizes), buffer, head, self.strides, DTYPES[self.itemsize])

    def view(self, raw: Any) -> Any:
        """The box, by numpy."""
        tensor = np.ndarray(self.sizes, KINDS[self.itemsize], raw.data, self.begin, self.strides)
        return tensor[(*(slice(a, b) for a, b in zip(*self.box, strict=True)), ...)]  # an array even without axes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else list(reversed(range(len(sizes))))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in sizes]
    box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    return Case(
        draw(st.sampled_from([1, 2, 4, 8])), sizes, list(order), draw(st.integers(0, 2)), draw(st.integers(0, 9)), box
    )


once = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@once
@given(case=cases(), name=st.sampled_from(list(WAYS)), turned=st.booleans())
def test_a_box_is_read_as_numpy_sees_it(case: Case, name: str, turned: bool, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(case.raw.tobytes())
    want = case.view(case.raw)
    out = np.zeros(want.shape[::-1], want.dtype).T if turned else np.zeros(want.shape, want.dtype)
    files = Files(tmp_path)
    with way(name):
        read_box(files, case.slot("f"), case.box, out)
    files.close()
    assert np.array_equal(out, want)


@once
@given(case=cases(), name=st.sampled_from(list(WAYS)), turned=st.booleans())
def test_a_box_is_written_where_numpy_would_and_nothing_beside_it(
    case: Case, name: str, turned: bool, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(case.raw.tobytes())
    want = case.raw.copy()
    target = case.view(want)
    data = (np.arange(target.size) * 37 + 11).astype(target.dtype).reshape(target.shape)
    data = np.asfortranarray(data) if turned else data
    target[...] = data
    files = Files(tmp_path, write=True)
    with way(name):
        write_box(files, case.slot("f"), case.box, data)
    files.close()
    assert (tmp_path / "f").read_bytes() == want.tobytes()


def test_a_slot_that_begins_inside_of_its_atom(tmp_path: Path) -> None:
    """Rows 2 and 3 of an atom of 4, alone in a file; row 3 is asked for."""
    (tmp_path / "f").write_bytes(np.array([[20, 21], [30, 31]], np.uint8).tobytes())
    slot = Slot(Box((2, 0), (4, 2)), Buffer("f", 0, 4, "x"), 0, (2, 1), "U8")
    out = np.zeros((1, 2), np.uint8)
    files = Files(tmp_path)
    read_box(files, slot, Box((3, 0), (4, 2)), out)
    files.close()
    assert out.tolist() == [[30, 31]]


def test_large_boxes_take_the_ways_that_they_are_meant_to(tmp_path: Path) -> None:
    """Real thresholds: long rows, a fine-grained box of a small span, and one of a large span."""
    tensor = np.random.default_rng(1).integers(0, 2**32, (600, 1024), dtype=np.uint32)
    (tmp_path / "f").write_bytes(b"#" * 12 + tensor.tobytes())
    slot = Slot(whole((600, 1024)), Buffer("f", 12, tensor.nbytes, "x"), 0, (4096, 4), "F32")
    turned = Slot(whole((1024, 600)), Buffer("f", 12, tensor.nbytes, "x"), 0, (4, 4096), "F32")
    files = Files(tmp_path)
    for place, box in [
        (slot, Box((0, 0), (600, 1024))),
        (slot, Box((3, 0), (590, 1024))),
        (slot, Box((3, 5), (9, 1000))),
        (slot, Box((0, 7), (600, 9))),
        (turned, Box((0, 0), (1024, 600))),
        (turned, Box((5, 3), (6, 600))),
    ]:
        source = tensor if place is slot else tensor.T
        out = np.zeros(box.sizes, np.uint32)
        read_box(files, place, box, out)
        assert np.array_equal(out, source[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]])
    files.close()


@pytest.mark.parametrize("name", ["rows", "span", "mapping"])
def test_a_file_that_ends_too_early_is_named(name: str, tmp_path: Path) -> None:
    """It was whole when its header was read, and is not any more."""
    (tmp_path / "short.safetensors").write_bytes(bytes(100))
    slot = Slot(whole((10, 4)), Buffer("short.safetensors", 8, 160, "x"), 0, (16, 4), "F32")
    files = Files(tmp_path)
    with way(name), pytest.raises(CorruptFile, match=r"short\.safetensors"):
        read_box(files, slot, Box((0, 0), (10, 2)), np.zeros((10, 2), np.uint32))
    files.close()


def test_reading_past_the_end_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    files = Files(tmp_path)
    with pytest.raises(CorruptFile, match="f: the file ends at byte 10, 6 bytes too early"):
        read_exactly(files.fd("f"), memoryview(bytearray(8)), 8, "f")
    files.close()


# ------------------------------------------------------------------------------------------------ open files


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_only_a_few_files_are_open_at_a_time_and_none_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawio, "_OPEN_FILES", 4)
    for n in range(12):
        (tmp_path / f"{n}").write_bytes(bytes([n]))
    before = _open_descriptors()
    files = Files(tmp_path)
    for n in [*range(12), 0, 11, 0]:
        assert os.pread(files.fd(f"{n}"), 1, 0) == bytes([n])
        assert _open_descriptors() <= before + 4
    assert files.fd("11") == files.fd("11")
    files.close()
    assert _open_descriptors() == before


def test_threads_do_not_share_descriptors(tmp_path: Path) -> None:
    """One thread's eviction must not close what another is reading."""
    (tmp_path / "f").write_bytes(b"x")
    files = Files(tmp_path)
    found: list[int] = [files.fd("f")]
    thread = threading.Thread(target=lambda: found.append(files.fd("f")))
    thread.start()
    thread.join()
    assert found[0] != found[1]
    files.close()


def test_reading_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(8))
    files = Files(tmp_path)
    slot = Slot(whole((8,)), Buffer("f", 0, 8, "x"), 0, (1,), "U8")
    with pytest.raises(OSError):
        write_box(files, slot, whole((8,)), np.ones(8, np.uint8))
    files.close()
    assert (tmp_path / "f").read_bytes() == bytes(8)


def test_names_may_be_absolute(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    files = Files()
    assert os.pread(files.fd(str(tmp_path / "f")), 1, 0) == b"x"
    files.close()
