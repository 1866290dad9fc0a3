"""Qwen2-MoE: QKV bias, experts on some layers, one shared expert behind a sigmoid gate."""

from __future__ import annotations

from .blocks import embeddings, experts, gqa, namings, norms, shared_expert, swiglu
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims, moe_layers

_rows = namings(embeddings(), norms(), gqa(bias=True), swiglu(), experts(), shared_expert("shared_expert.", gate=True))


def _dims(config: Config) -> dict[str, int]:
    shared = int(config["shared_expert_intermediate_size"])
    return base_dims(config) | moe_layers(config) | {"qkv_bias": int(bool(config.get("qkv_bias", True))), "s": shared}


TABLE = Table("qwen2_moe", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
