"""Mixtral: every layer has experts; the files call them `block_sparse_moe` and `w1`, `w3`, `w2`."""

from __future__ import annotations

from .blocks import ExpertNames, embeddings, experts, gqa, namings, norms
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims

_NAMES = ExpertNames("block_sparse_moe.", "gate.weight", "w1.weight", "w3.weight", "w2.weight")
_rows = namings(embeddings(), norms(), gqa(), experts(_NAMES))


def _dims(config: Config) -> dict[str, int]:
    dims = base_dims(config)
    return dims | {"m": dims["f"]}


TABLE = Table("mixtral", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
