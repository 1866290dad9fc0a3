"""What a backend refuses before any process group is made, and which one it names instead."""

from __future__ import annotations

from typing import Any

import pytest

from areal_convert.converter import ConfigError
from areal_convert.engines.api.backends import SCHEDULES
from areal_convert.engines.api.checks import TP_FAMILIES, check, sequence_divisor
from areal_convert.engines.api.configs import ParallelStrategy, TrainEngineConfig
from areal_convert.engines.api.fields import build
from areal_convert.engines.api.topology import backend_of, least_ranks, resolve

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "vocab_size": 1003,
}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48}

SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "rep": "data_parallel_replicate_size",
}


def sized(**sizes: int) -> ParallelStrategy:
    return ParallelStrategy(**{SHORT[name]: size for name, size in sizes.items()})


def refused(backend: str, config: dict[str, Any], model: dict[str, Any], sizes: ParallelStrategy, **more: Any) -> str:
    """The problems, a line each: `field: what (hint)`."""
    world = more.pop("world", sizes.world_size)
    with pytest.raises(ConfigError) as error:
        check(build(TrainEngineConfig, config), model, world, backend, parallel_strategy=sizes, **more)
    return "\n".join(f"{p.about}: {p.what} ({p.hint})" for p in error.value.problems)


def passes(backend: str, config: dict[str, Any], model: dict[str, Any], sizes: ParallelStrategy, **more: Any) -> None:
    given = build(TrainEngineConfig, config)
    assert check(given, model, sizes.world_size, backend, parallel_strategy=sizes, **more) == sizes


# ------------------------------------------------------------------------------------------------ sizes


def test_all_ranks_are_data_parallel_where_nobody_says_otherwise() -> None:
    assert check(TrainEngineConfig(), QWEN3, 4, "fsdp") == sized(dp=4)
    assert check(TrainEngineConfig(backend="fsdp"), {}, 3, "fsdp") == sized(dp=3)


def test_megatrons_fields_leave_the_rest_to_data_parallelism() -> None:
    config = TrainEngineConfig(megatron={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "use_fp8": True})
    assert check(config, QWEN3, 16, "megatron") == sized(tp=2, pp=2, dp=4)


def test_ranks_that_the_sizes_make_up() -> None:
    assert (
        least_ranks(TrainEngineConfig(megatron={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}), "megatron")
        == 4
    )
    assert (
        least_ranks(TrainEngineConfig(backend="fsdp:d2t2"), "fsdp") == 4
        and least_ranks(TrainEngineConfig(), "fsdp") == 1
    )
    with pytest.raises(ConfigError, match="contradict"):
        least_ranks(TrainEngineConfig(backend="megatron:t2", megatron={"tensor_parallel_size": 4}), "megatron")


def test_three_places_that_agree_or_complete_each_other() -> None:
    config = TrainEngineConfig(
        backend="megatron:d2t2p2", parallel_strategy=sized(dp=2, tp=2, pp=2), megatron={"tensor_parallel_size": 2}
    )
    assert resolve(config, "megatron", 8) == sized(dp=2, tp=2, pp=2)
    config = TrainEngineConfig(backend="megatron:d2", megatron={"tensor_parallel_size": 2, "pipeline_parallel_size": 1})
    assert resolve(config, "megatron", 4) == sized(dp=2, tp=2)


def test_three_places_that_contradict_each_other() -> None:
    config = TrainEngineConfig(
        backend="megatron:d2t2", parallel_strategy=sized(dp=4, tp=2), megatron={"tensor_parallel_size": 1}
    )
    with pytest.raises(ConfigError) as error:
        resolve(config, "megatron", 4)
    found = {p.about: p.what for p in error.value.problems}
    assert found == {
        "parallel_strategy": "data_parallel_size is 4, and 2 in backend=megatron:d2t2",
        "megatron.tensor_parallel_size": "tensor_parallel_size is 1, and 2 in backend=megatron:d2t2",
    }


def test_a_strategy_that_is_given_takes_the_place_of_the_configured_one() -> None:
    config = TrainEngineConfig(parallel_strategy=sized(dp=4))
    assert resolve(config, "fsdp", 2, sized(tp=2)) == sized(tp=2)


