"""Export from live shards: against what torch gathers, and by what transformers computes from the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from areal_convert.converter import Mesh, PlanError, TargetError, VerifyError, convert, verify
from areal_convert.converter.live import export_hf
from models import logits, sample_tokens, tensors
from oracles.fsdp import Torch, TorchFailed

Model = Callable[..., Path]
WORKER = Path(__file__).with_name("state_worker.py")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Torch]:
    with Torch(worker=WORKER) as torch_:
        yield torch_


LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "hsdp": {"dp": 2, "replicate": 2},
    "one": {"dp": 1},
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama_tied", "dp2"),
        ("llama_tied", "dp2_tp2"),
        ("qwen2", "tp2"),
        ("qwen2", "hsdp"),
        ("qwen3_moe", "dp2"),
        ("qwen3_moe", "dp2_tp2"),
        ("qwen3_moe", "one"),
    ],
)
def test_equal_to_what_torch_gathers(ranks: Torch, model: Model, tmp_path: Path, family: str, layout: str) -> None:
    base, out = model(family), tmp_path / "out"
    found = ranks.run("export", base, LAYOUTS[layout], dir=out, options={"max_shard": 200_000})
    assert all("error" not in answer for answer in found), found
    assert verify(out, tmp_path / "out-torch").same
    assert sum(answer["written"] for answer in found) == found[0]["total"]
    ours = logits(out, sample_tokens())
    assert torch.equal(ours, logits(tmp_path / "out-torch", sample_tokens()))
    live = torch.tensor(found[0]["logits"])
    torch.testing.assert_close(ours.flatten()[:4000], live, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours, logits(base, sample_tokens()))
    assert not any("experts.gate_up" in name for name in tensors(out))
    assert not out.with_name("out.areal-partial").exists()


@pytest.mark.multiprocess
def test_types_are_the_base_models_or_asked_for(ranks: Torch, model: Model, tmp_path: Path) -> None:
    """fp32 masters of a bfloat16 model become bfloat16 again; the type in the config follows."""
    base, quiet = model("qwen2", dtype="bfloat16", side_files=True), {"logits": False}
    found = ranks.run("export", base, {"dp": 2}, dir=tmp_path / "a", options={"gather_dtype": "bfloat16"}, **quiet)
    assert found[0]["casts"] == {"F32 → BF16": 51}
    assert verify(tmp_path / "a", tmp_path / "a-torch").same
    assert (tmp_path / "a" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    side = {p.name for p in base.iterdir() if p.suffix != ".safetensors"}
    assert side <= {p.name for p in (tmp_path / "a").iterdir()}
    wide = {"dtype": "float32", "config_changes": {"use_cache": False}}
    ranks.run("export", base, {"dp": 2}, dir=tmp_path / "b", options=wide, **quiet)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config.get("dtype") or config["torch_dtype"], config["use_cache"]) == ("float32", False)
    assert verify(tmp_path / "b", tmp_path / "b-torch").same


@pytest.mark.multiprocess
def test_a_rank_that_fails_stops_all_and_leaves_nothing(ranks: Torch, model: Model, tmp_path: Path) -> None:
    base, out = model("qwen2"), tmp_path / "out"
    first, second = ranks.run("export", base, {"dp": 2}, dir=out, options={"fail": 1})
    assert (first["error"], second["error"]) == ("RankError", "PlanError")
    assert "rank 1" in first["message"] and "model.norm.weight" in first["message"]
    found = ranks.run("export", base, {"dp": 2}, dir=out, options={"nan": True}, logits=False)
    assert {a["error"] for a in found} <= {"PlanError", "RankError"} and "NaN" in found[0]["message"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out-torch"]
    shutil.rmtree(tmp_path / "out-torch")
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    found = ranks.run("export", base, {"dp": 2}, dir=out, options={"overwrite": True}, logits=False)
    assert {a["error"] for a in found} == {"TargetError", "RankError"} and (out / "notes.txt").read_text() == "mine"


@pytest.mark.multiprocess
def test_a_rank_that_dies_leaves_nothing_that_looks_whole(ranks: Torch, model: Model, tmp_path: Path) -> None:
    with pytest.raises(TorchFailed):
        ranks.run("export_death", model("qwen2"), {"dp": 2}, dir=tmp_path / "out")
    assert "RankError: Rank 0 lost the others" in (tmp_path / "out-said").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["out-said"]


@pytest.mark.multiprocess
def test_replicas_that_drifted_apart_are_found(ranks: Torch, model: Model, tmp_path: Path) -> None:
    base, drift = model("qwen3_moe"), {"set": {"drift": 1}, "logits": False}
    found = ranks.run("export", base, {"tp": 2}, dir=tmp_path / "out", options={"replicas": True}, **drift)
    assert "VerifyError" in {a["error"] for a in found}
    text = " ".join(a["message"] for a in found)
    assert "q_norm" in text and "copies differ" in text and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ one process


def plain(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in tensors(path).items()}


def test_plain_tensors_of_one_process(model: Model, tmp_path: Path) -> None:
    base = model("llama_tied")
    state = plain(base)
    done = export_hf(state, base, tmp_path / "out")
    written = tensors(tmp_path / "out")
    assert done.bytes_written == done.bytes_total and written.keys() == state.keys()
    assert all(torch.equal(written[n], t) for n, t in state.items())
    manifest = json.loads((tmp_path / "out" / "areal_manifest.json").read_text())
    assert manifest["format"] == "hf" and len(manifest["atoms"]) == len(state)
    with pytest.raises(TargetError, match="not empty"):
        export_hf(state, base, tmp_path / "out")
    export_hf(state, base, tmp_path / "out", overwrite=True)
    with pytest.raises(TargetError, match="inside each other"):
        export_hf(state, base, base, overwrite=True)


def test_what_a_killed_export_left_is_begun_again(model: Model, tmp_path: Path) -> None:
    base, partial = model("qwen2"), tmp_path / "out.areal-partial"
    partial.mkdir()
    (partial / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="in the way"):
        export_hf(plain(base), base, tmp_path / "out")
    (partial / ".areal-journal").write_text("{}\n")
    export_hf(plain(base), base, tmp_path / "out")
    assert verify(base, tmp_path / "out").differ and not partial.exists()
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_a_head_that_is_not_the_embedding_any_more(model: Model, tmp_path: Path) -> None:
    base = model("llama_tied")
    state = plain(base)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    export_hf(state, base, tmp_path / "equal")
    assert "lm_head.weight" not in tensors(tmp_path / "equal")
    state["lm_head.weight"][5, 5] += 1
    with pytest.raises(VerifyError, match=r"lm_head\.weight.*differs"):
        export_hf(state, base, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.areal-partial").exists()


def test_a_live_head_tied_where_the_config_has_two(model: Model, tmp_path: Path) -> None:
    base = model("llama")
    state = plain(base)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    export_hf(state, base, tmp_path / "out")
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], state["lm_head.weight"])


def test_what_is_no_whole_model(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    state = plain(base)
    state["model.extra.weight"] = torch.zeros(3)
    with pytest.raises(PlanError, match=r"model\.extra\.weight"):
        export_hf(state, base, tmp_path / "out")
    del state["model.extra.weight"], state["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(PlanError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: no rank holds it"):
        export_hf(state, base, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_hole_is_named(model: Model, tmp_path: Path) -> None:
    """Two of three shards of an FSDP rank: the plan counts what is missing."""
    base = model("qwen2")
    state = {n: t.chunk(2)[0].clone() for n, t in tensors(base).items()}
    with pytest.raises(PlanError, match=r"holds \d+ of its \d+ elements"):
        export_hf(state, base, tmp_path / "out", mesh=Mesh(dp_shard=2), rank=0)


def test_a_megatron_rank_exports_too(model: Model, tmp_path: Path) -> None:
    base = model("qwen3_moe")
    convert(base, tmp_path / "mcore", "mp_rank", Mesh(), verify=False)
    (file,) = (tmp_path / "mcore").rglob("model_optim_rng.pt")
    export_hf(torch.load(file, weights_only=False)["model"], base, tmp_path / "out", mesh=Mesh())
    assert verify(base, tmp_path / "out").same


def test_fused_experts_come_out_one_by_one(model: Model, tmp_path: Path) -> None:
    base, fused = model("qwen3_moe"), model("qwen3_moe", fused_experts=True)
    export_hf(tensors(fused), base, tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(base).keys()
    export_hf(tensors(fused), base, tmp_path / "fused", experts="fused")
    assert tensors(tmp_path / "fused").keys() == tensors(fused).keys()
    assert verify(tmp_path / "fused", tmp_path / "out").same


def test_a_model_from_scratch_has_only_a_config(model: Model, tmp_path: Path) -> None:
    base, scratch = model("qwen2"), tmp_path / "scratch"
    scratch.mkdir()
    config = json.loads((base / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    (scratch / "config.json").write_text(json.dumps(config))
    export_hf(tensors(base), scratch, tmp_path / "same")
    assert verify(base, tmp_path / "same").same
    done = export_hf(tensors(base), scratch, tmp_path / "out", dtype="bfloat16")
    assert done.casts == {"F32 → BF16": 51}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards_and_index_as_the_base_model_has_them(model: Model, tmp_path: Path) -> None:
    base = model("qwen2", max_shard_size=200_000)
    export_hf(plain(base), base, tmp_path / "out")
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (base / index).read_bytes()
