"""Products in FP8: the numbers of a reference by hand, and which modules have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import models
from areal_convert.converter.errors import ConfigError
from areal_convert.engines.api.backends import ArchonFP8Config
from areal_convert.engines.archon import fp8
from test_archon_models import LENGTHS, load, packed_tokens, packing_of


def by_hand(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Block after block: scaled to 448, rounded to e4m3, scaled back."""
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 128):
            block = x[i : i + rows, j : j + 128].double()
            scale = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
            out[i : i + rows, j : j + 128] = (block / scale).float().to(torch.float8_e4m3fn).double() * scale
    return out


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, and a block of zeros."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-3, 2, shape[0])[:, None]
    x[:1, :128] = 0
    return x


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of fp32 sums; a value at the border of two of e4m3 may fall to either side."""
    error = (found.double() - expected).abs().max(-1).values / expected.abs().max(-1).values.clamp(min=1e-9)
    assert float(error.median()) < 1e-6
    assert float(error.max()) < 1e-2


@pytest.mark.parametrize(("m", "k", "n"), [(5, 128, 128), (130, 300, 200), (3, 64, 96)])
def test_a_layer_is_what_its_blocks_say_by_hand(m: int, k: int, n: int) -> None:
    x, w, b, pull = (
        drawn(m, k).requires_grad_(),
        drawn(n, k, seed=1).requires_grad_(),
        drawn(2, n)[1],
        drawn(m, n, seed=2),
    )
    y = fp8.linear(x, w, b)
    y.backward(pull)
    near(y.detach(), by_hand(x.detach(), 1) @ by_hand(w.detach(), 128).T + b)
    assert x.grad is not None
    assert w.grad is not None
    near(x.grad, by_hand(pull, 1) @ by_hand(w.detach().T, 128).T)
    near(w.grad, by_hand(pull.T, 1) @ by_hand(x.detach().T, 1).T)
    exact = x.detach() @ w.detach().T + b
    assert 1e-3 < float((y.detach() - exact).norm() / exact.norm()) < 0.1


def test_scales_are_of_rows_or_of_tiles() -> None:
    x = drawn(130, 300)
    rows, tiles = fp8.quantize(x, 1), fp8.quantize(x, 128)
    assert (rows.scales.shape, rows.values.shape) == ((130, 3), (130, 384))
    assert (tiles.scales.shape, tiles.values.shape) == ((2, 3), (256, 384))
    assert rows.values.dtype == torch.float8_e4m3fn
    assert float(rows.values.float().abs().max()) == 448
    assert float(rows.scales[0, 0]) == 1, "a block of zeros stays one"
    torch.testing.assert_close(fp8.dequantize(rows)[:130, :300], x, rtol=0.07, atol=1e-3)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch has no product scaled by blocks")
@pytest.mark.parametrize("rows", [(1, 128), (1, 1), (128, 1)])
@pytest.mark.parametrize("k", [128, 640])
def test_the_kernel_gets_scales_in_the_layout_that_it_wants(rows: tuple[int, int], k: int) -> None:
    """torch checks them on the meta device too."""
    sides = [fp8.quantize(torch.empty(n, k, device="meta"), r) for n, r in zip((256, 384), rows, strict=True)]
    found = fp8._kernel(sides[0], sides[1], torch.bfloat16)
    assert (found.shape, found.dtype) == ((256, 384), torch.bfloat16)


def test_linear_layers_but_for_the_excluded_have_them() -> None:
    model = load(models.cached_model("qwen2_moe", layers=1))
    whole = model(packed_tokens(), *packing_of(LENGTHS)).detach()
    found = fp8.use_fp8(model, ArchonFP8Config(mode="blockwise"), torch.device("cpu"))
    attention = {f"layers.0.attention.w{x}" for x in "qkvo"}
    assert set(found) == attention | {f"layers.0.moe.shared_experts.w{x}" for x in "123"}
    assert next(model.moe_layers()).experts.run is None
    out = model(packed_tokens(), *packing_of(LENGTHS))
    assert 1e-4 < float((out - whole).detach().norm() / whole.norm()) < 0.1
    out.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_experts_have_them_where_they_are_included() -> None:
    path = models.cached_model("qwen3_moe", layers=1)
    config = ArchonFP8Config(mode="blockwise", exclude_modules=["attention", "router", "output"], include_experts=True)
    model, plain = load(path), load(path)
    assert fp8.use_fp8(model, config, torch.device("cpu")) == []
    rows, counts = drawn(9, 64), torch.tensor([4, 0, 3, 2])
    given = [next(m.moe_layers()).experts for m in (plain, model)]
    exact, found = (experts(rows, counts) for experts in given)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        x = rows[start : start + count]
        gate, up, down = (given[0].get_parameter(f"w{n}")[expert].detach() for n in (1, 3, 2))
        inner = F.silu(fp8.linear(x, gate)) * fp8.linear(x, up)
        torch.testing.assert_close(found[start : start + count], fp8.linear(inner, down))
        start += count
    assert not torch.equal(exact, found)
    found.sum().backward()
    gradient = given[1].w2.grad
    assert gradient is not None
    assert gradient[0].any()
    assert not gradient[1].any(), "nobody visits this one"


def test_disabled_is_disabled_and_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(models.cached_model("qwen3", layers=1))
    assert fp8.use_fp8(model, ArchonFP8Config(), torch.device("cpu")) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        fp8.use_fp8(model, ArchonFP8Config(mode="blockwise"), torch.device("cuda", 0))
