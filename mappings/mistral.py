"""Mistral: Llama without biases; the sliding window is no matter of weights."""

from __future__ import annotations

from .blocks import embeddings, gqa, namings, norms, swiglu
from .schema import INV_FREQ, Table
from .sizes import base_dims

_rows = namings(embeddings(), norms(), gqa(), swiglu())

TABLE = Table("mistral", base_dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
