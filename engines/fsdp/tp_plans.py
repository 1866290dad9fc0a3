"""Which layer of which family is cut how: one table a family, patterns of transformers' module names → styles.

| what                     | how                                                                                    |
|--------------------------|----------------------------------------------------------------------------------------|
| q, k, v; gate, up        | by outputs (heads; intermediate)                                                       |
| o; down                  | by inputs; results are summed                                                          |
| embedding, output layer  | by vocabulary, evenly or not; logits stay cut                                          |
| norms, q-norm, k-norm    | whole, at work on a slice of the sequence or on some heads; gradients are summed       |
| experts                  | dealt out whole, E/tp a rank                                                           |
| routers                  | whole, the same work on every rank                                                     |

Heads, KV heads and experts must divide; nothing else has to.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...converter.errors import ConfigError, MeshError, Problems
from ..tensor_parallel import (
    AfterGather,
    Colwise,
    Enter,
    Norm,
    Plan,
    Rowwise,
    Style,
    VocabEmbedding,
    VocabHead,
    Whole,
)
from .expert_styles import Experts, SparseBlock

_L = "model.layers.*"
_MLP: dict[str, Style] = {"gate_proj": Colwise(), "up_proj": Colwise(), "down_proj": Rowwise()}

_ENDS: dict[str, Style] = {
    "model.embed_tokens": VocabEmbedding(),
    f"{_L}.input_layernorm": Norm(),
    f"{_L}.post_attention_layernorm": Norm(),
    "model.norm": Norm(),
    "lm_head": VocabHead(),
    "score": AfterGather(),
}
_ATTENTION: dict[str, Style] = {
    f"{_L}.self_attn.q_proj": Colwise(),
    f"{_L}.self_attn.k_proj": Colwise(),
    f"{_L}.self_attn.v_proj": Colwise(),
    f"{_L}.self_attn.o_proj": Rowwise(),
    f"{_L}.self_attn": Enter(),
}
_QK_NORM: dict[str, Style] = {f"{_L}.self_attn.q_norm": Norm(), f"{_L}.self_attn.k_norm": Norm()}
_DENSE_MLP: dict[str, Style] = {**{f"{_L}.mlp.{name}": style for name, style in _MLP.items()}, f"{_L}.mlp": Enter()}
_SPARSE: dict[str, Style] = {f"{_L}.mlp.gate": Whole(), f"{_L}.mlp.experts": Experts()}

_DENSE = {**_ENDS, **_ATTENTION, **_DENSE_MLP}
_MOE = {**_ENDS, **_ATTENTION, **_SPARSE}

PLANS: dict[str, Plan] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "smollm3": _DENSE,
    "qwen3": {**_QK_NORM, **_DENSE},
    "mixtral": _MOE,
    "qwen3_moe": {**_QK_NORM, **_MOE, **_DENSE_MLP},
}
"""By `model_type`. A layer of qwen3_moe is sparse or dense: see `plan_for`."""


def plan_for(model: nn.Module, config: Any, size: int) -> Plan:
    """The table of the model's family.

    Raises ConfigError for a family without one, MeshError when heads do not divide.
    """
    plan = PLANS.get(config.model_type)
    if plan is None:
        raise ConfigError(
            f"There is no tensor-parallel plan for {config.model_type!r}; known: {', '.join(PLANS)}.",
            hint="tensor_parallel_size=1 runs it with FSDP (and sequence parallelism) alone.",
        )
    problems = Problems()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key)
        if heads % size:
            problems.add(key, f"{heads} do not divide among {size} ranks", "choose a tensor_parallel_size that divides")
    problems.raise_as(MeshError, f"{config.model_type} does not fit tensor_parallel_size={size}:")
    sparse = {name: SparseBlock() for name, module in model.named_modules() if hasattr(module, "experts")}
    return {**sparse, **plan}
