"""FP8 on the fly: the bytes that a checkpoint of DeepSeek's or Qwen's would hold, by hand; and what a server gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_convert.converter import WeightSync, open_checkpoint
from areal_convert.converter.errors import ServerRefused
from areal_convert.converter.sync.dialects.quantize import Recipe, quantise, recipe_of
from areal_convert.converter.sync.sink import Wanted
from sync_standins import Kind, standing

pytestmark = pytest.mark.timeout(120)
Model = Callable[..., Path]
Weights = dict[str, torch.Tensor]


def by_hand(value: torch.Tensor, high: int = 128, wide: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A block at a time, in torch."""
    rows, cols = value.shape
    out = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-rows // high), -(-cols // wide))
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            at = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            block = value[at].float()
            factor = block.abs().max() / 448 if block.abs().max() > 0 else torch.tensor(1.0)
            factors[i, j] = factor
            out[at] = (block / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return out, factors


def bits_of(tensor: torch.Tensor) -> Any:
    return (
        tensor.contiguous()
        .view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        .numpy()
        .view(f"u{tensor.element_size()}")
    )


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 5), (64, 257)])
def test_bytes_are_those_of_a_computation_by_hand(shape: tuple[int, int], dtype: str) -> None:
    g = torch.Generator().manual_seed(7)
    value = torch.randn(shape, generator=g) * torch.logspace(-6, 3, shape[0])[:, None]
    value[: min(shape[0], 128), 128:256] = 0
    value = value.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
    weight, factors = quantise(bits_of(value), dtype)
    wanted, scale = by_hand(value)
    assert np.array_equal(weight, wanted.view(torch.uint8).numpy())
    assert np.array_equal(factors.view(np.float32), scale.numpy())


def test_a_number_or_two() -> None:
    """[1, 448 × 2] in one block: the factor is 2, so 1 becomes 0.5 and 896 becomes 448."""
    weight, factors = quantise(bits_of(torch.tensor([[1.0, 896.0]])), "F32")
    assert factors.view(np.float32).tolist() == [[2.0]]
    assert weight.tolist() == [[0x30, 0x7E]]  # 0.5 = 2^-1: exponent 6 of bias 7; 448 = 1.75 · 2^8


def test_what_is_not_to_be_quantised() -> None:
    recipe = Recipe({"a": "a_scale_inv", "n": "n_scale_inv", "gone": "gone_scale_inv"}, (128, 128))
    with pytest.raises(ServerRefused) as caught:
        recipe.expand([Wanted("a", (2, 2), "I32"), Wanted("n", (4,), "BF16"), Wanted("b", (2,), "BF16")], "http://x")
    assert {p.about for p in caught.value.problems} == {"a", "n", "gone"}


@pytest.fixture
def model_and_fp8(model: Model, tmp_path: Path) -> tuple[Path, Path, Weights]:
    """A bf16 model, and the directory from which a server of its FP8 form would start, with other weights."""
    path = model("qwen3", dtype="bfloat16", layers=2, hidden_size=160)
    state = load_file(path / "model.safetensors")
    held: Weights = {}
    for name, value in state.items():
        if "_proj" in name:
            held[name], held[f"{name}_scale_inv"] = by_hand(torch.zeros_like(value))
        else:
            held[name] = torch.zeros_like(value)
    where = tmp_path / "fp8"
    where.mkdir()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (where / "config.json").write_text(json.dumps(config))
    save_file(held, where / "model.safetensors", {"format": "pt"})
    return path, where, held


def test_the_recipe_is_what_the_headers_say(model_and_fp8: tuple[Path, Path, Weights]) -> None:
    path, where, held = model_and_fp8
    recipe = recipe_of(where)
    assert recipe.block == (128, 128)
    assert recipe.scales == {k.removesuffix("_scale_inv"): k for k in held if k.endswith("_scale_inv")}
    with pytest.raises(ServerRefused, match="no FP8"):
        recipe_of(path)


@pytest.mark.parametrize("kind", ["vllm-0.30", "sglang-0.5.23"])
def test_a_server_that_holds_fp8_gets_it(kind: Kind, model_and_fp8: tuple[Path, Path, Weights], tmp_path: Path) -> None:
    """And what it then holds is read, as a checkpoint, as the values that were sent, to FP8's precision."""
    path, where, held = model_and_fp8
    with standing(kind, held) as server:
        options = {"fp8": where, "group_bytes": 1 << 14}
        with WeightSync(path, server.url, in_flight="abort", timeout=10, options=options) as sync:
            report = sync.push()
        found = server.weights
    said = f"{sum(n.endswith('_scale_inv') for n in held)} tensors were quantised to F8_E4M3"
    assert any(note.startswith(said) for note in report.servers[server.url].notes)
    state = load_file(path / "model.safetensors")
    assert found.keys() == held.keys()
    for name, value in state.items():
        if "_proj" in name:
            weight, scale = by_hand(value)
            assert torch.equal(found[name].view(torch.uint8), weight.view(torch.uint8))
            assert torch.equal(found[f"{name}_scale_inv"], scale)
        else:
            assert torch.equal(found[name], value)
    save_file(found, where / "model.safetensors", {"format": "pt"})
    ckpt = open_checkpoint(where)
    name = next(n for n in state if "down_proj" in n)
    assert torch.allclose(ckpt.read(name).float(), state[name].float(), rtol=0.07, atol=1e-3)
