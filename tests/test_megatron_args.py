"""Megatron's arguments from a config, and a config from Megatron's arguments.

What a person can check by hand is checked by hand; the way back is judged by transformers (the same configuration, the
same logits), the way forth by Megatron-Core's own configuration, which `engines` builds without our arguments.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import models
from areal_convert.converter.convert import convert
from areal_convert.converter.errors import ConfigError
from areal_convert.converter.formats import torch_dist
from areal_convert.converter.mesh import Mesh
from areal_convert.converter.opening import open_checkpoint
from areal_convert.mappings import megatron_config, table
from areal_convert.mappings.megatron_args import Underivable, args_from_config, config_from_args
from areal_convert.mappings.megatron_flags import flags, unsaid
from megatron_variants import VARIANTS, args_of, config_of, derived

FIXTURES = Path(__file__).parent / "fixtures" / "mcore-0.19"

# ------------------------------------------------------------------------------------------------ to arguments

BY_HAND: dict[str, dict[str, Any]] = {
    "llama": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "kv_channels": 8,
        "max_position_embeddings": 256,
        "seq_length": 256,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 1003,
        "padded_vocab_size": 1024,
        "make_vocab_size_divisible_by": 128,
        "num_experts": None,
        "multi_latent_attention": False,
        "params_dtype": "torch.float32",
        "bf16": False,
        "no_save_optim": True,
        "no_save_rng": True,
    },
    "llama_tied": {"untie_embeddings_and_output_weights": False},
    "mha": {"group_query_attention": False, "num_query_groups": 8},
    "llama3": {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500000},
    "biases": {"add_bias_linear": True},
    "mistral": {"kv_channels": 16, "window_size": None},
    "mistral_window": {"window_size": (7, 0), "window_attn_skip_freq": None},
    "qwen2": {"add_qkv_bias": True, "add_bias_linear": False, "num_query_groups": 2},
    "qwen2_window": {"window_size": (7, 0), "window_attn_skip_freq": [0, 0, 1, 1]},
    "qwen3": {"qk_layernorm": True, "kv_channels": 24, "add_qkv_bias": False},
    "qwen3_yarn": {"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 64, "mscale": 1.0},
    "mixtral": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 96,
        "moe_layer_freq": 1,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_shared_expert_gate": False,
        "rotary_base": 1000000,
    },
    "qwen2_moe": {
        "add_qkv_bias": True,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
    },
    "qwen3_moe": {"qk_layernorm": True, "moe_router_pre_softmax": False, "moe_shared_expert_intermediate_size": None},
    "qwen3_moe_mixed": {"moe_layer_freq": [0, 1, 0, 1]},
    "deepseek_v3": {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_gate": False,
        "mtp_num_layers": None,
    },
    "deepseek_v3_noq": {"q_lora_rank": None},
    "deepseek_yarn": {
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "deepseek_yarn_plain": {"mscale": 1.0, "mscale_all_dim": 0.0},
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_values(variant: str) -> None:
    args = args_of(variant)
    assert {name: args[name] for name in BY_HAND[variant]} == BY_HAND[variant]


@pytest.mark.parametrize(
    ("mesh", "wanted"),
    [
        (Mesh(tp=2, pp=2), {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (Mesh(pp=2, vpp=2), {"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
        (Mesh(pp=2, first=1), {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": None}),
        (Mesh(pp=2, vpp=2, first=2), {"num_virtual_stages_per_pipeline_rank": 2}),
        (Mesh(pp=2, vpp=2, layout="Et|t|t|tL"), {"pipeline_model_parallel_layout": "Et|t|t|tL"}),
        (Mesh(tp=2, ep=2, etp=1), {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ],
)
def test_mesh(mesh: Mesh, wanted: dict[str, Any]) -> None:
    args = args_of("qwen3_moe", mesh)
    assert {name: args[name] for name in wanted} == wanted
    ways = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    assert sum(args[name] is not None for name in ways) <= 1  # Megatron refuses two of them


@pytest.mark.parametrize(("padded", "tp", "divisor"), [(1024, 1, 128), (1024, 8, 128), (1003, 1, 1), (1008, 2, 8)])
def test_divisor(padded: int, tp: int, divisor: int) -> None:
    config = config_of("llama")
    args = args_from_config(config, table("llama").dims(config), Mesh(tp=tp), padded)
    assert args["make_vocab_size_divisible_by"] == divisor


NOT_IN_CORE = ("biases", "qwen3_yarn", "qwen3_yarn_even", "deepseek_v3", "deepseek_v3_noq", "deepseek_yarn_uneven")


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in NOT_IN_CORE])
def test_megatron_core_agrees(variant: str) -> None:
    """Every field that Megatron-Core's configuration and our arguments both have, but for the CPU's and the dtypes."""
    from areal_convert.engines.megatron_cpu import CPU_CONFIG
    from areal_convert.engines.megatron_model import transformer_config

    args = args_of(variant)
    built = transformer_config(config_of(variant))
    core, gpt = built.core, built.gpt
    args |= {"num_moe_experts": args["num_experts"], "gated_linear_unit": args["swiglu"]}
    ours = {f.name for f in dataclasses.fields(core)} & args.keys()
    passed_over = {*CPU_CONFIG, "params_dtype", "moe_grouped_gemm", "cp_comm_type", "transformer_impl"}
    differ = {n: (args[n], getattr(core, n)) for n in ours - passed_over if args[n] != getattr(core, n)}
    assert not differ
    assert len(ours - passed_over) > 35
    assert gpt["share_embeddings_and_output_weights"] is not args["untie_embeddings_and_output_weights"]
    assert gpt["max_sequence_length"] == args["max_position_embeddings"]
    assert gpt.get("rotary_base", args["rotary_base"]) == args["rotary_base"]
    assert gpt.get("rope_scaling", False) is args["use_rope_scaling"]
    assert gpt.get("seq_len_interpolation_factor") == args.get("rotary_seq_len_interpolation_factor")


def test_flags() -> None:
    line = " ".join(flags(args_of("deepseek_v3")))
    for part in ("--multi-latent-attention", "--moe-layer-freq ([0]*1+[1]*3)", "--q-lora-rank 40", "--qk-layernorm"):
        assert part in line
    line = " ".join(flags(args_of("qwen2_window")))
    for part in ("--window-size (7,0)", "--window-attn-skip-freq ([0]*2+[1]*2)", "--norm-epsilon 1e-06", "--swiglu"):
        assert part in line
    assert "--num-query-groups 2 " in line and "--disable-bias-linear" in line
    assert "--moe" not in line


@pytest.mark.parametrize(
    ("variant", "word"),
    [("llama_rope", "original_max_position_embeddings"), ("linear", "linear"), ("deepseek_v3", "topk_group")],
)
def test_unsaid(variant: str, word: str) -> None:
    config = config_of(variant)
    assert any(word in reason for reason in unsaid(config, table(config["model_type"]).dims(config)))
    assert not unsaid(config_of("qwen3_moe"), table("qwen3_moe").dims(config_of("qwen3_moe")))


# ------------------------------------------------------------------------------------------------ back to a config

NOT_RECORDED = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "architectures",
    "transformers_version",
    "pretraining_tp",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_back(variant: str) -> None:
    """transformers makes the same configuration of what was derived; mistral without a window comes back as llama."""
    from transformers import AutoConfig

    wanted = config_of(variant)
    config, said = derived(args_of(variant))
    assert said.startswith("derived")
    kind = "llama" if variant == "mistral" else wanted["model_type"]
    assert config["model_type"] == kind
    a, b = ({**AutoConfig.for_model(**c).to_dict()} for c in ({**wanted, "model_type": kind}, config))
    extra = {"torch_dtype", "rope_theta", "scoring_func", "topk_method", "moe_layer_freq", "qkv_bias"}
    extra |= {"decoder_sparse_step", "mlp_only_layers"} if variant.endswith("_mixed") else set()  # said otherwise
    extra |= set() if wanted.get("use_sliding_window") else {"max_window_layers"}
    ignored = NOT_RECORDED | extra | ({"sliding_window"} if variant == "mistral" else set())
    assert {k: v for k, v in b.items() if k not in ignored} == {k: v for k, v in a.items() if k not in ignored}


def test_the_copy_of_the_config_wins() -> None:
    config = config_of("llama_rope") | {"bos_token_id": 7, "auto_map": {"AutoConfig": "x.Y"}}
    args = args_from_config(config, table("llama").dims(config), Mesh(), 1024)
    got, said = config_from_args(SimpleNamespace(args=args, tensors=[], facts={})) or ({}, "")
    assert got == config and said.startswith("derived")
    args["num_layers"] = 5  # no longer that model: the copy is not believed
    assert derived(args)[0]["num_hidden_layers"] == 5
    assert config_from_args(SimpleNamespace(args=args, tensors=[], facts={}))[0]["num_hidden_layers"] == 5  # type: ignore[index]


@pytest.mark.parametrize(
    ("variant", "change", "word"),
    [
        ("llama", {"normalization": "LayerNorm"}, "normalization"),
        ("llama", {"swiglu": False}, "swiglu"),
        ("llama", {"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent"),
        ("llama", {"position_embedding_type": "none", "use_rotary_position_embeddings": False}, "position_embedding"),
        ("llama", {"num_attention_heads": None}, "num_attention_heads"),
        ("llama", {"num_attention_heads": "eight"}, "num_attention_heads"),
        ("llama", {"rotary_base": "much"}, "malformed"),
        ("qwen3_moe", {"moe_router_score_function": "sigmoid"}, "score_function"),
        ("qwen3_moe", {"moe_shared_expert_intermediate_size": 64}, "shared experts"),
        ("mixtral", {"moe_layer_freq": 2}, "dense layers"),
        ("mixtral", {"moe_layer_freq": "([0]+[1]*3)"}, "moe_layer_freq"),
        ("deepseek_v3", {"moe_router_score_function": "softmax"}, "softmax"),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 0, 1]}, "dense layers"),
        ("qwen3", {"window_size": (7, 0), "qk_layernorm": False, "window_attn_skip_freq": 2}, "sliding window"),
    ],
)
def test_refused(variant: str, change: dict[str, Any], word: str) -> None:
    with pytest.raises(Underivable, match=word):
        derived(args_of(variant) | change)


def test_no_arguments() -> None:
    assert config_from_args(SimpleNamespace(args=None, tensors=[], facts={})) is None
    assert config_from_args(SimpleNamespace(args={}, tensors=[], facts={})) is None


# ------------------------------------------------------------------------------------------------ whole checkpoints


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the checkpoint were not ours: only what Megatron's own fields say counts."""
    monkeypatch.setattr(megatron_config, "_fits", lambda hint, args: False)


