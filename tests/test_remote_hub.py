"""Checkpoints read straight from a Hub: few requests, exact ranges, one commit, and whatever goes wrong on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download

from areal_convert.converter import (
    Checkpoint,
    ConvertError,
    CorruptFile,
    Limits,
    Mesh,
    convert,
    diff,
    explain,
    inspect,
    open_checkpoint,
    plan,
    verify,
)
from areal_convert.converter.errors import NoAccess, RemoteChanged, RemoteError, TargetError, Unreachable
from areal_convert.converter.formats import dcp_heads, dcpfile
from areal_convert.converter.remote import fetch, mirror, mounts
from areal_convert.converter.remote.fetch import Fetcher
from areal_convert.converter.remote.hub_store import HubStore
from areal_convert.converter.remote.store import open_store
from hub_server import INVALID, READ, STRANGER, HubServer
from models import add_side_files, make_model, tensors, to_bin

Model = Callable[..., Path]
COMMAND = [sys.executable, "-m", "areal_convert.converter.cli"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", lfs_threshold=100_000) as server:
        server.patch(monkeypatch)
        monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
        yield server
        mounts.unmount_all()
    assert not server.leaks, "a token reached the CDN"


def weight_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ it works


def test_a_conversion_fetches_every_byte_once(hub: HubServer, model: Model, tmp_path: Path) -> None:
    source = model("qwen3_moe")
    sha = hub.add_repo("org/model", source)
    result = convert("hf://org/model", tmp_path / "out", "torch_dist", Mesh(tp=2, pp=2))
    assert verify(source, tmp_path / "out").same
    assert hub.bytes_sent("*.safetensors") <= weight_bytes(source) + 40_000 and len(hub.calls("cdn")) <= 3
    report = result.report()
    assert report["source"]["path"] == f"hf://org/model@{sha}"
    assert report["fetched"]["bytes"] == hub.bytes_sent() and report["fetched"]["retries"] == 0
    assert report["fetched"]["checked_files"] == 1
    manifest = json.loads((tmp_path / "out/areal_manifest.json").read_text())
    assert (manifest["source"]["name"], manifest["source"]["revision"]) == ("org/model", sha)


def test_it_is_the_same_conversion_as_from_a_directory(hub: HubServer, model_copy: Model, tmp_path: Path) -> None:
    source = model_copy("llama", max_shard_size="200KB")
    add_side_files(source)
    hub.add_repo("org/model", source)
    for name, place in (("near", source), ("far", "hf://org/model")):
        convert(place, tmp_path / name, "torch_dist", Mesh(tp=2))
    near, far = (
        {str(f.relative_to(tmp_path / n)): f.read_bytes() for f in (tmp_path / n).rglob("*") if f.is_file()}
        for n in ("near", "far")
    )
    assert near.keys() == far.keys()
    assert {name for name in near if near[name] != far[name]} == {"areal_manifest.json"}


@pytest.mark.parametrize("form", ["torch_dist", "mp_rank", "dcp", "archon"])
def test_every_format(hub: HubServer, model: Model, tmp_path: Path, form: str) -> None:
    source = model("qwen3_moe")
    mesh = Mesh(dp_shard=2) if form in ("dcp", "archon") else Mesh(tp=2, pp=2, ep=2)
    convert(source, tmp_path / "there", form, mesh)
    hub.add_repo("org/model", tmp_path / "there")
    opened = open_checkpoint("hf://org/model")
    assert (opened.format, opened.problems.found) == (form, [])
    assert opened.fetched()["requests"] < 60
    result = convert(opened, tmp_path / "back", "hf")
    assert verify(source, tmp_path / "back").same and not (tmp_path / "back/.metadata").exists()
    size = sum(f.stat().st_size for f in (tmp_path / "there").rglob("*"))
    assert result.fetched["bytes"] == hub.bytes_sent() < 2.5 * size


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_bin(hub: HubServer, model_copy: Model, tmp_path: Path, shards: int) -> None:
    source = model_copy("llama")
    expected = tensors(source)
    hub.add_repo("org/model", to_bin(source, shards))
    convert("hf://org/model", tmp_path / "out", "hf")
    found = tensors(tmp_path / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


def test_a_folder_a_file_and_a_branch(hub: HubServer, model: Model, tmp_path: Path) -> None:
    source = model("llama")
    inside = {f"sub/{f.name}": f for f in source.iterdir()}
    hub.add_repo("org/model", {"README.md": "nothing here"})
    hub.api().create_branch("org/model", branch="dev")
    hub.commit("org/model", inside, branch="dev")
    for text in ("hf://org/model@dev/sub", "hf://org/model@dev/sub/model.safetensors"):
        opened = open_checkpoint(text)
        assert verify(opened, source).same
        assert str(opened.path) == text.replace("dev", hub.head("org/model", "dev"))
    with pytest.raises(ConvertError, match=r"hf://org/model@\w{40} is none of the formats"):
        open_checkpoint("hf://org/model")
    with pytest.raises(NoAccess, match=r"no such file or directory.\nIt holds: .*README.md"):
        open_checkpoint("hf://org/model/sub")


def test_fp8_and_replicas(hub: HubServer, model: Model, tmp_path: Path) -> None:
    source = fp8_model(model("llama", dtype="bfloat16"), tmp_path / "fp8")
    hub.add_repo("org/fp8", source)
    convert(source, tmp_path / "near", "hf")
    result = convert("hf://org/fp8", tmp_path / "far", "hf")
    assert verify(tmp_path / "near", tmp_path / "far").same
    assert result.fetched["bytes"] < 1.2 * weight_bytes(source) + 50_000


def fp8_model(source: Path, target: Path) -> Path:
    """Every matrix of the layers in FP8 with random block scales."""
    from safetensors.torch import save_file

    target.mkdir()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(source).items():
        if tensor.dim() == 2 and ".layers." in name:
            out[name] = (tensor.float() * 4).to(torch.float8_e4m3fn)
            blocks = [-(-n // 128) for n in tensor.shape]
            out[name + "_scale_inv"] = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) + 0.5
        else:
            out[name] = tensor.contiguous()
    save_file(out, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_reports_say_the_address(hub: HubServer, model: Model, tmp_path: Path) -> None:
    sha = hub.add_repo("org/model", model("llama"))
    url = f"hf://org/model@{sha}"
    found = inspect("hf://org/model")
    assert str(found.path) == url and found.config_from == f"{url}/config.json" and not found.problems
    assert str(hub.root) not in json.dumps(found.report(), default=str)
    shown = explain("hf://org/model", "layers.0.attn.q", "mp_rank", Mesh(tp=2)).report()
    assert f"{url}/model.safetensors" in json.dumps(shown) and "areal/hub" not in json.dumps(shown)
    planned = plan("hf://org/model", "hf")
    assert planned.report()["source"]["path"] == url
    assert diff("hf://org/model", model("llama")).same
    sent = hub.bytes_sent("*.safetensors")
    inspect("hf://org/model")
    assert hub.bytes_sent("*.safetensors") == sent, "headers are kept"


# ------------------------------------------------------------------------------------------------ only what is needed


def test_a_rank_of_tp4_fetches_its_share(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MANY", 500)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 2048}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    source = make_model("qwen3", tmp_path / "m", dtype="bfloat16", **sizes)
    hub.add_repo("org/model", source)
    opened, mesh = open_checkpoint("hf://org/model"), Mesh(tp=4)
    state, local = shard(opened, mesh, 2), shard(opened, mesh, 2)
    share = sum(t.numel() * t.element_size() for t in state.values())
    hub.reset()
    done = opened.load_into(state, mesh, 2)
    assert done.fetched["bytes"] == hub.bytes_sent() <= 1.1 * share < 0.5 * weight_bytes(source)
    open_checkpoint(source).load_into(local, mesh, 2)
    assert all(torch.equal(state[name], local[name]) for name in state)
    assert done.fetched["requests"] > 500 and any("--max-gap" in note for note in done.notes)

    hub.reset()
    done = opened.load_into(shard(opened, mesh, 2), mesh, 2, limits=Limits(max_gap=1 << 16))
    assert done.fetched["requests"] < 60 and not done.notes and hub.bytes_sent() < 2.5 * share
    planned = plan("hf://org/model", "mp_rank", mesh, ranks=[2])
    assert planned.moves.totals()["bytes_read"] <= share


def shard(opened: Checkpoint, mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    locals_ = plan(opened, "mp_rank", mesh).locals
    return {x.name: torch.zeros(x.shape, dtype=torch.bfloat16) for x in locals_ if x.rank == rank}


def test_one_tensor_is_read_alone(hub: HubServer, model: Model) -> None:
    source = model("llama")
    hub.add_repo("org/model", source)
    opened = open_checkpoint("hf://org/model")
    hub.reset()
    found = opened.read("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(found, tensors(source)["model.layers.1.mlp.down_proj.weight"])
    assert hub.bytes_sent() == found.numel() * found.element_size()


def test_a_config_from_elsewhere_fetches_no_weights(hub: HubServer, model: Model, tmp_path: Path) -> None:
    """B122."""
    source = model("llama")
    convert(source, tmp_path / "dcp", "dcp")
    shutil.rmtree(tmp_path / "dcp/hf")
    hub.add_repo("org/model", source)
    opened = open_checkpoint(tmp_path / "dcp", hf_config="hf://org/model")
    assert verify(opened, source).same
    convert(opened, tmp_path / "back", "hf")
    assert (tmp_path / "back/generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert not hub.calls(path="*.safetensors") and hub.calls(path="config.json")


# ------------------------------------------------------------------------------------------------ one commit


def test_main_moves_while_it_is_read(hub: HubServer, model: Model, tmp_path: Path) -> None:
    """B125."""
    first, second = model("llama"), model("qwen3")
    sha = hub.add_repo("org/model", first)
    everything = {f.name: f for f in second.iterdir()}
    moved = hub.fault("resolve", "config.json", times=1, call=lambda _: hub.commit("org/model", everything))
    result = convert("hf://org/model", tmp_path / "out", "hf")
    assert moved.fired and hub.head("org/model") != sha
    assert verify(tmp_path / "out", first).same and result.report()["source"]["path"].endswith(sha)


def ask_again(opened: Checkpoint) -> None:
    """Forget the signed addresses, as if they had expired."""
    place = mounts.mounted(opened.found.root)
    assert place is not None and isinstance(place[0].store, HubStore)
    place[0].store._locations.clear()


def test_the_commit_goes_while_it_is_read(hub: HubServer, model: Model, tmp_path: Path) -> None:
    sha = hub.add_repo("org/model", model("llama"))
    opened = open_checkpoint("hf://org/model")
    hub.commit("org/model", {"README.md": "forced"})
    hub.forget("org/model", sha)
    hub.url_lifetime = -1
    ask_again(opened)
    with pytest.raises(NoAccess, match=r"no such revision.*forced push"):
        convert(opened, tmp_path / "out", "hf")


# ------------------------------------------------------------------------------------------------ the cache


def test_what_is_in_the_cache_is_read_from_there(
    hub: HubServer, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model("llama", max_shard_size="200KB")
    sha = hub.add_repo("org/model", source)
    shards = sorted(f.name for f in source.glob("*.safetensors"))
    cached = Path(hf_hub_download("org/model", shards[0], revision=sha))
    hub.reset()
    convert("hf://org/model", tmp_path / "a", "hf")
    assert cached.is_symlink() and not hub.calls(path=shards[0]) and hub.calls(path=shards[1])
    snapshot_download("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.reset()
    for text in ("hf://org/model", f"hf://org/model@{sha}", f"hf://org/model@{sha[:10]}"):
        assert str(open_checkpoint(text).path) == f"hf://org/model@{sha}"
    result = convert("hf://org/model", tmp_path / "b", "hf")
    assert verify(tmp_path / "b", source).same and not hub.calls()
    assert result.fetched == {"bytes": 0, "requests": 0, "retries": 0, "checked_files": 0}
    manifest = json.loads((tmp_path / "b/areal_manifest.json").read_text())
    assert manifest["source"]["revision"] == sha and not any(f.is_symlink() for f in (tmp_path / "b").iterdir())


def test_links_that_lead_nowhere(hub: HubServer, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B127: with the Hub at hand the file is fetched, and the link named; without it, the error names it."""
    source = model("llama")
    hub.add_repo("org/model", source)
    cached = Path(snapshot_download("org/model")) / "model.safetensors"
    cached.resolve().unlink()
    opened = open_checkpoint("hf://org/model")
    assert any("model.safetensors" in note and "dangling link" in note for note in opened.notes)
    assert verify(opened, source).same
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match=r"lead nowhere: model\.safetensors"):
        open_checkpoint("hf://org/model")
    with pytest.raises(ConvertError, match=r"model\.safetensors"):
        open_checkpoint(cached.parent).check()
    shutil.rmtree(cached.parents[2])
    with pytest.raises(Unreachable, match=r"offline mode is on.*does not hold revision main"):
        open_checkpoint("hf://org/model")


