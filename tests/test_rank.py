"""`--rank`: some ranks' files only, made on several nodes, and copied together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from areal_convert.converter import Mesh, Options, convert, execute, inspect, open_checkpoint, plan, verify
from areal_convert.converter.cli import cli
from areal_convert.converter.errors import ConfigError, MeshError, SourceError, TargetError, VerifyError
from areal_convert.converter.human import parse_ranks, ranks_text
from areal_convert.converter.remote import mounts
from areal_convert.converter.sidefiles import MANIFEST, RANK_MANIFEST
from areal_convert.converter.slots import Box, tiles
from hub_server import HubServer

Model = Callable[..., Path]


def contents(root: Path) -> dict[str, bytes]:
    """Every file but the manifests, which differ on purpose."""
    files = {str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("areal_manifest")}


def converted(*args: Any, **how: Any) -> Path:
    return Path(convert(*args, **how).path)


def merge(into: Path, *parts: Path) -> Path:
    for part in parts:
        shutil.copytree(part, into, dirs_exist_ok=True)
    return into


# ------------------------------------------------------------------------------------------------ how ranks are written


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-1,7", [0, 1, 7]), (" 2 , 4-4", [2, 4])]
)
def test_ranks_as_people_write_them(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text) == ranks
    assert parse_ranks(ranks_text(ranks)) == ranks


@pytest.mark.parametrize("text", ["", "3-", "-1", "4-2", "a", "1,,2", "1;2", "9" * 9])
def test_no_ranks(text: str) -> None:
    with pytest.raises(ValueError, match="names no ranks"):
        parse_ranks(text)


# --------------------------------------------------------------------------------------------- all parts make the whole

TARGETS: list[tuple[str, str, Mesh, Options]] = [
    ("qwen3", "mp_rank", Mesh(tp=2, pp=2), Options()),
    ("qwen3", "torch_dist", Mesh(tp=4, pp=2), Options(dtype="bfloat16")),
    ("llama_tied", "torch_dist", Mesh(tp=2, pp=2, vpp=2), Options()),
    ("llama_tied", "mp_rank", Mesh(tp=2, pp=2), Options()),
    ("llama_tied", "dcp", Mesh(dp_shard=3, tp=2), Options()),
    ("qwen3", "archon", Mesh(dp_shard=2, tp=2), Options()),
    ("qwen3_moe", "mp_rank", Mesh(ep=2, pp=2), Options()),
    ("qwen3_moe", "torch_dist", Mesh(tp=2, ep=2, etp=1), Options()),
    ("qwen3_moe", "dcp", Mesh(dp_shard=4, ep=2), Options()),
]


@pytest.mark.parametrize(("family", "form", "mesh", "options"), TARGETS)
def test_the_parts_of_all_ranks_are_the_whole_byte_for_byte(
    model: Model, tmp_path: Path, family: str, form: str, mesh: Mesh, options: Options
) -> None:
    source = model(family)
    convert(source, tmp_path / "whole", form, mesh, options)
    wanted = contents(tmp_path / "whole")
    world = mesh.fsdp_world if form in ("dcp", "archon") else mesh.world
    parts, read = [], 0
    for rank in range(world):
        done = convert(source, tmp_path / f"part{rank}", form, mesh, options, ranks=[rank])
        parts.append(Path(done.path))
        read += done.planned.moves.bytes_read
        mine = contents(Path(done.path))
        assert {name: wanted[name] for name in mine} == mine and done.verified
        assert len(mine) < len(wanted) and not (Path(done.path) / MANIFEST).exists()
    assert read >= plan(source, form, mesh, options).plan.bytes_read  # all of it, and replicas again
    merged = merge(tmp_path / "merged", *parts)
    assert contents(merged) == wanted
    assert inspect(merged).ok and verify(merged, tmp_path / "whole").same


def test_from_another_mesh_and_back(model: Model, tmp_path: Path) -> None:
    """The source's replicas are compared in these boxes, and what was copied together converts like any other."""
    source = converted(model("qwen3_moe"), tmp_path / "mp", "mp_rank", Mesh(tp=2, ep=2))
    parts = [
        converted(source, tmp_path / f"p{ranks[0]}", "torch_dist", Mesh(tp=4), ranks=ranks)
        for ranks in ([0, 2], [1, 3])
    ]
    merged = merge(tmp_path / "merged", *parts)
    back = converted(merged, tmp_path / "hf", "hf")
    assert verify(back, model("qwen3_moe")).same


