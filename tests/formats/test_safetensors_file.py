"""safetensors headers against the safetensors library, and against everything that can be wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from areal_convert.converter.errors import CorruptFile, SourceError
from areal_convert.converter.formats import safetensors_file
from areal_convert.converter.formats.safetensors_file import BITS, encode_header, read_header

TENSORS = {
    "model.w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.int8),
    "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
    'odd "name" \\ ü \u2603': torch.ones(2, 2, dtype=torch.float16),
}


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def library_opens(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, "pt"):
            return True
    except (safetensors.SafetensorError, ValueError):
        return False


def problems(path: Path) -> list[str]:
    assert not library_opens(path) or "twice" in path.name
    with pytest.raises(CorruptFile, match=path.name) as caught:
        read_header(path)
    return [str(problem) for problem in caught.value.problems]


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "note": "ä"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "note": "ä"} and header.size == path.stat().st_size
    assert header.tensors.keys() == TENSORS.keys() and header.empty == ()
    data = path.read_bytes()
    assert data[8 : header.data_start].rstrip(b" ").endswith(b"}")
    for name, tensor in TENSORS.items():
        found = header.tensors[name]
        assert found.shape == tuple(tensor.shape)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[found.begin : found.end] == raw


def test_a_header_of_ours_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    order = sorted(header.tensors.items(), key=lambda item: item[1].begin)
    ours = encode_header([(name, t.dtype, t.shape) for name, t in order], header.metadata)
    assert path.read_bytes()[: header.data_start] == ours


def test_the_bytes_of_a_small_header() -> None:
    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    assert len(text) == 89
    assert encode_header([("a", "BF16", (2, 3))], {"format": "pt"}) == struct.pack("<Q", 96) + text + b" " * 7
    assert encode_header([]) == struct.pack("<Q", 8) + b"{}      "


def test_the_library_reads_any_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    order = ["b", "scalar", "model.w"]
    kinds = {"b": "I8", "scalar": "BF16", "model.w": "F32"}
    raw = [TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in order]
    head = encode_header([(name, kinds[name], tuple(TENSORS[name].shape)) for name in order])
    path.write_bytes(head + b"".join(raw))
    found = load_file(path)
    assert all(torch.equal(found[name], TENSORS[name]) for name in order)
    assert list(read_header(path).tensors) == order


@pytest.mark.parametrize("kind", sorted(BITS))
def test_every_type_that_the_library_knows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    size = 8 * BITS[kind] // 8
    path.write_bytes(encode_header([("w", kind, (2, 4))]) + b"\0" * size)
    assert read_header(path).tensors["w"][:2] == (kind, (2, 4))
    assert library_opens(path) and not library_opens(written(tmp_path / "y", {"w": entry("F7", [1], 0, 1)}, b"x"))


def test_tensors_without_elements_are_read_and_named(tmp_path: Path) -> None:
    """B101: ZeRO-3 saves that went wrong hold shape [0]. The file is sound; whether the model is, others must say."""
    path = tmp_path / "x.safetensors"
    save_file({"q": torch.empty(0), "w": torch.ones(3), "z": torch.empty(4, 0)}, path)
    header = read_header(path)
    assert set(header.empty) == {"q", "z"} and header.tensors["z"].shape == (4, 0)
    header = read_header(
        written(path, {"a": entry("F32", [0], 0, 0), "b": entry("U8", [1], 0, 1), "c": entry("F32", [0], 1, 1)}, b"x")
    )
    assert header.empty == ("a", "c")


def test_truncated_and_over_long_files_say_both_sizes(tmp_path: Path) -> None:
    """B80: the header ends where the file must end, for every shard, before anything else."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(40)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    found = problems(path)
    assert found == [
        f"x.safetensors: is truncated: expected {len(data)} bytes, found {len(data) - 10} (cut off are b, of 2 tensors)"
    ]
    path.write_bytes(data + b"0123456789")
    assert problems(path) == [
        f"x.safetensors: is longer than its header says: expected {len(data)} bytes, found {len(data) + 10}"
    ]
    path.write_bytes(data[:50])
    with pytest.raises(CorruptFile, match=r"claims a header of \d+ bytes: expected \d+ bytes or more, found 50"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is 0 bytes long"),
        (b"1234567", "is 7 bytes long"),
        (b"\xff" * 16, "claims a header of 18446744073709551615 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "the format's limit is 100000000"),
        (struct.pack("<Q", 99_999_999) + b"{}", "expected 100000007 bytes or more, found 10"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
    ],
)
def test_files_that_are_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert not library_opens(path)
    with pytest.raises(CorruptFile, match=message):
        read_header(path)


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[]", b"null", b'{"a": }', b"{}{}", b"\xff\xfe", b'{"a":' * 100_000, b"", b'"text"', b'{"a"}', b"NaN"],
    ids=lambda raw: repr(raw[:8]),
)
def test_headers_that_are_no_json_object(raw: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", raw)
    assert not library_opens(path)
    with pytest.raises(CorruptFile, match="a header that is no JSON"):
        read_header(path)


def test_everything_wrong_is_listed_together(tmp_path: Path) -> None:
    header = {
        "kind": entry("F99", [1], 0, 4),
        "shape": entry("F32", [-1], 0, 4),
        "real": entry("F32", [1.5], 0, 4),
        "truth": entry("U8", [True], 0, 1),
        "huge": entry("U8", [2**70], 0, 1),
        "bytes": entry("F32", [3], 0, 8),
        "order": entry("F32", [1], 8, 4),
        "bits": entry("F4", [3], 0, 1),
        "fields": {"dtype": "F32"},
        "three": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        "text": "F32",
        "__metadata__": {"format": 7},
    }
    found = problems(written(tmp_path / "x.safetensors", header, b"\0" * 8))
    assert [line.split(":")[0] for line in found] == ["__metadata__", *list(header)[:-1]]
    assert "bytes: shape [3] of F32 needs 12 bytes, found 8 (offsets 0 to 8)" in found
    assert "bits: shape [3] of F4 needs 1.5 bytes, found 1 (offsets 0 to 1)" in found
    assert any(line.startswith("kind: has the unknown dtype 'F99' (known are BF16, BOOL, ") for line in found)


def test_holes_and_overlaps(tmp_path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6), "c": entry("U8", [2], 8, 10)}
    start = 8 + len(json.dumps(header))
    assert problems(written(tmp_path / "x.safetensors", header, b"\0" * 10)) == [
        f"b: overlaps a: begins at byte {start + 2}, expected {start + 4}",
        f"c: leaves a hole behind b: begins at byte {start + 8}, expected {start + 6}",
    ]
    header = {"a": entry("U8", [4], 2, 6)}
    assert "leaves a hole behind the header" in problems(written(tmp_path / "x.safetensors", header, b"\0" * 6))[0]