# ------------------------------------------------------------------------------------------------ faults that pass


@pytest.mark.parametrize(
    "fault",
    [
        {"drop_after": 100_000},
        {"drop_after": 100_000, "reset": True},
        {"status": 429, "retry_after": 0},
        {"status": 503},
        {"status": 500},
        {"drop_after": 0, "reset": True},
    ],
    ids=["cut", "reset", "429", "503", "500", "at-once"],
)
def test_a_fault_that_passes(hub: HubServer, model: Model, tmp_path: Path, fault: dict[str, Any]) -> None:
    source = model("llama")
    hub.add_repo("org/model", source)
    opened = open_checkpoint("hf://org/model")
    hub.fault("cdn", times=2, **fault)
    hub.reset()
    result = convert(opened, tmp_path / "out", "hf")
    assert verify(tmp_path / "out", source).same and result.fetched["retries"] >= 2
    assert hub.bytes_sent("*.safetensors") <= weight_bytes(source) + 2 * 70_000


@pytest.mark.parametrize("kind", ["info", "tree", "resolve", "file"])
@pytest.mark.parametrize("status", [429, 503])
def test_every_kind_of_request_is_tried_again(hub: HubServer, model: Model, kind: str, status: int) -> None:
    hub.add_repo("org/model", model("llama"))
    fault = hub.fault(kind, status=status, retry_after=0, times=1)
    open_checkpoint("hf://org/model").check()
    assert fault.fired == 1