def test_a_ranks_files_do_not_depend_on_which_were_made_with_it(model: Model, tmp_path: Path) -> None:
    source, mesh = model("qwen3"), Mesh(tp=2, pp=2)
    one = converted(source, tmp_path / "one", "mp_rank", mesh, ranks=[2])
    three = converted(source, tmp_path / "three", "mp_rank", mesh, ranks=[3, 1, 2, 2])
    name = RANK_MANIFEST.format(rank=2)
    assert (one / name).read_bytes() == (three / name).read_bytes()
    assert sorted(p.name for p in three.glob("areal_manifest*")) == [RANK_MANIFEST.format(rank=r) for r in (1, 2, 3)]
    assert json.loads((one / name).read_text())["ranks"] == "0-3"


def test_a_plan_is_the_same_wherever_the_source_lies(model: Model, tmp_path: Path) -> None:
    mesh = Mesh(tp=2, pp=2)
    copied = shutil.copytree(model("qwen3"), tmp_path / "elsewhere" / "copy")
    first, second = (
        plan(path, "torch_dist", mesh, ranks=ranks) for path, ranks in ((model("qwen3"), None), (copied, [1]))
    )
    assert first.plan.digest == second.plan.digest
    assert plan(copied, "torch_dist", Mesh(tp=2)).plan.digest != first.plan.digest


# ------------------------------------------------------------------------------------------------ what is read


