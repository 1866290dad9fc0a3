"""A parallelized decoder is the whole one: logits, and every parameter's gradient, on every layout.

All layouts of two ranks share their processes, and so do those of four: a layout costs what it computes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from areal_convert.converter.opening import open_checkpoint
from areal_convert.engines.api.configs import ArchonEngineConfig, ArchonFP8Config, TrainEngineConfig
from areal_convert.engines.archon.dims import ArchonParallelDims
from areal_convert.engines.archon.fp8 import use_fp8
from areal_convert.engines.archon.model import Decoder, positions_of
from areal_convert.engines.archon.parallelize import Parallel, parallelize
from areal_convert.engines.archon.specs import spec_for
from areal_convert.engines.grad_norm import gradient_norm
from areal_convert.engines.packed_attention import Packing
from engine_worker import run_ranks
from test_archon_models import config_of, load

several = pytest.mark.multiprocess
TOKENS = 16
LENGTHS = ((9, 7), (3, 12, 1), (16,), (8, 8))
"""Of the packed sequences in each data-parallel rank's batch."""

Case = tuple[str, dict[str, int], dict[str, Any]]
"""Family, sizes, and what differs from a plain configuration (see `configured`)."""


def configured(checkpointing: bool = False, **archon: Any) -> TrainEngineConfig:
    own = ArchonEngineConfig(attn_type="sdpa", **archon)
    return TrainEngineConfig(backend="archon", dtype="float32", gradient_checkpointing=checkpointing, archon=own)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (1, t), boundaries, and what logits (1, t, v) are multiplied with for a loss."""
    lengths = LENGTHS[number]
    cu = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(number)
    pull = torch.randn(1, TOKENS, models.VOCAB, generator=generator) / TOKENS
    return models.sample_tokens(1, TOKENS, number), cu, pull


def packed(cu: torch.Tensor, **options: Any) -> Packing:
    return Packing(cu.tolist(), cu, "sdpa", **options)


@cache
def expected(path: Path, batches: int, mode: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of every batch, and the gradients of the mean loss, of the whole model."""
    whole = load(path)
    use_fp8(whole, ArchonFP8Config(mode=mode), torch.device("cpu"))
    logits = []
    for tokens, cu, pull in map(batch, range(batches)):
        out = whole(tokens, packed(cu), positions_of(cu))
        (out * pull).sum().div(batches).backward()
        logits.append(out.detach())
    return logits, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def sharded(path: Path, dims: ArchonParallelDims, config: TrainEngineConfig) -> tuple[Decoder, Parallel]:
    """Parallelized on the meta device, filled by the hub."""
    spec = spec_for(config_of(path))
    model = spec.build(spec.args(config_of(path)))
    fp32 = torch.float32
    parallel = parallelize(model, dims, config, compute=fp32, reduce=fp32, device=torch.device("cpu"))
    model.materialize("cpu")
    open_checkpoint(path).load_into(model, naming="archon")
    return model, parallel


