"""Qwen3-MoE: Qwen3 attention, experts without a shared one."""

from __future__ import annotations

from .blocks import embeddings, experts, gqa, namings, norms, swiglu
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims, moe_layers

_rows = namings(embeddings(), norms(), gqa(qk_norm=True, bias=True), swiglu(), experts())


def _dims(config: Config) -> dict[str, int]:
    dims = base_dims(config)
    return dims | moe_layers(config) | {"o_bias": dims["qkv_bias"]}


TABLE = Table("qwen3_moe", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
