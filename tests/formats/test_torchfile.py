"""Torch's files against torch itself: what we lay out it reads, what it writes we find, byte for byte."""

from __future__ import annotations

import io
import math
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_convert.converter.dtypes import BY_NAME
from areal_convert.converter.errors import CorruptFile, SourceError, UnsafePickle
from areal_convert.converter.formats import torchfile, torchfile_write, zip_layout
from areal_convert.converter.formats.pickle_values import Global, Opaque
from areal_convert.converter.formats.torchfile import TensorRef, TensorSpec, blob, locate, patch_crc, plan, read

SHAPES = [(), (0,), (5,), (3, 4), (300, 700), (70_000,), (2, 3, 4), (2, 3, 4, 5), (2, 0, 3), (1,) * 6]
KINDS = list(BY_NAME.values())


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def sample(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any type, its bytes all different where they can be."""
    size = BY_NAME[kind].size
    count = math.prod(shape)
    raw = torch.arange(count * size, dtype=torch.int64).remainder(251).to(torch.uint8)
    if kind == "BOOL":
        return raw.reshape(shape) % 2 == 1
    return raw.view(getattr(torch, BY_NAME[kind].torch)).reshape(shape)


def tensor_at(ref: TensorRef) -> torch.Tensor:
    """What a reference refers to, through nothing but the file's bytes."""
    with ref.file.open("rb") as file:
        file.seek(ref.storage[0])
        raw = bytearray(file.read(ref.storage[1]))
    dtype = getattr(torch, BY_NAME[ref.dtype].torch)
    if not raw:
        return torch.empty(ref.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=dtype)
    return torch.as_strided(flat, ref.shape, ref.strides, (ref.offset - ref.storage[0]) // BY_NAME[ref.dtype].size)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return as_bytes(left) == as_bytes(right)


def filled(file: torchfile.TorchFilePlan, data: dict[Any, bytes]) -> bytearray:
    out = bytearray(file.size)
    for at, segment in file.segments:
        out[at : at + len(segment)] = segment
    for key, raw in data.items():
        assert len(raw) == file.nbytes[key]
        out[file.tensors[key] : file.tensors[key] + len(raw)] = raw
    return out


def records(data: bytes) -> list[tuple[str, bytes]]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return [(info.filename.split("/", 1)[1], archive.read(info)) for info in archive.infolist()]


# ------------------------------------------------------------------------------------------------ the container


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_tensor_is_laid_out_as_torch_writes_it(kind: Any, shape: tuple[int, ...]) -> None:
    tensor = sample(kind.name, shape)
    theirs = saved(tensor)
    content = records(theirs)
    layout = zip_layout.lay_out(content)
    assert [at for at, _ in layout.segments] == [0]
    assert layout.segments[0][1] == theirs  # the container, every byte
    assert torchfile_write.single_pickle(kind, shape) == content[0][1]  # the pickle, every byte
    ours = blob(kind.name, shape)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    mine = bytearray(ours.head + raw + ours.tail)
    assert (len(mine), ours.size, ours.data_offset, ours.data_nbytes) == (
        len(theirs), len(theirs), layout.offsets["data/0"], len(raw),
    )  # fmt: skip
    for at in ours.crc_at:
        mine[at : at + 4] = struct.pack("<I", zlib.crc32(raw))
    own = layout.offsets[".data/serialization_id"]  # 40 digits, and their CRC behind them and in the directory
    differ = [at for at in range(len(mine)) if mine[at] != theirs[at]]
    assert all(own <= at < own + 48 or at > own + 56 for at in differ) and len(differ) <= 48


def test_the_first_bytes_of_a_blob() -> None:
    head = blob("BF16", (2, 2)).head
    assert head[:64] == (
        b"PK\x03\x04"  # local header
        b"\x00\x00" b"\x08\x08" b"\x00\x00"  # version; UTF-8 and sizes behind the data; stored
        b"\x00\x00\x00\x00" + b"\x00" * 12 +  # time and date; CRC and sizes: later
        b"\x10\x00\x12\x00"  # name of 16, extra of 18 bytes
        b"archive/data.pkl"
        b"FB\x0e\x00ZZZZZZZZZZZZZZ"  # padding to byte 64
    )  # fmt: skip
    assert head[64:221] == (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00"
        b"((X\x07\x00\x00\x00storageq\x01ctorch\nBFloat16Storage\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
        b"K\x04tq\x05QK\x00K\x02K\x02\x86q\x06K\x02K\x01\x86q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )
    assert len(head) == 704


def test_zip64_records_are_what_torch_writes() -> None:
    """Recorded from torch 2.13: tensors of 4 GiB + 100, of 4 and of 4 GiB - 1 bytes in one file."""
    big, edge = 2**32 + 100, 2**32 - 1
    layout = zip_layout.lay_out([("data.pkl", b"." * 726), ("data/0", big), ("data/1", b"\0\1\2\3"), ("data/2", edge)])
    parts = dict(layout.segments)
    first = parts[0]
    local = first.index(b"archive/data/0") + 14
    assert first[local : local + 20] == b"\x01\x00\x10\x00" + struct.pack("<QQ", big, 0)
    assert layout.offsets["data/0"] == 896 and len(first) == 896
    middle = parts[896 + big]
    assert middle[:24] == b"PK\x07\x08\0\0\0\0" + struct.pack("<QQ", big, big)
    header = 896 + big + 24
    assert middle[24 + 30 + 14 :][:12] == b"\x01\x00\x08\x00" + struct.pack("<Q", header)
    last = parts[layout.offsets["data/2"] + edge]
    assert last[:24] == b"PK\x07\x08\0\0\0\0" + struct.pack("<QQ", edge, edge)
    central = last.index(b"archive/data/2") + 14
    size, at = last[central : central + 28], middle.index(b"PK\x03\x04", 30)
    assert size == b"\x01\x00\x18\x00" + struct.pack("<QQQ", edge, edge, 896 + big + at)
    assert last[-22:] == b"PK\x05\x06\0\0\0\0\x04\x00\x04\x00" + struct.pack("<2IH", layout_size(last), 2**32 - 1, 0)


def layout_size(tail: bytes) -> int:
    return tail.index(b"PK\x06\x06") - tail.index(b"PK\x01\x02")


def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    names = [(f"data/{i}", b"x") for i in range(66_000)]
    layout = zip_layout.lay_out([("data.pkl", b"N."), *names])
    data = layout.segments[0][1]
    assert data[-22:-10] == b"PK\x05\x06\0\0\0\0\xff\xff\xff\xff"
    assert len(zipfile.ZipFile(io.BytesIO(data)).namelist()) == 66_001
    (tmp_path / "many.pt").write_bytes(data)
    assert read(tmp_path / "many.pt") is None


def test_a_file_beyond_4_gib_is_read_by_torch_and_by_us(tmp_path: Path) -> None:
    rows = 2**31 + 50
    file = plan({"a": TensorSpec("BF16", (rows,)), "b": TensorSpec("F32", (3,)), "c": TensorSpec("I8", ())}, "big")
    path = tmp_path / "big.pt"
    with path.open("wb") as out:
        out.truncate(file.size)  # sparse: takes no disk
        for at, segment in file.segments:
            out.seek(at)
            out.write(segment)
        out.seek(file.tensors["b"])
        out.write(struct.pack("<3f", 1, 2, 3))
        out.seek(file.tensors["a"] + 2 * (rows - 1))
        out.write(b"\x80\x3f")
    assert file.size > 2**32 and all(at % 64 == 0 for at in file.tensors.values())
    theirs = torch.load(path, mmap=True, weights_only=True)
    assert theirs["a"].shape == (rows,) and theirs["a"][-1] == 1 and theirs["b"].tolist() == [1, 2, 3]
    ours = read(path)
    assert {key: ref.offset for key, ref in ours.items()} == file.tensors
    assert len(zipfile.ZipFile(path).namelist()) == 9


# ------------------------------------------------------------------------------------------------ writing


def tree() -> tuple[Any, dict[Any, torch.Tensor]]:
    data = {
        "model.w": sample("BF16", (3, 4)),
        "tied": sample("F32", (2, 5)),
        "model.e": sample("F8_E4M3", (3,)),
        "model.layers.1.p": sample("F32", ()),
        "model.none": sample("F16", (0, 3)),
        "u": sample("U16", (7,)),
    }
    model = {
        "w": TensorSpec("BF16", (3, 4)),
        "embed": TensorSpec("F32", (2, 5), key="tied"),
        "head": TensorSpec("F32", (2, 5), key="tied"),
        "e": TensorSpec("F8_E4M3", (3,)),
        "layers": [7, {"p": TensorSpec("F32", (), parameter=True)}],
        "none": TensorSpec("F16", (0, 3)),
    }
    return {"model": model, "iteration": 5, "u": TensorSpec("U16", (7,), key="u"), "raw": io.BytesIO(b"hi")}, data


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_a_planned_tree_is_read_by_torch(tmp_path: Path) -> None:
    value, data = tree()
    file = plan(value, "model_optim_rng")
    assert list(file.tensors) == ["model.w", "tied", "model.e", "model.layers.1.p", "model.none", "u"]
    path = tmp_path / "model_optim_rng.pt"
    path.write_bytes(filled(file, {key: as_bytes(tensor) for key, tensor in data.items()}))
    for mmap in (False, True):
        found = torch.load(path, mmap=mmap, weights_only=False)
        assert same(found["model"]["w"], data["model.w"]) and same(found["model"]["e"], data["model.e"])
        assert same(found["model"]["head"], data["tied"]) and same(found["u"], data["u"])
        assert found["model"]["head"].data_ptr() == found["model"]["embed"].data_ptr()
        assert isinstance(found["model"]["layers"][1]["p"], torch.nn.Parameter)
        assert found["model"]["none"].shape == (0, 3)
        assert found["iteration"] == 5 and found["raw"].read() == b"hi"
    del value["raw"]
    path.write_bytes(filled(plan(value), {key: as_bytes(tensor) for key, tensor in data.items()}))
    assert same(torch.load(path, weights_only=True)["model"]["w"], data["model.w"])
    assert zipfile.ZipFile(path).namelist()[0] == "archive/data.pkl"


def test_arguments_travel_as_torch_would_have_pickled_them(tmp_path: Path) -> None:
    import argparse

    args = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16, nested={"x": (1, None)})
    theirs = save(tmp_path / "theirs.pt", {"args": args, "iteration": 3})
    file = plan(read(theirs), "ours")
    (tmp_path / "ours.pt").write_bytes(filled(file, {}))
    assert torch.load(tmp_path / "ours.pt", weights_only=False) == {"args": args, "iteration": 3}


def test_crcs_are_zero_until_patched_and_then_right(tmp_path: Path) -> None:
    value, data = tree()
    file = plan(value)
    raw = {key: as_bytes(tensor) for key, tensor in data.items()}
    out = filled(file, raw)
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() == "archive/data/0"  # torch reads it nevertheless, as seen above
    for at, patch in patch_crc(file, {key: zlib.crc32(part) for key, part in raw.items()}):
        assert out[at : at + 4] == b"\0\0\0\0" and len(patch) == 4
        out[at : at + 4] = patch
    assert zipfile.ZipFile(io.BytesIO(out)).testzip() is None
    path = tmp_path / "x.pt"
    path.write_bytes(out)
    assert subprocess.run([sys.executable, "-m", "zipfile", "-t", path], check=True).returncode == 0


def test_without_crcs_the_file_is_torchs_own_without_crcs() -> None:
    """The tensors' CRC fields hold what torch writes with set_crc32_options(False), and torch reads them unchecked."""
    tensor = sample("F32", (3, 4))
    torch.serialization.set_crc32_options(False)
    try:
        theirs = saved(tensor)
    finally:
        torch.serialization.set_crc32_options(True)
    ours = blob("F32", (3, 4))
    for at in ours.crc_at:
        assert theirs[at : at + 4] == b"\0\0\0\0" == (ours.head + as_bytes(tensor) + ours.tail)[at : at + 4]


def test_equal_plans_are_equal_bytes() -> None:
    assert plan(tree()[0]).segments == plan(tree()[0]).segments
    assert blob("F32", (3,)).tail != blob("F32", (4,)).tail


def test_a_key_that_two_shapes_share_is_refused() -> None:
    with pytest.raises(ValueError, match="share the key 'k'"):
        plan([TensorSpec("F32", (2,), "k"), TensorSpec("F32", (3,), "k")])


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_is_found(kind: Any, tmp_path: Path) -> None:
    tensors = {str(shape): sample(kind.name, shape) for shape in SHAPES}
    found = read(save(tmp_path / "x.pt", tensors))
    assert all(same(tensor_at(found[key]), tensor) for key, tensor in tensors.items())


def test_views_share_their_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "base": base,
        "rows": base[1:3],
        "columns": base[:, 2:],
        "turned": base.t(),
        "one": base[3, 5],
        "same": base,
    }
    found = read(save(tmp_path / "x.pt", value))
    assert len({ref.storage for ref in found.values()}) == 1
    assert all(torch.equal(tensor_at(found[key]), tensor) for key, tensor in value.items())
    assert found["turned"].strides == (1, 6) and found["one"].offset == found["base"].offset + 23 * 4


def test_modules_parameters_and_extra_state(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    found = read(save(tmp_path / "x.pt", {"s": module.state_dict(), "p": module.weight, "e": io.BytesIO(b"\xff1")}))
    assert list(found["s"]) == ["weight", "bias"] and not found["s"]["weight"].parameter
    assert found["p"].parameter and torch.equal(tensor_at(found["p"]), module.weight.detach())
    assert torchfile.stream_bytes(found["e"]) == b"\xff1" and torchfile.stream_bytes(found["p"]) is None


class Marked(torch.Tensor):
    """A tensor subclass, as quantisation libraries have them."""


Marked.__module__ = "transformer_engine.pytorch"


def test_a_known_subclass_is_a_tensor_and_an_unknown_one_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    import types

    home = types.ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", home)
    home.Marked = Marked  # type: ignore[attr-defined]
    tensor = torch.arange(6.0).as_subclass(Marked)
    tensor.note = "x"  # type: ignore[attr-defined]
    ref = read(save(tmp_path / "x.pt", tensor))
    assert torch.equal(tensor_at(ref), torch.arange(6.0))
    code = (tmp_path / "x.pt").read_bytes().replace(b"transformer_engine.pytorch", b"somebody_elses.own_library")
    (tmp_path / "y.pt").write_bytes(code)
    with pytest.raises(UnsafePickle, match=r"somebody_elses\.own_library\.Marked"):
        read(tmp_path / "y.pt")


def test_a_dtensor_shows_its_local_part(tmp_path: Path) -> None:
    """The pickle of a DTensor as torch 2.13 writes it, from a process that stands alone in the mesh."""
    script = """
import sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
local = torch.arange(6.0).reshape(2, 3)
strided = [_StridedShard(0, split_factor=2), Shard(0)]
a = DTensor.from_local(local, mesh, strided, shape=torch.Size((8, 3)), stride=(3, 1))
b = DTensor.from_local(local, mesh, [Replicate(), Shard(1)], shape=torch.Size((2, 6)), stride=(6, 1))
torch.save({"a": torch.nn.Parameter(a), "b": b}, sys.argv[1])
"""
    path = tmp_path / "d.pt"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, path], check=True, timeout=120)
    found = read(path)
    assert found["a"].placements == (("_StridedShard", 0, 2), ("Shard", 0))
    assert found["b"].placements == (("Replicate",), ("Shard", 1))
    assert (found["a"].shape, found["b"].shape, found["a"].dtype) == ((8, 3), (2, 6), "F32")
    assert (found["a"].mesh_shape, found["a"].mesh_names, found["a"].coordinate) == ((2, 2), ("dp", "tp"), (0, 1))
    assert found["a"].local.parameter and not found["b"].local.parameter
    assert torch.equal(tensor_at(found["a"].local), torch.arange(6.0).reshape(2, 3))


