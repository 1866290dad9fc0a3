"""Llama 2 and 3.x: grouped-query attention, SwiGLU, tied or untied head, optional biases."""

from __future__ import annotations

from .blocks import embeddings, gqa, namings, norms, swiglu
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims

_rows = namings(embeddings(), norms(), gqa(bias=True), swiglu())


def _dims(config: Config) -> dict[str, int]:
    dims = base_dims(config)
    return dims | {"o_bias": dims["qkv_bias"]}


TABLE = Table("llama", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