def test_only_the_boxes_of_the_rank_are_read(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def reading(files: Any, slot: Any, box: Any, out: Any) -> None:
        read.append(out.nbytes)
        original(files, slot, box, out)

    original = execute.read_box
    monkeypatch.setattr(execute, "read_box", reading)
    done = convert(model("qwen3"), tmp_path / "out", "mp_rank", Mesh(tp=2, pp=2), ranks=[3], verify=False)
    moved = sum(a.box.volume * 4 for a in done.planned.moves.atoms)
    assert sum(read) == moved == done.planned.report()["bytes_read"]
    assert 0.2 < moved / done.planned.report()["whole"]["bytes_read"] < 0.35
    assert {(slot.buffer.file, box) for a in done.planned.moves.atoms for slot, box in a.reads()} == {
        (a.source[0].buffer.file, a.box) for a in done.planned.moves.atoms
    }


def test_large_boxes_are_read_in_parts() -> None:
    region = Box((2, 1, 0), (6, 5, 7))
    parts = list(execute.parts_of(region, 2, 30))
    moved = [Box(tuple(map(sub, p.lo, region.lo)), tuple(map(sub, p.hi, region.lo))) for p in parts]
    assert tiles(moved, region.sizes) and len(parts) == 8 and all(p.volume * 2 <= 30 for p in parts)
    assert moved == sorted(moved)  # digests depend on the order


def test_what_other_ranks_hold_may_be_broken(model_copy: Model, tmp_path: Path) -> None:
    source = model_copy("qwen3")
    (file,) = source.glob("*.safetensors")
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = 8 + int.from_bytes(raw[:8], "little") + header["model.layers.3.mlp.down_proj.weight"]["data_offsets"][0]
    broken = bytearray(raw)
    broken[begin : begin + 4] = np.float32(np.nan).tobytes()
    file.write_bytes(broken)
    mesh = Mesh(tp=2, pp=2)
    assert convert(source, tmp_path / "first", "torch_dist", mesh, ranks=[0, 1]).verified
    assert convert(source, tmp_path / "right", "torch_dist", mesh, ranks=[3]).verified  # column 0 is rank 2's
    with pytest.raises(SourceError, match=r"holds NaN \(in layers\.3\.mlp\.down\)"):
        convert(source, tmp_path / "second", "torch_dist", mesh, ranks=[2])


# --------------------------------------------------------------------------------------------- a part is no checkpoint


@pytest.mark.parametrize(
    ("form", "mesh"), [("mp_rank", Mesh(tp=2, pp=2)), ("torch_dist", Mesh(tp=4)), ("dcp", Mesh(dp_shard=4))]
)
def test_a_part_says_which_ranks_are_missing(model: Model, tmp_path: Path, form: str, mesh: Mesh) -> None:
    part = converted(model("qwen3"), tmp_path / "part", form, mesh, ranks=[1])
    found = inspect(part)
    (problem,) = found.problems
    assert found.format == form and not found.ok
    assert "holds the files of rank 1 only; the files of rank 0,2-3 are missing" in problem.what
    assert "Copy the directories" in problem.hint
    missing = "files of rank 0,2-3 are missing"
    with pytest.raises(SourceError, match=missing):
        open_checkpoint(part)
    with pytest.raises(SourceError, match=missing):
        convert(part, tmp_path / "no", "hf")
    if (part / "release").exists():
        assert missing in inspect(part / "release").problems[0].what
    (part / RANK_MANIFEST.format(rank=1)).unlink()
    assert not inspect(part).ok  # the formats themselves miss the other files


def test_parts_of_different_conversions_are_not_taken_for_one(model: Model, tmp_path: Path) -> None:
    source, mesh = model("qwen3"), Mesh(tp=2)
    one = converted(source, tmp_path / "one", "mp_rank", mesh, ranks=[0])
    other = converted(source, tmp_path / "other", "mp_rank", mesh, Options(dtype="bfloat16"), ranks=[1])
    with pytest.raises(SourceError, match=r"rank-0\.json and .*rank-1\.json are from different conversions"):
        open_checkpoint(merge(tmp_path / "both", one, other))


def test_parts_of_changed_weights_are_not_taken_for_one(model_copy: Model, tmp_path: Path) -> None:
    """The plan is the same, the name too; what both ranks hold (a norm) tells them apart."""
    source, mesh = model_copy("qwen3"), Mesh(tp=2)
    one = converted(source, tmp_path / "one", "mp_rank", mesh, ranks=[0])
    (file,) = source.glob("*.safetensors")
    raw = file.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    data = np.frombuffer(raw[header:], np.float32) * 2
    file.write_bytes(raw[:header] + data.tobytes())
    other = converted(source, tmp_path / "other", "mp_rank", mesh, ranks=[1])
    with pytest.raises(SourceError, match=r"different conversions: .*norm.* has other values"):
        open_checkpoint(merge(tmp_path / "both", one, other))


def test_a_damaged_manifest_is_named(model: Model, tmp_path: Path) -> None:
    part = converted(model("qwen3"), tmp_path / "part", "mp_rank", Mesh(tp=2), ranks=[0, 1])
    (part / RANK_MANIFEST.format(rank=1)).write_text('{"rank": 1')
    with pytest.raises(SourceError, match=r"rank-1\.json: is no manifest"):
        open_checkpoint(part)


# --------------------------------------------------------------------------------------------- resume, verify, refuse


def test_an_interrupted_part_is_resumed(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, mesh = model("qwen3"), Mesh(tp=2, pp=2)
    whole = converted(source, tmp_path / "whole", "mp_rank", mesh)
    moved, original = [0], execute.write_box

    def writing(*args: Any) -> None:
        moved[0] += 1
        if moved[0] == 12:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(execute, "write_box", writing)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "mp_rank", mesh, ranks=[2, 3])
    assert not (tmp_path / "out").exists()
    with pytest.raises(TargetError, match="begun with another source, other options"):
        convert(source, tmp_path / "out", "mp_rank", mesh, ranks=[2], resume=True)
    done = convert(source, tmp_path / "out", "mp_rank", mesh, ranks=[2, 3], resume=True)
    assert done.resumed > 0 and done.verified
    wanted = contents(whole)
    assert {name: wanted[name] for name in contents(Path(done.path))} == contents(Path(done.path))
    assert set(done.digests) == {a.key for a in done.planned.moves.atoms}


def test_a_piece_that_reads_back_otherwise_is_named(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = execute.write_box

    def writing(files: Any, slot: Any, box: Any, data: Any) -> None:
        original(files, slot, box, data * 0 if "linear_proj" in slot.buffer.name else data)

    monkeypatch.setattr(execute, "write_box", writing)
    with pytest.raises(VerifyError, match=r"layers\.2\.attn\.o\[0:64,.*reads back with another content"):
        convert(model("qwen3"), tmp_path / "out", "mp_rank", Mesh(tp=2, pp=2), ranks=[3])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "mesh", "ranks", "error", "says"),
    [
        ("hf", Mesh(), [0], ConfigError, "hf has no ranks"),
        ("mp_rank", Mesh(tp=2, pp=2), [1, 4, 5], MeshError, "no rank 4-5 in this mesh (tp2 pp2); it has 4"),
        ("dcp", Mesh(dp_shard=3), [3], MeshError, "it has 3"),
        ("torch_dist", Mesh(), [-1], MeshError, "no rank -1"),
        ("torch_dist", Mesh(), [], ConfigError, "No ranks"),
    ],
)
def test_ranks_that_cannot_be(
    model: Model, tmp_path: Path, form: str, mesh: Mesh, ranks: list[int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        convert(model("qwen3"), tmp_path / "out", form, mesh, ranks=ranks)
    assert says in str(caught.value) and not (tmp_path / "out").exists()


def test_a_rank_without_a_file_is_told(model: Model, tmp_path: Path) -> None:
    """A grid of experts can be larger than the dense one; this model has no experts to put there."""
    source, mesh = model("qwen3"), Mesh(tp=1, etp=2)
    idle = convert(source, tmp_path / "idle", "torch_dist", mesh, ranks=[1])
    assert "rank 1 has no file of its own" in " ".join(idle.planned.source.notes)
    busy = convert(source, tmp_path / "busy", "torch_dist", mesh, ranks=[0])
    assert inspect(merge(tmp_path / "both", Path(idle.path), Path(busy.path))).ok


def test_a_part_can_be_replaced(model: Model, tmp_path: Path) -> None:
    source, out = model("qwen3"), tmp_path / "out"
    convert(source, out, "torch_dist", Mesh(tp=2), ranks=[0])
    convert(source, out, "torch_dist", Mesh(tp=2), ranks=[1], overwrite=True)
    assert not (out / RANK_MANIFEST.format(rank=0)).exists() and (out / "release" / "__1_0.distcp").exists()


# ------------------------------------------------------------------------------------------------ from a Hub


def test_nodes_fetch_what_their_ranks_hold(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a cache of its own: the parts are the same as if one node had made them all, and from one commit."""
    source, mesh = model("qwen3", layers=8), Mesh(pp=2)
    whole = converted(source, tmp_path / "whole", "torch_dist", mesh)
    parts = []
    with HubServer(tmp_path / "hub", lfs_threshold=100_000) as hub:
        sha = hub.add_repo("org/model", source)
        hub.patch(monkeypatch)
        for rank in (0, 1):
            monkeypatch.setenv("AREAL_CACHE", str(tmp_path / f"cache{rank}"))
            done = convert("hf://org/model", tmp_path / f"node{rank}", "torch_dist", mesh, ranks=[rank])
            share = done.planned.report()["bytes_read"]
            assert share < done.fetched["bytes"] == hub.bytes_sent() < 1.1 * share
            parts.append(Path(done.path))
            hub.reset()
            mounts.unmount_all()
    merged = merge(tmp_path / "merged", *parts)
    assert contents(merged) == contents(whole) and inspect(merged).ok
    manifests = [json.loads(path.read_text()) for path in merged.glob("areal_manifest*")]
    assert [m["source"]["revision"] for m in manifests] == [sha, sha]
    assert manifests[0]["plan"] == manifests[1]["plan"] == json.loads((whole / MANIFEST).read_text())["plan"]


# ------------------------------------------------------------------------------------------------ the command


def run(*args: Any) -> Any:
    result = CliRunner().invoke(cli, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command(model: Model, tmp_path: Path) -> None:
    source, mesh = model("qwen3"), ("--to", "mp_rank", "--tp", 2, "--pp", 2)
    planned = json.loads(run("plan", source, *mesh, "--rank", "1", "--rank", "3", "--json").stdout)
    assert planned["only_ranks"] == [1, 3] and planned["ranks"] == planned["files"] == 2
    assert planned["bytes_read"] < planned["whole"]["bytes_read"] and planned["whole"]["files"] == 4
    assert "only rank" in run("plan", source, *mesh, "--rank", "1-3").stdout
    for out, ranks in (("a", "0-2"), ("b", "3")):
        done = run("convert", source, tmp_path / out, *mesh, "--rank", ranks)
        assert done.exit_code == 0 and f"rank {ranks} only" in done.stdout
    told = run("inspect", tmp_path / "a")
    assert told.exit_code == 1 and "the files of rank 3 are missing" in told.stdout
    assert run("inspect", merge(tmp_path / "a", tmp_path / "b")).exit_code == 0
    wrong = run("convert", source, tmp_path / "c", *mesh, "--rank", "two")
    assert wrong.exit_code == 2 and "--rank" in wrong.stderr and "names no ranks" in wrong.stderr
