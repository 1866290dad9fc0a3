"""The gradient norm: one number on every layout, whatever cuts each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal_convert.converter.errors import MeshError
from areal_convert.engines.grad_norm import clip, gradient_norm
from engine_worker import run_ranks

SHAPES = {"matrix": (10, 6), "head": (7, 4), "norm": (5,), "scalar": (1,), "fused": (4, 6, 3)}


def whole() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def expected() -> float:
    return torch.cat([t.double().flatten() for t in whole().values()]).norm().item()


def on_a_mesh(sizes: tuple[int, int]) -> tuple[float, float, bool]:
    """Every kind of placement at once, plain tensors among them; some ranks hold nothing of the small ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh: Any = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    tensors = whole()
    gradients = [
        distribute_tensor(tensors["matrix"], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(tensors["head"], mesh["tp"], [Shard(0)]),
        distribute_tensor(tensors["norm"], mesh["dp"], [Shard(0)]),
        tensors["scalar"],
        distribute_tensor(tensors["fused"], mesh, [Replicate(), Shard(0)]),
    ]
    before = float(gradient_norm(gradients))
    clip(gradients, torch.tensor(before), 1.0)
    from torch.distributed.tensor import DTensor

    refused = False
    try:
        gradient_norm([DTensor.from_local(tensors["norm"], mesh["dp"], [Partial()])])
    except MeshError:
        refused = True
    return before, float(gradient_norm(gradients)), refused


@pytest.mark.multiprocess
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1)])
def test_every_parameter_is_reduced_over_its_own_mesh(sizes: tuple[int, int]) -> None:
    answers = run_ranks(4, on_a_mesh, sizes=sizes)
    for norm, clipped, refused in answers:
        assert norm == pytest.approx(expected(), rel=1e-6)
        assert norm == answers[0][0], "ranks differ"
        assert clipped == pytest.approx(1.0, rel=1e-5)
        assert refused


def test_plain_tensors_are_whole_and_clipped_as_torch_clips() -> None:
    parameters = [torch.nn.Parameter(t.clone()) for t in whole().values()]
    for p, t in zip(parameters, whole().values(), strict=True):
        p.grad = t.clone()
    mine = [t.clone() for t in whole().values()]
    norm = gradient_norm(mine)
    assert float(norm) == pytest.approx(expected(), rel=1e-6)
    clip(mine, norm, 2.0)
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    torch.testing.assert_close(mine, [p.grad for p in parameters], rtol=1e-6, atol=0)


def test_small_and_unlimited_gradients_stay_as_they_are() -> None:
    mine = [torch.ones(4)]
    assert clip(mine, gradient_norm(mine), 3.0) == 1.0
    assert clip(mine, gradient_norm(mine), 0.0) == 1.0
    assert mine[0].tolist() == [1.0] * 4


def test_what_is_not_finite_shows() -> None:
    assert not torch.isfinite(gradient_norm([torch.tensor([1.0, float("nan")])]))
    assert not torch.isfinite(gradient_norm([torch.tensor([float("inf")])]))
    assert float(gradient_norm([])) == 0.0
