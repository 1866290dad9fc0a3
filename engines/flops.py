"""Floating-point operations of a model, counted from its `config.json`, and what devices can do at most.

Counted are matrix products, 2 for each multiply-add: projections, experts that a token goes through, router, LM head,
and the two products of attention by the true length of every sequence. Norms, softmax, rotary embedding and the
embedding lookup are left out, as everywhere. A training step is three forward passes (two for the gradients);
recomputed activations are work of the hardware, not of the model: they count in HFU, never in MFU.

By hand, Llama-7B (H=4096, 32 layers, I=11008, V=32000): a layer has 4·4096² + 3·4096·11008 = 202,375,168 weights, all
of them and the head 6,476,005,376 + 131,072,000 = 6,607,077,376, so 13.214 GFLOPs for a token, the usual 2N. Attention
at length s adds 4·4096·(s+1)/2 for a token and layer: 1.07 GFLOPs at 2048 over all layers.

DeepSeek-V3 (report: 37 B of 671 B active): MLA is 7168·1536 + 1536·128·192 + 7168·576 + 512·128·256 + 128·128·7168 =
187,105,280 weights a layer; 61 of them, 3 dense MLPs of 3·7168·18432, 58 sparse ones of 9·3·7168·2048 and a router of
7168·256, and the head 7168·129280 make 36,624,596,992; with the embedding (its equal, a lookup) 37.55 B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..converter.errors import ConfigError, Problem

__all__ = ["PEAKS", "Architecture", "peak_tflops"]


@dataclass(frozen=True)
class Layer:
    """One decoder layer: weights that a token is multiplied with, and attention's widths."""

    weights: int
    score_width: int
    """Heads × width of q·k, plus heads × width of v: multiply-adds for every pair of positions."""
    window: int | None = None


@dataclass(frozen=True)
class Architecture:
    """What a model computes for a token. `of` reads a Hugging Face configuration."""

    layers: tuple[Layer, ...]
    head: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Architecture:
        """From `config.json` as a dict. Raises ConfigError for what it cannot count, naming the field."""
        config = {**config, **config["text_config"]} if "text_config" in config else dict(config)
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        lacking = [Problem(name, "is missing") for name in needed if name not in config]
        if lacking:
            raise ConfigError("The FLOPs of this model cannot be counted.", lacking)
        count = config["num_hidden_layers"]
        layers = tuple(_layer(config, index) for index in range(count))
        return cls(layers, config["hidden_size"] * config["vocab_size"])

    @property
    def weights(self) -> int:
        """Weights that one token is multiplied with, the LM head among them, the embedding not."""
        return sum(layer.weights for layer in self.layers) + self.head

    def forward(self, lengths: Iterable[int], *, causal: bool = True, head: bool = True) -> int:
        """FLOPs of a forward pass over sequences of these lengths. `causal=False` counts every pair of positions, as a
        kernel does that computes the upper triangle and throws it away."""
        lengths = list(lengths)
        weights = self.weights if head else self.weights - self.head
        return 2 * sum(lengths) * weights + self._attention(lengths, causal)

    def _attention(self, lengths: list[int], causal: bool = True) -> int:
        by_window: dict[int | None, int] = {}
        for layer in self.layers:
            by_window[layer.window] = by_window.get(layer.window, 0) + layer.score_width
        return sum(
            2 * width * sum(_pairs(n, window) if causal else n * n for n in lengths)
            for window, width in by_window.items()
        )

    def training(self, lengths: Iterable[int], *, recompute: bool = False, frozen: bool = False) -> int:
        """FLOPs of a training step: three forward passes; with `recompute` the layers a fourth time (for HFU).

        `frozen` weights (under adapters, whose own work is left out) have no gradient: their part counts twice only.
        """
        lengths = list(lengths)
        total = 3 * self.forward(lengths) - (2 * sum(lengths) * self.weights if frozen else 0)
        return total + (self.forward(lengths, head=False) if recompute else 0)


def _pairs(length: int, window: int | None) -> int:
    """Positions that see each other: t of them at the t-th, at most `window`."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _layer(config: Mapping[str, Any], index: int) -> Layer:
    kinds = config.get("layer_types")
    kind = kinds[index] if kinds else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ConfigError(
            "The FLOPs of this model cannot be counted.",
            [Problem(f"layer_types[{index}]", f"{kind!r} is not known", "known: full_attention, sliding_attention")],
        )
    weights, score = _mla(config) if config.get("kv_lora_rank") else _gqa(config)
    return Layer(weights + _mlp(config, index), score, _window(config, kind))


def _window(config: Mapping[str, Any], kind: str | None) -> int | None:
    if kind == "full_attention" or config.get("use_sliding_window") is False:
        return None
    return config.get("sliding_window")


def _gqa(config: Mapping[str, Any]) -> tuple[int, int]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    return 2 * hidden * width * (heads + groups), 2 * heads * width


def _mla(config: Mapping[str, Any]) -> tuple[int, int]:
    """q (through a latent or not), the latent of k and v with the shared rotary key, its two expansions, output."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotary, value = config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rotary
    q_latent = config.get("q_lora_rank")
    q = hidden * q_latent + q_latent * heads * key if q_latent else hidden * heads * key
    kv = hidden * (latent + rotary) + latent * heads * (key - rotary + value)
    return q + kv + heads * value * hidden, heads * (key + value)


def _mlp(config: Mapping[str, Any], index: int) -> int:
    hidden = config["hidden_size"]
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts or not _is_sparse(config, index):
        return 3 * hidden * config["intermediate_size"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = (config.get("n_shared_experts") or 0) * width
    gate = 0
    if config.get("shared_expert_intermediate_size"):
        shared, gate = config["shared_expert_intermediate_size"], hidden
    chosen = _first(config, "num_experts_per_tok", "moe_topk")
    return 3 * hidden * (chosen * width + shared) + hidden * experts + gate


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    if index < (config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return False
    if config.get("decoder_sparse_step"):
        return (index + 1) % config["decoder_sparse_step"] == 0
    return index % (config.get("moe_layer_freq") or 1) == 0


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((config[name] for name in names if config.get(name)), 0)


# ------------------------------------------------------------------------------------------------ devices

PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 NVL", 835.0),
    ("H100 PCIE", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX A6000", 154.8),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI355X", 2500.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)
"""TFLOP/s in bf16, dense (no 2:4 sparsity), as the makers' data sheets have them; a two-die board as one device. The
first name that the device's contains counts, so longer names stand first."""


def peak_tflops(device_name: str) -> float | None:
    """The bf16 peak of a device by the name that torch gives it; None when it is not in the table (a CPU, say).

    The word must end there: "NVIDIA H20" is not an H200, "NVIDIA L4" no L40.
    """
    words = f" {device_name.upper().replace('-', ' ').replace('_', ' ')} "
    return next((peak for name, peak in PEAKS if f" {name} " in words), None)