def run(model: Decoder, parallel: Parallel, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the logits, and what it is multiplied with."""
    dims, vocabulary = parallel.dims, parallel.vocabulary
    tokens, cu, pull = batch(number)
    mine = slice(*(TOKENS // dims.cp * at for at in (dims.rank("cp"), dims.rank("cp") + 1)))
    packing = packed(cu, group=parallel.cp_group, stream=parallel.stream)
    out = model(tokens[:, mine], packing, positions_of(cu)[mine])
    return out, pull[:, mine, vocabulary.start : vocabulary.start + vocabulary.size]


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compared(path: Path, dims: ArchonParallelDims, config: TrainEngineConfig) -> dict[str, Any]:
    """How far this rank's logits and all gradients are from the whole model's."""
    batches, number = dims.size("dp"), dims.rank("dp")
    logits, gradients = expected(path, batches, config.archon.fp8_config.mode)
    model, parallel = sharded(path, dims, config)
    out, pull = run(model, parallel, number)
    (out * pull).sum().mul(parallel.loss_factor / batches).backward()
    cp, vocabulary = dims.rank("cp"), parallel.vocabulary
    wanted = logits[number].chunk(dims.cp, 1)[cp][..., vocabulary.start :][..., : vocabulary.size]
    worst: dict[str, float] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found, reference = full(p.grad), gradients[name]
        assert found.shape == reference.shape, name
        worst[name] = float((found - reference).abs().max() / reference.abs().max())
    norm = float(gradient_norm([p.grad for p in model.parameters() if p.grad is not None]))
    reference_norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
    held = sum(part(p).numel() for p in model.parameters())
    return {
        "logits": float((out.detach() - wanted).abs().max()),
        "gradients": max(worst.values()),
        "name": max(worst, key=lambda name: worst[name]),
        "norm": abs(norm - reference_norm) / reference_norm,
        "held": held / sum(g.numel() for g in gradients.values()),
        "tied": model.tied,
        "names": len(worst),
    }


def all_of(cases: Sequence[Case], paths: dict[str, Path]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    world, results = dist.get_world_size(), []
    built: dict[Any, ArchonParallelDims] = {}
    for family, sizes, options in cases:
        key = tuple(sizes.items())
        if key not in built:
            built[key] = ArchonParallelDims(world_size=world, **sizes).build()  # pyright: ignore[reportArgumentType]
        try:
            results.append(compared(paths[family], built[key], configured(**options)))
        except Exception as error:
            raise AssertionError(f"{family} {sizes} {options}") from error
    return results


def path_of(family: str) -> Path:
    if family == "llama_bias":
        return models.cached_model("llama", layers=2, attention_bias=True)
    if family == "llama_wide":  # every rank has whole blocks of 128
        return models.cached_model("llama", layers=1, hidden_size=256, intermediate_size=512, head_dim=64)
    return models.cached_model(family, layers=2)


def check(world: int, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    paths = {family: path_of(family) for family, _, _ in cases}
    ranks = run_ranks(world, all_of, cases=cases, paths=paths)
    for n, case in enumerate(cases):
        for rank, found in enumerate(one[n] for one in ranks):
            times = 100 if "fp8_config" in case[2] else 1  # a difference in the last bit can be one of e4m3's steps
            assert found["logits"] < 2e-5 * times, (case, rank, found)
            assert found["gradients"] < 2e-5 * times, (case, rank, found)
            assert found["norm"] < 1e-6 * times, (case, rank, found)
            assert found["tied"] == ("tied" in case[0])
    return ranks


TP, CP, EP = {"tp": 2}, {"cp": 2}, {"ep": 2}
TWO: list[Case] = [
    *((family, sizes, {}) for family in ("qwen3", "llama_tied", "qwen2_moe", "deepseek_v3") for sizes in (TP, CP)),
    ("llama", {}, {}),
    ("llama_bias", TP, {}),
    ("deepseek_v3_noq", TP, {}),
    ("qwen3_moe", {}, {}),
    *((family, EP, {}) for family in ("qwen3_moe", "qwen2_moe", "deepseek_v3")),
    *((family, {"ep": 2, "tp": 2}, {}) for family in ("qwen3_moe", "qwen2_moe", "deepseek_v3")),
    ("qwen3_moe", {"ep": 2, "cp": 2}, {}),
]
AGAIN = {"checkpointing": True}
TWO += [
    ("qwen3_moe", EP, AGAIN),
    ("qwen2_moe", {"ep": 2, "tp": 2}, AGAIN | {"selective_ac_option": "2"}),
    ("deepseek_v3", TP, AGAIN | {"ac_mode": "full"}),
    ("llama_tied", {}, {"offload_params": True, "reshard_after_forward_policy": "never"}),
    ("qwen3_moe", EP, {"offload_params": True}),
    ("llama_wide", TP, {"fp8_config": {"mode": "blockwise"}}),
    ("qwen3", TP, {"use_deterministic_algorithms": True}),
]


@several
def test_two_ranks_are_the_whole_model() -> None:
    check(2, TWO)


FOUR: list[Case] = [
    *((family, {"ep": 2, "etp": 2, "tp": 2}, {}) for family in ("qwen3_moe", "qwen2_moe", "deepseek_v3")),
    *((family, {"ep": 4, "tp": 2}, {}) for family in ("qwen2_moe", "deepseek_v3")),
    ("qwen3_moe", {"ep": 2, "tp": 2}, {}),
    ("qwen3_moe", {"ep": 2}, {}),
    ("qwen3_moe", {"ep": 2, "dp_replicate": 2}, {}),
    *((family, {"dp_replicate": 2, "dp_shard": 2}, {}) for family in ("llama_tied", "qwen3_moe")),
    *((family, {"cp": 2, "tp": 2}, {}) for family in ("llama_tied", "deepseek_v3")),
    ("qwen3", {"cp": 4}, {}),
]


@several
def test_four_ranks_are_the_whole_model() -> None:
    check(4, FOUR)


@several
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
def test_compiled_blocks_on_two_ranks_are_the_whole_model() -> None:
    """Collectives and the dispatch to experts are in the compiled blocks, or beside their graphs."""
    check(2, [("qwen2_moe", {"ep": 2, "tp": 2}, {"enable_compile": True, **AGAIN})])


# ------------------------------------------------------------------------------------------------ critics and types


def odds(path: Path) -> dict[str, Any]:
    """On four ranks: what a critic, a router's counts and bfloat16 are like."""
    import torch.distributed as dist

    from areal_convert.engines.archon.moe import update_expert_biases

    dims = ArchonParallelDims(tp=2, ep=2, world_size=dist.get_world_size()).build()
    spec, number = spec_for(config_of(path)), dims.rank("dp")
    model, parallel = sharded(path, dims, configured(True))
    run(model, parallel, number)[0].sum().backward()
    seen = [layer.seen.clone() for layer in model.moe_layers()]
    biases = [layer.expert_bias.clone() for layer in model.moe_layers() if layer.expert_bias is not None]
    update_expert_biases(model.moe_layers(), 0.25, parallel.bias_groups)
    moved = [m.expert_bias - b for m, b in zip(model.moe_layers(), biases, strict=True) if m.expert_bias is not None]
    whole = load(path)
    for tokens, cu, _ in map(batch, range(dims.size("dp"))):
        whole(tokens, packed(cu), positions_of(cu)).sum().backward()
    before = [layer.expert_bias.clone() for layer in whole.moe_layers() if layer.expert_bias is not None]
    update_expert_biases(whole.moe_layers(), 0.25)
    wanted = [m.expert_bias - b for m, b in zip(whole.moe_layers(), before, strict=True) if m.expert_bias is not None]
    critic = spec.build(spec.args(config_of(path)), head="value")
    half = torch.bfloat16
    ours = parallelize(critic, dims, configured(), compute=half, reduce=torch.float32, device=torch.device("cpu"))
    critic.materialize("cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for p in critic.parameters():
            part(p).normal_().mul_(0.05)
    tokens, cu, _ = batch(number)
    values = critic(tokens, packed(cu, stream=ours.stream), positions_of(cu))
    values.float().square().sum().backward()
    return {
        "mine": [int(s.sum()) for s in seen],
        "moved": [torch.equal(a, b) for a, b in zip(moved, wanted, strict=True)],
        "values": (tuple(values.shape), values.dtype),
        "kinds": {(p.dtype, p.grad.dtype) for p in critic.parameters() if p.grad is not None},
        "gradients": all(p.grad is not None for p in critic.parameters()),
    }


@several
def test_critics_counts_and_types_on_four_ranks() -> None:
    """Where ranks route their own slices, counts are summed over them too; parameters stay fp32 around bf16."""
    for rank in run_ranks(4, odds, path=models.cached_model("deepseek_v3", layers=2)):
        assert rank["mine"] == [TOKENS // 2 * 2 * 2], "its own tokens, at two experts each, and computed again"
        assert rank["moved"] == [True]
        assert rank["values"] == ((1, TOKENS, 1), torch.bfloat16)
        assert rank["kinds"] == {(torch.float32, torch.float32)}
        assert rank["gradients"]
