"""What Archon's models read in a config.json: every field used, refused by name, or known to mean nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from areal_convert.converter.errors import ConfigError
from areal_convert.engines.archon.args import GqaArgs, MlaArgs, RopeArgs
from areal_convert.engines.archon.rotary import frequencies
from areal_convert.engines.archon.specs import SPECS, spec_for, split
from areal_convert.mappings import FAMILIES

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


def config_of(family: str, **changed: Any) -> dict[str, Any]:
    config = json.loads((models.cached_model(family, layers=1) / "config.json").read_text())
    return config | changed


def test_every_family_with_a_table_has_a_model() -> None:
    assert SPECS.keys() == FAMILIES.keys()
    assert all(name == spec.name for name, spec in SPECS.items())
    with pytest.raises(ConfigError, match="'gpt2'"):
        spec_for({"model_type": "gpt2"})


def test_published_configurations_are_understood() -> None:
    llama = spec_for(PUBLISHED["Llama-3.1-8B"]).args(PUBLISHED["Llama-3.1-8B"])
    assert llama.attention == GqaArgs(heads=32, kv_heads=8, head_dim=128)
    assert (llama.rope.kind, llama.rope.theta, llama.rope.original_length) == ("llama3", 500000.0, 8192)
    deepseek = spec_for(PUBLISHED["DeepSeek-V3"]).args(PUBLISHED["DeepSeek-V3"])
    assert isinstance(deepseek.attention, MlaArgs)
    assert deepseek.attention.scale == pytest.approx(192**-0.5 * 1.3688879**2)  # 0.1 ln 40 + 1
    assert deepseek.moe is not None
    assert (deepseek.moe.groups, deepseek.moe.top_groups, deepseek.moe.shared_width) == (8, 4, 2048)
    assert sum(deepseek.sparse) == 58
    assert deepseek.ignored == ("num_nextn_predict_layers=1: these layers are not trained",)
    model = SPECS["deepseek_v3"].build(deepseek)  # on the meta device: 671 billion parameters
    assert sum(p.numel() for p in model.parameters()) == 671_026_404_352


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"vocab_size": None}, "vocab_size"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("llama", {"num_attention_heads": "8"}, "num_attention_heads"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"head_dim": 9}, "head_dim"),
    ("llama", {"logit_softcapping": 30.0}, "logit_softcapping"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("qwen2", {"layer_types": ["chunked_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": []}, ""),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_moe", {"output_router_logits": True}, "output_router_logits"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v3", {"n_group": 8}, "n_group"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
]


@pytest.mark.parametrize(("family", "changed", "field"), REFUSED, ids=lambda x: "" if isinstance(x, str) else str(x))
def test_what_the_model_cannot_express_is_refused_by_name(family: str, changed: dict[str, Any], field: str) -> None:
    config = config_of(family, **changed)
    if not field:
        spec_for(config).args(config)
        return
    with pytest.raises(ConfigError) as caught:
        spec_for(config).args(config)
    assert [problem.about for problem in caught.value.problems] == [field]


def test_everything_is_said_at_once_and_what_is_off_is_passed_over() -> None:
    config = config_of("llama", hidden_act="gelu", weights_of_nobody=3, mlp_bias=True)
    with pytest.raises(ConfigError) as caught:
        spec_for(config).args(config)
    assert [problem.about for problem in caught.value.problems] == ["hidden_act", "mlp_bias", "weights_of_nobody"]
    config = config_of("llama", weights_of_nobody=None, tricks=[], _private=1, other_version="1")
    spec_for(config).args(config)


def test_windows_of_configurations_that_say_little() -> None:
    """transformers' own default where the field is not there at all; null is no window."""
    silent = config_of("mistral")
    silent.pop("sliding_window", None)
    assert spec_for(silent).args(silent).windows == (4096,)
    assert spec_for(silent).args({**silent, "sliding_window": None}).windows == (None,)
    qwen = config_of("qwen2", sliding_window=16, use_sliding_window=False)
    qwen.pop("layer_types", None)
    assert spec_for(qwen).args(qwen).windows == (None,)
    on = {**qwen, "use_sliding_window": True, "num_hidden_layers": 4}
    assert spec_for(on).args({**on, "max_window_layers": 1}).windows == (None, 16, 16, 16)
    assert spec_for(on).args({**on, "max_window_layers": 4}).windows == (None,) * 4


ROPES = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 6.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 20, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 50000.0, "original_max_position_embeddings": 4096, **rope}
    if rope["rope_type"] == "linear":
        del rope["original_max_position_embeddings"]
    theirs = LlamaConfig(num_attention_heads=4, hidden_size=512, rope_parameters=dict(rope))
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    config = config_of("llama", head_dim=128, rope_parameters=rope)
    args = spec_for(config).args(config).rope
    torch.testing.assert_close(frequencies(args), expected, atol=0, rtol=1e-6)
    assert args.attention_factor == pytest.approx(scale)
    assert (frequencies(args) != frequencies(RopeArgs(dim=128, theta=50000.0))).any()


# ------------------------------------------------------------------------------------------------ pipeline stages


@given(st.integers(1, 80), st.integers(1, 16), st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_stages_have_all_layers_once_and_even_loads(layers: int, stages: int, first: int, last: int) -> None:
    try:
        parts = split(layers, stages, first_less=first, last_less=last)
    except ConfigError:
        assert layers + first + last < stages * max(1, first, last)
        return
    assert [layer for part in parts for layer in range(part.begin, part.end)] == list(range(layers))
    assert [part.first for part in parts] == [True] + [False] * (stages - 1)
    assert [part.last for part in parts] == [False] * (stages - 1) + [True]
    loads = [part.end - part.begin + part.first * first + part.last * last for part in parts]
    assert max(loads) - min(loads) <= 1
    assert loads == sorted(loads, reverse=True)


def test_stages_by_hand_and_too_many_of_them() -> None:
    assert [p.end - p.begin for p in split(8, 4)] == [2, 3, 2, 1]
    with pytest.raises(ConfigError, match="stage 4: would have -1 layers"):
        split(2, 5)
