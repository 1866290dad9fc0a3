"""`push`: any format to a repository on the Hub, one commit or none, nothing sent twice, the old revision served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter import Mesh, convert
from areal_convert.converter.errors import ConvertError, SourceError, TargetError
from areal_convert.converter.execute import Limits
from areal_convert.converter.hub import Pushed, push
from areal_convert.converter.remote import fetch
from areal_convert.converter.remote.mounts import unmount_all
from areal_convert.converter.sidefiles import INDEX, MANIFEST
from areal_convert.converter.target import Options
from hub_server import INVALID, READ, STRANGER, HubServer
from models import add_mtp, tensors

pytestmark = pytest.mark.filterwarnings(
    # How huggingface_hub hands a file to its HTTP client.
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning",
)

KIND: dict[str, Any] = {"dtype": "bfloat16", "layers": 2}
SHARD = 100_000
TWO = Limits(workers=2, memory=16 << 20)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(fetch, "FIRST_PAUSE", 0.01)
    with HubServer(tmp_path / "hub") as server:
        server.patch(monkeypatch)
        monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
        yield server
    unmount_all()
    assert not server.leaks, "a token reached the CDN"
    scratch = list((tmp_path / "cache").rglob("*.safetensors"))
    assert not [s for s in scratch if "push" in s.parts], "files were left in the scratch directory"


@pytest.fixture
def sharded(model_copy: Callable[..., Path]) -> Path:
    """A Hugging Face directory of several shards, with side files."""
    return model_copy("llama", max_shard_size=SHARD, side_files=True, **KIND)


@pytest.fixture
def mp_rank(tmp_path: Path, model: Callable[..., Path]) -> Path:
    out = tmp_path / "mp"
    convert(model("llama", side_files=True, **KIND), out, "mp_rank", Mesh(tp=2, pp=2), limits=TWO)
    return out


def weights(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.name.endswith((".safetensors", INDEX))}


def remote(hub: HubServer, repo: str = "org/m", revision: str = "main") -> dict[str, bytes]:
    return {path: hub.read(repo, path, revision) for path in hub.files(repo, revision)}


def fp8_model(source: Path, target: Path) -> Path:
    """The matrices of the layers in FP8, with block scales."""
    import torch
    from safetensors.torch import save_file

    target.mkdir()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(source).items():
        out[name] = tensor
        if tensor.dim() == 2 and ".layers." in name:
            out[name] = (tensor.float() * 4).to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in tensor.shape], 0.25)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))
    return target


# What arrives


def test_a_directory_is_sent_as_its_files_are(hub: HubServer, sharded: Path) -> None:
    hub.add_repo("org/m")
    done = push(sharded, "org/m", limits=TWO, message="First")
    there = remote(hub)
    for path in sharded.rglob("*"):
        name = str(path.relative_to(sharded))
        if path.is_file() and name != "README.md":
            assert there[name] == path.read_bytes(), name
    assert set(there) - {str(p.relative_to(sharded)) for p in sharded.rglob("*")} == {".gitattributes", MANIFEST}
    assert done.changed and done.commit == hub.head("org/m") and done.url == f"{hub.url}/org/m/commit/{done.commit}"
    assert len(hub.repo("org/m").commits) == 2 and hub.repo("org/m").commits[done.commit or ""].title == "First"
    assert done.report()["as_is"] and len(done.report()["made"]) == len(weights(sharded)) - 1


def test_another_format_is_made_on_the_way(hub: HubServer, mp_rank: Path, tmp_path: Path) -> None:
    """The same bytes as a conversion to a directory, in shards of the asked size."""
    hub.add_repo("org/m")
    options = Options(max_shard=SHARD)
    convert(mp_rank, tmp_path / "hf", "hf", options=options, limits=TWO)
    done = push(mp_rank, "org/m", options=options, limits=TWO)
    there = remote(hub)
    assert weights(tmp_path / "hf") == {n: data for n, data in there.items() if n.endswith((".safetensors", INDEX))}
    for path in (tmp_path / "hf").rglob("*"):
        name = str(path.relative_to(tmp_path / "hf"))
        if path.is_file() and name != "README.md":
            assert there[name] == path.read_bytes(), name
    assert not done.report()["as_is"] and len(done.report()["made"]) > 3


def test_a_dtype_is_cast_on_the_way(hub: HubServer, sharded: Path) -> None:
    hub.add_repo("org/m")
    report = push(sharded, "org/m", options=Options(dtype="float32"), limits=TWO).report()
    manifest = json.loads(remote(hub)[MANIFEST])
    assert report["exactness"] == "widen" and {entry[0] for entry in manifest["atoms"].values()} == {"F32"}
    assert json.loads(remote(hub)["config.json"])["dtype"] == "float32"


def test_a_file_under_another_name_is_made_anew(hub: HubServer, model_copy: Callable[..., Path]) -> None:
    """Nobody would find `weights.safetensors`."""
    path = model_copy("llama", **KIND)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    hub.add_repo("org/m")
    assert not push(path, "org/m", limits=TWO).report()["as_is"]
    assert [n for n in remote(hub) if n.endswith(".safetensors")] == ["model.safetensors"]


def test_an_atom_in_two_files_is_made_in_both(hub: HubServer, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """DeepSeek's MTP layer repeats the embedding and the head."""
    path, options = add_mtp(model_copy("deepseek_v3", **KIND)), Options(max_shard=SHARD)
    convert(path, tmp_path / "mp", "mp_rank", Mesh(ep=2), limits=TWO)
    convert(tmp_path / "mp", tmp_path / "hf", "hf", options=options, limits=TWO)
    push(tmp_path / "mp", "org/new", options=options, limits=TWO)
    there = {n: data for n, data in remote(hub, "org/new").items() if n.endswith((".safetensors", INDEX))}
    assert weights(tmp_path / "hf") == there and len(there) > 5


