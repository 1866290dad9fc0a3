"""Distributed checkpoints against torch's own DCP and Megatron-Core: theirs are read by us, ours by them."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from areal_convert.converter.errors import CorruptFile, NotACheckpoint, SourceError, UnsafePickle
from areal_convert.converter.formats import dcpfile, torchfile
from areal_convert.converter.formats.dcp_boxes import cover_problem
from areal_convert.converter.formats.dcpfile import METADATA, DcpIndex, encode_metadata

pytestmark = [
    # torch's own, about itself: no process group, and TypedStorage.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}
WEIGHTS = {
    "model.a": torch.arange(24.0).reshape(4, 6),
    "model.b": torch.arange(7, dtype=torch.bfloat16),
    "step": torch.tensor(3),
    "model.empty": torch.empty(0, 3),
}
PLANNER = {"model.a": ("model", "a"), "model.b": ("model", "b"), "step": ("step",), "model.empty": ("model", "empty")}


def torch_checkpoint(path: Path, value: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=path)
    return path


def torch_load(value: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(value, checkpoint_id=path)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def value_of(ref: torchfile.TensorRef) -> torch.Tensor:
    with ref.file.open("rb") as file:
        file.seek(ref.storage[0])
        raw = bytearray(file.read(ref.storage[1]))
    dtype = {name: dtype for dtype, name in NAMES.items()}[ref.dtype]
    if not raw:
        return torch.empty(ref.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=dtype)
    return torch.as_strided(flat, ref.shape, ref.strides, (ref.offset - ref.storage[0]) // dtype.itemsize)


def assembled(index: DcpIndex, name: str) -> torch.Tensor:
    """The tensor as its chunks make it up."""
    tensor = index.tensors[name]
    dtype = {name: dtype for dtype, name in NAMES.items()}[tensor.dtype]
    out = torch.full(tensor.shape, 99, dtype=torch.float32).to(dtype)
    for chunk in tensor.chunks:
        with chunk.file.open("rb") as file:
            ref = torchfile.locate(file.fileno(), chunk.offset, chunk.length, chunk.file)
        assert (ref.dtype, ref.shape) == (tensor.dtype, chunk.sizes)
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        out[box] = value_of(ref)
    return out


def cuts(tensor: torch.Tensor, parts: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Rows, dealt out as FSDP2 does: the last ranks get fewer, or none."""
    if tensor.dim() == 0:
        yield (), tensor
        return
    for at, rows in zip(
        range(0, max(len(tensor), 1), -(-len(tensor) // parts) or 1), tensor.chunk(parts), strict=False
    ):
        yield (at,) + (0,) * (tensor.dim() - 1), rows


def our_checkpoint(path: Path, weights: dict[str, torch.Tensor], parts: int = 2, planner: Any = PLANNER) -> Path:
    """Written with nothing but `blob`, `plan` and `encode_metadata`."""
    path.mkdir()
    files = [bytearray() for _ in range(parts)]
    tensors = []
    for name, tensor in weights.items():
        chunks = []
        for rank, (offsets, part) in enumerate(cuts(tensor, parts)):
            plan = torchfile.blob(NAMES[tensor.dtype], tuple(part.shape))
            chunks.append((offsets, tuple(part.shape), f"__{rank}_0.distcp", len(files[rank]), plan.size))
            files[rank] += plan.head + as_bytes(part) + plan.tail
        tensors.append((name, NAMES[tensor.dtype], tuple(tensor.shape), chunks))
    extra = torchfile.plan([1, "x"])
    objects = [("extra", "__0_0.distcp", len(files[0]), extra.size)]
    files[0] += b"".join(segment for _, segment in extra.segments)
    for rank, content in enumerate(files):
        (path / f"__{rank}_0.distcp").write_bytes(content)
    planner = {**planner, "extra": ("extra",)} if planner is not None else None
    (path / METADATA).write_bytes(encode_metadata(tensors, objects, planner))
    return path


# ------------------------------------------------------------------------------------------------ theirs, read


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    state = {"model": {"a": WEIGHTS["model.a"], "b": WEIGHTS["model.b"]}, "l": [torch.ones(2), 5], "s": WEIGHTS["step"]}
    state["model"]["turned"] = WEIGHTS["model.a"].t()
    index = dcpfile.read(torch_checkpoint(tmp_path / "c", state))
    assert list(index.tensors) == ["model.a", "model.b", "model.turned", "l.0", "s"]
    assert index.planner_data is not None
    assert (index.planner_data["model.a"], index.planner_data["l.0"]) == (("model", "a"), ("l", 0))
    assert list(index.objects) == ["l.1"] and torchfile.read(*index.objects["l.1"]) == 5
    for name, tensor in {
        "model.a": WEIGHTS["model.a"],
        "model.turned": WEIGHTS["model.a"].t(),
        "s": torch.tensor(3),
    }.items():
        assert torch.equal(assembled(index, name), tensor)
    assert list(index.files) == ["__0_0.distcp"] and not index.warnings


FIXTURES = Path(__file__).parents[1] / "fixtures" / "mcore-0.19"


@pytest.mark.parametrize("name", ["qwen2", "llama_tied", "qwen3_moe"])
def test_what_megatron_core_0_19_saved_is_read(name: str) -> None:
    index = dcpfile.read(FIXTURES / name / "torch_dist")
    assert index.tensors["embedding.word_embeddings.weight"].shape[0] == 1024
    assert index.tensors["decoder.layers.self_attention.linear_qkv.weight"].shape[0] == 4
    assert any(key.startswith("common_state") for key in index.objects)
    for entry in index.objects.values():
        torchfile.read(*entry)
    assert not index.warnings and index.planner_data is None


def test_old_metadata_is_read(tmp_path: Path) -> None:
    """TensorProperties once had another home; Megatron up to 0.15 had a Metadata class and notes of its own."""
    path = our_checkpoint(tmp_path / "c", WEIGHTS)
    found = pickle.loads((path / METADATA).read_bytes())
    data = pickle.dumps(found, 2)
    home = b"ctorch.distributed.checkpoint.metadata\n"
    data = data.replace(
        home + b"TensorProperties", b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties"
    )
    data = data.replace(home + b"Metadata\n", b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n")
    assert data.endswith(b"ub.")
    assert data.count(b"sharded_tensor.metadata\nTensorProperties") == data.count(b"MCoreMetadata") == 1
    (path / METADATA).write_bytes(data[:-3] + notes_items() + b"ub.")
    index = dcpfile.read(path)
    assert index.mcore_shapes == {"a": (2, 3)}
    assert torch.equal(assembled(index, "model.a"), WEIGHTS["model.a"])


def notes_items() -> bytes:
    """`"mcore_data": {"a": {"nd_reformulated_orig_global_shape": (2, 3)}}` as a key and a value on the stack."""
    word = b"nd_reformulated_orig_global_shape"
    key = b"X" + len(word).to_bytes(4, "little") + word
    return b"X\x0a\x00\x00\x00mcore_data}X\x01\x00\x00\x00a}" + key + b"K\x02K\x03\x86ss"


# ------------------------------------------------------------------------------------------------ ours, read by torch


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_torch_loads_what_we_write(parts: int, tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", WEIGHTS, parts)
    state: dict[str, Any] = {name: torch.full_like(tensor, 9) for name, tensor in WEIGHTS.items()}
    torch_load({**state, "extra": None}, path)
    assert all(torch.equal(state[name], tensor) for name, tensor in WEIGHTS.items())
    part = {"model": {"b": torch.zeros(7, dtype=torch.bfloat16)}}
    torch_load(part, path)
    assert torch.equal(part["model"]["b"], WEIGHTS["model.b"])


def test_torch_turns_ours_into_one_file(tmp_path: Path) -> None:
    """`dcp_to_torch_save` asks no state dict: the nesting comes from the planner data alone."""
    path = our_checkpoint(tmp_path / "c", WEIGHTS)
    dcp_to_torch_save(path, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert set(found) == {"model", "step", "extra"} and set(found["model"]) == {"a", "b", "empty"}
    assert torch.equal(found["model"]["a"], WEIGHTS["model.a"]) and found["step"] == 3 and found["extra"] == [1, "x"]
    shutil.rmtree(path)
    dcp_to_torch_save(our_checkpoint(path, WEIGHTS, planner={name: (name,) for name in WEIGHTS}), tmp_path / "y.pt")
    assert set(torch.load(tmp_path / "y.pt", weights_only=True)) == {*WEIGHTS, "extra"}


def test_our_metadata_is_what_torch_would_have_made(tmp_path: Path) -> None:
    """Field for field the objects of torch's own classes, and the same bytes of opcodes where no name is shared."""
    state = {"model": {"a": WEIGHTS["model.a"], "b": WEIGHTS["model.b"]}, "step": WEIGHTS["step"]}
    theirs = dcp.FileSystemReader(torch_checkpoint(tmp_path / "t", state)).read_metadata()
    index = dcpfile.read(tmp_path / "t")
    tensors = [
        (name, t.dtype, t.shape, [(c.offsets, c.sizes, c.file.name, c.offset, c.length) for c in t.chunks])
        for name, t in index.tensors.items()
    ]
    ours = pickle.loads(encode_metadata(tensors, planner_data=index.planner_data))
    assert isinstance(ours, torch_metadata.Metadata)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data == theirs.storage_data
    assert {(key, key.index) for key in ours.storage_data} == {(key, key.index) for key in theirs.storage_data}
    assert ours.version == theirs.version == "1.0.0"
    assert vars(ours).keys() == vars(theirs).keys()
    assert vars(next(iter(ours.storage_data.values()))).keys() == vars(next(iter(theirs.storage_data.values()))).keys()


def test_the_bytes_of_a_small_metadata() -> None:
    data = encode_metadata([], [("o", "f", 3, 4)])
    words = data.split(b"\x94")  # MEMOIZE ends each word
    assert words[0] == b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata"
    assert words[1] == b"\x8c\x08Metadata" and words[2] == b"\x93"
    assert words[3] == b")\x81}(\x8c\x13state_dict_metadata"
    assert words[4] == b"}(\x8c\x01o"
    assert words[5] == b"h\x00\x8c\x14BytesStorageMetadata" and words[6] == b"\x93"
    assert words[7] == b")\x81u\x8c\x0cplanner_data"
    assert data.endswith(b"]ub\x8c\x07version\x94\x8c\x051.0.0\x94ub.")


def test_fifty_thousand_chunks_are_quick() -> None:
    import time

    tensors = [
        (
            f"layers.{i}.weight",
            "BF16",
            (4096, 64),
            [((j * 512, 0), (512, 64), f"__{j}_0", i * 9000, 8000) for j in range(8)],
        )
        for i in range(6250)
    ]
    start = time.perf_counter()
    data = encode_metadata(tensors)
    assert time.perf_counter() - start < 4  # 0.3 s on an idle core
    assert len(data) < 110 * 50_000


MEGATRON = """
import io, os, sys, warnings
from argparse import Namespace
from pathlib import Path

warnings.simplefilter("ignore")


def main(theirs, ours):
    import torch
    import torch.distributed as dist
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    from megatron.core import dist_checkpointing as mc
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.transformer.enums import AttnBackend
    from areal_convert.converter.formats import dcpfile, torchfile

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    w = torch.arange(48.0).reshape(2, 4, 6)
    half = torch.arange(7, dtype=torch.bfloat16)

    def piece(data, layer, column, columns):
        return ShardedTensor.from_rank_offsets(
            "decoder.w", data, (0, layer, 2), (2, column, columns), prepend_axis_num=1, replica_id=0)

    state = {"w0": piece(w[0], 0, 0, 1), "w1": piece(w[1], 1, 0, 1), "b": ShardedTensor.from_rank_offsets("b", half),
             "x": ShardedObject("x._extra_state", io.BytesIO(b"abc"), (1,), (0,)),
             "iteration": 3, "args": Namespace(a=1, dt=torch.bfloat16, be=AttnBackend.flash)}
    mc.save(state, theirs)

    index = dcpfile.read(theirs)
    assert index.tensors["decoder.w"].shape == (2, 4, 6) and len(index.tensors["decoder.w"].chunks) == 2
    assert torchfile.stream_bytes(torchfile.read(*index.objects["x._extra_state/shard_0_1"])[0]) == b"abc"
    common = torchfile.read(Path(theirs) / "common.pt")
    assert common["iteration"] == 3 and common["args"].state["be"].name == "AttnBackend"

    # The same bytes, under a .metadata and a common.pt of our own making.
    tensors = [(n, t.dtype, t.shape, [(c.offsets, c.sizes, c.file.name, c.offset, c.length) for c in t.chunks])
               for n, t in index.tensors.items()]
    objects = [(n, o.file.name, o.offset, o.length) for n, o in index.objects.items()]
    Path(ours, ".metadata").write_bytes(dcpfile.encode_metadata(tensors, objects))
    Path(ours, "common.pt").write_bytes(b"".join(part for _, part in torchfile.plan(common, "common").segments))
    Path(ours, "metadata.json").write_bytes(Path(theirs, "metadata.json").read_bytes())
    for file in index.files.values():
        os.link(file, Path(ours, file.name))

    wanted = {f"{i}{j}": piece(torch.zeros(4, 3), i, j, 2) for i in range(2) for j in range(2)}
    wanted |= {"b": ShardedTensor.from_rank_offsets("b", torch.zeros_like(half)),
               "x": ShardedObject("x._extra_state", None, (1,), (0,))}
    found = mc.load(wanted, ours, strict=StrictHandling.RAISE_ALL)
    assert all(torch.equal(found[f"{i}{j}"], w[i][:, 3 * j : 3 * j + 3]) for i in range(2) for j in range(2))
    assert torch.equal(found["b"], half) and found["x"].read() == b"abc"
    assert found["iteration"] == 3 and found["args"].be is AttnBackend.flash
    assert set(mc.load_tensors_metadata(ours)) == {"decoder.w", "b"}
    print("same")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.multiprocess
def test_megatron_core_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing", exc_type=ImportError)
    (tmp_path / "script.py").write_text(MEGATRON)
    folders = [tmp_path / "theirs", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    job = subprocess.run(
        [sys.executable, tmp_path / "script.py", *folders], capture_output=True, text=True, timeout=200, check=False
    )
    assert job.stdout.endswith("same\n"), job.stderr[-3000:]


# ------------------------------------------------------------------------------------------------ damage


def problems(path: Path, *also: Path, **options: Any) -> list[str]:
    with pytest.raises(CorruptFile) as caught:
        dcpfile.read(path, also, **options)
    return [str(problem) for problem in caught.value.problems]


def rewritten(path: Path, change: Any) -> None:
    found = pickle.loads((path / METADATA).read_bytes())
    change(found)
    (path / METADATA).write_bytes(pickle.dumps(found, 4))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"has no \.metadata\nIs the path right"):
        dcpfile.read(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(NotACheckpoint, match=r"only 1 \.distcp files\nIt is written last"):
        dcpfile.read(tmp_path)
    (tmp_path / "__0.metadata").write_bytes(b"x")
    with pytest.raises(NotACheckpoint, match="Each rank saved for itself"):
        dcpfile.read(tmp_path)
    with pytest.raises(NotACheckpoint):
        dcpfile.read(tmp_path / "nothing")


def test_files_spread_over_nodes(tmp_path: Path) -> None:
    """B88: `.metadata` on one node, the files on several."""
    path = our_checkpoint(tmp_path / "c", WEIGHTS, 3)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, name in ((one, "__1_0.distcp"), (two, "__2_0.distcp")):
        folder.mkdir()
        (path / name).rename(folder / name)
    assert problems(path) == [
        "__1_0.distcp: is missing; it holds model.a, model.b",
        "__2_0.distcp: is missing; it holds model.b",
    ]
    assert problems(path, one) == ["__2_0.distcp: is missing; it holds model.b"]
    index = dcpfile.read(path, [one, two])
    assert torch.equal(assembled(index, "model.b"), WEIGHTS["model.b"])
    assert index.files["__2_0.distcp"] == two / "__2_0.distcp"
    (path / METADATA).rename(two / METADATA)
    assert dcpfile.read(one, [two, path]).tensors.keys() == index.tensors.keys()


def test_truncated_files_with_both_sizes(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", WEIGHTS)
    size = (path / "__1_0.distcp").stat().st_size
    (path / "__1_0.distcp").write_bytes(b"x" * (size - 1))
    (path / "__0_0.distcp").unlink()
    found = problems(path)
    assert found == [
        "__0_0.distcp: is missing; it holds model.a, model.b, step and 2 more",
        f"{path / '__1_0.distcp'}: is truncated: expected {size} bytes or more, found {size - 1}",
    ]


def test_what_is_not_wanted_may_be_broken(tmp_path: Path) -> None:
    """B89: exporting weights must not depend on the optimizer's entries."""
    weights = {"model.a": WEIGHTS["model.a"], "optimizer.b": WEIGHTS["model.b"]}
    path = our_checkpoint(tmp_path / "c", weights, planner={name: (name,) for name in weights})

    def spoil(found: Any) -> None:
        found.state_dict_metadata["optimizer.b"].chunks.pop()
        for key, value in found.storage_data.items():
            if key.fqn == "optimizer.b":
                value.relative_path, value.length = "__9_0.distcp", None

    rewritten(path, spoil)
    assert len(problems(path)) >= 2
    index = dcpfile.read(path, only=lambda name: not name.startswith("optimizer."))
    assert list(index.tensors) == ["model.a"] and index.skipped == ["optimizer.b"]


def test_stale_files_are_a_warning(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", WEIGHTS)
    (path / "__7_0.distcp").write_bytes(b"old")
    index = dcpfile.read(path)
    assert [str(warning) for warning in index.warnings] == [
        f"{path / '__7_0.distcp'}: is not named in .metadata (left over from another save; ignored)"
    ]


def test_chunks_that_do_not_tile_are_named_together(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", WEIGHTS)

    def spoil(found: Any) -> None:
        entries = found.state_dict_metadata
        entries["model.a"].chunks.pop()
        entries["model.b"].chunks[1].offsets = torch.Size((3,))
        key = next(key for key in found.storage_data if key.fqn == "model.b" and key.offset == torch.Size((4,)))
        found.storage_data[torch_metadata.MetadataIndex("model.b", (3,), 1)] = found.storage_data.pop(key)
        entries["step"].size = torch.Size((2, 2))
        del found.storage_data[torch_metadata.MetadataIndex("model.empty", (0, 0))]

    rewritten(path, spoil)
    assert problems(path) == [
        "model.a: its 1 chunks hold 12 elements and do not cover the 24 of [4, 6]",
        "model.b: the chunks at [0] of [4] and at [3] of [3] overlap",
        "step: a chunk at [] of [] has other dimensions than the tensor, [2, 2]",
        "model.empty: its chunk at [0, 0] has no place in the storage_data of .metadata",
    ]


def test_a_name_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", {"model.b": WEIGHTS["model.b"]}, 1)
    for name in ("../../etc/passwd", "/etc/passwd", "a\0b"):

        def spoil(found: Any, name: str = name) -> None:
            for value in found.storage_data.values():
                value.relative_path = name

        rewritten(path, spoil)
        assert "outside of the checkpoint" in problems(path)[0]


def test_entries_that_are_no_such_thing(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", WEIGHTS)

    def spoil(found: Any) -> None:
        found.state_dict_metadata["model.a"] = {"not": "described"}
        found.state_dict_metadata["model.b"].properties.dtype = torch.complex64
        found.state_dict_metadata["step"].size = "wide"
        for key, value in found.storage_data.items():
            if key.fqn == "model.empty":
                value.transform_descriptors = ["zstd"]

    rewritten(path, spoil)
    text = "\n".join(problems(path))
    assert "model.a: is not described as torch describes" in text
    assert "model.b: has the type complex64" in text
    assert "step: has a shape or offsets that are none" in text
    assert "model.empty is stored through stream extensions (compression, say)" in text


def test_a_chunk_larger_than_its_entry(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path / "c", {"model.a": torch.zeros(600, 6)}, 1, {"model.a": ("model.a",)})

    def spoil(found: Any) -> None:
        for value in found.storage_data.values():
            value.length = min(value.length, 1000)

    rewritten(path, spoil)
    assert "model.a: its chunk at [0, 0] needs 14400 bytes, 1000 are stored" in problems(path)


def test_metadata_that_runs_code_or_is_garbage(tmp_path: Path) -> None:
    """B86: torch itself reads `.metadata` with plain pickle."""
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    path = our_checkpoint(tmp_path / "c", WEIGHTS)
    rewritten(path, lambda found: setattr(found, "planner_data", Evil()))
    with pytest.raises(UnsafePickle, match=r"c/\.metadata refers to posix\.system"):
        dcpfile.read(path)
    assert not (tmp_path / "canary").exists()
    for content in (b"", b"\x80\x04", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([])):
        (path / METADATA).write_bytes(content)
        with pytest.raises(CorruptFile, match=r"\.metadata"):
            dcpfile.read(path)
    rewrite = our_checkpoint(tmp_path / "d", WEIGHTS)
    rewritten(rewrite, lambda found: setattr(found, "storage_data", None))
    with pytest.raises(CorruptFile, match="no storage_data"):
        dcpfile.read(rewrite)


SMALL = encode_metadata(
    [("a", "F32", (4, 2), [((0, 0), (2, 2), "__0_0.distcp", 0, 1600), ((2, 0), (2, 2), "__0_0.distcp", 1600, 1600)])],
    [("o", "__0_0.distcp", 3200, 100)],
    {"a": ("m", 1), "o": ("o",)},
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_damaged_metadata_raises_nothing_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz-dcp"
    path.mkdir(exist_ok=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 3300)
    data = bytearray(SMALL)
    for at, value in changes:
        data[at] = value
    (path / METADATA).write_bytes(data)
    try:
        dcpfile.read(path)
    except SourceError as error:
        assert str(error)


# ------------------------------------------------------------------------------------------------ tiling


def grid(shape: tuple[int, ...], edges: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    spans = [list(pairwise(sorted({0, extent, *cut}))) for extent, cut in zip(shape, edges, strict=True)]
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*spans)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_grids_tile_and_nothing_less_or_more_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    edges = [data.draw(st.lists(st.integers(0, extent), max_size=3)) for extent in shape]
    boxes = data.draw(st.permutations(grid(shape, edges)))
    assert cover_problem(shape, boxes) == ""
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert "do not cover" in cover_problem(shape, boxes[:index] + boxes[index + 1 :]) or len(boxes) == 1
    assert "overlap" in cover_problem(shape, [*boxes, boxes[index]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_the_tiling_agrees_with_counting(cells: list[tuple[int, int, int, int]]) -> None:
    boxes = [((a, b), (min(h, 4 - a), min(w, 4 - b))) for a, b, h, w in cells]
    count = torch.zeros(4, 4)
    for (a, b), (h, w) in boxes:
        count[a : a + h, b : b + w] += 1
    assert (cover_problem((4, 4), boxes) == "") == bool((count == 1).all())


def test_a_hole_and_an_overlap_of_one_size_do_not_cancel() -> None:
    boxes = [((0,), (2,)), ((1,), (2,))]
    assert math.prod((4,)) == sum(size[0] for _, size in boxes)
    assert "overlap" in cover_problem((4,), boxes)


def test_tensors_without_elements_and_without_dimensions() -> None:
    assert cover_problem((), [((), ())]) == ""
    assert cover_problem((), []) != "" and cover_problem((), [((), ()), ((), ())]) != ""
    assert cover_problem((0, 3), []) == "" and cover_problem((0, 3), [((0, 0), (0, 3))]) == ""
    assert cover_problem((2,), [((0,), (2,)), ((2,), (0,))]) == ""  # FSDP2's last rank may hold no row
