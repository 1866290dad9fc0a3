"""DeepSeek-V3 and R1: MLA with or without q-LoRA, first-k dense, shared experts, selection bias in fp32, MTP."""

from __future__ import annotations

from .blocks import embeddings, experts, mla, mtp_heads, namings, norms, shared_expert, swiglu
from .schema import INV_FREQ, Config, Table
from .sizes import base_dims, mla_dims

_rows = namings(embeddings(), norms(mla=True), mla(), swiglu(), experts(), shared_expert(), mtp_heads())


def _dims(config: Config) -> dict[str, int]:
    dims = base_dims(config) | mla_dims(config)
    shared = int(config.get("n_shared_experts") or 0)
    first = int(config.get("first_k_dense_replace", 0))
    return dims | {"s": shared * dims["m"], "moe_first": first, "expert_bias": 1}


TABLE = Table("deepseek_v3", _dims, _rows.hf, _rows.megatron, _rows.archon, drops=(INV_FREQ,))