def test_a_server_that_asks_to_wait_is_obeyed(hub: HubServer, model: Model) -> None:
    hub.add_repo("org/model", model("llama"))
    hub.fault("cdn", status=429, retry_after=1, times=1)
    start = time.monotonic()
    open_checkpoint("hf://org/model")
    assert time.monotonic() - start >= 1


def test_a_signed_address_expires(hub: HubServer, model: Model, tmp_path: Path) -> None:
    source = model("llama")
    hub.add_repo("org/model", source)
    hub.url_lifetime = -1
    hub.fault("resolve", "*.safetensors", after=1, times=1, call=lambda _: setattr(hub, "url_lifetime", 60))
    convert("hf://org/model", tmp_path / "out", "hf")
    assert verify(tmp_path / "out", source).same and len(hub.calls("resolve", "*.safetensors")) == 2
    assert 403 in [call.status for call in hub.calls("cdn")]


def test_a_signed_address_expires_under_several_requests(hub: HubServer, model: Model) -> None:
    """All of them are refused before any of them has asked for a new one."""
    hub.add_repo("org/model", model("llama"))
    store = open_store("hf://org/model")
    bytes_of = b"".join(map(bytes, store.stream("model.safetensors", 0, 400)))
    together = threading.Barrier(4)
    hub.fault("cdn", status=403, call=lambda _: together.wait(20), times=4)
    fetcher = Fetcher(store)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda at: fetcher.read("model.safetensors", at, at + 100), range(0, 400, 100))
        assert b"".join(parts) == bytes_of
    assert fetcher.traffic.retries == 4