def test_a_remote_source_goes_on_byte_for_byte(hub: HubServer, sharded: Path) -> None:
    sha = hub.add_repo("org/base", sharded)
    hub.add_repo("org/m")
    hub.reset()
    push("hf://org/base", "org/m", limits=TWO)
    there = remote(hub)
    assert {n: there[n] for n in weights(sharded)} == weights(sharded)
    sizes = sum(len(data) for data in weights(sharded).values())
    assert hub.bytes_sent("*.safetensors", repo="org/base") < sizes + 4 * 33_000, "once, and the headers"
    assert json.loads(there[MANIFEST])["source"]["revision"] == sha and sha in there["README.md"].decode()


def test_a_remote_source_of_another_format(hub: HubServer, mp_rank: Path, tmp_path: Path) -> None:
    hub.add_repo("org/megatron", mp_rank)
    hub.add_repo("org/m")
    push("hf://org/megatron", "org/m", branch="hf", limits=TWO)
    convert(mp_rank, tmp_path / "hf", "hf", limits=TWO)
    assert hub.read("org/m", "model.safetensors", "hf") == (tmp_path / "hf" / "model.safetensors").read_bytes()


def test_fp8_stays_fp8(hub: HubServer, model: Callable[..., Path], tmp_path: Path) -> None:
    """Its files need no change, though whoever reads them gets bfloat16; with a dtype it is converted."""
    path = fp8_model(model("llama", **KIND), tmp_path / "fp8")
    report = push(path, "org/new", limits=TWO).report()
    assert report["as_is"] and report["exactness"] == "bitwise"
    there = remote(hub, "org/new")
    assert all(there[p.name] == p.read_bytes() for p in path.iterdir())
    report = push(path, "org/plain", options=Options(dtype="bfloat16"), limits=TWO).report()
    assert (
        report["exactness"] == "dequant"
        and "quantization_config" not in remote(hub, "org/plain")["config.json"].decode()
    )


def test_a_snapshot_in_the_cache(hub: HubServer, sharded: Path) -> None:
    """B127: its files are links to blobs; what arrives are files."""
    from huggingface_hub import snapshot_download

    sha = hub.add_repo("org/base", sharded)
    push(snapshot_download("org/base"), "org/new", limits=TWO)
    there = remote(hub, "org/new")
    assert {n: there[n] for n in weights(sharded)} == weights(sharded)
    assert json.loads(there[MANIFEST])["source"]["revision"] == sha


