"""What a `config.json` says of a model: its sizes, named as the axes of `blocks.py`, and the kinds of its layers."""

from __future__ import annotations

from .schema import Config, Dims, When

# ---------------------------------------------------------------------------------------------- conditions


def body(dims: Dims, layer: int) -> bool:
    """A decoder layer proper, not an MTP layer."""
    return layer < dims["layers"]


def mtp(dims: Dims, layer: int) -> bool:
    """A multi-token-prediction layer; they are numbered after the decoder's layers."""
    return layer >= dims["layers"]


def moe(dims: Dims, layer: int) -> bool:
    """A layer whose MLP is made of experts. `moe_first`, `moe_step` and `dense.N` come from the config; MTP layers of a
    MoE model are MoE layers."""
    if not dims.get("e", 0):
        return False
    if mtp(dims, layer):
        return True
    if f"dense.{layer}" in dims or layer < dims.get("moe_first", 0):
        return False
    return (layer + 1) % dims.get("moe_step", 1) == 0


def dense(dims: Dims, layer: int) -> bool:
    """A layer with an ordinary MLP."""
    return not moe(dims, layer)


def both(*conditions: When) -> When:
    """All of the conditions."""
    return lambda dims, layer: all(c(dims, layer) for c in conditions)


def has(switch: str) -> When:
    """The config says so: `tied`, `qkv_bias`, `q_lora`, …"""
    return lambda dims, layer: bool(dims.get(switch, 0))


def lacks(switch: str) -> When:
    """The config does not say so."""
    return lambda dims, layer: not dims.get(switch, 0)


# ---------------------------------------------------------------------------------------------- config.json


def base_dims(config: Config) -> dict[str, int]:
    """Sizes that nearly every `config.json` spells the same way. Raises KeyError with the name of a missing field."""

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, bool):
                raise TypeError(f"{name} is {value}")
            if value is not None:
                return int(value)
        if default is None:
            raise KeyError(names[0])
        return default

    heads = number("num_attention_heads")
    groups = number("num_key_value_heads", default=heads)
    hidden = number("hidden_size")
    return {
        "h": hidden,
        "u": 1,
        "o": hidden,
        "x": 2 * hidden,
        "n": heads,
        "g": groups,
        "r": heads // groups,
        "d": number("head_dim", default=hidden // heads),
        "f": number("intermediate_size", default=0),
        "v": number("vocab_size"),
        "layers": number("num_hidden_layers"),
        "mtp": number("num_nextn_predict_layers", default=0),
        "tied": int(bool(config.get("tie_word_embeddings", False))),
        "qkv_bias": int(bool(config.get("attention_bias", False))),
        "e": number("num_experts", "num_local_experts", "n_routed_experts", default=0),
        "m": number("moe_intermediate_size", default=0),
    }


def moe_layers(config: Config) -> dict[str, int]:
    """Which layers have experts, in Qwen's words: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    dense_layers = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step", 1)
    return {"moe_step": int(step)} | {f"dense.{layer}": 1 for layer in dense_layers}


def mla_dims(config: Config) -> dict[str, int]:
    """Sizes of multi-head latent attention. Raises KeyError for a missing field."""
    rope, nope, value, rank = (
        int(config[name]) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    q_rank = int(config.get("q_lora_rank") or 0)
    return {"k": nope + rope, "w": value, "y": nope + value, "c": rank, "j": rank + rope, "a": q_rank, "q_lora": q_rank}
