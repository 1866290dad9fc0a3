"""Every field of ArchonEngineConfig changes what is built, or is refused by name; nothing is passed over in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.checks import check
from areal_convert.engines.api.configs import ArchonEngineConfig, ArchonFP8Config, ParallelStrategy, TrainEngineConfig
from areal_convert.engines.archon import checkpointing, loading
from areal_convert.engines.archon.compute import attention_of
from areal_convert.engines.archon.dims import ArchonParallelDims
from areal_convert.engines.archon.model import Decoder
from areal_convert.engines.archon.parallelize import parallelize
from areal_convert.engines.archon.schedules import order_of, plan_pipeline
from test_archon_dims import fake_world
from test_archon_large import SMALL
from test_archon_schedules import write


def config(archon: dict[str, Any], **rest: Any) -> TrainEngineConfig:
    settings = {"dtype": "bfloat16", "attn_impl": "sdpa", "optimizer": {}, **rest}
    return TrainEngineConfig(archon={"attn_type": "sdpa", **archon}, **settings)


def planned(archon: dict[str, Any], pp: int = 2, **rest: Any) -> loading.Plan:
    return loading.plan(config(archon, **rest), SMALL, pp)


def built(archon: dict[str, Any], world: int = 2, **rest: Any) -> Decoder:
    """The model of one of two ranks, sharded and on the meta device."""
    settings = config(archon, **rest)
    plan = loading.plan(settings, SMALL, 1)
    with fake_world(world, 0):
        dims = ArchonParallelDims(world_size=world).build()
        router = torch.float32 if settings.archon.moe_router_dtype else None
        model = plan.spec.build(plan.args, router_dtype=router)
        cpu = torch.device("cpu")
        parallelize(model, dims, settings, compute=torch.bfloat16, reduce=torch.float32, device=cpu)
    return model


def refused(archon: dict[str, Any], device: str = "cpu", pp: int = 1, **rest: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config(archon, **rest), SMALL, pp, "archon", parallel_strategy=sizes(pp), device=device)
    return str(caught.value)


def sizes(pp: int) -> ParallelStrategy:
    return ParallelStrategy(pipeline_parallel_size=pp)


def again(monkeypatch: pytest.MonkeyPatch, archon: dict[str, Any]) -> dict[str, Any]:
    """What torch's checkpoint is told of a block; {} where nothing is computed again."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(checkpointing, "checkpoint", lambda inner, *a, **options: told.update(options))
    block: Any = built(archon, world=1, gradient_checkpointing=True).layers["0"]
    if "_again" in block.forward.__qualname__:
        block.forward(torch.zeros(1))
    return told


# ------------------------------------------------------------------------------------------------ field by field


def attn_type(_: Any, tmp_path: Path) -> None:
    assert attention_of(config({"attn_type": "sdpa"}, attn_impl="flex_attention")) == "sdpa"
    assert attention_of(config({"attn_type": "varlen"}, attn_impl="flex_attention")) == "flex_attention"
    assert "archon.attn_type: varlen has no kernel for the CPU" in refused({"attn_type": "varlen"})
    assert "archon.attn_type: tree" in refused({"attn_type": "tree"}, device="cuda")


def offload_params(_: Any, tmp_path: Path) -> None:
    def kinds(on: bool) -> set[str]:
        model: Any = built({"offload_params": on})
        return {type(group.offload_policy).__name__ for group in groups_of(model)}

    assert (kinds(True), kinds(False)) == ({"CPUOffloadPolicy"}, {"OffloadPolicy"})


def enable_compile(_: Any, tmp_path: Path) -> None:
    def compiled(on: bool) -> bool:
        return all(hasattr(block.forward, "_torchdynamo_orig_callable") for block in
                   built({"enable_compile": on}, world=1).layers.values())  # fmt: skip

    assert compiled(True)
    assert not compiled(False)
    assert "archon.enable_compile" in refused({"enable_compile": True, "pp_schedule": "dual_pipe_v"}, pp=2)
    mine = write(tmp_path / "mine.csv", order_of(plan_pipeline("zbv_zero_bubble", 2, 4), 4))
    with pytest.raises(ConfigError, match=r"archon\.enable_compile"):
        planned({"enable_compile": True, "pp_schedule": str(mine)})