def test_a_file_inside_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.distcp"
    tensors = [sample("F32", (3, 4)), sample("F8_E5M2", (5,)), torch.arange(24.0).reshape(4, 6).t(), sample("BF16", ())]
    tensors += [torch.arange(24.0)[3:9], sample("I64", (0, 2)), torch.zeros(4, 4).index_fill(1, torch.tensor(1), 2.0)]
    places = []
    with path.open("wb") as out:
        for tensor in tensors:
            at = out.tell()
            torch.save(tensor, out)
            places.append((at, out.tell() - at))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for tensor, (at, length) in zip(tensors, places, strict=True):
            found = locate(descriptor, at, length, path)
            assert found == read(path, at, length)
            assert same(tensor_at(found), tensor)
    finally:
        os.close(descriptor)


def test_unusual_blobs_take_the_slow_way(tmp_path: Path) -> None:
    """Another archive name, other records first, a pickle beyond the probe, sizes in the local headers."""
    tensor = sample("F32", (3, 4))
    content = dict(records(saved(tensor)))
    pickle = content.pop("data.pkl")
    raw = content.pop("data/0")
    variants = {
        "renamed": zip_layout.lay_out([("data.pkl", pickle), ("data/0", raw)], "model").segments[0][1],
        "padding": zip_layout.lay_out([("x", b"y" * 5000), ("data.pkl", pickle), ("data/0", raw)]).segments[0][1],
        "data first": zip_layout.lay_out([("data/0", raw), ("data.pkl", pickle)]).segments[0][1],
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/data/0", raw)
    variants["by zipfile"] = stream.getvalue()
    for name, data in variants.items():
        path = tmp_path / name
        path.write_bytes(b"#" * 100 + data)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            assert same(tensor_at(locate(descriptor, 100, len(data), path)), tensor), name
        finally:
            os.close(descriptor)


def test_an_entry_that_is_no_tensor_is_no_tensor(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", [1, 2])
    with path.open("rb") as file, pytest.raises(CorruptFile, match="holds a list where a tensor"):
        locate(file.fileno(), 0, path.stat().st_size, path)


def test_an_attack_in_a_blob_names_the_file(tmp_path: Path) -> None:
    data = zip_layout.lay_out([("data.pkl", b"\x80\x02cposix\nsystem\n."), ("data/0", b"1234")]).segments[0][1]
    path = tmp_path / "x.distcp"
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(UnsafePickle, match=r"x\.distcp.* refers to posix\.system"):
        locate(file.fileno(), 0, len(data), path)


# ------------------------------------------------------------------------------------------------ damage


def test_files_that_are_no_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    cases = {
        b"": "is empty",
        b"version https://git-lfs.github.com/spec/v1\n": "no torch file",
        b"PK\x03\x04" + b"\0" * 100: "no end record",
        b"PK\x05\x06" + b"\0" * 18: "no torch file",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match=message):
            read(path)
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        read(tmp_path / "none.bin")
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_the_format_before_1_6_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match=r"before version 1\.6") as caught:
        read(path)
    assert "torch.save(torch.load" in str(caught.value)


def test_a_truncated_file_says_how_long_it_should_be(tmp_path: Path) -> None:
    value = {f"w{i}": torch.arange(1000.0) for i in range(3)}
    data = save(tmp_path / "x.pt", value).read_bytes()
    path = tmp_path / "cut.pt"
    for cut in (0.5, 0.7):
        length = int(len(data) * cut)
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFile, match=rf"its 3 storages need more than 1\d{{4}} bytes, found {length}"):
            read(path)
    path.write_bytes(data[:-10])
    with pytest.raises(CorruptFile, match="truncated"):
        read(path)
    path.write_bytes(data + b"0123456789")
    with pytest.raises(
        CorruptFile, match=f"is {len(data) + 10} bytes long, but its zip directory ends at byte {len(data)}"
    ):
        read(path)
    with pytest.raises(CorruptFile, match=rf"expected {len(data) + 15} bytes or more, found {len(data) + 10}"):
        read(path, 10, len(data) + 5)