def test_worlds_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=4 would fit"):
        resolve(TrainEngineConfig(backend="fsdp:d2t2"), "fsdp", 8)
    with pytest.raises(ConfigError, match="start 4 ranks"):
        resolve(TrainEngineConfig(backend="fsdp:d2t2"), "fsdp", 7)
    with pytest.raises(ConfigError, match="12 ranks were configured, 8 are there"):
        resolve(TrainEngineConfig(megatron={"tensor_parallel_size": 3, "pipeline_parallel_size": 4}), "megatron", 8)


def test_backends_by_name() -> None:
    assert backend_of(TrainEngineConfig()) == ""
    assert backend_of(TrainEngineConfig(backend="archon")) == "archon"
    assert backend_of(TrainEngineConfig(backend="megatron:(attn:d4|ffn:e2)")) == "megatron"
    for wrong, says in (("fdsp", "did you mean fsdp"), ("sglang:d4", "does not train"), ("d4", "a backend has to")):
        with pytest.raises(ConfigError, match=says):
            backend_of(TrainEngineConfig(backend=wrong))
    with pytest.raises(ConfigError, match="no training backend"):
        check(TrainEngineConfig(), {}, 1, "fsdpp")


def test_another_engine_than_the_configured() -> None:
    found = refused("fsdp", {"backend": "megatron:d2"}, QWEN3, sized(dp=2))
    assert "backend: 'megatron:d2' was configured, and this is the fsdp engine (take the megatron engine" in found


# ------------------------------------------------------------------------------------------------ what a backend lacks


@pytest.mark.parametrize(
    ("backend", "config", "sizes", "says"),
    [
        ("fsdp", {}, sized(pp=2), "pipeline_parallel_size: 2: fsdp has no pipeline parallelism (megatron and archon"),
        ("fsdp", {}, sized(dp=2, ep=2), "expert_parallel_size: 2: fsdp has no expert parallelism (megatron and arch"),
        ("fsdp", {}, sized(tp=2, etp=2), "expert_tensor_parallel_size: 2: fsdp has no expert parallelism"),
        ("fsdp", {"megatron": {"use_fp8": True}}, sized(), "fp8_config: FP8: fsdp has no FP8 (megatron and archon can"),
        ("fsdp", {"archon": {"fp8_config": {"mode": "blockwise"}}}, sized(), "archon.fp8_config.mode: FP8: fsdp has"),
        ("fsdp", {"megatron": {"pipeline_parallel_size": 2}}, sized(), "fsdp has no pipeline parallelism"),
        ("megatron", {}, sized(dp=4, rep=2), "data_parallel_replicate_size: 2: megatron has no replicas of shards"),
        ("archon", {"megatron": {"virtual_pipeline_parallel_size": 2}}, sized(), "archon has no chunks of layers"),
        ("archon", {"megatron": {"use_fp8": True}}, sized(), "FP8 was asked of megatron"),
        ("fsdp", {"use_kernels": True}, sized(), "use_kernels: kernels from the Hub: no backend here has it"),
        ("fsdp", {"fsdp": {"shard_vision_across_sp": True}}, sized(), "fsdp.shard_vision_across_sp: "),
        ("fsdp", {"dtype": "fp16", "optimizer": {}}, sized(), "dtype: float16: fsdp does not scale losses"),
        ("megatron", {"enable_tree_training": True}, sized(), "enable_tree_training: "),
        ("megatron", {"optimizer": {"type": "adam_bf16"}}, sized(), "optimizer.type: megatron has no adam_bf16 (fsdp"),
        ("megatron", {"optimizer_dtype": "bf16"}, sized(), "optimizer_dtype: bfloat16: megatron keeps its own"),
    ],
)
def test_what_a_backend_lacks(backend: str, config: dict[str, Any], sizes: ParallelStrategy, says: str) -> None:
    assert says in refused(backend, config, MOE, sizes)


def test_what_a_device_lacks() -> None:
    on_cpu = {"device": "cpu"}
    found = refused("fsdp", {}, QWEN3, sized(), **on_cpu)
    assert found == "attn_impl: flash_attention_2 has no kernel for the CPU (attn_impl=sdpa)"
    found = refused("fsdp", {"attn_impl": "flex_attention"}, QWEN3, sized(), **on_cpu)
    assert found == "attn_impl: flex_attention has no backward pass on the CPU (attn_impl=sdpa)"
    assert "attn_type=sdpa" in refused("archon", {}, QWEN3, sized(), **on_cpu)
    assert "FP8 needs a GPU" in refused("megatron", {"megatron": {"use_fp8": True}}, QWEN3, sized(), **on_cpu)
    passes("fsdp", {"attn_impl": "sdpa"}, QWEN3, sized(), **on_cpu)
    passes("fsdp", {}, QWEN3, sized(), device="cuda")


