"""Things that went wrong for people with other tools (shared/reference/cases.md), one test each, named after the case.

The first sentence of each docstring says what happened to them. Expected values come from the source's own files, read
with safetensors and torch, or are written down here; where a case concerns files, `test_bad_sources.py` has it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import models
from areal_convert.converter import Limits, Mesh, Options, convert, open_checkpoint, plan, verify
from areal_convert.converter.errors import ConfigError, ConvertError, MeshError, PlanError, SourceError
from areal_convert.converter.formats.dcpfile import read as read_index

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------ helpers


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """The same names, types, shapes and bits."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:10]
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, (name, tensor.dtype, b[name].dtype)
        assert tensor.shape == b[name].shape, (name, tensor.shape, b[name].shape)
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name
    return True


def around(source: Path, to: str, mesh: Mesh | None = None, options: Options | None = None, **how: Any) -> Path:
    """Convert to a format and back to Hugging Face; the directory that came back."""
    root = source.parent / f"around-{len(list(source.parent.iterdir()))}"
    convert(source, root / "there", to, mesh, options, **how)
    convert(root / "there", root / "back", "hf")
    return root / "back"


def edited(path: Path, change: Callable[[Tensors], Any]) -> Path:
    """The model with other tensors; `change` edits them or returns new ones."""
    tensors = models.tensors(path)
    tensors = change(tensors) or tensors
    for old in (*path.glob("*.safetensors"), path / INDEX):
        old.unlink(missing_ok=True)
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path / FILE, metadata={"format": "pt"})
    return path


def config(path: Path, **fields: Any) -> dict[str, Any]:
    """The config, after `fields` were put into it."""
    value = json.loads((path / "config.json").read_text()) | fields
    if fields:
        (path / "config.json").write_text(json.dumps(value))
    return value


def save_dcp(tensors: Mapping[str, Any], path: Path) -> Path:
    """With torch's own writer, in one process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def load_dcp(path: Path) -> Tensors:
    """With torch's own reader: every tensor whole, by the name in the checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, path.parent / "whole.pt")
    return torch.load(path.parent / "whole.pt", weights_only=True)


def rank_files(path: Path) -> dict[str, dict[str, Any]]:
    """Per-rank files as torch reads them, by the directory's name."""
    return {f.parent.name: torch.load(f, weights_only=False) for f in sorted(path.rglob("model_optim_rng.pt"))}


def indexed(path: Path) -> dict[str, str]:
    """The index, after a look at whether it and the shards say the same."""
    held = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                assert name not in held, name
                held[name] = file.name
    index = json.loads((path / INDEX).read_text())
    assert index["weight_map"] == held
    tensors = models.tensors(path)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return held


MEGATRON = [("torch_dist", Mesh(tp=2)), ("mp_rank", Mesh(tp=2))]
ALL = [*MEGATRON, ("dcp", Mesh(dp_shard=3)), ("archon", Mesh(dp_shard=2)), ("hf", Mesh())]


# ------------------------------------------------------------------------------------------------ tied embeddings


@pytest.mark.parametrize("family", ["llama_tied", "llama", "qwen2_tied"])
@pytest.mark.parametrize(("to", "mesh"), [*ALL, ("mp_rank", Mesh(pp=2))])
def test_b01_ties_are_recognised_by_role(to: str, mesh: Mesh, family: str, model_copy: Callable[..., Path]) -> None:
    """The tie was recognised by one parameter's spelling, other models lost or doubled their head. Tied: no head on
    disk; untied: one head."""
    source = model_copy(family, dtype="bfloat16")
    have = models.tensors(around(source, to, mesh))
    assert ("lm_head.weight" in have) == (family == "llama")
    assert same(have, models.tensors(source))


def test_b02_no_storage_under_two_names(model_copy: Callable[..., Path]) -> None:
    """The same tensor was handed out under two names and safetensors refused to write it."""
    source = model_copy("llama_tied", dtype="bfloat16", layers=2)
    back = around(source, "mp_rank", Mesh(tp=2))
    assert len(models.tensors(back)) == 2 + 2 * 9  # embedding, final norm, nine in each layer
    header = open_checkpoint(back).found.tensors
    places = sorted((box.buffer.begin, box.buffer.begin + box.buffer.size) for t in header for box in t.boxes)
    assert all(a[1] <= b[0] for a, b in pairwise(places))


