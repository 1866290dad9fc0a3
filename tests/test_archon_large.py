"""Meshes of 8 to 512 ranks, without their processes: checked, planned, and each rank's part of the model cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from areal_convert.converter.errors import ConfigError
from areal_convert.converter.loading_targets import local_pieces
from areal_convert.engines.api.allocation import ModelAllocation
from areal_convert.engines.api.checks import check
from areal_convert.engines.api.configs import TrainEngineConfig
from areal_convert.engines.archon import loading
from areal_convert.engines.archon.dims import ArchonParallelDims
from areal_convert.engines.archon.orders import bubble_share, timeline
from areal_convert.engines.archon.parallelize import parallelize
from areal_convert.engines.archon.schedules import order_of
from test_archon_dims import fake_world

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

# Model, allocation (as in `engine.backend`), etp, schedule, micro-batches, and the bubble at most.
MESHES: list[tuple[dict[str, Any], str, int, str, int, float]] = [
    (LLAMA, "archon:d8", 1, "1f1b", 1, 0.0),
    (LLAMA, "archon:d2t4", 1, "1f1b", 1, 0.0),
    (LLAMA, "archon:d4p2t2", 1, "zbv_zero_bubble", 8, 0.05),
    (LLAMA, "archon:d8r2p4t4", 1, "interleaved_1f1b", 16, 0.09),
    (QWEN, "archon:d8t4c2e8", 1, "1f1b", 1, 0.0),
    (QWEN, "archon:d16p2t4e32", 1, "dual_pipe_v", 16, 0.03),
    (DEEPSEEK, "archon:d32t4e32", 4, "1f1b", 1, 0.0),
    (DEEPSEEK, "archon:d32p8t2e64", 1, "dual_pipe_v", 32, 0.06),
    (DEEPSEEK, "archon:d8p8t4c2e8", 4, "interleaved_zero_bubble", 64, 0.09),
]


def configured(backend: str, etp: int, schedule: str) -> TrainEngineConfig:
    parallel = ModelAllocation.from_str(backend).parallel
    if etp > 1:
        parallel.expert_tensor_parallel_size = etp
        backend = "archon"
    archon = {"attn_type": "sdpa", "pp_schedule": schedule}
    return TrainEngineConfig(backend=backend, parallel_strategy=parallel, archon=archon, optimizer={}, dtype="bfloat16")


@pytest.mark.parametrize(("model", "backend", "etp", "schedule", "micro", "most"), MESHES)
def test_a_large_mesh_is_checked_planned_and_cut(
    model: dict[str, Any], backend: str, etp: int, schedule: str, micro: int, most: float
) -> None:
    config = configured(backend, etp, schedule)
    assert config.parallel_strategy is not None
    world = config.parallel_strategy.world_size
    assert 8 <= world <= 512
    strategy = check(config, model, world, "archon")
    plan = loading.plan(config, model, strategy.pp_size)
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        assert [part.begin for part in pipeline.parts[1:]] == [part.end for part in pipeline.parts[:-1]]
        assert (pipeline.parts[0].begin, pipeline.parts[-1].end) == (0, model["num_hidden_layers"])
        assert {len(pipeline.stages_of(rank)) for rank in range(pipeline.pp)} <= {1, 2}
        pipeline.check(micro)
        assert bubble_share(timeline(order_of(pipeline, micro))) < most
    seen = []
    for rank in (0, world - 1):
        with fake_world(world, rank):
            seen.append(_held(config, plan, ArchonParallelDims.of(strategy, world).build()))
    # fp32 masters, gradients and two moments of a rank's part have to fit a GPU of 141 GB where the mesh is meant to.
    average = _parameters(plan) / (world / strategy.dp_replicate_size)
    assert max(seen) < 1.6 * average + 0.05e9


def _held(config: TrainEngineConfig, plan: loading.Plan, dims: ArchonParallelDims) -> int:
    """Elements of this rank's stages, after everything is cut; all on the meta device."""
    return sum(parameter.to_local().numel() for _, parameter in _cut(config, plan, dims))


def _cut(config: TrainEngineConfig, plan: loading.Plan, dims: ArchonParallelDims) -> list[tuple[str, Any]]:
    stages: Any = [None] if plan.pipeline is None else [plan.pipeline.parts[s] for s in
              plan.pipeline.stages_of(dims.rank("pp"))]  # fmt: skip
    found: list[tuple[str, Any]] = []
    for stage in stages:
        model = plan.spec.build(plan.args, stage)
        cpu = torch.device("cpu")
        parallelize(model, dims, config, compute=torch.bfloat16, reduce=torch.float32, device=cpu)
        found += model.named_parameters()
    return found


def _parameters(plan: loading.Plan) -> int:
    return sum(parameter.numel() for parameter in plan.spec.build(plan.args).parameters())


SMALL: dict[str, Any] = {
    **DEEPSEEK,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("backend", "etp", "schedule"),
    [("archon:d2p2t2e2", 2, "1f1b"), ("archon:d4t2e4", 1, "1f1b"), ("archon:d2p2c2e4", 1, "dual_pipe_v")],
)
def test_all_ranks_together_hold_every_element_equally_often(
    backend: str, etp: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch keeps meshes that are equal but for the rank, which in this process changes.
    monkeypatch.setattr(DeviceMesh, "get_coordinate", _coordinate)
    config = configured(backend, etp, schedule)
    assert config.parallel_strategy is not None
    world = config.parallel_strategy.world_size
    strategy = check(config, SMALL, world, "archon")
    plan = loading.plan(config, SMALL, strategy.pp_size)
    counts: dict[str, Counter[Any]] = {}
    for rank in range(world):
        with fake_world(world, rank):
            for name, parameter in _cut(config, plan, ArchonParallelDims.of(strategy, world).build()):
                for piece in local_pieces(parameter):
                    counts.setdefault(name, Counter())[piece.lo, piece.hi] += 1
    whole = dict(plan.spec.build(plan.args).named_parameters())
    assert counts.keys() == whole.keys()
    for name, boxes in counts.items():
        held = sum(n * _volume(lo, hi) for (lo, hi), n in boxes.items())
        copies = held / whole[name].numel()
        assert copies == int(copies) >= 1, name
        solid = {box: n for box, n in boxes.items() if _volume(*box)}
        assert set(solid.values()) == {int(copies)}, (name, boxes)


def _coordinate(mesh: DeviceMesh) -> list[int]:
    return (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()


def _volume(lo: Any, hi: Any) -> int:
    return int(torch.tensor([b - a for a, b in zip(lo, hi, strict=True)]).prod())


@pytest.mark.parametrize(
    ("model", "backend", "schedule", "said"),
    [
        (LLAMA, "archon:d2t16", "1f1b", "16 does not divide num_key_value_heads=8"),
        (LLAMA, "archon:d2p64", "dual_pipe_v", "dual_pipe_v makes 128 stages of 64 ranks, and num_hidden_layers=80"),
        (QWEN, "archon:d8t4c2e4", "1f1b", "4 is no multiple of 8 that divides 64 (sizes that are: 8, 16, 32, 64)"),
        (DEEPSEEK, "archon:d8e512", "1f1b", "512"),
        (LLAMA, "archon:d8e8", "1f1b", "the model has no experts"),
    ],
)
def test_large_meshes_that_cannot_be_are_refused_by_name(
    model: dict[str, Any], backend: str, schedule: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config = configured(backend, 1, schedule)
        assert config.parallel_strategy is not None
        check(config, model, config.parallel_strategy.world_size, "archon")
    assert said in str(caught.value)