def test_half_precision_without_training() -> None:
    passes("fsdp", {"dtype": "float16"}, QWEN3, sized())
    passes("megatron", {"dtype": "float16", "optimizer": {}}, QWEN3, sized())


# ------------------------------------------------------------------------------------------------ the model's numbers


def test_heads_go_whole_to_tensor_parallel_ranks() -> None:
    found = refused("fsdp", {}, QWEN3, sized(tp=3))
    assert "3 does not divide num_attention_heads=8 (sizes that do: 1, 2, 4, 8)" in found
    assert "3 does not divide num_key_value_heads=4 (sizes that do: 1, 2, 4)" in found
    found = refused("fsdp", {}, QWEN3, sized(tp=8))
    assert "num_key_value_heads=4 (sizes that do: 1, 2, 4; megatron can, it repeats them)" in found
    passes("megatron", {}, QWEN3, sized(tp=8))
    passes("fsdp", {}, QWEN3, sized(tp=4))


def test_ulysses_shares_heads_after_tensor_parallelism() -> None:
    found = refused("fsdp", {}, QWEN3, sized(tp=4, cp=4))
    assert "4 does not divide the 2 attention heads that each of tp=4 ranks has (sizes that do: 1, 2; megatron" in found
    passes("fsdp", {}, QWEN3, sized(tp=4, cp=2))  # one KV head, repeated
    passes("archon", {}, QWEN3, sized(tp=1, cp=8))
    passes("megatron", {}, QWEN3, sized(tp=4, cp=4))
    passes("fsdp", {}, {**QWEN3, "num_attention_heads": 12}, sized(cp=6))  # 4 KV heads, each three times


def test_heads_without_groups() -> None:
    model = {"num_attention_heads": 6}
    passes("fsdp", {}, model, sized(tp=3, cp=2))
    assert "num_key_value_heads=6" in refused("fsdp", {}, model, sized(tp=4))


def test_widths_and_vocabulary() -> None:
    assert "5 does not divide intermediate_size=96" in refused("megatron", {}, QWEN3, sized(tp=5))
    assert "tensor_parallel_size: 4 is more than vocab_size=3" in refused(
        "fsdp", {}, {**QWEN3, "vocab_size": 3}, sized(tp=4)
    )
    shared = {**MOE, "n_shared_experts": 1, "moe_intermediate_size": 6, "num_experts": 8}
    assert "4 does not divide shared_expert_intermediate_size=6" in refused("archon", {}, shared, sized(tp=4))
    passes("fsdp", {}, {**QWEN3, "intermediate_size": 97}, sized(tp=2))  # cuts unevenly
    passes("fsdp", {}, QWEN3, sized(tp=2))  # 1003 does not divide either


def test_families_without_a_plan() -> None:
    found = refused("fsdp", {}, {**QWEN3, "model_type": "gpt2"}, sized(tp=2))
    assert "fsdp has no tensor parallel plan for gpt2" in found and "qwen3" in found
    passes("fsdp", {}, {**QWEN3, "model_type": "gpt2"}, sized(dp=2))


def test_the_families_are_those_that_have_a_plan() -> None:
    from areal_convert.engines.archon.specs import SPECS
    from areal_convert.engines.fsdp.tp_plans import PLANS

    assert set(TP_FAMILIES["fsdp"]) == set(PLANS)
    assert set(TP_FAMILIES["archon"]) == set(SPECS)
    found = refused("archon", {}, {**QWEN3, "model_type": "gpt2"}, sized())
    assert "model_type: archon has no model 'gpt2' (those with one: llama, " in found


def test_latent_attention_has_no_groups_of_heads() -> None:
    latent = {**QWEN3, "model_type": "deepseek_v3", "kv_lora_rank": 8}
    assert "num_key_value_heads" not in refused("archon", {}, latent, sized(tp=8))
    passes("archon", {"archon": {"attn_type": "sdpa"}}, latent, sized(tp=8))
    passes("archon", {"attn_impl": "flex_attention"}, latent, sized(tp=8))
    assert "latent attention has values of another width than keys" in refused("archon", {}, latent, sized())


