"""Qwen2 and Qwen2.5: biases on q, k and v, none on o."""

from __future__ import annotations

from .blocks import embeddings, gqa, namings, norms, swiglu
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims

_rows = namings(embeddings(), norms(), gqa(bias=True), swiglu())


def _dims(config: Config) -> dict[str, int]:
    return base_dims(config) | {"qkv_bias": 1}


TABLE = Table("qwen2", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