@pytest.mark.parametrize("form", ["dcp", "hf", "bin"])
def test_b04_a_trained_head_is_kept(form: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The flag said tied, the tensors had drifted apart, and the save dropped the trained head."""
    source = model_copy("llama_tied", dtype="bfloat16", layers=2)
    tensors = models.tensors(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    path = source
    if form == "dcp":
        path = save_dcp(tensors, tmp_path / "dcp")
    elif form == "bin":
        (source / FILE).unlink()
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        edited(source, lambda _: tensors)
    result = convert(path, tmp_path / "out", "hf", hf_config=source)
    assert same(models.tensors(tmp_path / "out"), tensors)
    assert config(tmp_path / "out")["tie_word_embeddings"] is False
    assert any("tie" in note for note in result.planned.source.notes)
    assert same(models.tensors(around(tmp_path / "out", "torch_dist", Mesh(tp=2))), tensors)


def test_b04_an_equal_stored_head_is_the_tie(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The other way about: stored twice, equal, and the flag is right."""
    source = edited(
        model_copy("llama_tied", dtype="bfloat16", layers=2),
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    convert(source, tmp_path / "out", "hf")
    assert "lm_head.weight" not in models.tensors(tmp_path / "out")
    assert config(tmp_path / "out")["tie_word_embeddings"] is True


@pytest.mark.parametrize("to", ["torch_dist", "mp_rank"])
def test_b04_a_separate_head_in_megatron_files(to: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A Megatron run with `--untie-embeddings-and-output-weights` on a model whose config ties them: keep both, or
    refuse and take the user's word; never drop the head."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "there", to, Mesh(tp=2))
    config(tmp_path / "there" / "hf", tie_word_embeddings=True)
    try:
        convert(tmp_path / "there", tmp_path / "back", "hf")
    except SourceError as error:
        assert "output_layer.weight" in str(error) or "tie" in str(error)
        convert(tmp_path / "there", tmp_path / "back", "hf", tie=False)
    assert same(models.tensors(tmp_path / "back"), models.tensors(source))
    assert config(tmp_path / "back")["tie_word_embeddings"] is False


def test_b05_untied_without_a_head(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A published checkpoint says untied and holds no head; loaders start one at random. Refused until somebody says
    which it is."""
    source = edited(model_copy("llama", dtype="bfloat16", layers=2), lambda t: t.pop("lm_head.weight") is None)
    with pytest.raises(SourceError, match=r"lm_head\.weight is missing.*tie"):
        convert(source, tmp_path / "out", "torch_dist")
    assert list(tmp_path.glob("out*")) == []
    convert(source, tmp_path / "out", "hf", tie=True)
    assert config(tmp_path / "out")["tie_word_embeddings"] is True
    assert same(models.tensors(tmp_path / "out"), models.tensors(source))


def test_b07_sharing_comes_from_the_config(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A repair matched shared tensors by address, and tied the wrong pairs. Embedding alone: fine when the config ties
    it, otherwise an error that names the head."""
    source = model_copy("qwen2_tied", dtype="bfloat16", layers=2)
    models.to_bin(source)
    convert(source, tmp_path / "out", "hf")
    config(source, tie_word_embeddings=False)
    with pytest.raises(SourceError, match=r"lm_head\.weight"):
        convert(source, tmp_path / "other", "hf")


# ------------------------------------------------------------------------------------------------ vocabulary


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
@pytest.mark.parametrize(("tp", "rows"), [(1, 1152), (2, 1280), (4, 1536)])
def test_b08_padding_is_trimmed(tp: int, rows: int, family: str, model_copy: Callable[..., Path]) -> None:
    """Rows added for tensor parallelism reached the exported files."""
    source = model_copy(family, dtype="bfloat16", layers=2, vocab_size=1100)
    for to in ("torch_dist", "mp_rank"):
        there = source.parent / f"{to}-there"
        convert(source, there, to, Mesh(tp=tp))
        embed = open_checkpoint(there).dialect["vocab"]
        assert embed == {"true": 1100, "stored": rows}
        convert(there, source.parent / f"{to}-back", "hf")
        assert same(models.tensors(source.parent / f"{to}-back"), models.tensors(source))
        assert config(source.parent / f"{to}-back") == config(source)
        shutil.rmtree(there)


def test_b08_the_divisor_is_the_users(model_copy: Callable[..., Path]) -> None:
    """`--make-vocab-size-divisible-by` of the run decides, and comes back out of the files."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    for divisor, rows in ((1, 1004), (64, 1024), (1000, 4000)):
        there = source.parent / f"d{divisor}"
        convert(source, there, "torch_dist", Mesh(tp=4 if divisor != 1 else 2), Options(vocab_divisor=divisor))
        assert open_checkpoint(there).dialect["vocab"]["stored"] == rows
        convert(there, source.parent / f"back{divisor}", "hf")
        assert same(models.tensors(source.parent / f"back{divisor}"), models.tensors(source))


def test_b11_the_config_and_not_the_tokenizer_counts(model_copy: Callable[..., Path]) -> None:
    """Rows were cut to the tokenizer's length. The config's vocab_size is the contract."""
    source = model_copy("llama", dtype="bfloat16", layers=2, vocab_size=1024, side_files=True)
    assert len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]) < 1003
    for to, mesh in ALL:
        assert models.tensors(around(source, to, mesh))["model.embed_tokens.weight"].shape == (1024, 64)


# ------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("to", ["torch_dist", "mp_rank"])
def test_b13_fewer_kv_groups_than_tp(tp: int, to: str, model_copy: Callable[..., Path]) -> None:
    """Two KV groups and TP 8: 'groups must be a multiple of TP'. Either exact, or refused beforehand with what fits."""
    source = model_copy("llama", dtype="bfloat16", layers=2, num_key_value_heads=2)
    try:
        back = around(source, to, Mesh(tp=tp))
    except MeshError as error:
        assert "2" in str(error)
        assert not any(source.parent.glob("around*/*"))
    else:
        assert same(models.tensors(back), models.tensors(source))


def test_b14_slices_of_the_interleaved_tensor(model_copy: Callable[..., Path]) -> None:
    """Above the KV head count a rank owns part of a group; taking q, k, v apart rank by rank is wrong. Eight heads, two
    groups, TP 4: each rank has a plain quarter of [q0 q1 q2 q3 k0 v0 | q4 q5 q6 q7 k1 v1]."""
    source = model_copy("llama", dtype="bfloat16", layers=2, num_key_value_heads=2)
    have, d = models.tensors(source), 8
    there = source.parent / "there"
    convert(source, there, "mp_rank", Mesh(tp=4))
    files = rank_files(there)
    for layer in range(2):
        q, k, v = (have[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        rows = [*(q[h * d : (h + 1) * d] for h in range(4)), k[:d], v[:d]]
        rows += [*(q[h * d : (h + 1) * d] for h in range(4, 8)), k[d:], v[d:]]
        quarters = torch.cat(rows).chunk(4)
        for rank in range(4):
            stored = files[f"mp_rank_{rank:02d}"]["model"][f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
            assert torch.equal(stored, quarters[rank]), (layer, rank)
    convert(there, source.parent / "back", "hf")
    assert same(models.tensors(source.parent / "back"), have)


@pytest.mark.parametrize(("to", "mesh"), ALL)
def test_b16_head_dim_of_its_own(to: str, mesh: Mesh, model_copy: Callable[..., Path]) -> None:
    """Qwen3-8B worked and Qwen3-32B did not: head_dim is not hidden/heads there."""
    source = model_copy("qwen3", dtype="bfloat16", layers=2, head_dim=32)
    assert models.tensors(source)["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert same(models.tensors(around(source, to, mesh)), models.tensors(source))


@pytest.mark.parametrize(("family", "biases"), [("qwen2", 3), ("mixtral", 0), ("qwen2_moe", 3)])
def test_b20_biases_are_counted(family: str, biases: int, model_copy: Callable[..., Path]) -> None:
    """QKV biases were lost silently, and the model babbled."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    for to, mesh in ALL:
        back = models.tensors(around(source, to, mesh))
        assert sum(name.endswith(".bias") for name in back) == 2 * biases
        assert same(back, models.tensors(source))


def test_b20_a_bias_that_the_config_denies_is_an_error(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Presence is read from the tensors and checked against the config, both ways."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    bias = "model.layers.0.self_attn.q_proj.bias"
    edited(source, lambda t: t.update({bias: torch.ones(64, dtype=torch.bfloat16)}))
    with pytest.raises(SourceError, match=r"q_proj\.bias"):
        convert(source, tmp_path / "a", "torch_dist")
    edited(source, lambda t: t.pop(bias) is None)
    config(source, attention_bias=True)
    with pytest.raises(SourceError, match=r"q_proj\.bias"):
        convert(source, tmp_path / "b", "torch_dist")


# ------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("to", "mesh"), [("torch_dist", Mesh(ep=2)), ("mp_rank", Mesh(ep=2)), ("mp_rank", Mesh(tp=2, ep=2))]
)
def test_b22_no_element_keeps_its_initial_value(
    to: str, mesh: Mesh, family: str, model_copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All expert weights stayed as they were initialised, and the tool reported success. Here every file starts as NaN:
    none is left but in the padding of the vocabulary."""
    from areal_convert.converter.workdir import WorkDir

    source, allocate = model_copy(family, dtype="bfloat16", layers=2), WorkDir.allocate

    def poisoned(self: WorkDir, name: str, size: int) -> Any:
        result = allocate(self, name, size)
        (self.path / name).write_bytes(b"\xff" * size)
        return result

    monkeypatch.setattr(WorkDir, "allocate", poisoned)
    there = source.parent / "there"
    convert(source, there, to, mesh)
    if to == "mp_rank":
        for name, tree in rank_files(there).items():
            for tensor, value in tree["model"].items():
                if torch.is_tensor(value) and "word_embeddings" not in tensor and "output_layer" not in tensor:
                    assert not value.isnan().any(), (name, tensor)
    monkeypatch.undo()
    convert(there, source.parent / "back", "hf")
    assert same(models.tensors(source.parent / "back"), models.tensors(source))


def test_b25_experts_that_are_not_there(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Half of the experts were in the files, and loading gave every rank the same ones."""
    source = model_copy("qwen3_moe", dtype="bfloat16", layers=2)
    tensors = {n: t for n, t in models.tensors(source).items() if ".experts.2." not in n and ".experts.3." not in n}
    with pytest.raises(SourceError) as caught:
        convert(save_dcp(tensors, tmp_path / "dcp"), tmp_path / "out", "hf", hf_config=source)
    assert "layers.0.mlp.experts.2.gate_proj" in str(caught.value)
    assert "layers.1.mlp.experts.3.down_proj" in str(caught.value)
    edited(source, lambda _: tensors)
    with pytest.raises(SourceError, match=r"experts\.3"):
        convert(source, tmp_path / "out", "hf")


def test_b26_sequential_grouped_and_legacy_experts(model_copy: Callable[..., Path]) -> None:
    """Hand-converted experts started with loss 6 instead of 1: the order of concatenation did not match. Sequential,
    grouped, and Megatron's older `weight1` and `weight2`, which hold the experts transposed, one after another."""
    source = model_copy("qwen3_moe", dtype="bfloat16", layers=2)
    have, at = models.tensors(source), source
    part = {
        x: [have[f"model.layers.1.mlp.experts.{e}.{x}_proj.weight"] for e in range(4)] for x in ("gate", "up", "down")
    }
    for form in ("sequential", "grouped", "legacy", "sequential"):
        there = source.parent / f"{len(list(source.parent.iterdir()))}-{form}"
        convert(at, there, "mp_rank", Mesh(ep=2), Options(megatron_experts=form))
        at, trees = there, [tree["model"] for tree in rank_files(there).values()]
        assert len(trees) == 2
        for rank, tree in enumerate(trees):
            stored = {n.split(".experts.")[1]: t for n, t in tree.items() if "layers.1.mlp.experts." in n}
            mine = range(2 * rank, 2 * rank + 2)
            fc1 = [torch.cat([part["gate"][e], part["up"][e]]) for e in mine]
            fc2 = [part["down"][e] for e in mine]
            if form == "legacy":
                assert stored.keys() == {"weight1", "weight2"}
                # Shapes say [hidden, …] and […, hidden]; what counts is the view that GroupedMLP.forward takes of them.
                assert stored["weight1"].shape == (64, 2 * 96) and stored["weight2"].shape == (2 * 48, 64)
                assert torch.equal(stored["weight1"].view(2, 64, 96), torch.stack([t.T for t in fc1]))
                assert torch.equal(stored["weight2"].view(2, 48, 64), torch.stack([t.T for t in fc2]))
                continue
            name = "local_experts.{e}.linear_{fc}.weight" if form == "sequential" else "linear_{fc}.weight{e}"
            assert len(stored) == 4
            for e in range(2):
                assert torch.equal(stored[name.format(e=e, fc="fc1")], fc1[e]), (form, e)
                assert torch.equal(stored[name.format(e=e, fc="fc2")], fc2[e]), (form, e)
    convert(at, source.parent / "back", "hf")
    assert same(models.tensors(source.parent / "back"), have)


@pytest.mark.parametrize("fused", [False, True])
def test_b28_the_layout_of_the_source_or_the_one_asked_for(fused: bool, model_copy: Callable[..., Path]) -> None:
    """Checkpoints re-saved with fused experts were skipped by loaders that look for single ones."""
    source = model_copy("qwen3_moe", dtype="bfloat16", layers=2, fused_experts=fused)
    plain = models.tensors(model_copy("qwen3_moe", dtype="bfloat16", layers=2))
    stacked = models.tensors(model_copy("qwen3_moe", dtype="bfloat16", layers=2, fused_experts=True))
    assert same(models.tensors(around(source, "torch_dist", Mesh(ep=2))), stacked if fused else plain)
    for experts, wanted in (("per_expert", plain), ("fused", stacked)):
        convert(source, source.parent / experts, "hf", options=Options(experts=experts))
        assert same(models.tensors(source.parent / experts), wanted)


def test_b29_another_layout_in_the_mtp_layer(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Experts were fused in the body and single in the MTP block: key error. The layout is a block's, not a model's."""
    source = models.add_mtp(model_copy("deepseek_v3", dtype="bfloat16", layers=2))
    have = models.tensors(source)

    def fuse_body(tensors: Tensors) -> None:
        for part, names in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
            of = [
                torch.cat([tensors.pop(f"model.layers.1.mlp.experts.{e}.{x}_proj.weight") for x in names])
                for e in range(8)
            ]
            tensors[f"model.layers.1.mlp.experts.{part}"] = torch.stack(of)

    convert(edited(source, fuse_body), tmp_path / "out", "hf", options=Options(experts="per_expert"))
    assert same(models.tensors(tmp_path / "out"), have)
    convert(source, tmp_path / "meg", "torch_dist")
    convert(tmp_path / "meg", tmp_path / "out2", "hf", options=Options(experts="per_expert"))
    assert same(models.tensors(tmp_path / "out2"), have)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_b32_square_experts_hide_nothing(family: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Dimensions of experts were swapped, or gate and up left joined; with square matrices no shape tells."""
    source = model_copy(family, dtype="bfloat16", layers=2, moe_intermediate_size=64)
    have = models.tensors(source)
    for to, mesh in ALL:
        assert same(models.tensors(around(source, to, mesh)), have)
    convert(source, tmp_path / "archon", "archon")
    convert(source, tmp_path / "fused", "hf", options=Options(experts="fused"))
    archon, fused = load_dcp(tmp_path / "archon"), models.tensors(tmp_path / "fused")
    for expert in range(4):
        gate, up, down = (have[f"model.layers.1.mlp.experts.{expert}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        for name, wanted in (("w1", gate), ("w3", up), ("w2", down)):
            assert torch.equal(archon[f"layers.1.moe.experts.{name}"][expert], wanted), name
        assert torch.equal(fused["model.layers.1.mlp.experts.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(fused["model.layers.1.mlp.experts.down_proj"][expert], down)


@pytest.mark.parametrize(
    ("family", "name", "count"),
    [("qwen2_moe", "mlp.shared_expert_gate.weight", 2), ("deepseek_v3", "mlp.shared_experts.gate_proj.weight", 1)],
)
def test_b34_shared_experts(family: str, name: str, count: int, model_copy: Callable[..., Path]) -> None:
    """The shared expert's gate had no place to go."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    for to, mesh in ALL:
        have = models.tensors(around(source, to, mesh))
        assert sum(x.endswith(name) for x in have) == count
        assert same(have, models.tensors(source))


@pytest.mark.parametrize(("to", "mesh"), ALL)
def test_b35_the_selection_bias_stays_fp32(to: str, mesh: Mesh, model_copy: Callable[..., Path]) -> None:
    """An export in bf16 cast the router's selection bias too, and top-k changed near ties."""
    source = model_copy("deepseek_v3", layers=2)
    have = models.tensors(around(source, to, mesh, Options(dtype="bfloat16")))
    bias = {n for n in have if n.endswith("e_score_correction_bias")}
    assert bias and all(have[n].dtype == torch.float32 for n in bias)
    assert all(t.dtype == torch.bfloat16 for n, t in have.items() if n not in bias)
    wanted = {n: t if n in bias else t.bfloat16() for n, t in models.tensors(source).items()}
    assert same(have, wanted)


# ------------------------------------------------------------------------------------------------ MLA, MTP


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_b41_rotary_frequencies_in_the_files(family: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Sources that list `rotary_emb.inv_freq` made strict exports fail. The config says them: left, and listed."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    have = models.tensors(source)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(2)}
    edited(source, lambda t: t.update(extra))
    result = convert(source, tmp_path / "there", "torch_dist")
    assert result.planned.source.drops.keys() == extra.keys()
    assert all("config" in why for why in result.planned.source.drops.values())
    convert(tmp_path / "there", tmp_path / "back", "hf")
    assert same(models.tensors(tmp_path / "back"), have)


@pytest.mark.parametrize("to", ["hf", "torch_dist", "dcp"])
@pytest.mark.parametrize(("said", "stored"), [(2, 1), (0, 1), (1, 1)])
def test_b43_the_physical_number_of_mtp_layers(
    said: int, stored: int, to: str, model_copy: Callable[..., Path]
) -> None:
    """One module repeated twice was announced as two, and vLLM failed. Files are counted, and the config says it."""
    source = model_copy("deepseek_v3", dtype="bfloat16", layers=2)
    models.add_mtp(source)
    config(source, num_nextn_predict_layers=said)
    back = around(source, to)
    assert config(back)["num_nextn_predict_layers"] == stored
    assert same(models.tensors(back), models.tensors(source))


def test_b43_an_announced_layer_that_is_not_there(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """transformers itself writes such configs: it is told, and neither the weights nor the source's config change."""
    source = model_copy("deepseek_v3", dtype="bfloat16", layers=2)
    config(source, num_nextn_predict_layers=1)
    result = convert(source, tmp_path / "out", "hf")
    assert any("MTP" in note for note in result.report()["notes"])
    assert config(tmp_path / "out") == config(source)
    assert same(models.tensors(tmp_path / "out"), models.tensors(source))


@pytest.mark.parametrize("to", ["hf", "torch_dist", "archon"])
def test_b44_an_export_without_mtp(to: str, model_copy: Callable[..., Path]) -> None:
    """Asked for: all of the MTP layer goes, all else is there, and the config does not announce it any more."""
    source = models.add_mtp(model_copy("deepseek_v3", dtype="bfloat16", layers=2, max_shard_size=100_000))
    back = around(source, to, drop=[r"model\.layers\.2\..*"])
    wanted = {n: t for n, t in models.tensors(source).items() if not n.startswith("model.layers.2.")}
    assert same(models.tensors(back), wanted)
    assert config(back)["num_nextn_predict_layers"] == 0
    if (back / INDEX).exists():
        indexed(back)


def test_b44_shards_that_held_mtp_tensors(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Shards of the reference that hold any MTP tensor were skipped whole, with the embedding inside. The index of the
    original names MTP tensors; the trained model has none."""
    trained = model_copy("deepseek_v3", dtype="bfloat16", layers=2)
    original = models.add_mtp(model_copy("deepseek_v3", dtype="bfloat16", layers=2, max_shard_size=100_000))
    index = json.loads((original / INDEX).read_text())
    first = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.layers.2.enorm.weight"] = first
    (original / INDEX).write_text(json.dumps(index))
    convert(trained, tmp_path / "there", "torch_dist", Mesh(ep=2))
    shutil.rmtree(tmp_path / "there" / "hf")
    reference = tmp_path / "reference"  # no weights
    shutil.copytree(original, reference, ignore=shutil.ignore_patterns("*.safetensors"))
    convert(tmp_path / "there", tmp_path / "back", "hf", hf_config=reference)
    assert same(models.tensors(tmp_path / "back"), models.tensors(trained))
    if (tmp_path / "back" / INDEX).exists():
        indexed(tmp_path / "back")
    convert(tmp_path / "there", tmp_path / "cut", "hf", options=Options(max_shard=100_000), hf_config=reference)
    indexed(tmp_path / "cut")


def test_b46_nothing_is_read_from_the_target(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Whether to write MTP was decided by the config in the output folder, which was an old one."""
    source = models.add_mtp(model_copy("deepseek_v3", dtype="bfloat16", layers=2))
    convert(source, tmp_path / "empty", "hf")
    shutil.copytree(model_copy("deepseek_v3", dtype="bfloat16", layers=2), tmp_path / "old")
    config(tmp_path / "old", num_nextn_predict_layers=0)
    convert(source, tmp_path / "old", "hf", overwrite=True)
    files = {p.name for p in (tmp_path / "empty").iterdir()}
    assert files == {p.name for p in (tmp_path / "old").iterdir()}
    assert all((tmp_path / "empty" / f).read_bytes() == (tmp_path / "old" / f).read_bytes() for f in files)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "deepseek_v3"])
def test_b47_the_index_is_made_of_what_was_written(family: str, model_copy: Callable[..., Path]) -> None:
    """The index listed tensors that no shard holds, and loads failed."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    for to, mesh in [("torch_dist", Mesh(tp=2)), ("archon", Mesh(dp_shard=2))]:
        there = source.parent / to
        convert(source, there, to, mesh)
        convert(there, source.parent / f"{to}-back", "hf", options=Options(max_shard=60_000))
        assert set(indexed(source.parent / f"{to}-back")) == set(models.tensors(source))


# ------------------------------------------------------------------------------------------------ pipelines


def layers_of(tree: Mapping[str, Any], chunk: str = "model") -> list[int]:
    """What a stage holds, told by the constants that `layered` puts into the input norms."""
    found = []
    for n in range(100):
        value = tree[chunk].get(f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight")
        if value is None:
            return found
        assert (value == value[0]).all()
        found.append(round(float(value[0])))
    raise AssertionError("too many layers")


def layered(source: Path) -> Path:
    """Every tensor of layer i is filled with i."""
    return edited(
        source,
        lambda t: {n: torch.full_like(x, float(n.split(".")[2])) if ".layers." in n else x for n, x in t.items()},
    )


@pytest.mark.parametrize(
    ("layers", "mesh", "wanted"),
    [
        (5, Mesh(pp=2), None),
        (5, Mesh(pp=2, first=3), [[0, 1, 2], [3, 4]]),
        (5, Mesh(pp=2, last=1), [[0, 1, 2, 3], [4]]),
        (7, Mesh(pp=4), None),
        (7, Mesh(pp=4, first=1), [[0], [1, 2], [3, 4], [5, 6]]),
        (7, Mesh(pp=4, first=1, last=2), [[0], [1, 2], [3, 4], [5, 6]]),
        (6, Mesh(pp=3, first=1, last=1), [[0], [1, 2, 3, 4], [5]]),
        (7, Mesh(pp=3, first=1, last=4), [[0], [1, 2], [3, 4, 5, 6]]),
        (4, Mesh(pp=4), [[0], [1], [2], [3]]),
    ],
)
def test_b49_uneven_pipelines(
    layers: int, mesh: Mesh, wanted: list[list[int]] | None, model_copy: Callable[..., Path]
) -> None:
    """30 layers over 4 stages became 28. Every layer once, or a refusal that says what would fit."""
    source = layered(model_copy("llama", dtype="bfloat16", layers=layers))
    there = source.parent / "there"
    if wanted is None:
        with pytest.raises(MeshError, match=rf"{layers} layers do not divide over {mesh.pp}"):
            convert(source, there, "mp_rank", mesh)
        return
    convert(source, there, "mp_rank", mesh)
    assert [layers_of(tree) for tree in rank_files(there).values()] == wanted
    convert(there, source.parent / "back", "hf")
    assert same(models.tensors(source.parent / "back"), models.tensors(source))
    assert same(models.tensors(around(source, "torch_dist", mesh)), models.tensors(source))


@pytest.mark.parametrize(
    ("layers", "mesh", "wanted"),
    [
        (8, Mesh(pp=2, vpp=2), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (8, Mesh(pp=2, vpp=4), [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
        (24, Mesh(pp=2, vpp=12), [[[2 * n] for n in range(12)], [[2 * n + 1] for n in range(12)]]),
    ],
)
def test_b50_virtual_stages(
    layers: int, mesh: Mesh, wanted: list[list[list[int]]], model_copy: Callable[..., Path]
) -> None:
    """A wrong chunk order was silently filled with defaults. Chunks interleave; and `model10` comes after `model9`."""
    source = layered(model_copy("llama", dtype="bfloat16", layers=layers))
    there = source.parent / "there"
    convert(source, there, "mp_rank", mesh)
    have = [[layers_of(tree, f"model{n}") for n in range(mesh.vpp)] for tree in rank_files(there).values()]
    assert have == wanted
    convert(there, source.parent / "back", "hf")
    assert same(models.tensors(source.parent / "back"), models.tensors(source))


@pytest.mark.parametrize(
    ("layout", "mesh", "wanted"),
    [
        ("E|t*2|t*2|L", Mesh(pp=4, layout="E|t*2|t*2|L"), [[], [0, 1], [2, 3], []]),
        ("Et*3|t|L", Mesh(pp=3, layout="Et*3|t|L"), [[0, 1, 2], [3], []]),
        ("E|(t|)*4L", Mesh(pp=3, vpp=2, layout="E|(t|)*4L"), None),
    ],
)
def test_b52_layout_strings(
    layout: str, mesh: Mesh, wanted: list[list[int]] | None, model_copy: Callable[..., Path]
) -> None:
    """A custom layout was saved in a form that could not be read back. It is stored as the plain string."""
    source = layered(model_copy("llama", dtype="bfloat16", layers=4))
    for to in ("mp_rank", "torch_dist"):
        there = source.parent / to
        convert(source, there, to, mesh)
        convert(there, source.parent / f"{to}-back", "hf")
        assert same(models.tensors(source.parent / f"{to}-back"), models.tensors(source))
    files = rank_files(source.parent / "mp_rank")
    if wanted is not None:
        assert [layers_of(tree) for tree in files.values()] == wanted
    common = torch.load(source.parent / "torch_dist" / "release" / "common.pt", weights_only=False)
    for args in (common["args"], next(iter(files.values()))["args"]):
        assert isinstance(args, argparse.Namespace)
        assert args.pipeline_model_parallel_layout == layout


def test_b53_layers_are_global(model_copy: Callable[..., Path]) -> None:
    """Both pipeline stages received layers 0 and 1."""
    source = layered(model_copy("llama", dtype="bfloat16", layers=4))
    convert(source, source.parent / "there", "mp_rank", Mesh(tp=2, pp=2))
    have = {name: layers_of(tree) for name, tree in rank_files(source.parent / "there").items()}
    assert have == {
        "mp_rank_00_000": [0, 1],
        "mp_rank_00_001": [2, 3],
        "mp_rank_01_000": [0, 1],
        "mp_rank_01_001": [2, 3],
    }


# ------------------------------------------------------------------------------------------------ element types


def test_b55_fp32_into_bf16_ranks(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Scattering failed on mixed types. Cast once, by plan, as torch rounds, and reported."""
    source = model_copy("llama", layers=2)
    result = convert(source, tmp_path / "there", "mp_rank", Mesh(tp=2), Options(dtype="bfloat16"))
    report = result.report()
    assert report["exactness"] == "narrow"
    assert list(report["casts"]) == ["F32 → BF16"] and sum(report["casts"].values()) == report["atoms"]
    convert(tmp_path / "there", tmp_path / "back", "hf")
    assert same(models.tensors(tmp_path / "back"), {n: t.bfloat16() for n, t in models.tensors(source).items()})
    assert config(tmp_path / "back")["dtype"] == "bfloat16"


@pytest.mark.parametrize(("to", "mesh"), ALL)
def test_b56_types_are_kept_name_by_name(to: str, mesh: Mesh, model_copy: Callable[..., Path]) -> None:
    """Some tensors became fp32 or uint8 on the way. bf16 weights with fp32 norms come back as they were."""
    source = edited(
        model_copy("qwen3", dtype="bfloat16", layers=2),
        lambda t: {n: x.float() + 1e-3 if "norm" in n else x for n, x in t.items()},
    )
    assert same(models.tensors(around(source, to, mesh)), models.tensors(source))


# ------------------------------------------------------------------------------------------------ Megatron's formats


def test_b65_extra_states(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Users stripped `_extra_state` by hand before loading. Ignored in any form, and listed."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "there", "mp_rank")
    file = next((tmp_path / "there").rglob("model_optim_rng.pt"))
    tree = torch.load(file, weights_only=False)
    states: dict[str, Any] = {
        "mlp.linear_fc1": None,
        "mlp.linear_fc2": b"bytes",
        "self_attention.linear_qkv": io.BytesIO(b"x"),
    }
    states |= {
        "self_attention.core_attention": torch.empty(0),
        "self_attention.linear_proj": torch.zeros(3, dtype=torch.uint8),
    }
    names = {f"decoder.layers.0.{module}._extra_state": value for module, value in states.items()}
    tree["model"] |= names
    torch.save(tree, file)
    result = convert(tmp_path / "there", tmp_path / "back", "hf")
    assert names.keys() <= result.planned.source.drops.keys()
    assert same(models.tensors(tmp_path / "back"), models.tensors(source))


def test_b67_two_formats_that_look_alike(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A converter for torch_dist was given an FSDP checkpoint, and failed over `common.pt`."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    save_dcp(models.tensors(source), tmp_path / "run" / "fsdp")
    convert(source, tmp_path / "run" / "megatron", "torch_dist", Mesh(tp=2))
    convert(source, tmp_path / "run" / "titan", "archon")
    for name, format_name in (("fsdp", "dcp"), ("megatron", "torch_dist"), ("titan", "archon")):
        opened = open_checkpoint(tmp_path / "run" / name, hf_config=source)
        assert opened.format == format_name
        convert(opened, tmp_path / name, "hf")
        assert same(models.tensors(tmp_path / name), models.tensors(source))


def test_b68_wrapped_megatron_names(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Unknown parameter `module.module.…`: wrappers are taken off; whatever stays unknown is listed at once."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "there", "mp_rank")
    file = next((tmp_path / "there").rglob("model_optim_rng.pt"))
    tree = torch.load(file, weights_only=False)
    plain = tree["model"]
    tree["model"] = {f"module.module.{n}": t for n, t in plain.items()}
    torch.save(tree, file)
    convert(tmp_path / "there", tmp_path / "back", "hf")
    assert same(models.tensors(tmp_path / "back"), models.tensors(source))
    tree["model"] = {f"module.module.vision_model.{n}": t for n, t in plain.items()}
    torch.save(tree, file)
    with pytest.raises(SourceError) as caught:
        convert(tmp_path / "there", tmp_path / "other", "hf")
    assert "decoder.final_layernorm.weight" in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_b71_resharding_without_a_detour(family: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A TP4 checkpoint loaded at TP1: 'global shape mismatch', and advice in three steps."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    meshes = [Mesh(tp=2), Mesh(tp=1), Mesh(tp=4, pp=2), Mesh(tp=2, pp=2)]
    if family == "qwen3_moe":
        meshes += [Mesh(tp=2, ep=4, etp=1), Mesh(tp=4, ep=2)]
    at = source
    for n, mesh in enumerate(meshes):
        for to in ("torch_dist", "mp_rank"):
            if to == "mp_rank" and mesh.ep > 1 and mesh.expert_tp != mesh.tp:
                continue
            convert(at, tmp_path / f"{n}-{to}", to, mesh)
            at = tmp_path / f"{n}-{to}"
    assert verify(source, at).same
    convert(at, tmp_path / "back", "hf")
    assert same(models.tensors(tmp_path / "back"), models.tensors(source))


def test_b73_what_is_to_be_left_behind(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A reward model's head was refused with everything else. Left behind when asked for by name, and listed."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    have = models.tensors(source)
    edited(source, lambda t: t.update({"score.weight": torch.ones(1, 64, dtype=torch.bfloat16)}))
    with pytest.raises(SourceError, match=r"score\.weight"):
        convert(source, tmp_path / "out", "hf")
    result = convert(source, tmp_path / "out", "hf", drop=[r"score\..*"])
    assert list(result.report()["dropped"]) == ["score.weight"]
    assert same(models.tensors(tmp_path / "out"), have)
    with pytest.raises(ConfigError, match="score"):
        convert(source, tmp_path / "other", "hf", drop=["score"])  # a whole name, not a part of it


def test_b73_a_known_tensor_left_behind(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The head of a causal model, dropped by name, is nowhere in the target; half of a fused tensor cannot be."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    result = convert(source, tmp_path / "out", "torch_dist", drop=[r"lm_head\.weight"])
    assert result.report()["dropped"] == {"lm_head.weight": "asked for"}
    names = read_index(tmp_path / "out" / "release").tensors
    assert "output_layer.weight" not in names and "embedding.word_embeddings.weight" in names
    with pytest.raises(PlanError, match=r"layers\.0\.attn\.k"):
        convert(source, tmp_path / "half", "torch_dist", drop=[r"model\.layers\.0\.self_attn\.k_proj\.weight"])


def test_b73_leaving_behind_is_never_everything(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A head may go because somebody said so, on record; without that record it is missed, and not all can go."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "out", "hf", drop=[r"lm_head\.weight"])
    assert models.tensors(source).keys() - models.tensors(tmp_path / "out").keys() == {"lm_head.weight"}
    (tmp_path / "out" / "areal_manifest.json").unlink()
    with pytest.raises(SourceError, match=r"lm_head\.weight"):
        convert(tmp_path / "out", tmp_path / "no", "hf")
    with pytest.raises(ConvertError):
        convert(source, tmp_path / "nothing", "hf", drop=[".*"])


def test_b44_mtp_layers_left_behind(tmp_path: Path) -> None:
    """DeepSeek-V3 without its MTP layer: all of it goes, the rest stays, and Archon, which has none, takes it."""
    source = models.add_mtp(models.make_model("deepseek_v3", tmp_path / "hf", dtype="bfloat16"))
    kept = {k: v for k, v in models.tensors(source).items() if not k.startswith("model.layers.4.")}
    with pytest.raises(ConfigError, match="--drop"):
        convert(source, tmp_path / "archon", "archon")
    convert(source, tmp_path / "archon", "archon", drop=[r"model\.layers\.4\..*"])
    convert(tmp_path / "archon", tmp_path / "back", "hf")
    assert same(models.tensors(tmp_path / "back"), kept)


# ------------------------------------------------------------------------------------------------ shards


def test_b74_index_and_total_size(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The final checkpoint had shards and no index. Measured by hand: 251,904 bytes for this model in two layers."""
    source = model_copy("llama_tied", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "out", "hf", options=Options(max_shard=60_000))
    held = indexed(tmp_path / "out")
    shards = sorted(set(held.values()))
    assert shards == [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    sizes = dict.fromkeys(shards, 0)
    for name, tensor in models.tensors(tmp_path / "out").items():
        sizes[held[name]] += tensor.numel() * 2
    alone = {file for file in shards if list(held.values()).count(file) == 1}
    assert all(size <= 60_000 for file, size in sizes.items() if file not in alone)
    assert not (tmp_path / "out" / FILE).exists()


def test_b79_views_of_one_storage(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Every tensor was a view of one flat buffer, and the save refused all of them. A tie is something else."""
    source = model_copy("llama_tied", dtype="bfloat16", layers=2)
    have = models.tensors(source)
    flat = torch.cat([t.flatten() for t in have.values()])
    views, at = {}, 0
    for name, tensor in have.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    views["lm_head.weight"] = views["model.embed_tokens.weight"]
    (source / FILE).unlink()
    torch.save(views, source / "pytorch_model.bin")
    convert(source, tmp_path / "out", "hf")
    assert same(models.tensors(tmp_path / "out"), have)


def test_b83_one_file_without_an_index(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """An exporter demanded an index that a one-file model does not have; nor does one come out."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    back = around(source, "torch_dist")
    assert [p.name for p in back.glob("*.safetensors*")] == [FILE]
    assert (back / FILE).read_bytes() == (source / FILE).read_bytes()


# ------------------------------------------------------------------------------------------------ DCP


def test_b89_an_optimizer_beside_the_weights(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """A key such as `state.0.step` stopped the load. The optimizer is a group that is named, and never in the way, even
    when its files are gone."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    have = models.tensors(source)
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t.float()} for n, t in have.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 1e-4, "params": list(have), "betas": (0.9, 0.95)}]}
    path = save_dcp({"model": have, "optimizer": optimizer, "train_state": {"step": 7}}, tmp_path / "dcp")
    result = convert(path, tmp_path / "out", "hf", hf_config=source)
    assert same(models.tensors(tmp_path / "out"), have)
    assert any("optimizer" in why for why in result.planned.source.drops.values())


@pytest.mark.parametrize("form", ["dcp", "archon", "torch_dist"])
def test_b91_missing_and_unexpected_are_both_fatal(form: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Extra keys were ignored silently, missing ones fatal. Both are, in one list."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "there", form)
    inside = tmp_path / "there" / ("release" if form == "torch_dist" else "")
    tensors = load_dcp(inside)
    gone = next(
        n for n in tensors if "norm" in n and n.count(".") == (2 if form == "torch_dist" else 1 + (form == "dcp"))
    )
    del tensors[gone]
    tensors["decoder.extra.weight" if form == "torch_dist" else "extra.weight"] = torch.ones(4)
    path = save_dcp(tensors, tmp_path / "other")
    if form == "torch_dist":
        shutil.copy(inside / "common.pt", path)
    with pytest.raises(SourceError) as caught:
        convert(path, tmp_path / "out", "hf", hf_config=source)
    assert gone in str(caught.value) and "extra.weight" in str(caught.value)


@pytest.mark.parametrize("root", ["", "model.", "app.model.", "state_dict.", "module.", "model.module.", "dcp.model."])
def test_b92_roots(root: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The loader expected `{"model": …}`, and the names did not match."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    have = models.tensors(source)
    tree: dict[str, Any] = dict(have)
    for part in reversed(root.rstrip(".").split(".") if root else []):
        tree = {part: tree}
    path = save_dcp(tree, tmp_path / "dcp")
    convert(path, tmp_path / "out", "hf", hf_config=source)
    assert same(models.tensors(tmp_path / "out"), have)
    convert(path, tmp_path / "again", "dcp", Mesh(dp_shard=2), Options(root=root), hf_config=source)
    assert set(load_dcp(tmp_path / "again")) == {root + name for name in have} or root
    assert same(models.tensors(around(tmp_path / "again", "hf")), have)


def test_b94_norms_of_archon(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Attention and feed-forward norms were exchanged; their shapes are equal, so nothing complained."""

    def constants(tensors: Tensors) -> Tensors:
        fill = {"input_layernorm": 2.0, "post_attention_layernorm": 3.0, "model.norm": 5.0}
        return {n: torch.full_like(t, next((v for k, v in fill.items() if k in n), 1.0)) for n, t in tensors.items()}

    source = edited(model_copy("llama", dtype="bfloat16", layers=2), constants)
    convert(source, tmp_path / "archon", "archon", Mesh(dp_shard=2))
    have = load_dcp(tmp_path / "archon")
    for layer in range(2):
        assert (have[f"layers.{layer}.attention_norm.weight"] == 2).all()
        assert (have[f"layers.{layer}.ffn_norm.weight"] == 3).all()
    assert (have["norm.weight"] == 5).all()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_fsdp_wrapped_module.", "module.", "module._orig_mod.", "inside"])
def test_b100_wrappers_in_names(prefix: str, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """torch.compile left `_orig_mod.` in the names; from_pretrained then gave a random model without an error. And
    there was no config.json."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    have = models.tensors(source)

    def wrap(name: str) -> str:
        if prefix == "inside":
            return name.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod.").replace(
                "mlp.", "mlp._fsdp_wrapped_module."
            )
        return prefix + name

    wrapped = {wrap(n): t for n, t in have.items()}
    (tmp_path / "st").mkdir()
    save_file(wrapped, tmp_path / "st" / FILE)
    for path in (tmp_path / "st", save_dcp(wrapped, tmp_path / "dcp")):
        with pytest.raises(Exception, match=r"--hf-config"):
            convert(path, tmp_path / "no", "hf")
        convert(path, tmp_path / f"{path.name}-out", "hf", hf_config=source)
        assert same(models.tensors(tmp_path / f"{path.name}-out"), have)
        assert config(tmp_path / f"{path.name}-out") == config(source)


def test_b112_a_prefix_that_stands_twice(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """save_pretrained wrote keys with a repeated prefix, and reloading hid it. Ours come out right; it is on record."""
    source = model_copy("llama", dtype="bfloat16", layers=2)
    have = models.tensors(source)
    edited(source, lambda t: {f"model.{n}": x for n, x in t.items()})
    result = convert(source, tmp_path / "out", "hf")
    assert same(models.tensors(tmp_path / "out"), have)
    assert result.planned.source.dialect["root"] == "model."
    edited(source, lambda t: {n.replace("model.model.layers", "model.layers.layers"): x for n, x in t.items()})
    with pytest.raises(SourceError, match=r"layers\.layers"):
        convert(source, tmp_path / "other", "hf")


# ------------------------------------------------------------------------------------------------ config, side files


@pytest.mark.parametrize("family", ["llama_rope", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("to", "mesh"), ALL)
def test_b115_b116_the_config_is_the_sources_own(
    to: str, mesh: Mesh, family: str, model_copy: Callable[..., Path]
) -> None:
    """The exporter rebuilt config.json: RoPE in the new spelling only (old stacks fell back to theta 10000), the
    training length for max_position_embeddings. Byte for byte the source's, in whatever spelling."""
    source = model_copy(family, dtype="bfloat16", layers=2)
    text = json.dumps(config(source) | {"max_position_embeddings": 1_048_576, "rope_theta": 5e5, "x": [1, {"y": None}]})
    (source / "config.json").write_text(text + "  \n")
    assert (around(source, to, mesh) / "config.json").read_text() == text + "  \n"


@pytest.mark.parametrize(("to", "mesh"), ALL)
def test_b118_b119_b121_side_files(to: str, mesh: Mesh, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """generation_config.json, vocab.json, merges.txt, chat template and code were gone after a merge; or an invalid
    generation_config stopped the save. All are copied as they are, none is judged."""
    source = model_copy("llama", dtype="bfloat16", layers=2, side_files=True)
    (source / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    for name in ("vocab.json", "merges.txt", "preprocessor_config.json", "chat_template.jinja", "tokenizer.model"):
        (source / name).write_bytes(b"\x00\xff" + name.encode())
    (source / "LICENSE").write_text("none")
    side = {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file() and p.name != FILE}
    assert len(side) > 10
    back = around(source, to, mesh)
    have = {p.relative_to(back): p.read_bytes() for p in back.rglob("*") if p.is_file() and p.name != FILE}
    have.pop(Path("areal_manifest.json"))
    assert have == side


def test_b40_no_framework_is_needed(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """The script and the trainer wanted different Megatron trees. Neither Megatron nor torch is imported."""
    source = model_copy("qwen3_moe", dtype="bfloat16", layers=2)
    script = f"""
import sys
for name in ("torch", "megatron", "transformers", "safetensors"):
    sys.modules[name] = None
from areal_convert.converter import Mesh, convert, verify
at = {str(source)!r}
meshes = {{"torch_dist": Mesh(tp=2), "mp_rank": Mesh(ep=2), "dcp": Mesh(dp_shard=2), "archon": Mesh(), "hf": Mesh()}}
for to, mesh in meshes.items():
    convert(at, {str(tmp_path)!r} + "/" + to, to, mesh)
    at = {str(tmp_path)!r} + "/" + to
assert verify({str(source)!r}, at).same
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------ time and memory


def synthetic(path: Path, layers: int, hidden: int, intermediate: int, shards: int = 1) -> Path:
    """A llama whose files are all holes: as large as one likes, on no disk at all."""
    path.mkdir()
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
    }
    sizes |= {
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
    }
    sizes |= {
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    tensors |= {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in sizes.items()}
    where = {}
    for n, names in enumerate(split(list(tensors), shards)):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else FILE
        header, at = {}, 0
        for name in names:
            size = 2 * torch.Size(tensors[name]).numel()
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [at, at + size]}
            at += size
            where[name] = file
        raw = json.dumps(header).encode()
        with open(path / file, "wb") as out:
            out.write(struct.pack("<Q", len(raw)) + raw)
            out.truncate(8 + len(raw) + at)
    if shards > 1:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    values = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
    }
    values |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(values))
    return path


def split(names: list[str], parts: int) -> Iterable[list[str]]:
    return [names[n * len(names) // parts : (n + 1) * len(names) // parts] for n in range(parts)]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "mesh"), [("hf", Mesh()), ("torch_dist", Mesh(tp=2))])
def test_b130_time_is_linear_in_tensors(to: str, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export scanned all pending shards for each tensor: 45 minutes instead of 7. Four times the tensors (in four
    times the shards) may take six times the processor's time, not sixteen."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    spent = []
    for n, layers in enumerate((25, 100, 400)):  # the first one warms up
        source = synthetic(tmp_path / f"source{n}", layers, 8, 8, shards=layers // 10)
        start = time.process_time()
        convert(source, tmp_path / f"out{n}", to, mesh, Options(max_shard=9000))
        spent.append(time.process_time() - start)
    assert spent[2] < 6 * spent[1] + 0.5, spent


@pytest.mark.parametrize(("to", "mesh"), [("hf", Mesh()), ("torch_dist", Mesh(tp=2)), ("dcp", Mesh(dp_shard=2))])
def test_b131_memory_does_not_grow_with_the_model(to: str, mesh: Mesh, tmp_path: Path) -> None:
    """`dict()` around a stream gathered the whole model on rank 0. 70 MB go through a few."""
    source = synthetic(tmp_path / "source", 4, 1024, 2048)
    size = (source / FILE).stat().st_size
    assert size > 70_000_000
    convert(synthetic(tmp_path / "warm", 1, 8, 8), tmp_path / "warm-out", to, mesh)
    tracemalloc.start()
    try:
        convert(source, tmp_path / "out", to, mesh, limits=Limits(workers=2, memory=8 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20, f"{peak / 1e6:.0f} MB at the highest, for a model of {size / 1e6:.0f} MB"


# ------------------------------------------------------------------------------------------------ FSDP2, several ranks


def _worker(rank: int, port: int, out: str) -> None:
    """What two training processes save; see the tests below."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh, root = init_device_mesh("cpu", (2,)), Path(out)
    for name in ("deepseek", "seven"):
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype="auto")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dcp.save(model.state_dict(), checkpoint_id=root / f"{name}-fsdp")
        dcp.save({"model": model.state_dict()}, checkpoint_id=root / f"{name}-fsdp-model")
    whole = load_file(root / "seven" / FILE)
    mine = {n: t for k, (n, t) in enumerate(sorted(whole.items())) if k % 2 == rank}
    dcp.save(mine, checkpoint_id=root / "disjoint")
    for dim in (0, 1, 2):
        archon = torch.load(root / "archon.pt", weights_only=True)
        for n, t in archon.items():
            on = dim if "moe.experts" in n else 0
            archon[n] = distribute_tensor(t, mesh, [Shard(on)]) if t.dim() > on else t
        dcp.save(archon, checkpoint_id=root / f"archon-{dim}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints that two gloo processes made; once for all tests below."""
    root = tmp_path_factory.mktemp("trained")
    deepseek = models.make_model("deepseek_v3", root / "deepseek", dtype="bfloat16", layers=2)
    seven = models.make_model(
        "llama", root / "seven", layers=2, hidden_size=7, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    edited(seven, lambda t: {n: torch.ones_like(x) if "norm" in n else x for n, x in t.items()})
    moe = models.make_model("qwen3_moe", root / "moe", dtype="bfloat16", layers=2)
    convert(moe, root / "archon", "archon")
    torch.save(load_dcp(root / "archon"), root / "archon.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(port), str(root)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert deepseek.is_dir()
    yield root


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["deepseek-fsdp", "deepseek-fsdp-model"])
def test_b97_replicated_buffers(name: str, trained: Path, tmp_path: Path) -> None:
    """Plain buffers, whole on every rank, were concatenated: [1] became [8]. DeepSeek's selection bias is one."""
    convert(
        trained / name, tmp_path / "out", "hf", hf_config=trained / "deepseek", options=Options(experts="per_expert")
    )
    have = models.tensors(tmp_path / "out")
    assert have["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (8,)
    wanted = models.tensors(trained / "deepseek")
    assert have.keys() == wanted.keys()
    assert all(torch.equal(have[n].float(), t.float()) for n, t in wanted.items())


@pytest.mark.multiprocess
def test_b98_equal_shards_are_no_replicas(trained: Path, tmp_path: Path) -> None:
    """Norms of ones: equal shards were taken for replicas, 1/8 of the tensor was kept. 7 rows over 2 ranks: 4 and 3."""
    convert(trained / "seven-fsdp", tmp_path / "out", "hf", hf_config=trained / "seven")
    have = models.tensors(tmp_path / "out")
    assert have["model.norm.weight"].tolist() == [1.0] * 7
    assert same(have, models.tensors(trained / "seven"))


@pytest.mark.multiprocess
def test_b82_keys_that_only_one_rank_has(trained: Path, tmp_path: Path) -> None:
    """Each rank planned from its own keys, and the other's were lost."""
    assert len(list((trained / "disjoint").glob("__*.distcp"))) == 2
    convert(trained / "disjoint", tmp_path / "out", "hf", hf_config=trained / "seven")
    assert same(models.tensors(tmp_path / "out"), models.tensors(trained / "seven"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_b95_stacked_experts_cut_anywhere(dim: int, trained: Path, tmp_path: Path) -> None:
    """Saving grouped experts gathered everything on one rank. Experts (E, F, H) sharded on any dimension become single
    ones, piece by piece."""
    opened = open_checkpoint(trained / f"archon-{dim}", hf_config=trained / "moe")
    assert opened.format == "archon"
    convert(opened, tmp_path / "out", "hf", options=Options(experts="per_expert"))
    assert same(models.tensors(tmp_path / "out"), models.tensors(trained / "moe"))


def test_planning_reads_no_weights(tmp_path: Path) -> None:
    """B38, B46: what will be written is settled before anything is, from headers alone."""
    source = synthetic(tmp_path / "source", 2, 8, 8)
    report = plan(source, "torch_dist", Mesh(tp=2)).report()
    assert report["parameters"] == 64 * 8 + 8 + 2 * (4 * 64 + 3 * 64 + 2 * 8)
    assert list(tmp_path.iterdir()) == [source]


if __name__ == "__main__":
    _worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