def test_experts_divide() -> None:
    assert "3 does not divide the number of experts=8" in refused("megatron", {}, MOE, sized(dp=3, ep=3))
    assert "4, and the model has no experts" in refused("megatron", {}, QWEN3, sized(dp=4, ep=4))
    few = {**MOE, "num_experts": 2}
    assert "4 does not divide the number of experts=2" in refused("fsdp", {}, few, sized(tp=4))
    narrow = {**MOE, "moe_intermediate_size": 6}
    assert "4 does not divide moe_intermediate_size=6" in refused("megatron", {}, narrow, sized(tp=4, etp=4))
    passes("megatron", {}, MOE, sized(dp=4, ep=4))


def test_archon_folds_experts_into_the_other_ranks() -> None:
    passes("archon", {}, MOE, sized(dp=4, cp=2, ep=4))
    found = refused("archon", {}, MOE, sized(dp=4, cp=2, tp=2, ep=2))
    assert "expert_parallel_size: 2 is no multiple of 4 that divides 16 (sizes that are: 4, 8, 16)" in found
    assert "expected 1 or tensor_parallel_size=4" in refused("archon", {}, MOE, sized(dp=4, tp=4, ep=2, etp=2))


def test_text_models_inside_of_others() -> None:
    assert "num_attention_heads=8" in refused("fsdp", {}, {"text_config": QWEN3}, sized(tp=3))


# ------------------------------------------------------------------------------------------------ layers, sequences


def test_layers_go_round() -> None:
    one = {"megatron": {"virtual_pipeline_parallel_size": 2}}
    assert "2 chunks on each pipeline rank, and no pipeline" in refused("megatron", one, QWEN3, sized())
    three = {"megatron": {"virtual_pipeline_parallel_size": 3}}
    assert "4·3 = 12 chunks of layers, and num_hidden_layers=8" in refused("megatron", three, QWEN3, sized(pp=4))
    passes("megatron", one, QWEN3, sized(pp=4))


@pytest.mark.parametrize(
    ("archon", "pp", "says"),
    [
        ({"pp_schedule": "dual_pipe_v"}, 8, "dual_pipe_v makes 16 stages of 8 ranks, and num_hidden_layers=8"),
        ({"pp_schedule": "1f1b"}, 16, "1f1b makes 16 stages of 16 ranks"),
        ({"pp_schedule": "1f1b", "pp_last_stage_less_layers": 10}, 2, "1f1b makes 2 stages of 2 ranks, and num_hid"),
        ({"pp_schedule": "zbv_zero_bubble", "pp_layers_per_stage": 5}, 2, "5 gives 2 stages, zbv_zero_bubble needs 4"),
        ({"pp_schedule": "1f1b", "pp_layers_per_stage": 2}, 2, "2 gives 5 stages, 1f1b needs 2"),
        ({"pp_layers_per_stage": 4}, 2, "4 gives 3 stages, interleaved_1f1b needs a multiple of 2"),
        ({"pp_schedule": "interleaved_zero_bubble", "enable_compile": True}, 2, "torch.compile cannot cut"),
        ({"pp_schedule": "dual_pipe_v", "enable_compile": True}, 2, "torch.compile cannot cut"),
        ({"pp_schedule": "dual_pipe_v", "reshard_after_forward_policy": "always"}, 2, "FSDP would lose the gradients"),
        ({"attn_type": "tree"}, 1, "archon.attn_type: tree: training on trees of sequences: no backend here has it"),
    ],
)
def test_schedules_and_stages(archon: dict[str, Any], pp: int, says: str) -> None:
    assert says in refused("archon", {"archon": archon}, QWEN3, sized(pp=pp))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble", "dual_pipe_v", "x.csv"])
def test_schedules_that_fit(name: str) -> None:
    passes("archon", {"archon": {"pp_schedule": name}}, QWEN3, sized(pp=2))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", range(1, 8))
def test_stages_are_refused_as_the_planner_refuses_them(name: str, layers: int) -> None:
    from areal_convert.engines.archon.schedules import plan_pipeline

    for pp in (2, 3):
        for first, last in ((1, 1), (0, 2), (3, 0)):
            ends = {"pp_first_stage_less_layers": first, "pp_last_stage_less_layers": last}
            try:
                plan_pipeline(name, pp, layers, first_less=first, last_less=last)
                fits = True
            except ConfigError:
                fits = False
            model = {**QWEN3, "num_hidden_layers": layers}
            arguments = ("archon", {"archon": {"pp_schedule": name, **ends}}, model, sized(pp=pp))
            if fits:
                passes(*arguments)
            else:
                assert "stages of" in refused(*arguments)