def forged(change: Any, **replaced: bytes) -> bytes:
    content = dict(records(saved({"a": torch.arange(4.0), "b": torch.arange(6, dtype=torch.int64)})))
    content |= {key.replace("__", "/"): value for key, value in replaced.items()}
    if change:
        change(content)
    return zip_layout.lay_out(list(content.items())).segments[0][1]


def test_all_that_is_wrong_with_the_tensors_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(forged(lambda content: content.pop("data/1"), data__0=b"\0" * 12))
    with pytest.raises(CorruptFile) as caught:
        read(path)
    assert [str(problem) for problem in caught.value.problems] == [
        "storage 0: expected 16 bytes of F32, found 12",
        "tensor 1 in the file: shape [4] of F32 from element 0 on needs 16 bytes of storage 0, found 12",
        "storage 1: the record data/1 is missing, expected 48 bytes of I64",
    ]


def test_big_endian_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(forged(None, byteorder=b"big"))
    with pytest.raises(SourceError, match="byte order b'big'"):
        read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records(saved(torch.ones(100))):
            archive.writestr(f"x/{name}", content)
    with pytest.raises(SourceError, match="compressed"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CorruptFile, match=r"without a data\.pkl"):
        read(path)


def test_a_view_beyond_its_storage_is_found(tmp_path: Path) -> None:
    data = saved(torch.arange(8.0).reshape(2, 4))
    assert data.count(b"K\x02K\x04\x86") == 1
    path = tmp_path / "x.pt"
    path.write_bytes(data.replace(b"K\x02K\x04\x86", b"K\x09K\x04\x86"))
    with pytest.raises(CorruptFile, match=r"shape \[9, 4\] of F32 from element 0 on needs 144 bytes .* found 32"):
        read(path)
    with path.open("rb") as file, pytest.raises(CorruptFile, match="needs 144 bytes"):
        locate(file.fileno(), 0, len(data), path)