def test_what_is_not_of_the_model_stays_at_home(hub: HubServer, sharded: Path) -> None:
    for name in ("training_args.bin", "stray.safetensors", "m.gguf"):
        (sharded / name).write_bytes((sharded / "model-00004-of-00004.safetensors").read_bytes())
    index = json.loads((sharded / INDEX).read_bytes())
    done = push(sharded, "org/new", limits=TWO)
    assert done.report()["left_behind"] == ["m.gguf", "stray.safetensors", "training_args.bin"]
    held = {n for n in hub.files("org/new") if n.endswith((".safetensors", ".bin", ".gguf"))}
    assert held == set(index["weight_map"].values())


# Where to, and who


def test_a_repository_is_made(hub: HubServer, sharded: Path) -> None:
    done = push(sharded, "org/new", private=True, limits=TWO)
    assert hub.repo("org/new").private and done.intent.report()["creates"] == ["repository"]
    push(sharded, "alice/own", limits=TWO)
    assert not hub.repo("alice/own").private


def test_private_is_not_said_of_what_is_public(hub: HubServer, sharded: Path) -> None:
    hub.add_repo("org/m")
    with pytest.raises(TargetError, match="exists and is public"):
        push(sharded, "org/m", private=True)


def test_a_branch_is_made_on_request(hub: HubServer, sharded: Path) -> None:
    base = hub.add_repo("org/m", {"notes.txt": "kept"})
    done = push(sharded, "org/m", branch="step/100", limits=TWO)
    assert hub.head("org/m") == base and hub.head("org/m", "step/100") == done.commit
    assert remote(hub, revision="step/100")["notes.txt"] == b"kept"
    again = push(sharded, "hf://org/m@step%2F100", limits=TWO)
    assert not again.changed


