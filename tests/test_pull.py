"""`pull`: the exact files of one commit, or their conversion; checked, resumable, whole or not there."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter import Mesh, convert, open_checkpoint, verify
from areal_convert.converter.errors import ConfigError, NoAccess, RemoteChanged, SourceError, TargetError, Unreachable
from areal_convert.converter.execute import Limits
from areal_convert.converter.hub import pull, push
from areal_convert.converter.remote import fetch, pulling
from areal_convert.converter.remote.mounts import unmount_all
from areal_convert.converter.remote.pulling import choose
from areal_convert.converter.sidefiles import INDEX, MANIFEST
from areal_convert.converter.target import Options
from areal_convert.converter.workdir import partial_of
from hub_server import STRANGER, HubServer
from models import logits, sample_tokens, tensors

pytestmark = pytest.mark.filterwarnings(
    # How huggingface_hub hands a file to its HTTP client.
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning",
)

KIND: dict[str, Any] = {"dtype": "bfloat16", "layers": 2}
TWO = Limits(workers=2, memory=16 << 20)
PIECE = 40_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pulling, "PIECE", PIECE)
    with HubServer(tmp_path / "hub") as server:
        server.patch(monkeypatch)
        monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield server
    unmount_all()
    assert not server.leaks, "a token reached the CDN"


@pytest.fixture
def source(model: Callable[..., Path]) -> Path:
    """A model of several shards with side files; not to be written to."""
    return model("llama", max_shard_size=100_000, side_files=True, **KIND)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def total(directory: Path) -> int:
    return sum(map(len, files_of(directory).values()))


# What comes


def test_the_files_of_one_commit(hub: HubServer, source: Path, tmp_path: Path) -> None:
    sha = hub.add_repo("org/m", source)
    done = pull("org/m")
    there = files_of(tmp_path / "m")
    manifest = json.loads(there.pop(MANIFEST))
    assert there.pop(".gitattributes") and there == files_of(source)
    assert done.path == tmp_path / "m" and done.revision == sha and not partial_of(tmp_path / "m").exists()
    assert (manifest["source"]["name"], manifest["source"]["revision"]) == ("org/m", sha)
    found = open_checkpoint(tmp_path / "m").check()
    assert {n: e[0] for n, e in manifest["atoms"].items()} == found.dtypes()
    report = done.report()
    assert report["verified"] and report["fetched_bytes"] == hub.bytes_sent() and not report["left_out"]


def test_all_from_one_commit_though_main_moves(hub: HubServer, source: Path, tmp_path: Path) -> None:
    """B125."""
    sha = hub.add_repo("org/m", source)
    hub.fault("resolve", after=2, times=1, call=lambda _: hub.commit("org/m", {"config.json": "{}", "new.txt": "x"}))
    pull("org/m", tmp_path / "out")
    assert files_of(source).items() <= files_of(tmp_path / "out").items()
    assert json.loads((tmp_path / "out" / MANIFEST).read_bytes())["source"]["revision"] == sha != hub.head("org/m")


def test_a_revision_a_folder_and_the_default_name(hub: HubServer, source: Path, tmp_path: Path) -> None:
    old = hub.add_repo("org/m", {f"step/1/{name}": data for name, data in files_of(source).items()})
    hub.commit("org/m", delete=("step/1/config.json",))
    assert pull("hf://org/m/step/1", revision=old).path == tmp_path / "1"
    assert files_of(source).items() <= files_of(tmp_path / "1").items()
    with pytest.raises(ConfigError, match="revision"):
        pull("org/m@main", tmp_path / "x", revision=old)
    with pytest.raises(NoAccess, match="is a file"):
        pull("org/m/step/1/tokenizer.json", tmp_path / "x")


OTHERS = {
    "pytorch_model.bin": b"\0",
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"\0",
    "m.gguf": b"\0",
    "onnx/model.onnx": b"\0",
    "onnx/config.json": b"{}",
    "original/consolidated.00.pth": b"\0",
    "original/params.json": b"{}",
}


def test_other_formats_are_left_out_and_listed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", files_of(source) | OTHERS)
    hub.reset()
    done = pull("org/m")
    assert done.report()["left_out"] == sorted(OTHERS) and not any(hub.calls(path=name) for name in OTHERS)
    assert (tmp_path / "m" / "1_Pooling" / "config.json").is_file()
    pull("org/m", "all", include_all=True)
    assert files_of(tmp_path / "all").items() >= (files_of(source) | OTHERS).items()


def _index(*files: str) -> str:
    return json.dumps({"weight_map": {str(n): file for n, file in enumerate(files)}})


@pytest.mark.parametrize(
    ("names", "index", "left"),
    [
        (["config.json", "model.safetensors", "a.safetensors"], "", ["a.safetensors"]),
        (["config.json", INDEX, "a.safetensors", "b.safetensors"], _index("a.safetensors"), ["b.safetensors"]),
        (["config.json", "odd.safetensors", "pytorch_model.bin"], "", ["pytorch_model.bin"]),
        (["config.json", "pytorch_model.bin", "tf_model.h5"], "", ["tf_model.h5"]),
        (["pytorch_model.bin.index.json", "a.bin", "b.bin"], _index("a.bin"), ["b.bin"]),
        ([INDEX, "w/a.safetensors", "w/b.json"], _index("w/a.safetensors"), []),
        ([".metadata", "__0_0.distcp", "hf/config.json"], "", []),
        (["mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"], "", []),
    ],
    ids=str,
)
def test_which_files_make_up_the_model(names: list[str], index: str, left: list[str]) -> None:
    assert choose(names, lambda _: index) == ([n for n in sorted(names) if n not in left], left)


def test_a_repository_without_a_config(hub: HubServer, source: Path) -> None:
    hub.add_repo("org/m", {"model.safetensors": source / "model-00001-of-00004.safetensors"})
    with pytest.raises(SourceError, match=r"no config\.json(.|\n)*`pull --to FORMAT --hf-config DIR`"):
        pull("org/m", "out")
    hub.add_repo("org/none")
    with pytest.raises(SourceError, match=r"It holds: \.gitattributes\. Its files are in"):
        pull("org/none", "none")


def test_bin_weights_alone(hub: HubServer, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    from models import to_bin

    path = to_bin(model_copy("llama", **KIND), shards=2)
    hub.add_repo("org/m", path)
    pull("org/m", "out")
    assert files_of(path).items() <= files_of(tmp_path / "out").items() and verify(path, tmp_path / "out").same


def test_a_family_that_is_not_known(hub: HubServer, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    path = model_copy("llama", **KIND)
    (path / "config.json").write_text('{"model_type": "none"}')
    hub.add_repo("org/m", path)
    done = pull("org/m", "out")
    assert any("no table for model_type 'none'" in note for note in done.notes) and done.report()["family"] is None
    assert files_of(path).items() <= files_of(tmp_path / "out").items()


def test_half_a_model_does_not_appear(hub: HubServer, source: Path, tmp_path: Path) -> None:
    files = files_of(source)
    del files[sorted(n for n in files if n.endswith(".safetensors"))[1]]
    hub.add_repo("org/m", files)
    with pytest.raises(SourceError, match=r"(?s)is no whole model.*Its files are in .*out\.areal-partial"):
        pull("org/m", "out")
    assert not (tmp_path / "out").exists() and (partial_of(tmp_path / "out") / "tokenizer.json").is_file()


# There and back


def test_there_and_back_is_bitwise(hub: HubServer, source: Path, tmp_path: Path) -> None:
    sha = push(source, "org/m", limits=TWO).commit
    pull("org/m", "out")
    there = files_of(tmp_path / "out")
    assert {n: d for n, d in files_of(source).items() if n != "README.md"}.items() <= there.items()
    manifest = json.loads(there[MANIFEST])
    assert manifest["source"]["revision"] == sha and manifest["source"]["origin"]["name"] == source.name
    assert verify(source, tmp_path / "out").same


def test_transformers_computes_the_same_from_what_was_pushed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    import torch

    convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2, pp=2), limits=TWO)
    push(tmp_path / "mp", "org/m", options=Options(max_shard=50_000), limits=TWO)
    pull("org/m", "out")
    a, b = tensors(source), tensors(tmp_path / "out")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    tokens = sample_tokens()
    assert torch.equal(logits(source, tokens), logits(tmp_path / "out", tokens))


def test_converted_on_the_way(hub: HubServer, source: Path, tmp_path: Path) -> None:
    """The same bytes as from a local directory of the same files."""
    sha = hub.add_repo("org/m", source)
    mesh = Mesh(tp=2, pp=2)
    done = pull("org/m", "out", to="torch_dist", mesh=mesh, limits=TWO)
    convert(source, tmp_path / "local", "torch_dist", mesh, limits=TWO)
    here, there = files_of(tmp_path / "local"), files_of(tmp_path / "out")
    assert json.loads(there.pop(MANIFEST))["source"]["revision"] == sha and here.pop(MANIFEST)
    there.pop("hf/.gitattributes", None)
    assert here == there and done.report()["revision"] == sha


# What goes wrong


def test_cuts_and_bad_days_are_ridden_out(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", source)
    hub.fault("cdn", times=3, drop_after=10_000)
    hub.fault("cdn", after=5, times=2, drop_after=5_000, reset=True)
    hub.fault("cdn", after=8, times=2, status=503)
    hub.fault("file", times=1, status=500)
    done = pull("org/m", "out")
    assert files_of(source).items() <= files_of(tmp_path / "out").items()
    assert done.report()["retries"] >= 6 and hub.bytes_sent() < 1.2 * total(source)


def test_damage_on_the_way_is_seen_and_fetched_again(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", source)
    hub.fault("cdn", "model-00002-*", times=1, corrupt_at=3_000)
    pull("org/m", "out")
    assert files_of(source).items() <= files_of(tmp_path / "out").items()


def test_damage_that_stays_is_an_error(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", source)
    hub.fault("cdn", "model-00002-*", corrupt_at=3_000)
    with pytest.raises(RemoteChanged, match=r"(?s)model-00002.*its digest is wrong.*--resume"):
        pull("org/m", "out")
    assert not (tmp_path / "out").exists()
    hub.clear_faults()
    hub.reset()
    pull("org/m", "out", resume=True)
    assert files_of(source).items() <= files_of(tmp_path / "out").items()
    assert {call.path for call in hub.calls("cdn")} == {n for n in files_of(source) if n.startswith("model-00002")}


def test_a_hub_that_goes_away_and_comes_back(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", source)
    hub.fault("cdn", after=6, status=503)
    with pytest.raises(Unreachable, match="--resume"):
        pull("org/m", "out")
    assert not (tmp_path / "out").exists() and partial_of(tmp_path / "out").is_dir()
    hub.clear_faults()
    hub.reset()
    with pytest.raises(TargetError, match="unfinished"):
        pull("org/m", "out")
    done = pull("org/m", "out", resume=True)
    assert done.report()["bytes_of_the_pull_before"] > 3 * PIECE
    assert hub.bytes_sent("*.safetensors") <= total(source) - 3 * PIECE
    assert files_of(source).items() <= files_of(tmp_path / "out").items()


@pytest.mark.parametrize("how", [{}, {"to": "hf", "limits": Limits(workers=1, connections=4)}], ids=["files", "to"])
def test_what_was_begun_is_finished_though_main_moves(
    how: dict[str, Any], hub: HubServer, source: Path, tmp_path: Path
) -> None:
    begun = hub.add_repo("org/m", source)
    if how:
        open_checkpoint("hf://org/m")  # headers are kept, so that it is tensors that do not come
        # All files are asked for at once, in whatever order: one never comes, and the others are there by then.
        hub.fault("cdn", "model-00003-*", status=403, delay=0.5)
    else:
        hub.fault("cdn", after=6, status=403, delay=0.5)  # what came before is on the disk by then
    with pytest.raises(Unreachable, match="--resume"):
        pull("org/m", "out", **how)
    assert partial_of(tmp_path / "out").is_dir()
    hub.clear_faults()
    moved = hub.commit("org/m", {"notes.txt": "new"})
    with pytest.raises(TargetError, match="begun with another source"):
        pull(f"org/m@{moved}", "out", resume=True, **how)
    hub.reset()
    done = pull("org/m", "out", resume=True, **how)
    assert done.revision == begun and not (tmp_path / "out" / "notes.txt").exists()
    assert hub.bytes_sent("*.safetensors") < 0.9 * total(source) and verify(tmp_path / "out", source).same
    assert pull("org/m", "out", overwrite=True, **how).revision == moved
    assert (tmp_path / "out" / "notes.txt").read_text() == "new"


@pytest.mark.multiprocess
def test_killed_and_resumed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    """Bytes that were on the disk are not fetched again."""
    hub.add_repo("org/m", source)
    code = "import sys\nfrom areal_convert.converter.remote import pulling\n"
    code += f"pulling.PIECE, pulling.PARALLEL = {PIECE}, 2\n"
    code += "from areal_convert.converter.hub import pull\npull('org/m', sys.argv[1])\n"
    env = hub.env(AREAL_CACHE=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    running: list[subprocess.Popen[bytes]] = []
    hub.fault("cdn", every=1, delay=0.25)
    hub.fault("cdn", after=9, times=1, call=lambda _: (running[0].kill(), running[0].wait()))
    running.append(subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], env=env))
    assert running[0].wait(60) == -9 and not (tmp_path / "out").exists()
    hub.clear_faults()
    hub.reset()
    done = pull("org/m", "out", resume=True)
    assert done.report()["bytes_of_the_pull_before"] >= PIECE
    index = (source / INDEX).stat().st_size  # which is read before, to choose the files
    assert hub.bytes_sent() + done.report()["bytes_of_the_pull_before"] <= done.report()["bytes"] + index
    assert files_of(source).items() <= files_of(tmp_path / "out").items()


def test_who_may_not(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("org/hidden", source, private=True)
    hub.add_repo("org/gated", source, gated="manual")
    hub.patch(monkeypatch, token=STRANGER)
    for repo in ("org/hidden", "org/gated", "org/none"):
        with pytest.raises(NoAccess):
            pull(repo, "out")
    assert not os.path.lexists("out")


def test_what_is_in_the_way_stays(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add_repo("org/m", source)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(TargetError):
            pull("org/m", overwrite=overwrite)
    assert files_of(tmp_path / "m") == {"mine": b"mine"}


# From Hugging Face's cache


def test_what_the_cache_holds_is_not_fetched(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also offline. B127: links are followed, real files are written, a dangling one is named."""
    from huggingface_hub import snapshot_download

    hub.add_repo("org/m", source)
    snapshot = Path(snapshot_download("org/m"))
    hub.reset()
    done = pull("org/m", "out")
    assert not hub.calls("cdn") and not hub.calls("file") and done.report()["bytes_from_the_cache"] >= total(source)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pull("org/m", "offline")
    assert files_of(source).items() <= files_of(tmp_path / "offline").items()
    assert not [p for p in (tmp_path / "offline").rglob("*") if p.is_symlink()]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    lost = snapshot / "tokenizer.json"
    lost.resolve().unlink()
    done = pull("org/m", "dangling")
    assert any("tokenizer.json" in note and "dangling" in note for note in done.notes)
    assert filecmp.cmp(source / "tokenizer.json", tmp_path / "dangling" / "tokenizer.json", shallow=False)


def test_a_damaged_cache_is_passed_over(hub: HubServer, source: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    hub.add_repo("org/m", source)
    blob = next(Path(snapshot_download("org/m")).glob("model-00002-*")).resolve()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    pull("org/m", "out")
    assert files_of(source).items() <= files_of(tmp_path / "out").items()