def test_strides_that_point_backwards_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = saved(torch.arange(8.0).reshape(2, 4))
    path.write_bytes(data.replace(b"K\x02K\x04\x86", b"K\x02N\x86N"))
    with pytest.raises(CorruptFile, match=r"x\.pt"):
        read(path)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    with pytest.raises(UnsafePickle, match=r"model\.bin, data\.pkl refers to posix\.system"):
        read(save(tmp_path / "model.bin", {"w": torch.ones(2), "x": Evil()}))
    assert not (tmp_path / "canary").exists()


SEED = saved({"a": torch.arange(4.0), "b": [torch.ones(2, 3, dtype=torch.bfloat16), 5, "x"]})
LONE = saved(torch.arange(6.0).reshape(2, 3))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([SEED, LONE]),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=5),
    st.integers(0, 4000) | st.none(),
)
def test_damaged_files_raise_nothing_but_our_errors(
    tmp_path: Path, seed: bytes, changes: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % len(data)] = value
    data = data[:cut] if cut is not None else data
    path = tmp_path / "fuzz.pt"
    path.write_bytes(data)
    for job in (lambda: read(path), lambda: _locate(path, len(data))):
        try:
            job()
        except SourceError as error:
            assert "fuzz.pt" in str(error)


def _locate(path: Path, length: int) -> TensorRef:
    with path.open("rb") as file:
        return locate(file.fileno(), 0, length, path)


def test_descriptions_are_kept(tmp_path: Path) -> None:
    found = read(
        save(tmp_path / "x.pt", {"dtype": torch.float16, "size": torch.Size((2, 3)), "dev": torch.device("cpu")})
    )
    assert found["dtype"] == Global("torch", "float16") and found["size"] == (2, 3)
    assert isinstance(found["dev"], Opaque) and found["dev"].args == ("cpu",)


def test_no_format_imports_torch() -> None:
    modules = "pickles torchfile torchfile_write zip_layout zip_read torch_tensors dcpfile dcp_write safetensors_file"
    imports = "; ".join(f"import areal_convert.converter.formats.{name}" for name in modules.split())
    check = "import sys; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True)