def test_a_pull_request(hub: HubServer, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = hub.add_repo("org/m")
    hub.patch(monkeypatch, token=STRANGER)
    done = push(sharded, "org/m", create_pr=True, limits=TWO)
    assert hub.head("org/m") == base and hub.head("org/m", "refs/pr/1") == done.commit
    assert done.url == f"{hub.url}/org/m/discussions/1"


def _refusals(hub: HubServer) -> dict[str, tuple[str | None, dict[str, Any], str]]:
    hub.add_repo("org/m", {"notes.txt": "."})
    hub.add_repo("org/hidden", private=True)
    hub.add_repo("org/gated", gated="manual")
    hub.api().create_tag("org/m", tag="v1")
    return {
        "unknown branch": (
            "hf_write",
            {"revision": "nightly"},
            r"branch 'nightly' does not exist.*\n.*--branch nightly",
        ),
        "tag": ("hf_write", {"branch": "v1"}, "'v1' is a tag"),
        "read-only token": (READ, {}, "token 'tests' of alice is read-only"),
        "invalid token": (INVALID, {}, r"does not accept this token.*\n.*hf auth login"),
        "no token": (None, {}, "needs a token, and there is none"),
        "not a member": (STRANGER, {}, r"may not write to it.*\n.*--create-pr"),
        "private": (STRANGER, {"repo": "org/hidden"}, "does not exist, or is private"),
        "gated": (STRANGER, {"repo": "org/gated", "create_pr": True}, "gated"),
        "no namespace": ("hf_write", {"repo": "other/m"}, "'other' is not one of yours"),
        "branch of nothing": (
            "hf_write",
            {"repo": "org/none", "revision": "x"},
            r"so has no branch 'x'.*\n.*--branch x",
        ),
        "pull request to nothing": ("hf_write", {"repo": "org/none", "create_pr": True}, "one that is there"),
        "pull request to a branch": ("hf_write", {"create_pr": True, "revision": "x"}, "for main only"),
    }


def test_rights_and_branch_are_settled_before_anything_is_read(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B124: each trouble has words of its own, and comes before the model is so much as looked at."""
    for about, (token, how, words) in _refusals(hub).items():
        hub.patch(monkeypatch, token=token)
        hub.reset()
        with pytest.raises(TargetError, match=words):
            push(tmp_path / "not even there", how.pop("repo", "org/m"), **how)
        assert not [call for call in hub.calls() if call.method != "GET"], about


def test_offline_is_said(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match="offline mode is on"):
        push("x", "org/m")
    assert not hub.calls()


@pytest.mark.parametrize("repo", ["a/b/c", "justone", "datasets/org/m", "org/m@x/sub", "a b/c"])
def test_what_is_no_repository(hub: HubServer, repo: str) -> None:
    with pytest.raises(ConvertError, match="repository"):
        push("x", repo)


# What goes, and what stays


def test_only_stale_weights_are_deleted(hub: HubServer, mp_rank: Path) -> None:
    """B128: five old shards give way to fewer; what else lies there is somebody's."""
    old = {f"model-{n:05d}-of-00005.safetensors": b"\0" * (20 + n) for n in range(1, 6)}
    odd = {"weights-a.safetensors": b"\0\0"}
    index = json.dumps({"weight_map": dict(zip("abcdef", [*old, *odd], strict=True))})
    others = {"adapter_model.safetensors": b"\0", "m.gguf": b"\0", "sub/model.safetensors": b"\0", "notes.txt": b"n"}
    hub.add_repo("org/m", old | odd | others | {INDEX: index, "pytorch_model.bin": b"\0"})
    shown: list[Pushed] = []
    done = push(mp_rank, "org/m", limits=TWO, confirm=shown.append)
    gone = {*old, *odd, INDEX, "pytorch_model.bin"}
    assert set(shown[0].intent.delete) == gone and shown[0].intent.delete[[*old][2]] == 23
    assert shown[0].intent.stay == ["adapter_model.safetensors", "m.gguf"]
    there = remote(hub)
    assert not gone & set(there) and {n: there[n] for n in others} == others
    assert len(hub.repo("org/m").commits) == 3, "deleted in the same commit"
    assert set(done.report()["deletes"]) == gone


def test_a_dry_run_asks_and_changes_nothing(hub: HubServer, sharded: Path) -> None:
    base = hub.add_repo("org/m", {"model.safetensors": b"\0" * 9})
    report = push(sharded, "org/m", dry_run=True).report()
    assert report["dry_run"] and report["deletes"] == {"model.safetensors": 9} and report["parent"] == base
    assert report["files"]["config.json"] == (sharded / "config.json").stat().st_size
    push(sharded, "org/new", dry_run=True)
    push(sharded, "org/m", branch="new", dry_run=True)
    assert not [call for call in hub.calls() if call.method != "GET"]


def test_progress_ends_where_it_should(hub: HubServer, mp_rank: Path, sharded: Path) -> None:
    for source, options in ((mp_rank, Options(max_shard=SHARD)), (sharded, Options())):
        steps: list[tuple[str, int, int]] = []
        push(source, "org/new", options=options, limits=TWO, progress=lambda *step, to=steps: to.append(step))
        for phase in ("convert", "upload"):
            seen = [(done, total) for name, done, total in steps if name == phase]
            assert seen[-1][0] == seen[-1][1] > 0 and all(a[0] <= b[0] for a, b in pairwise(seen))


def test_what_was_refused_when_shown_is_not_done(hub: HubServer, sharded: Path) -> None:
    hub.add_repo("org/m", {"model.safetensors": b"\0"})

    def never(_: Pushed) -> None:
        raise TargetError("no")

    with pytest.raises(TargetError, match="no"):
        push(sharded, "org/m", confirm=never)
    assert not [call for call in hub.calls() if call.method != "GET"]


def test_the_same_once_more_is_no_commit(hub: HubServer, mp_rank: Path) -> None:
    hub.add_repo("org/m")
    first = push(mp_rank, "org/m", limits=TWO)
    again = push(mp_rank, "org/m", limits=TWO)
    assert first.changed and not again.changed and again.commit == first.commit == hub.head("org/m")
    assert len(hub.calls("lfs-upload")) == 1 and again.report()["same_as_before"] == ["model.safetensors"]


def test_files_that_the_hub_ignores_are_not_lost_silently(hub: HubServer, sharded: Path) -> None:
    base = hub.add_repo("org/m", {".gitignore": "*-00002-*\n"})
    with pytest.raises(TargetError, match=r"\.gitignore excludes model-00002"):
        push(sharded, "org/m", limits=TWO)
    assert hub.head("org/m") == base


# The card and the manifest


def test_the_card_is_kept_and_says_where_the_weights_came_from(hub: HubServer, mp_rank: Path) -> None:
    card = "---\nlicense: mit\ntags: [x]\n---\r\n# Ours\n\nWords.\n"
    hub.add_repo("org/m", {"README.md": card})
    done = push(mp_rank, "org/m", limits=TWO)
    text, manifest = remote(hub)["README.md"].decode(), json.loads(remote(hub)[MANIFEST])
    assert text.startswith(card.rstrip()) and any("repository's is kept" in note for note in done.intent.notes)
    assert all(word in text for word in ("`llama`", "mp_rank", "tp2 pp2", "BF16", manifest["plan"], manifest["tool"]))
    assert manifest["atoms"]["embed"][1] in text and str(mp_rank.parent) not in text
    hub.commit("org/m", {"README.md": text.replace("Words.", "Other words.")})
    assert not push(mp_rank, "org/m", limits=TWO).changed


def test_the_card_says_the_mesh_that_only_a_manifest_knows(hub: HubServer, sharded: Path, tmp_path: Path) -> None:
    convert(sharded, tmp_path / "td", "torch_dist", Mesh(tp=2, pp=2), limits=TWO)
    push(tmp_path / "td", "org/m", limits=TWO)
    assert "| mesh of the source | `tp2 pp2` |" in hub.read("org/m", "README.md").decode()
    (tmp_path / "td" / MANIFEST).unlink()
    push(tmp_path / "td", "org/n", limits=TWO)
    assert "mesh of the source" not in hub.read("org/n", "README.md").decode()


def test_a_card_with_a_broken_head_is_refused_early(hub: HubServer, sharded: Path) -> None:
    (sharded / "README.md").write_text("---\na: [1\n---\n# x\n")
    hub.add_repo("org/m")
    with pytest.raises(TargetError, match=r"README\.md: its head is no valid YAML"):
        push(sharded, "org/m")
    assert not hub.calls("lfs-*")


def test_a_manifest_that_is_true_travels_and_a_stale_one_does_not(
    hub: HubServer, model: Callable[..., Path], mp_rank: Path, tmp_path: Path
) -> None:
    hub.add_repo("org/m")
    convert(mp_rank, tmp_path / "hf", "hf", limits=TWO)
    push(tmp_path / "hf", "org/m", limits=TWO)
    assert remote(hub)[MANIFEST] == (tmp_path / "hf" / MANIFEST).read_bytes()
    file = tmp_path / "hf" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)
    done = push(tmp_path / "hf", "org/m", limits=TWO)
    manifest = json.loads(remote(hub)[MANIFEST])
    assert any("changed since" in note for note in done.intent.notes)
    assert manifest != json.loads((tmp_path / "hf" / MANIFEST).read_bytes()) and manifest["source"]["origin"]


# A bad source


def test_a_source_with_nans_is_not_pushed(hub: HubServer, sharded: Path) -> None:
    base = hub.add_repo("org/m")
    file = sorted(sharded.glob("*.safetensors"))[2]
    raw = bytearray(file.read_bytes())
    raw[-2:] = b"\xff\xff"
    file.write_bytes(raw)
    for options in (Options(), Options(max_shard=SHARD + 1)):
        with pytest.raises(SourceError, match="holds NaN"):
            push(sharded, "org/m", options=options, limits=TWO)
    assert hub.head("org/m") == base
    assert push(sharded, "org/m", options=Options(allow_nan=True), limits=TWO).changed


def test_a_source_that_is_written_meanwhile(hub: HubServer, sharded: Path) -> None:
    base = hub.add_repo("org/m")
    last = sorted(sharded.glob("*.safetensors"))[-1]
    hub.fault("lfs-verify", times=1, call=lambda _: last.touch())
    with pytest.raises(SourceError, match="was changed"):
        push(sharded, "org/m", limits=TWO)
    assert hub.head("org/m") == base


def test_half_a_model_is_refused_before_anything_is_sent(hub: HubServer, sharded: Path) -> None:
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    hub.add_repo("org/m")
    with pytest.raises(SourceError):
        push(sharded, "org/m")
    assert not hub.calls("lfs-*") and not hub.calls("preupload")
