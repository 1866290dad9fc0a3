#!/usr/bin/env python3
"""Writes Hugging Face checkpoints of real shapes and made-up values, for benchmarks: no model is built.

    python tools/synth.py llama-3.2-1b OUT           2.5 GB, one file, tied
    python tools/synth.py llama-4x OUT               9.9 GB, four files: what grows with a model four times larger?
    python tools/synth.py qwen3-moe-small OUT        1.5 GB in 1,263 tensors, most of them small
    python tools/synth.py deepseek-v3-headers OUT    671B in 163 sparse files: real headers, no data, no disk used
                          [--fp8]                    … in the published FP8 layout instead of bf16
    --layers N                                       fewer or more layers of the same kind

Values are finite bf16 near a normal distribution. They come from one pool that is walked through again and again;
its length is prime, so that no two tensors begin at the same place in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

Config = dict[str, Any]
WIDTH = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
BLOCK = 128  # edge of an FP8 block, which has one scale
POOL_ELEMENTS = 33_554_393  # prime


@dataclass(frozen=True)
class Spec:
    """One tensor as a safetensors header has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def size(self) -> int:
        return math.prod(self.shape) * WIDTH[self.dtype]


@dataclass(frozen=True)
class Kind:
    """A model: its configuration, the tensors that follow from it, and how many files they fill."""

    config: Config
    tensors: Callable[[Config], Iterator[Spec]]
    shards: int
    sparse: bool = False


# --- what tensors there are ------------------------------------------------------------------------------------------


def attention(prefix: str, c: Config, qk_norm: bool = False) -> Iterator[Spec]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield Spec(f"{prefix}.q_proj.weight", (q, hidden))
    yield Spec(f"{prefix}.k_proj.weight", (kv, hidden))
    yield Spec(f"{prefix}.v_proj.weight", (kv, hidden))
    yield Spec(f"{prefix}.o_proj.weight", (hidden, q))
    if qk_norm:
        yield from (Spec(f"{prefix}.{name}_norm.weight", (dim,)) for name in "qk")


