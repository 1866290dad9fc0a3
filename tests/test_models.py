"""The test material itself: what transformers writes is what the suite believes it to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_is_built_and_runs(family: str, model: Callable[..., Path]) -> None:
    out = models.logits(model(family), models.sample_tokens())
    assert out.shape == (2, 24, models.VOCAB)
    assert 0.3 < float(out.std()) < 30


@pytest.mark.parametrize("family", models.FAMILIES)
def test_no_two_tensors_are_alike(family: str, model: Callable[..., Path]) -> None:
    have = models.tensors(model(family))
    assert len({tensor.numpy().tobytes() for tensor in have.values()}) == len(have)
    assert all(float(tensor.float().std()) > 0.01 for tensor in have.values())


def test_bf16_is_the_fp32_model_rounded_and_keeps_the_router_correction(model: Callable[..., Path]) -> None:
    import torch

    wide, narrow = (models.tensors(model("deepseek_v3", dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert wide.keys() == narrow.keys()
    for name, value in narrow.items():
        correction = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if correction else torch.bfloat16), name
        assert torch.equal(value, wide[name].to(value.dtype)), name


def test_experts_lie_on_disk_one_by_one_or_fused(model: Callable[..., Path]) -> None:
    import torch

    split = models.tensors(model("qwen3_moe"))
    fused = models.tensors(model("qwen3_moe", fused_experts=True))
    gate = [split[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(4)]
    up = [split[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(4)]
    both = torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
    assert torch.equal(fused["model.layers.0.mlp.experts.gate_up_proj"], both)


def test_mtp_layer_as_published(model_copy: Callable[..., Path]) -> None:
    path = models.add_mtp(model_copy("deepseek_v3"))
    added = {name.removeprefix("model.layers.4.") for name in models.tensors(path) if ".layers.4." in name}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.head.weight", "embed_tokens.weight"} < added
    assert "mlp.gate.e_score_correction_bias" in added
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    models.logits(path, models.sample_tokens())


def test_shards_side_files_and_bin(model_copy: Callable[..., Path]) -> None:
    path = model_copy("llama_tied", max_shard_size=60_000, side_files=True)
    assert len(list(path.glob("*.safetensors"))) > 3
    assert {"chat_template.jinja", "generation_config.json", "modeling_x.py", "tokenizer.json"} <= {
        file.name for file in path.iterdir()
    }
    before = models.logits(path, models.sample_tokens())
    have = models.tensors(path)
    models.to_bin(path, shards=3)
    import torch

    saved = [torch.load(file, weights_only=True) for file in sorted(path.glob("*.bin"))]
    assert {name for part in saved for name in part} == have.keys()
    assert torch.equal(models.logits(path, models.sample_tokens()), before)
