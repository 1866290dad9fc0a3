"""FLOPs: by hand for published models, and against torch's own counter on tiny ones of every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter.errors import ConfigError
from areal_convert.engines.flops import Architecture, peak_tflops

LLAMA_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def test_llama_7b_by_hand() -> None:
    arch = Architecture.of(LLAMA_7B)
    assert arch.layers[0].weights == 202_375_168
    assert arch.weights == 6_607_077_376
    attention = 32 * 4 * 4096 * (2048 * 2049 // 2)
    assert arch.forward([2048]) == 2 * 6_607_077_376 * 2048 + attention
    assert arch.training([2048]) == 3 * arch.forward([2048])
    layers_again = arch.forward([2048]) - 2 * 2048 * 131_072_000
    assert arch.training([2048], recompute=True) == 3 * arch.forward([2048]) + layers_again
    assert arch.training([2048], frozen=True) == 2 * 2 * 6_607_077_376 * 2048 + 3 * attention


def test_two_halves_cost_less_than_one_whole() -> None:
    """Packed sequences do not attend to each other."""
    arch = Architecture.of(LLAMA_7B)
    saved = arch.forward([2048]) - arch.forward([1024, 1024])
    assert saved == 32 * 4 * 4096 * 1024 * 1024


def test_deepseek_v3_by_hand() -> None:
    arch = Architecture.of(DEEPSEEK_V3)
    mla = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert mla == 187_105_280
    dense, sparse = 3 * 7168 * 18432, 9 * 3 * 7168 * 2048 + 7168 * 256
    assert arch.layers[2].weights == mla + dense and arch.layers[3].weights == mla + sparse
    assert arch.weights == 61 * mla + 3 * dense + 58 * sparse + 7168 * 129280 == 36_624_596_992
    assert (arch.weights + 7168 * 129280) / 1e9 == pytest.approx(37, rel=0.02), "37 B active, says the report"
    assert arch.layers[0].score_width == 128 * (192 + 128)


def test_a_window_bounds_attention() -> None:
    arch = Architecture.of(LLAMA_7B | {"sliding_window": 4, "num_hidden_layers": 1})
    free = Architecture.of(LLAMA_7B | {"sliding_window": 4, "num_hidden_layers": 1, "use_sliding_window": False})
    # Six positions see 1, 2, 3, 4, 4, 4 of them, not 1 … 6.
    assert (free.forward([6]) - arch.forward([6])) == 4 * 4096 * (21 - 18)
    mixed = Architecture.of(
        LLAMA_7B | {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    )
    assert [layer.window for layer in mixed.layers] == [4, None]


def _counted(path: Path, length: int) -> int:
    """What torch counts in a forward pass (full square of attention, every expert by its own tokens)."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=torch.arange(length)[None] + 3, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "family",
    ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe_mixed", "qwen3_moe", "deepseek_v3"],
)
def test_as_torch_counts(model: Callable[..., Path], family: str) -> None:
    """To the last operation."""
    path, length = model(family), 24
    arch = Architecture.of(json.loads((path / "config.json").read_text()))
    assert _counted(path, length) == arch.forward([length], causal=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_training_step_as_torch_counts(model: Callable[..., Path], frozen: bool) -> None:
    """Forward and backward. The first layer's inputs need no gradient where the embedding has none."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    path, length = model("llama"), 24
    llama: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    llama.requires_grad_(not frozen)
    embedded = llama.get_input_embeddings()(torch.arange(length)[None] + 3).detach().requires_grad_()
    counter = FlopCounterMode(display=False)
    with counter:
        llama(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    arch = Architecture.of(json.loads((path / "config.json").read_text()))
    square = arch.forward([length], causal=False) - arch.forward([length])  # what a full mask costs more
    assert counter.get_total_flops() == arch.training([length], frozen=frozen) + 3 * square


def test_what_cannot_be_counted_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be counted") as error:
        Architecture.of({"hidden_size": 8})
    assert [p.about for p in error.value.problems] == ["num_hidden_layers", "num_attention_heads", "vocab_size"]
    with pytest.raises(ConfigError, match=r"layer_types\[0\]: 'linear_attention' is not known"):
        Architecture.of(LLAMA_7B | {"layer_types": ["linear_attention"] * 32})


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A1000", None),
        ("Intel Xeon", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
