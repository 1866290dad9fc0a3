"""A decoder on two ranks, in stages under every schedule, and sharded: the whole model's losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import models
from areal_convert.converter.opening import open_checkpoint
from areal_convert.engines.api.backends import SCHEDULES
from areal_convert.engines.archon.dims import ArchonParallelDims
from areal_convert.engines.archon.schedules import (
    Shapes,
    forward_of,
    order_of,
    plan_pipeline,
    run_schedule,
    schedule_of,
    stage_of,
)
from areal_convert.engines.archon.specs import spec_for
from engine_worker import run_ranks
from test_archon_models import config_of, load, packing_of
from test_archon_schedules import write

LENGTHS = ((9, 7), (16,), (3, 12, 1), (8, 8))
TOKENS = 16


def batch() -> tuple[list[torch.Tensor], list[dict[str, Any]], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = [models.sample_tokens(1, TOKENS, seed) for seed in range(len(LENGTHS))]
    made = [packing_of(lengths) for lengths in LENGTHS]
    packed: list[dict[str, Any]] = [{"packing": packing, "positions": positions} for packing, positions in made]
    pulls = [torch.randn(1, TOKENS, models.VOCAB, generator=generator) / TOKENS for _ in LENGTHS]
    return tokens, packed, pulls


def loss(logits: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
    return (logits * pull).sum()


def on_two_ranks(path: Path, names: list[str]) -> dict[str, Any]:
    """Of every schedule: where the last stage is, and how far losses and gradients are from the whole model's."""
    import torch.distributed as dist

    rank, (tokens, packed, pulls) = dist.get_rank(), batch()
    whole = load(path)
    expected = [loss(whole(x, **s), pull) for x, s, pull in zip(tokens, packed, pulls, strict=True)]
    torch.stack(expected).sum().backward()
    shapes = Shapes((1, TOKENS), (1, TOKENS, whole.args.hidden), (1, TOKENS, whole.args.vocab))
    found: dict[str, Any] = {}
    for name in names:
        pipeline = plan_pipeline(name, 2, whole.args.layers)
        mine = {stage: load(path, pipeline.parts[stage]) for stage in pipeline.stages_of(rank)}
        stages = [stage_of(pipeline, stage, model, shapes, torch.device("cpu")) for stage, model in mine.items()]
        with torch.no_grad():
            given = run_schedule(forward_of(pipeline, stages, len(tokens)), tokens, packed)
        losses = run_schedule(schedule_of(pipeline, stages, len(tokens), loss), tokens, packed, pulls)
        worst, seen = 0.0, 0
        for model in mine.values():
            for key, p in model.named_parameters():
                reference = whole.get_parameter(key).grad
                assert p.grad is not None, key
                assert reference is not None
                worst = max(worst, float((p.grad - reference).abs().max() / reference.abs().max()))
                seen += 1
        off = [abs(float(a) - float(b)) for a, b in zip(losses, expected, strict=bool(losses))]
        again = [float(loss(x, pull)) - float(y) for x, pull, y in zip(given, pulls, expected, strict=bool(given))]
        found[name] = {"losses": off, "outputs": again, "gradients": worst, "seen": seen, "last": pipeline.last_rank}
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_every_schedule_is_the_whole_model(family: str, tmp_path: Path) -> None:
    path = models.cached_model(family, layers=4)
    mine = write(tmp_path / "mine.csv", order_of(plan_pipeline("zbv_zero_bubble", 2, 4), len(LENGTHS)))
    names = [*SCHEDULES, str(mine)]
    results = run_ranks(2, on_two_ranks, path=path, names=names)
    whole = len(list(load(path).named_parameters()))
    for name in names:
        both = [result[name] for result in results]
        assert sum(one["seen"] for one in both) == whole
        for rank, one in enumerate(both):
            assert one["gradients"] < 2e-5, (name, rank, one)
            assert len(one["losses"]) == len(one["outputs"]) == (len(LENGTHS) if rank == one["last"] else 0), (
                name,
                one,
            )
            assert max(map(abs, [*one["losses"], *one["outputs"], 0.0])) < 1e-4, (name, one)


# ------------------------------------------------------------------------------------------------ sharded


def sharded_on_two_ranks(path: Path) -> dict[str, Any]:
    """FSDP2 around every block, filled by the hub after sharding; each rank has a batch of its own."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank, (tokens, packed, pulls) = dist.get_rank(), batch()
    mesh = ArchonParallelDims(world_size=2).build().mesh("fsdp")
    config = config_of(path)
    spec = spec_for(config)
    model = spec.build(spec.args(config))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.materialize("cpu")
    loaded = open_checkpoint(path).load_into(model, naming="archon")
    parameters: dict[str, Any] = dict(model.named_parameters())
    held = sum(p.to_local().numel() for p in parameters.values())
    loss(model(tokens[rank], **packed[rank]), pulls[rank]).backward()
    whole = load(path)
    torch.stack([loss(whole(tokens[n], **packed[n]), pulls[n]) / 2 for n in range(2)]).sum().backward()
    worst = 0.0
    for name, p in parameters.items():
        reference: Any = whole.get_parameter(name).grad
        worst = max(worst, float((p.grad.full_tensor() - reference).abs().max() / reference.abs().max()))
    size = sum(p.numel() for p in whole.parameters())
    return {"gradients": worst, "held": held, "whole": size, "read": loaded.bytes_read, "tied": model.tied}


@pytest.mark.multiprocess
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_a_sharded_decoder_is_the_whole_model(family: str) -> None:
    results = run_ranks(2, sharded_on_two_ranks, path=models.cached_model(family, layers=2))
    for one in results:
        assert one["gradients"] < 2e-5
        assert one["held"] <= one["whole"] * 0.51
        assert one["read"] <= one["whole"] * 4 * 0.51  # a tied head is read once
        assert one["tied"] == family.endswith("tied")
