"""Dropout where ranks share a batch: masks differ, what all of them compute stays equal, resumed on any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine_jobs
import models
from areal_convert.engines.dropout import own_masks, own_stream
from areal_convert.engines.packed_attention import Packing, packed_attention
from areal_convert.engines.state.extras import reseed
from engine_jobs import Case
from engine_worker import run_ranks

CPU = torch.device("cpu")


def drawn(stream: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers inside and after."""
    torch.manual_seed(7)
    with own_stream(stream, CPU):
        inside = torch.rand(8)
    return inside, torch.rand(8)


def test_streams_differ_inside_and_go_on_alike() -> None:
    (a, after_a), (b, after_b), (again, _) = drawn(0), drawn(1), drawn(0)
    assert not torch.equal(a, b) and torch.equal(a, again)
    assert torch.equal(after_a, after_b)
    torch.manual_seed(7)
    assert torch.equal(drawn(None)[0], torch.manual_seed(7) and torch.rand(8)), "alone, nothing changes"


def test_layers_draw_apart_in_training_only() -> None:
    x = torch.ones(4, 64)
    found = []
    for stream in (0, 1):
        model = nn.Sequential(nn.Dropout(0.5))
        own_masks(model, stream)
        torch.manual_seed(3)
        found.append(model(x))
        assert torch.equal(model.eval()(x), x)
    assert not torch.equal(*found)


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_attention_drops_other_weights_on_other_ranks(impl: str) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=g) for _ in range(3))
    found = []
    for stream in (0, 1):
        torch.manual_seed(5)
        packing = Packing([0, 16], torch.tensor([0, 16], dtype=torch.int32), impl, stream=stream)
        found.append(packed_attention(nn.Module(), q, k, v, None, dropout=0.5, packing=packing)[0])
    assert not torch.allclose(*found)


def generators(case: Case) -> dict[str, Any]:
    """The shared generator's next numbers after a step, after a save, and after seeding anew as a load does."""
    from areal_convert.engines.losses import sft_loss, sft_weight
    from areal_convert.engines.states import state_of

    engine = engine_jobs.make_engine(case)
    engine.model.config.attention_dropout = 0.5
    for module in engine.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    result = engine.train_batch(engine_jobs.batch_of(engine, 0), sft_loss, sft_weight)
    answer = {"data": engine.data_parallel_rank, "loss": result["loss"], "after": torch.rand(3).tolist()}
    state = state_of(engine)
    reseed(1, 5, dist.get_rank() if state.stream is None else state.stream)
    answer["anew"] = torch.rand(3).tolist()
    engine.destroy()
    return answer


@pytest.mark.multiprocess
def test_ranks_with_one_batch_share_their_random_numbers() -> None:
    path = str(models.cached_model("llama", layers=2))
    plain = run_ranks(2, engine_jobs.two_steps, cases=[Case(path, tp=2)])[0][0][0][0]
    for case in (Case(path, tp=2), Case(path, cp=2), Case(path, dp=2)):
        one, two = run_ranks(2, generators, case=case)
        shared = case.dp == 1
        assert one["loss"] == two["loss"] != plain
        assert (one["after"] == two["after"]) is shared and (one["anew"] == two["anew"]) is shared