def mla(prefix: str, c: Config) -> Iterator[Spec]:
    hidden, heads, q_rank, kv_rank = (
        c[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield Spec(f"{prefix}.q_a_proj.weight", (q_rank, hidden))
    yield Spec(f"{prefix}.q_a_layernorm.weight", (q_rank,))
    yield Spec(f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank))
    yield Spec(f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    yield Spec(f"{prefix}.kv_a_layernorm.weight", (kv_rank,))
    yield Spec(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank))
    yield Spec(f"{prefix}.o_proj.weight", (hidden, heads * value))


def mlp(prefix: str, hidden: int, width: int) -> Iterator[Spec]:
    yield Spec(f"{prefix}.gate_proj.weight", (width, hidden))
    yield Spec(f"{prefix}.up_proj.weight", (width, hidden))
    yield Spec(f"{prefix}.down_proj.weight", (hidden, width))


def norms(prefix: str, hidden: int) -> Iterator[Spec]:
    yield from (Spec(f"{prefix}.{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))


def ends(c: Config) -> Iterator[Spec]:
    yield Spec("model.norm.weight", (c["hidden_size"],))
    if not c["tie_word_embeddings"]:
        yield Spec("lm_head.weight", (c["vocab_size"], c["hidden_size"]))


def embedding(c: Config) -> Spec:
    return Spec("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]))


def llama(c: Config) -> Iterator[Spec]:
    yield embedding(c)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield from attention(f"{layer}.self_attn", c)
        yield from mlp(f"{layer}.mlp", c["hidden_size"], c["intermediate_size"])
        yield from norms(layer, c["hidden_size"])
    yield from ends(c)


def qwen3_moe(c: Config) -> Iterator[Spec]:
    yield embedding(c)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield from attention(f"{layer}.self_attn", c, qk_norm=True)
        yield Spec(f"{layer}.mlp.gate.weight", (c["num_experts"], c["hidden_size"]))
        for e in range(c["num_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{e}", c["hidden_size"], c["moe_intermediate_size"])
        yield from norms(layer, c["hidden_size"])
    yield from ends(c)


def deepseek_layer(layer: str, c: Config, dense: bool) -> Iterator[Spec]:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    yield from mla(f"{layer}.self_attn", c)
    if dense:
        yield from mlp(f"{layer}.mlp", hidden, c["intermediate_size"])
    else:
        yield Spec(f"{layer}.mlp.gate.weight", (c["n_routed_experts"], hidden))
        yield Spec(f"{layer}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],), "F32")
        yield from mlp(f"{layer}.mlp.shared_experts", hidden, width * c["n_shared_experts"])
        for e in range(c["n_routed_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{e}", hidden, width)
    yield from norms(layer, hidden)


def deepseek(c: Config) -> Iterator[Spec]:
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    yield embedding(c)
    for i in range(layers):
        yield from deepseek_layer(f"model.layers.{i}", c, i < c["first_k_dense_replace"])
    yield from ends(c)
    for i in range(layers, layers + c["num_nextn_predict_layers"]):
        layer = f"model.layers.{i}"
        yield Spec(f"{layer}.embed_tokens.weight", (c["vocab_size"], hidden))
        yield from (Spec(f"{layer}.{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm"))
        yield Spec(f"{layer}.eh_proj.weight", (hidden, 2 * hidden))
        yield from deepseek_layer(layer, c, dense=False)
        yield Spec(f"{layer}.shared_head.head.weight", (c["vocab_size"], hidden))


def fp8(specs: Iterator[Spec]) -> Iterator[Spec]:
    """The published layout: linear layers in FP8 with one fp32 scale for each block, all else as it was."""
    for spec in specs:
        if not ("self_attn." in spec.name or ".mlp." in spec.name) or len(spec.shape) < 2 or "mlp.gate." in spec.name:
            yield spec
            continue
        yield Spec(spec.name, spec.shape, "F8_E4M3")
        yield Spec(f"{spec.name}_scale_inv", tuple(-(-size // BLOCK) for size in spec.shape), "F32")


# --- which models there are ------------------------------------------------------------------------------------------

LLAMA_3_2_1B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

# Llama 3.1 8B with 18 of its 32 layers: four times the bytes of the 1B.
LLAMA_4X: Config = LLAMA_3_2_1B | {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 18,
    "rope_scaling": LLAMA_3_2_1B["rope_scaling"] | {"factor": 8.0},
    "tie_word_embeddings": False,
}

QWEN3_MOE_SMALL: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 40960,
}

# As published, but for the references to its own code.
DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
FP8_CONFIG: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}

KINDS: dict[str, Kind] = {
    "llama-3.2-1b": Kind(LLAMA_3_2_1B, llama, shards=1),
    "llama-4x": Kind(LLAMA_4X, llama, shards=4),
    "qwen3-moe-small": Kind(QWEN3_MOE_SMALL, qwen3_moe, shards=1),
    "deepseek-v3-headers": Kind(DEEPSEEK_V3, deepseek, shards=163, sparse=True),
}


# --- writing ---------------------------------------------------------------------------------------------------------


class Noise:
    """An endless stream of bf16 values, served from one pool without a copy."""

    def __init__(self, seed: int = 0) -> None:
        import numpy

        floats = numpy.random.default_rng(seed).standard_normal(POOL_ELEMENTS, dtype=numpy.float32)
        floats *= 0.03
        self._pool = (floats.view(numpy.uint32) >> 16).astype(numpy.uint16).data.cast("B")
        self._at = 0

    def write(self, file: BinaryIO, size: int) -> None:
        while size:
            piece = self._pool[self._at : self._at + size]
            file.write(piece)
            size -= len(piece)
            self._at = (self._at + len(piece)) % len(self._pool)


def header(specs: list[Spec]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        fields[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.size]}
        at += spec.size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def split(specs: list[Spec], shards: int) -> list[list[Spec]]:
    """Consecutive runs of about equal size, exactly `shards` of them where there are enough tensors."""
    total, done = sum(spec.size for spec in specs), 0
    files: list[list[Spec]] = [[] for _ in range(shards)]
    for spec in specs:
        files[done * shards // total].append(spec)
        done += spec.size
    return [file for file in files if file]


def write_file(path: Path, specs: list[Spec], noise: Noise | None) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(header(specs))
        size = sum(spec.size for spec in specs)
        if noise is None:
            os.truncate(path, file.tell() + size)
        else:
            noise.write(file, size)


def write(
    name: str, out: Path, *, layers: int | None = None, in_fp8: bool = False, shards: int | None = None
) -> Config:
    """Writes the checkpoint into the new directory `out`; returns what it holds: tensors, parameters, bytes, files."""
    kind = KINDS[name]
    if in_fp8 and not kind.sparse:
        raise SystemExit("--fp8 goes with deepseek-v3-headers: the made-up values are bf16")
    config = kind.config | ({"num_hidden_layers": layers} if layers else {})
    specs = list(kind.tensors(config))
    # A cut of few layers would otherwise come in files of a few megabytes.
    wanted = shards or max(1, round(kind.shards * len(specs) / sum(1 for _ in kind.tensors(kind.config))))
    parameters = sum(math.prod(spec.shape) for spec in specs)
    if in_fp8:
        config = config | {"quantization_config": FP8_CONFIG}
        specs = list(fp8(iter(specs)))

    out.mkdir(parents=True)
    files = split(specs, wanted)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    noise = None if kind.sparse else Noise()
    for filename, content in zip(names, files, strict=True):
        write_file(out / filename, content, noise)
    size = sum(spec.size for spec in specs)
    if len(files) > 1:
        where = {spec.name: filename for filename, content in zip(names, files, strict=True) for spec in content}
        _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})
    _write_json(out / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(out / "generation_config.json", ids)
    return {"tensors": len(specs), "parameters": parameters, "bytes": size, "files": len(files)}


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="write a synthetic Hugging Face checkpoint")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("out", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--shards", type=int, help="another number of files")
    parser.add_argument("--fp8", action="store_true", help="deepseek-v3-headers in its published FP8 layout")
    arguments = parser.parse_args()
    start = time.perf_counter()
    made = write(arguments.kind, arguments.out, layers=arguments.layers, in_fp8=arguments.fp8, shards=arguments.shards)
    print(
        f"{arguments.out}: {made['tensors']:,} tensors, {made['parameters'] / 1e9:.2f}B parameters, "
        f"{made['bytes'] / 1e9:.2f} GB in {made['files']} files, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