def bare(source: Path, out: Path, to: str, mesh: Mesh) -> Path:
    """`source` in Megatron's format, its Hugging Face side files lost."""
    convert(source, out, to, mesh, verify=False)
    shutil.rmtree(out / "hf")
    return out


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize(
    ("family", "to"),
    [
        *((f, "torch_dist") for f in models.FAMILIES if f not in ("llama_rope", "qwen2_tied", "qwen3_moe_mixed")),
        *((f, "mp_rank") for f in ("llama_tied", "qwen2_moe_mixed", "deepseek_v3")),
    ],
)
def test_logits(family: str, to: str, tmp_path: Path) -> None:
    """HF → Megatron without side files → HF computes the same."""
    source = models.cached_model(family)
    lost = bare(source, tmp_path / "megatron", to, Mesh(tp=2, pp=2 if to == "mp_rank" else 1))
    convert(lost, tmp_path / "back", "hf", verify=False)
    tokens = models.sample_tokens()
    assert models.logits(tmp_path / "back", tokens).equal(models.logits(source, tokens))


def test_logits_with_our_copy(tmp_path: Path) -> None:
    """Rotary scaling that Megatron's arguments cannot express comes back all the same."""
    source = models.cached_model("llama_rope")
    convert(bare(source, tmp_path / "m", "torch_dist", Mesh()), tmp_path / "back", "hf", verify=False)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.usefixtures("no_copy")