# ------------------------------------------------------------------------------------------------ faults that stay


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ({"status": 500}, Unreachable, r"the server answers 500 \(at byte \d+, after 6 attempts\)"),
        ({"drop_after": 0}, Unreachable, "the connection failed"),
        ({"ignore_range": True}, RemoteError, "the server ignores ranges"),
        ({"status": 403}, Unreachable, "signed address has expired or is refused"),
    ],
    ids=["500", "cut", "no-ranges", "403"],
)
def test_a_fault_that_stays(
    hub: HubServer, model: Model, tmp_path: Path, fault: dict[str, Any], kind: type[ConvertError], words: str
) -> None:
    source = model("llama")
    hub.add_repo("org/model", source)
    opened = open_checkpoint("hf://org/model")
    hub.fault("cdn", **fault)
    with pytest.raises(kind, match=words) as caught:
        convert(opened, tmp_path / "out", "hf")
    assert f"hf://org/model@{hub.head('org/model')}/model.safetensors" in str(caught.value)
    assert not (tmp_path / "out").exists()
    if kind is Unreachable:
        assert "--resume" in str(caught.value)


def test_a_file_is_changed(hub: HubServer, model: Model, tmp_path: Path) -> None:
    """Behind the commit's back: the server says another ETag than the listing, or than a moment ago."""
    source = model("llama")
    hub.add_repo("org/model", source)
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    opened = open_checkpoint("hf://org/model")
    hub.tamper("org/model", "model.safetensors", bytes(data))
    ask_again(opened)
    with pytest.raises(RemoteChanged, match=r"model\.safetensors is not what commit \w{10} lists"):
        convert(opened, tmp_path / "out", "hf")
    assert not list(tmp_path.glob("out*"))