def test_micro_batches_are_cut_evenly() -> None:
    assert sequence_divisor("fsdp", sized(tp=2, cp=4)) == 8
    assert sequence_divisor("megatron", sized(tp=2, cp=4)) == 16
    assert sequence_divisor("megatron", sized(tp=2)) == 2
    assert sequence_divisor("archon", sized(tp=2, cp=4)) == 8
    padded = {"pad_to_maximum": True, "mb_spec": {"max_tokens_per_mb": 1001}}
    found = refused("fsdp", padded, QWEN3, sized(tp=2, cp=2))
    assert "mb_spec.max_tokens_per_mb: 1001, and tp2·cp2 cut micro-batches into 4 even parts (a multiple of 4)" in found
    assert "there is no maximum" in refused("fsdp", {"pad_to_maximum": True}, QWEN3, sized())
    assert "max_tokens_per_mb: 2" in refused("fsdp", {"mb_spec": {"max_tokens_per_mb": 2}}, QWEN3, sized(tp=4))
    passes("fsdp", {"mb_spec": {"max_tokens_per_mb": 1001}}, QWEN3, sized(tp=2, cp=2))


# ------------------------------------------------------------------------------------------------ optimizer, adapters


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"optimizer": {"type": "sgd"}}, "streams the state of adam, and not of sgd"),
        ({"fsdp": {"per_layer_optim_step": True, "offload_params": True}}, "set one of the two"),
        ({"use_lora": True}, "false under use_lora"),
    ],
)
def test_what_does_not_go_with_the_step_by_layers(config: dict[str, Any], says: str) -> None:
    config = {"fsdp": {"per_layer_optim_step": True}, **config}
    assert says in refused("fsdp", config, QWEN3, sized())
    passes("fsdp", {**config, "fsdp": {}}, QWEN3, sized())


def test_everything_at_once() -> None:
    config = {
        "backend": "megatron:d2t2p2",
        "attn_impl": "flash_attention_3",
        "megatron": {"virtual_pipeline_parallel_size": 2, "tensor_parallel_size": 4, "fp8_config": {}},
        "use_kernels": True,
        "pad_to_maximum": True,
    }
    found = refused("fsdp", config, QWEN3, sized(dp=2, tp=3, pp=2), world=7, device="cpu")
    about = [line.split(":")[0] for line in found.splitlines()]
    assert set(about) == {
        "backend",
        "megatron.tensor_parallel_size",
        "world_size",
        "pipeline_parallel_size",
        "megatron.virtual_pipeline_parallel_size",
        "megatron.fp8_config",
        "use_kernels",
        "attn_impl",
        "tensor_parallel_size",
        "pad_to_maximum",
    }


def test_experts_that_contradict_the_ranks_do_not_hide_the_rest() -> None:
    config = build(TrainEngineConfig, {"megatron": {"expert_parallel_size": 2, "tensor_parallel_size": 3}})
    with pytest.raises(ConfigError) as error:
        check(config, MOE, 5, "megatron")
    assert {p.about for p in error.value.problems} == {"expert_parallel_size", "tensor_parallel_size", "world_size"}


def test_a_configuration_that_says_nothing_about_the_model_is_not_refused() -> None:
    passes("fsdp", {}, {}, sized(dp=2, tp=3, cp=5))


# ------------------------------------------------------------------------------------------------ archon


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"archon": {"ac_mode": "memory_budget"}}, "archon.ac_mode: memory_budget is the compiler's choice"),
        ({"archon": {"selective_ac_option": "every"}}, "archon.selective_ac_option: 'every', expected op"),
        ({"archon": {"ac_debug": True}}, "archon.ac_debug: torch records nothing"),
    ],
)
def test_recomputation_that_cannot_be(config: dict[str, Any], says: str) -> None:
    assert says in refused("archon", {"gradient_checkpointing": True, **config}, QWEN3, sized())
    passes("archon", config, QWEN3, sized())  # without recomputation nobody reads it


def test_archons_adapters_and_fp8() -> None:
    lora = {"use_lora": True, "archon": {"fp8_config": {"mode": "blockwise"}}}
    assert "use_lora: products in FP8 take no adapters" in refused("archon", lora, QWEN3, sized(), device="cuda")
    passes("archon", {"use_lora": True}, QWEN3, sized(pp=2))