def test_mtp(tmp_path: Path) -> None:
    source = models.add_mtp(models.make_model("deepseek_v3", tmp_path / "mtp"))
    opened = open_checkpoint(bare(source, tmp_path / "m", "torch_dist", Mesh(tp=2)))
    assert opened.config["num_nextn_predict_layers"] == 1
    assert not opened.problems


@pytest.mark.usefixtures("no_copy")
def test_tensors_decide(tmp_path: Path) -> None:
    """Arguments that contradict the tensors lose, and the sentence says so."""
    found = torch_dist.read_checkpoint(bare(models.cached_model("qwen3_moe"), tmp_path / "m", "torch_dist", Mesh()))
    wrong = {"num_query_groups": 1, "kv_channels": 8, "num_layers": 2, "num_experts": 64, "qk_layernorm": False}
    wrong |= {"vocab_size": None, "untie_embeddings_and_output_weights": False, "moe_ffn_hidden_size": 7}
    found.args = {**(found.args or {}), **wrong}
    config, said = config_from_args(found) or ({}, "")
    wanted = {"num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 1024}
    wanted |= {"model_type": "qwen3_moe", "tie_word_embeddings": False, "moe_intermediate_size": 48}
    assert {name: config[name] for name in wanted} == wanted
    assert "num_layers is 4 by the tensors, not 2" in said and "1024 entries" in said


def test_torch_reads_the_arguments(tmp_path: Path) -> None:
    """As Megatron-Core reads them: `weights_only`, with a Namespace allowed."""
    import argparse

    import torch

    out = bare(models.cached_model("deepseek_v3"), tmp_path / "m", "torch_dist", Mesh(tp=2))
    with torch.serialization.safe_globals([argparse.Namespace]):
        args = torch.load(out / "release" / "common.pt", weights_only=True)["args"]
    assert (args.num_layers, args.kv_lora_rank, args.tensor_model_parallel_size) == (4, 24, 2)
    assert str(args.params_dtype) == "torch.float32"


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_moe"])
def test_megatron_core_0_19(name: str, tmp_path: Path) -> None:
    """Written by Megatron-Core alone, without Megatron-LM's arguments: nothing tells the number of heads."""
    shutil.copytree(FIXTURES / name / "torch_dist", tmp_path / "torch_dist")
    assert config_from_args(torch_dist.read_checkpoint(tmp_path / "torch_dist")) is None
    with pytest.raises(ConfigError, match="hf-config"):
        open_checkpoint(tmp_path / "torch_dist")
    opened = open_checkpoint(tmp_path / "torch_dist", hf_config=FIXTURES / name / "hf")
    assert not opened.problems