def ac_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert again(monkeypatch, {"ac_mode": "none"}) == {}
    assert "context_fn" not in again(monkeypatch, {"ac_mode": "full"})
    assert "context_fn" in again(monkeypatch, {"ac_mode": "selective"})
    assert "archon.ac_mode: memory_budget" in refused({"ac_mode": "memory_budget"}, gradient_checkpointing=True)


def selective_ac_option(_: Any, tmp_path: Path) -> None:
    def wrapped(option: str) -> list[bool]:
        model = built({"selective_ac_option": option}, world=1, gradient_checkpointing=True)
        blocks: list[Any] = list(model.layers.values())
        return ["_again" in block.forward.__qualname__ for block in blocks]

    assert wrapped("2") == [True, False, True, False]
    assert wrapped("1") == wrapped("op") == [True] * 4
    said = refused({"selective_ac_option": "0"}, gradient_checkpointing=True)
    assert "archon.selective_ac_option: '0', expected op, or a number" in said


def ac_memory_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._functorch.config as functorch

    names = ("activation_memory_budget", "unsafe_treat_script_objects_as_zero_size")
    before = {name: getattr(functorch, name) for name in names if hasattr(functorch, name)}
    budget = {"ac_mode": "memory_budget", "ac_memory_budget": 0.25, "enable_compile": True}
    try:
        built(budget, world=1, gradient_checkpointing=True)
        assert functorch.activation_memory_budget == 0.25
    finally:  # monkeypatch would take away what torch keeps in a place of its own
        for name, value in before.items():
            setattr(functorch, name, value)


def ac_preserve_rng_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for on in (True, False):
        assert again(monkeypatch, {"ac_mode": "full", "ac_preserve_rng_state": on})["preserve_rng_state"] is on


def ac_debug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for on in (True, False):
        assert again(monkeypatch, {"ac_mode": "full", "ac_debug": on})["debug"] is on
    assert "archon.ac_debug" in refused({"ac_debug": True}, gradient_checkpointing=True)


def pp_schedule(_: Any, tmp_path: Path) -> None:
    for given, name in (("GPipe", "gpipe"), ("ScheduleDualPipeV", "dual_pipe_v")):
        pipeline = planned({"pp_schedule": given}).pipeline
        assert pipeline is not None
        assert pipeline.name == name
    with pytest.raises(ConfigError, match="pp_schedule"):
        planned({"pp_schedule": "2f2b"})


def stages(archon: dict[str, Any]) -> list[int]:
    pipeline = planned(archon).pipeline
    assert pipeline is not None
    return [part.end - part.begin for part in pipeline.parts]


def pp_layers_per_stage(_: Any, tmp_path: Path) -> None:
    assert len(stages({"pp_layers_per_stage": 1})) == 6
    assert len(stages({"pp_layers_per_stage": None})) == 4


def pp_first_stage_less_layers(_: Any, tmp_path: Path) -> None:
    assert stages({"pp_schedule": "1f1b", "pp_first_stage_less_layers": 3}) == [1, 3]


def pp_last_stage_less_layers(_: Any, tmp_path: Path) -> None:
    assert stages({"pp_schedule": "1f1b", "pp_last_stage_less_layers": 3}) == [3, 1]


def reshard_after_forward_policy(_: Any, tmp_path: Path) -> None:
    def frees(policy: str) -> bool:
        model: Any = built({"reshard_after_forward_policy": policy})
        return all(g.post_forward_mesh_info is not None for g in groups_of(model.layers["0"], alone=True))

    assert [frees(policy) for policy in ("always", "never", "default")] == [True, False, True]
    halves = {"reshard_after_forward_policy": "always", "pp_schedule": "zbv_zero_bubble"}
    assert "archon.reshard_after_forward_policy" in refused(halves, pp=2)