def test_names_that_stand_twice(tmp_path: Path) -> None:
    one = json.dumps(entry("U8", [1], 0, 1))
    raw = f'{{"a":{one},"b":{one},"a":{one}}}'.encode()
    assert problems(written(tmp_path / "twice.safetensors", raw, b"x")) == [
        "a: stands twice in the header (one of the two would be lost)"
    ]


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="none cannot be read: No such file"):
        read_header(tmp_path / "none")
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


def test_fifty_thousand_tensors_are_quick(tmp_path: Path) -> None:
    import time

    names = [(f"model.layers.{i}.mlp.experts.{i % 7}.up_proj.weight", "BF16", (2, 3)) for i in range(50_000)]
    start = time.perf_counter()
    head = encode_header(names, {"format": "pt"})
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 12 * len(names))
    assert len(read_header(path).tensors) == 50_000
    assert time.perf_counter() - start < 8  # 0.6 s on an idle core
    assert library_opens(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["F32", "BF16", "U8", "BOOL"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), st.text('ab\n"ü', max_size=4)),
)
def test_what_is_written_is_read_by_us_and_by_the_library(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "x.safetensors"
    order = [(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    head = encode_header(order, metadata)
    total = sum(BITS[dtype] // 8 * torch.Size(shape).numel() for _, dtype, shape in order)
    path.write_bytes(head + b"\0" * total)
    header = read_header(path)
    assert [(name, t.dtype, t.shape) for name, t in header.tensors.items()] == order
    assert header.metadata == metadata and len(head) % 8 == 0
    with safetensors.safe_open(path, "pt") as found:
        assert set(found.keys()) == set(tensors)
        assert (found.metadata() or {}) == metadata


SOUND = encode_header([("a", "F32", (2, 2)), ("b", "U8", (3,)), ("c", "BF16", ())], {"k": "v"}) + b"\1" * 21


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(SOUND)) | st.none(),
)
def test_damaged_headers_raise_nothing_but_our_errors_and_pass_no_more_than_the_library(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(SOUND)
    for at, value in changes:
        data[at] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(data[:cut])
    try:
        read_header(path)
    except SourceError as error:
        assert "x.safetensors" in str(error)
    else:
        assert library_opens(path)


def test_the_limit_is_the_librarys() -> None:
    assert safetensors_file.MAX_HEADER == 100_000_000
