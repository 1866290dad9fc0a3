"""Every field of MegatronEngineConfig arrives in Megatron-Core's configurations, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.configs import (
    FP8EngineConfig,
    MegatronEngineConfig,
    OptimizerConfig,
    ParallelStrategy,
    TrainEngineConfig,
)
from areal_convert.engines.megatron import build, fields, fp8
from areal_convert.engines.megatron.fields import DDP, FP8, MEGATRON, Here, Only, To

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {**SPARSE, "model_type": "deepseek_v3", "kv_lora_rank": 24}
MULTI = {**LATENT, "num_nextn_predict_layers": 1, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MULTI |= {"norm_topk_prob": True}
SELECTIVE = {"recompute_granularity": "selective"}

# Field → (what to set, what it needs besides, the value that arrives, where not on the CPU).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "tensor_parallel_size": ({}, {"sizes": {"tp": 2}}, 2),
    "pipeline_parallel_size": ({}, {"sizes": {"pp": 2}}, 2),
    "context_parallel_size": ({}, {"sizes": {"cp": 2}}, 2),
    "expert_parallel_size": ({}, {"sizes": {"ep": 2, "dp": 2}}, 2),
    "expert_tensor_parallel_size": ({}, {"sizes": {"etp": 2, "tp": 2}}, 2),
    "virtual_pipeline_parallel_size": ({"virtual_pipeline_parallel_size": 2}, {"sizes": {"pp": 2}}, 2),
    "num_layers_in_first_pipeline_stage": ({"num_layers_in_first_pipeline_stage": 5}, {"sizes": {"pp": 2}}, 5),
    "num_layers_in_last_pipeline_stage": ({"num_layers_in_last_pipeline_stage": 3}, {"sizes": {"pp": 2}}, 3),
    "pipeline_model_parallel_layout": ({"pipeline_model_parallel_layout": "Et*3|t*5L"}, {"sizes": {"pp": 2}}, None),
    "sequence_parallel": ({"sequence_parallel": False}, {"sizes": {"tp": 2}, "model": DENSE}, False),
    "overlap_p2p_comm": (
        {"overlap_p2p_comm": True, "virtual_pipeline_parallel_size": 2},
        {"sizes": {"pp": 2}, "device": CUDA},
        True,
    ),
    "fp32_residual_connection": ({"fp32_residual_connection": True}, {}, True),
    "overlap_param_gather_with_optimizer_step": (
        {
            "overlap_param_gather_with_optimizer_step": True,
            "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        },
        {},
        True,
    ),
    "use_deterministic_algorithms": ({"use_deterministic_algorithms": True}, {}, True),
    "recompute_granularity": (SELECTIVE, {"recompute": True}, "selective"),
    "recompute_method": ({"recompute_method": "block"}, {"recompute": True}, "block"),
    "recompute_num_layers": ({"recompute_num_layers": 3}, {"recompute": True}, 3),
    "recompute_modules": ({**SELECTIVE, "recompute_modules": ["mlp", "moe"]}, {"recompute": True}, ["mlp", "moe"]),
    "distribute_saved_activations": (
        {"distribute_saved_activations": True, "sequence_parallel": False},
        {"recompute": True, "sizes": {"tp": 2}, "model": DENSE},
        True,
    ),
    "moe_router_dtype": ({"moe_router_dtype": "fp64"}, {}, "fp64"),
    "moe_shared_expert_overlap": ({"moe_shared_expert_overlap": True}, {"device": CUDA}, True),
    "moe_enable_deepep": (
        {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"},
        {"device": CUDA},
        "deepep",
    ),
    "moe_token_dispatcher_type": ({"moe_token_dispatcher_type": "allgather"}, {"device": CUDA}, "allgather"),
    "moe_permute_fusion": ({"moe_permute_fusion": True}, {"device": CUDA, "engine": True}, True),
    "moe_router_fusion": ({"moe_router_fusion": True}, {"device": CUDA, "engine": True}, True),
    "moe_router_bias_update_rate": ({"moe_router_bias_update_rate": 0.01}, {}, 0.01),
    "moe_z_loss_coeff": ({"moe_z_loss_coeff": 0.001}, {}, 0.001),
    "enable_mtp": ({"enable_mtp": True}, {"model": MULTI}, 1),
    "mtp_loss_coeff": ({"enable_mtp": True, "mtp_loss_coeff": 0.3}, {"model": MULTI}, 0.3),
}
DDP_CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "grad_reduce_in_fp32": ({"grad_reduce_in_fp32": False}, False),
    "overlap_grad_reduce": ({"overlap_grad_reduce": True}, True),
    "overlap_param_gather": ({"overlap_param_gather": True, "overlap_grad_reduce": True}, True),
    "align_param_gather": ({"align_param_gather": True}, True),
    "use_distributed_optimizer": ({"use_distributed_optimizer": False}, False),
    "check_for_nan_in_grad": ({"check_for_nan_in_grad": True}, True),
    "bucket_size": ({"bucket_size": 12345}, 12345),
    "average_in_collective": ({"average_in_collective": True}, True),
}
FP8_CASES: dict[str, Any] = {
    "mode": "hybrid",
    "recipe": "tensorwise",
    "margin": 2,
    "amax_history_len": 16,
    "amax_compute_algo": "max",
    "wgrad": False,
    "dot_product_attention": True,
    "multi_head_attention": True,
    "tp_only_amax_red": True,
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 2,
    "num_layers_at_end_in_bf16": 3,
}
PRECISION = {
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
}


def _sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1, dp: int = 1) -> ParallelStrategy:
    return ParallelStrategy(
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def _config(megatron: Mapping[str, Any], **rest: Any) -> TrainEngineConfig:
    settings = {"dtype": "bfloat16", "optimizer": OptimizerConfig(), **rest}
    return TrainEngineConfig(megatron=MegatronEngineConfig(**megatron), **settings)


def test_every_field_has_a_place() -> None:
    assert fields.undeclared() == set()


def test_every_field_that_goes_to_megatron_is_shown_to_arrive() -> None:
    def sent(table: Mapping[str, Any]) -> set[str]:
        return {name for name, entry in table.items() if isinstance(entry, To) and entry.field}

    assert sent(MEGATRON) == CASES.keys() | PRECISION
    assert sent(DDP) == DDP_CASES.keys()
    assert sent(FP8) == FP8_CASES.keys()


@pytest.mark.filterwarnings("ignore:If you are using transformer_engine")
@pytest.mark.parametrize("name", CASES)
def test_a_field_arrives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, needs, wanted = CASES[name]
    if needs.get("engine"):
        monkeypatch.setattr(fields, "find_spec", lambda _name: True)
    config = _config(given, gradient_checkpointing=needs.get("recompute", False))
    device, sizes = needs.get("device", CPU), _sizes(**needs.get("sizes", {}))
    fields.check_fields(config, sizes, device)
    entry = MEGATRON[name]
    assert isinstance(entry, To)
    if entry.config == "optimizer":
        plain: Any = build.optimizer_config(_config({}), OptimizerConfig())
        made: Any = build.optimizer_config(config, OptimizerConfig())
    else:
        model = needs.get("model", SPARSE)
        if needs.get("engine"):
            pytest.importorskip("transformer_engine", reason="Megatron-Core looks for its kernels")
        plain = build.core_config(_config({}), model, _sizes(), device).core
        made = build.core_config(config, model, sizes, device).core
    if name == "pipeline_model_parallel_layout":
        assert [len(made.pipeline_model_parallel_layout.layout[stage][0]) for stage in (0, 1)] == [4, 6]
        return
    assert getattr(made, entry.field) == wanted
    assert name in ("sequence_parallel", "moe_enable_deepep") or getattr(plain, entry.field) != wanted


@pytest.mark.parametrize("name", DDP_CASES)
def test_a_field_of_the_ddp_wrapper_arrives(name: str) -> None:
    given, wanted = DDP_CASES[name]
    config = _config({"ddp": given}, grad_reduce_dtype="bfloat16")
    fields.check_fields(config, _sizes(), CUDA)
    assert getattr(build.ddp_config(config), name) == wanted
    assert getattr(build.ddp_config(_config({})), name) != wanted


@pytest.mark.parametrize("name", FP8_CASES)
def test_a_field_of_fp8_arrives(name: str) -> None:
    recipe = {} if name in ("recipe", "margin", "amax_history_len", "amax_compute_algo") else {"recipe": "blockwise"}
    config = FP8EngineConfig(**{**recipe, name: FP8_CASES[name]})
    fp8.check(config, DENSE, GREAT)
    entry = FP8[name]
    assert isinstance(entry, To)
    from areal_convert.engines.megatron_cpu import quiet
    from areal_convert.engines.megatron_model import transformer_config

    with quiet():
        import megatron.core.transformer  # noqa: F401
    made = transformer_config(DENSE, dtype=torch.bfloat16, **fp8._fields(config, experts=False)).core
    assert getattr(made, entry.field) == FP8_CASES[name]


@pytest.mark.parametrize("part", ["", "ddp", "fp8_config"])
def test_what_only_has_one_value_is_refused_by_name(part: str) -> None:
    table = {"": MEGATRON, "ddp": DDP, "fp8_config": FP8}[part]
    for name, entry in table.items():
        if not isinstance(entry, Only):
            continue
        other = not entry.value if isinstance(entry.value, bool) else entry.value + 1
        given = {part: {name: other}} if part else {name: other}
        with pytest.raises(ConfigError, match=rf"megatron\.{part + '.' if part else ''}{name}: {other!r}: "):
            fields.check_fields(_config(given), _sizes(), CUDA)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sequence_parallel", {"sequence_parallel": True}, {}, "one tensor parallel rank"),
    ("overlap_p2p_comm", {"overlap_p2p_comm": True}, {"device": CUDA}, "needs chunks"),
    ("moe_enable_deepep", {"moe_enable_deepep": True}, {"device": CUDA}, "flex"),
    ("recompute_num_layers", {"recompute_num_layers": None}, {"recompute": True}, "is full"),
    ("recompute_modules", {"recompute_modules": ["mlp"]}, {"recompute": True}, "all of them"),
    ("ddp.grad_reduce_in_fp32", {"ddp": {"grad_reduce_in_fp32": False}}, {}, "is float32"),
    ("ddp.overlap_param_gather", {"ddp": {"overlap_param_gather": True}}, {}, "needs overlap_grad_reduce"),
    ("overlap_param_gather_with_optimizer_step", {"overlap_param_gather_with_optimizer_step": True}, {}, "needs ddp"),
    ("exp_avg_dtype", {"exp_avg_dtype": "bfloat16"}, {}, "without use_precision_aware_optimizer"),
    ("use_precision_aware_optimizer", {"use_precision_aware_optimizer": True}, {}, "Transformer Engine"),
    ("use_precision_aware_optimizer", {"use_precision_aware_optimizer": True}, {"device": CUDA}, "it installed"),
    ("moe_enable_deepep", {"moe_token_dispatcher_type": "flex"}, {"device": CUDA}, "is DeepEP's"),
    ("moe_router_fusion", {"moe_router_fusion": True}, {"device": CUDA}, "it installed"),
    ("moe_permute_fusion", {"moe_permute_fusion": True}, {}, "for GPUs"),
    ("ddp.average_in_collective", {"ddp": {"average_in_collective": True}}, {}, "gloo"),
    ("ddp.use_distributed_optimizer", {}, {"optimizer": "sgd"}, "optimizer is adam"),
]


@pytest.mark.parametrize(("name", "given", "needs", "why"), REFUSED)
def test_contradictions_are_refused_by_name(
    name: str, given: dict[str, Any], needs: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "find_spec", lambda _name: None)
    optimizer = OptimizerConfig(type=needs.get("optimizer", "adam"))
    config = _config(given, gradient_checkpointing=needs.get("recompute", False), optimizer=optimizer)
    with pytest.raises(ConfigError, match=rf"megatron\.{name}: .*{why}"):
        fields.check_fields(config, _sizes(), needs.get("device", CPU))


@pytest.mark.parametrize(
    ("given", "model", "why"),
    [
        ({"sequence_parallel": False}, SPARSE, "trains experts"),
        ({"num_layers_in_last_pipeline_stage": 3}, DENSE, "3 layers are placed by hand"),
        ({"pipeline_model_parallel_layout": "Et*7L"}, DENSE, "names 7 decoder layers"),
        ({"sequence_parallel": False}, LATENT, "whole on every rank"),
        ({"distribute_saved_activations": True}, DENSE, "cut by sequence parallelism"),
        ({**SELECTIVE, "recompute_modules": ["attention"]}, DENSE, "'attention' is none"),
        ({**SELECTIVE, "recompute_modules": ["moe"]}, DENSE, "no experts"),
        ({**SELECTIVE, "recompute_modules": ["mla_up_proj"]}, SPARSE, "no latent attention"),
    ],
)
def test_what_a_model_cannot_be_trained_with_is_refused(given: dict[str, Any], model: Any, why: str) -> None:
    config = _config(given, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match=why):
        fields.check_model(config, model, _sizes(tp=2), experts=build.is_moe(model))


def test_a_field_that_megatron_does_not_know_is_an_error() -> None:
    from areal_convert.engines.megatron_model import transformer_config

    @dataclasses.dataclass
    class Older:
        lr: float = 0.0

    with pytest.raises(ConfigError, match=r"Older of the installed megatron-core .* has no adam_eps, fp8_recipe"):
        fields.known(Older, ["lr", "fp8_recipe", "adam_eps"])
    with pytest.raises(ConfigError, match="has no hyper_connections"):
        transformer_config(DENSE, hyper_connections=True)


def test_what_megatron_refuses_is_a_configuration_error() -> None:
    from areal_convert.engines.megatron_model import transformer_config

    with pytest.raises(ConfigError, match=r"Megatron-Core refuses this configuration: .*num_query_groups"):
        transformer_config({**DENSE, "num_key_value_heads": 3, "num_attention_heads": 12}, tp=2)


def test_recomputation_is_off_without_gradient_checkpointing() -> None:
    core: Any = build.core_config(_config({}), DENSE, _sizes(), CPU).core
    assert core.recompute_granularity is None
    core = build.core_config(_config({}, gradient_checkpointing=True), DENSE, _sizes(), CPU).core
    assert (core.recompute_granularity, core.recompute_method, core.recompute_num_layers) == ("full", "uniform", 1)


def test_tensor_parallelism_brings_sequence_parallelism() -> None:
    assert build.core_config(_config({}), DENSE, _sizes(tp=2), CPU).core.sequence_parallel
    assert not build.core_config(_config({}), DENSE, _sizes(), CPU).core.sequence_parallel


def test_reasons_are_sentences_for_users() -> None:
    for table in (MEGATRON, DDP, FP8):
        for name, entry in table.items():
            text = entry.where if isinstance(entry, Here) else entry.why if isinstance(entry, Only) else "goes there"
            assert len(text.split()) >= 2, name


# ------------------------------------------------------------------------------------------------ FP8

GREAT = fp8.Machine((10, 0), (2, 9))
HOPPER = fp8.Machine((9, 0), (2, 3))
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("machine", "recipe", "why"),
    [
        (fp8.Machine(), "delayed", "FP8 needs a GPU"),
        (fp8.Machine((8, 0), (2, 9)), "delayed", r"capability 8\.9, this GPU has 8\.0"),
        (fp8.Machine((8, 9), (2, 9)), "blockwise", r"recipes that it runs: delayed, tensorwise"),
        (fp8.Machine((9, 0), (2, 9)), "mxfp8", r"capability 10\.0"),
        (fp8.Machine((9, 0), None), "blockwise", "Transformer Engine, which is not installed"),
        (fp8.Machine((9, 0), (2, 2)), "blockwise", r"Transformer Engine 2\.3, 2\.2 is installed"),
    ],
)
def test_fp8_that_cannot_run_here_is_refused_with_the_reason(machine: fp8.Machine, recipe: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        fp8.check(FP8EngineConfig(recipe=recipe), DENSE, machine)


@pytest.mark.parametrize(
    ("change", "recipe", "why"),
    [
        ({}, "delayed", "delayed, and the checkpoint's weights have block scales"),
        ({"weight_block_size": [64, 64]}, "blockwise", r"\[64, 64\]: recipes here"),
        ({"weight_block_size": None}, "blockwise", "None: recipes here"),
        ({"fmt": "e5m2"}, "blockwise", "'e5m2'"),
        ({"activation_scheme": "static"}, "blockwise", "'static'"),
        ({"quant_method": "gptq"}, "blockwise", "'gptq'"),
    ],
)
def test_checkpoint_and_recipe_have_to_agree(change: dict[str, Any], recipe: Any, why: str) -> None:
    model = {**DENSE, "quantization_config": {**BLOCKS, **change}}
    with pytest.raises(ConfigError, match=why):
        fp8.check(FP8EngineConfig(recipe=recipe), model, HOPPER)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"first_last_layers_bf16": True}, "delayed scaling cannot leave layers out"),
        ({"recipe": "blockwise", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 7}, "none is left"),
        ({"recipe": "blockwise", "margin": 1}, "margin: 1: only delayed"),
    ],
)
def test_fp8_settings_that_contradict_each_other_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        fp8.check(FP8EngineConfig(**given), DENSE, HOPPER)


def test_fp8_beside_fp32_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: float32"):
        fp8.check(FP8EngineConfig(), DENSE, HOPPER, dtype="float32")


def test_an_agreement_passes_and_everything_wrong_is_said_at_once() -> None:
    fp8.check(FP8EngineConfig(recipe="blockwise"), {**DENSE, "quantization_config": BLOCKS}, HOPPER)
    model = {**DENSE, "quantization_config": {**BLOCKS, "fmt": "e5m2"}}
    with pytest.raises(ConfigError) as caught:
        fp8.check(FP8EngineConfig(), model, fp8.Machine())
    assert all(word in str(caught.value) for word in ("recipe", "fmt", "needs a GPU"))


def test_rows_are_padded_to_what_fp8_products_take() -> None:
    assert fp8.token_multiple(None) == 1
    assert fp8.token_multiple(FP8EngineConfig()) == 16
    assert fp8.token_multiple(FP8EngineConfig(recipe="mxfp8")) == 32


def test_without_a_gpu_the_engine_refuses_fp8(tmp_path: Path) -> None:
    from areal_convert.engines.api.checks import check

    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(ConfigError, match=r"megatron\.fp8_config: FP8 needs a GPU"):
        check(_config({"use_fp8": True}, attn_impl="sdpa"), DENSE, 1, "megatron", device="cpu")
    with pytest.raises(ConfigError, match=r"megatron\.fp8_config: FP8 needs a GPU"):
        build.core_config(_config({"use_fp8": True}), DENSE, _sizes(), CPU)