def test_damage_on_the_way(hub: HubServer, model: Model, tmp_path: Path) -> None:
    hub.add_repo("org/model", model("llama"))
    hub.fault("file", "config.json", method="GET", corrupt_at=3, times=1)
    with pytest.raises(RemoteChanged, match=r"config\.json: its content is not what its digest says"):
        open_checkpoint("hf://org/model")
    mounts.unmount_all()
    hub.add_repo("org/second", model("qwen3"))
    hub.fault("cdn", corrupt_at=9, times=1)
    with pytest.raises(ConvertError, match=r"hf://org/second@\w+/model\.safetensors has a header that is no JSON"):
        open_checkpoint("hf://org/second").check()
    opened = open_checkpoint("hf://org/second").check()  # what was wrong was not kept
    hub.fault("cdn", corrupt_at=500_000)
    with pytest.raises(RemoteChanged, match=r"model\.safetensors: what came is not what its sha256 says"):
        convert(opened, tmp_path / "out", "hf")
    assert not list(tmp_path.glob("out*"))


def test_a_dcp_of_many_entries_is_opened_with_few_requests(
    hub: HubServer, model_copy: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of each kind is fetched; the others are supposed to be like it, and proved when they are read."""
    monkeypatch.setattr(dcp_heads, "MANY", 10)
    monkeypatch.setattr(mirror, "GAP", 0)
    source = model_copy("llama", dtype="bfloat16", num_hidden_layers=12)
    convert(source, tmp_path / "there", "dcp", Mesh(dp_shard=2))
    hub.add_repo("org/model", tmp_path / "there")
    opened = open_checkpoint("hf://org/model")
    assert opened.fetched()["requests"] < 60 < sum(len(t.boxes) for t in opened.found.tensors) / 3
    assert verify(opened, source).same
    name = "model.layers.7.mlp.up_proj.weight"
    entry = dcpfile.read(tmp_path / "there").tensors[name].chunks[1]
    raw = bytearray(entry.file.read_bytes())
    shape = raw.index(b"K\x40", entry.offset)  # the columns, in the entry's pickle
    raw[shape + 1] = 0x20
    entry.file.write_bytes(raw)
    hub.add_repo("org/lie", tmp_path / "there")
    opened = open_checkpoint("hf://org/lie").check()
    with pytest.raises(CorruptFile, match=rf"{entry.file.name}: the entry of {name} .* otherwise than its like"):
        convert(opened, tmp_path / "out", "hf")


@pytest.mark.parametrize("damage", ["shorter", "pointer"])
def test_a_damaged_file_is_called_by_its_address(hub: HubServer, model: Model, damage: str) -> None:
    data = (model("llama") / "model.safetensors").read_bytes()
    data = data[:-100_000] if damage == "shorter" else b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
    hub.add_repo("org/model", {"config.json": model("llama") / "config.json", "model.safetensors": data})
    with pytest.raises(ConvertError, match=r"hf://org/model@\w{40}") as caught:
        open_checkpoint("hf://org/model").check()
    words = {"shorter": "model.safetensors: is truncated", "pointer": "Git LFS pointer"}[damage]
    assert words in str(caught.value) and str(hub.root) not in str(caught.value)


# ------------------------------------------------------------------------------------------------ who may read what


def refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None, text: str = "hf://org/model") -> str:
    hub.patch(monkeypatch, token=token)
    with pytest.raises(NoAccess) as caught:
        open_checkpoint(text)
    return str(caught.value)


def test_who_may_read_what(hub: HubServer, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f.name: f for f in model("llama").iterdir()}
    hub.add_repo("org/model", files, private=True)
    hub.add_repo("org/gated", files, gated="manual")
    hub.add_repo("org/open", files)
    unknown = refused(hub, monkeypatch, READ, "hf://org/nowhere")
    assert "no such repository, or it is private" in unknown and "Does the token belong" in unknown
    assert "no such repository, or it is private" in refused(hub, monkeypatch, STRANGER)
    assert "No token is set: log in" in refused(hub, monkeypatch, None)
    assert "does not accept the token" in refused(hub, monkeypatch, INVALID, "hf://org/open")
    gated = refused(hub, monkeypatch, STRANGER, "hf://org/gated")
    assert "is gated" in gated and f"{hub.url}/org/gated" in gated
    assert "No token is set" in refused(hub, monkeypatch, None, "hf://org/gated")
    assert "no such revision" in refused(hub, monkeypatch, READ, "hf://org/open@nope")
    assert "A slash in a branch's name is written %2F." in refused(hub, monkeypatch, READ, "hf://org/open@a/b")
    assert "A repository is org/name." in refused(hub, monkeypatch, READ, "hf://open")
    hub.patch(monkeypatch, token=READ)
    assert open_checkpoint("hf://org/model").check()


def test_no_way_to_the_server(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(endpoint: str) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(Unreachable) as caught:
            open_checkpoint("hf://org/model")
        return str(caught.value)

    port = hub.url.rpartition(":")[2]
    tls = failing(f"https://127.0.0.1:{port}")
    assert "no secure connection" in tls and "SSL_CERT_FILE" in tls
    assert "the connection failed" in failing("http://127.0.0.1:9") and "attempts" in failing("http://127.0.0.1:9")
    assert "name cannot be resolved" in failing("http://nowhere.invalid")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    from huggingface_hub.utils import _http

    _http.close_session()
    assert "HTTP_PROXY is set" in failing(hub.url)
    monkeypatch.undo()
    _http.close_session()


def test_a_target_elsewhere_and_a_cache_that_cannot_be_written(
    hub: HubServer, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match="areal-convert push"):
        convert(model("llama"), "hf://org/other", "hf")
    assert not Path("hf:").exists()
    hub.add_repo("org/model", model("llama"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="AREAL_CACHE names another directory"):
        open_checkpoint("hf://org/model")


# ------------------------------------------------------------------------------------------------ other processes


def cli(hub: HubServer, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], env=hub.env(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    return out + errors if code else out


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_conversion_that_is_killed_goes_on(hub: HubServer, model: Model, tmp_path: Path) -> None:
    """What is in the journal is not fetched again; nor are the headers."""
    source = model("llama", max_shard_size="100KB")
    hub.add_repo("org/model", source)
    hub.fault("cdn", rate=150_000)
    command = ["convert", "hf://org/model", tmp_path / "out", "--to", "mp_rank", "--tp", "2", "--connections", "1"]
    process = cli(hub, *command)
    journal = tmp_path / "out.areal-partial/.areal-journal"
    until(lambda: journal.exists() and "done" in journal.read_text())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = [json.loads(line)["done"] for line in journal.read_text().splitlines()[1:] if line.endswith("}")]
    finished_atoms = {name for entry in done for name in entry}
    hub.clear_faults()
    hub.reset()
    report = convert("hf://org/model", tmp_path / "out", "mp_rank", Mesh(tp=2), resume=True).report()
    planned = plan(source, "mp_rank", Mesh(tp=2))
    left = sum(a.nbytes for a in planned.plan.atoms if a.name not in finished_atoms)
    assert finished_atoms and report["resumed_atoms"] == len(finished_atoms)
    assert left <= hub.bytes_sent("*.safetensors") <= 1.08 * left < 0.95 * weight_bytes(source)
    assert verify(tmp_path / "out", source).same


def test_a_dead_connection_keeps_what_is_done(hub: HubServer, model: Model, tmp_path: Path) -> None:
    """After the last attempt the error says so, and --resume goes on without the bytes that are there."""
    source = model("llama", max_shard_size="100KB")
    hub.add_repo("org/model", source)
    shards = len(list(source.glob("*.safetensors")))
    hub.fault("cdn", after=shards + shards // 2, status=403)
    limits = Limits(workers=1, connections=1)
    with pytest.raises(Unreachable, match=r"expired or is refused(.|\n)*--resume"):
        convert("hf://org/model", tmp_path / "out", "hf", limits=limits)
    assert (tmp_path / "out.areal-partial").is_dir()
    hub.clear_faults()
    hub.reset()
    begun = hub.head("org/model")
    hub.commit("org/model", {"README.md": "main moves on"})
    result = convert("hf://org/model@main", tmp_path / "out", "hf", limits=limits, resume=True)
    assert result.report()["source"]["path"] == f"hf://org/model@{begun}", (
        "it goes on with the commit that it began with"
    )
    assert result.resumed > 0 and hub.bytes_sent("*.safetensors") < 0.9 * weight_bytes(source)
    assert verify(tmp_path / "out", source).same


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_an_interrupt_ends_at_once(hub: HubServer, model: Model, tmp_path: Path) -> None:
    hub.add_repo("org/model", model("llama"))
    slow = hub.fault("cdn", after=1, rate=5_000)
    process = cli(hub, "convert", "hf://org/model", tmp_path / "out", "--to", "hf")
    until(lambda: slow.fired)
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    text = finished(process, 130)
    assert time.monotonic() - start < 4 and "Interrupted." in text


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_several_processes_share_a_mirror(hub: HubServer, model: Model) -> None:
    sha = hub.add_repo("org/model", model("llama", max_shard_size="200KB"))
    processes = [cli(hub, "inspect", "hf://org/model", "--json") for _ in range(2)]
    reports = [json.loads(finished(p)) for p in processes]
    assert reports[0] == reports[1] and reports[0]["path"] == f"hf://org/model@{sha}"
    hub.reset()
    assert inspect(f"hf://org/model@{sha}").report() == reports[0]
    assert not hub.calls("cdn") and not hub.calls("file"), "the mirror is everybody's"


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_the_command_says_what_it_fetched(hub: HubServer, model: Model, tmp_path: Path) -> None:
    hub.add_repo("org/model", model("llama"))
    line = finished(cli(hub, "convert", "hf://org/model", tmp_path / "out", "--to", "torch_dist"))
    assert "hf://org/model@" in line and "fetched in" in line and "requests" in line
    assert "error: hf://org/none: there is no such repository" in finished(cli(hub, "inspect", "hf://org/none"), 2)