def fp8_config(_: Any, tmp_path: Path) -> None:
    on = {"fp8_config": {"mode": "blockwise"}}
    assert "archon.fp8_config.mode: FP8 needs a GPU" in refused(on)
    assert "use_lora: products in FP8" in refused(on, device="cuda", use_lora=True)
    assert eights(built(on, world=1))


def use_deterministic_algorithms(_: Any, tmp_path: Path) -> None:
    try:
        built({}, world=1)
        assert not torch.are_deterministic_algorithms_enabled()
        built({"use_deterministic_algorithms": True}, world=1)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def moe_router_dtype(_: Any, tmp_path: Path) -> None:
    seen = []
    for dtype in ("fp32", None):
        settings = config({"moe_router_dtype": dtype})
        with fake_world(1, 0):
            dims = ArchonParallelDims().build()
            plan = loading.plan(settings, SMALL, 1)
            (model,), *_rest = loading.build(plan, settings, dims, torch.device("cpu"))
        seen.append({moe.router.dtype for moe in model.moe_layers()})
    assert seen == [{torch.float32}, {None}]


def moe_router_bias_update_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from areal_convert.engines.archon import engine as engines

    rates: list[float] = []
    monkeypatch.setattr(engines, "update_expert_biases", lambda layers, rate, groups: rates.append(rate))
    one: Any = engines.ArchonEngine(config({"moe_router_bias_update_rate": 0.25}))
    monkeypatch.setattr(type(one), "decoders", [])
    one.parallel = type("Parallel", (), {"bias_groups": ()})()
    one._stepped(True)
    one._stepped(False)
    assert rates == [0.25, 0.0]


def groups_of(model: Any, *, alone: bool = False) -> list[Any]:
    """The groups of parameters that FSDP gathers at a time."""
    from torch.distributed.fsdp import FSDPModule

    modules = [m for m in ([model] if alone else model.modules()) if isinstance(m, FSDPModule)]
    states: list[Any] = [m._get_fsdp_state() for m in modules]
    return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]


def eights(model: Decoder) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "product")}


CASES: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    case.__name__: case
    for case in (
        attn_type, offload_params, enable_compile, ac_mode, selective_ac_option, ac_memory_budget,
        ac_preserve_rng_state, ac_debug, pp_schedule, pp_layers_per_stage, pp_first_stage_less_layers,
        pp_last_stage_less_layers, reshard_after_forward_policy, fp8_config, use_deterministic_algorithms,
        moe_router_dtype, moe_router_bias_update_rate,
    )
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ArchonEngineConfig)])
def test_a_field_is_honoured_or_refused_by_name(field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert field in CASES, "a new field: honour it, or refuse it, and say here how that is seen"
    CASES[field](monkeypatch, tmp_path)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ArchonFP8Config)])
def test_a_field_of_fp8_is_honoured_or_said_to_have_no_effect(field: str) -> None:
    def model(**changes: Any) -> Decoder:
        return built({"fp8_config": {"mode": "blockwise", **changes}}, world=1)

    def experts(decoder: Decoder) -> bool:
        return any(hasattr(moe.experts.run, "keywords") for moe in decoder.moe_layers())

    if field == "mode":
        assert not eights(model(mode="disabled"))
    elif field == "exclude_modules":
        assert "wo" in eights(model())
        assert "wo" not in eights(model(exclude_modules=["wo"]))
    elif field == "include_experts":
        assert experts(model(include_experts=True))
        assert not experts(model())
    else:
        (found,) = [f for f in dataclasses.fields(ArchonFP8Config) if f.name == field]
        assert found.metadata["help"].startswith("taken, without effect")
