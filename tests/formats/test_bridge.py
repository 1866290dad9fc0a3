"""Megatron-Bridge's `run_config.yaml`. Megatron-Bridge itself does not run here; that it builds these models from the
file and computes transformers' logits was tried by hand (docs/dev/megatron-args.md)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from areal_convert.converter.formats import bridge
from areal_convert.converter.mesh import Mesh
from areal_convert.mappings import table
from areal_convert.mappings.megatron_args import config_from_args
from megatron_variants import VARIANTS, args_of, config_of, derived


def text_of(variant: str, mesh: Mesh | None = None) -> bytes:
    config = config_of(variant)
    dims = table(config["model_type"]).dims(config)
    return bridge.run_config(config, dims, mesh or Mesh(tp=2), 1024, "BF16")


def run_of(variant: str, mesh: Mesh | None = None) -> dict[str, Any]:
    return yaml.safe_load(text_of(variant, mesh))


def test_dense() -> None:
    run = run_of("llama", Mesh(tp=2, pp=2, first=1))
    model = run["model"]
    wanted = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "gated_linear_unit": True,
        "layernorm_epsilon": 1e-6,  # a float: YAML 1.1 takes 1e-06 for a text
        "num_query_groups": 4,
        "num_layers_in_first_pipeline_stage": 1,
        "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
        "pipeline_model_parallel_size": 2,
        "seq_length": 256,
        "share_embeddings_and_output_weights": False,
        "should_pad_vocab": True,
        "tensor_model_parallel_size": 2,
        "vocab_size": 1003,
    }
    assert {name: model[name] for name in wanted} == wanted
    assert "transformer_layer_spec" not in model and "multi_latent_attention" not in model
    assert (run["checkpoint"]["save_optim"], run["checkpoint"]["save_rng"]) == (False, False)
    assert text_of("llama") == text_of("llama")


def test_experts_and_mla() -> None:
    model = run_of("deepseek_yarn")["model"]
    assert model["_target_"] == "megatron.bridge.models.mla_provider.MLAModelProvider"
    assert model["transformer_layer_spec"]["_partial_"] is True
    assert (model["moe_layer_freq"], model["num_moe_experts"]) == ([0, 1, 1, 1], 8)
    assert (model["rope_type"], model["rotary_scaling_factor"], model["mscale_all_dim"]) == ("yarn", 40.0, 1.0)
    model = run_of("qwen3_yarn")["model"]
    assert (model["position_embedding_type"], model["yarn_rotary_scaling_factor"]) == ("yarn", 4.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, tmp_path: Path) -> None:
    """What is read from the file derives the same config as Megatron-LM's arguments do."""
    (tmp_path / bridge.FILE).write_bytes(text_of(variant))
    args = bridge.read_run_config(tmp_path)
    assert args is not None
    wanted, _ = derived(args_of(variant))
    config, _ = config_from_args(SimpleNamespace(args=args, tensors=[], facts={})) or ({}, "")
    assert config == {**wanted, "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def test_the_directory_above(tmp_path: Path) -> None:
    (tmp_path / bridge.FILE).write_bytes(text_of("qwen3"))
    (tmp_path / "iter_0000007").mkdir()
    assert (bridge.read_run_config(tmp_path / "iter_0000007") or {})["num_layers"] == 4


def test_nested_configs(tmp_path: Path) -> None:
    """Later versions keep the fields of TransformerConfig below `transformer`."""
    model = run_of("qwen3")["model"]
    outer = {"_target_": "megatron.training.models.gpt.GPTModelConfig", "transformer": model, "vocab_size": 1003}
    (tmp_path / bridge.FILE).write_text(yaml.safe_dump({"model": outer}))
    assert (bridge.read_run_config(tmp_path) or {})["qk_layernorm"] is True


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "model: 3",
        "model: {",
        "model: {_target_: megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider, num_layers: 2}",
        "model: !!python/object/apply:os.system ['touch ran']",
        "a: " * 3000,
    ],
)
def test_not_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bridge.read_run_config(tmp_path / "none") is None
    (tmp_path / bridge.FILE).write_text(text)
    assert bridge.read_run_config(tmp_path) is None
    assert not (tmp_path / "ran").exists()
