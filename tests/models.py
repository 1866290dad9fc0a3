"""Tiny random models of every family, made by transformers: the ground truth that conversions are measured against.

What lies on disk counts, not what a module holds in memory: transformers 5 keeps experts fused and writes them one
by one, renames Mixtral's router, and writes `rope_parameters` where older configurations had `rope_theta`.

Every weight differs from every other: a matrix of ones or zeros (norms, biases and router corrections straight from
an initialiser) would hide a swap. Values depend on the tensor's name alone, so that a bf16 twin, or the same model
with more layers, has the same weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VOCAB = 1003  # odd and prime to every mesh: it has to be padded
CACHE_ENV = "AREAL_TEST_MODELS"  # conftest points it at a directory that the parallel workers of one run share

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,  # differs from qk_nope_head_dim: a swap of the two does not go through
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,  # transformers builds no MTP layer but would announce one; see add_mtp
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_MIXED = {"mlp_only_layers": [0], "decoder_sparse_step": 2}  # dense, sparse, dense, sparse, …

_SPECS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_rope": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2_tied": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 80, **_MOE},
    "qwen2_moe_mixed": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 80, **_MOE, **_MIXED},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **_MOE},
    "qwen3_moe_mixed": {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **_MOE, **_MIXED},
    "deepseek_v3": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "deepseek_v3_noq": {"model_type": "deepseek_v3", **_DEEPSEEK, "q_lora_rank": None},
}
FAMILIES: tuple[str, ...] = tuple(_SPECS)


def make_model(
    family: str,
    path: Path,
    *,
    dtype: str = "float32",
    layers: int = 4,
    max_shard_size: int | str = "50GB",
    fused_experts: bool = False,
    side_files: bool = False,
    **config_overrides: Any,
) -> Path:
    """A tiny random model of `family`, saved at `path`, which must not exist yet; returns `path`.

    `fused_experts` writes 3-D expert tensors as transformers holds them. `side_files` adds a tokenizer, a chat
    template, custom code and whatever else real repositories carry. Built once per session and kind, then copied:
    the caller may damage its copy. `cached_model` gives the original, to be read only.
    """
    shutil.copytree(
        cached_model(
            family,
            dtype=dtype,
            layers=layers,
            max_shard_size=max_shard_size,
            fused_experts=fused_experts,
            side_files=side_files,
            **config_overrides,
        ),
        path,
    )
    return path


def cached_model(
    family: str,
    *,
    dtype: str = "float32",
    layers: int = 4,
    max_shard_size: int | str = "50GB",
    fused_experts: bool = False,
    side_files: bool = False,
    **config_overrides: Any,
) -> Path:
    """The same, at a path of its own that tests share: read it, never write to it."""
    config = {**_SMALL, **_SPECS[family], "num_hidden_layers": layers, **config_overrides}
    key = json.dumps([config, dtype, max_shard_size, fused_experts, side_files], sort_keys=True, default=str)

    def build(path: Path) -> None:
        _save_model(config, path, dtype, max_shard_size, fused_experts)
        if side_files:
            add_side_files(path)

    return _once(f"{family}-{zlib.crc32(key.encode()):08x}", build)


def logits(path: Path, tokens: Any) -> Any:
    """What transformers computes from the files at `path`, in fp32. Raises if a tensor is missing or left over."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    _set_layout(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    mtp = _mtp_prefix(config)
    left = [name for name in info["unexpected_keys"] if not (mtp and name.startswith(mtp))]
    if info["missing_keys"] or info["mismatched_keys"] or left:
        raise AssertionError(f"{path} is not this model: missing {info['missing_keys']}, left over {left}, {info}")
    with torch.no_grad():
        return model.eval()(input_ids=torch.as_tensor(tokens), use_cache=False).logits


def sample_tokens(batch: int = 2, length: int = 24, seed: int = 0) -> Any:
    """Token ids to compare logits on."""
    import torch

    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def tensors(path: Path) -> dict[str, Any]:
    """Every tensor of a safetensors directory, by name."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def add_mtp(path: Path, *, shared: bool = True) -> Path:
    """Gives a deepseek_v3 model one multi-token-prediction layer, as the published DeepSeek-V3 has it.

    It stands as layer L behind the last one: a full sparse layer with `enorm`, `hnorm`, `eh_proj`, `shared_head.norm`
    and copies of the embedding and of the head. Those are equal to the model's own in the published checkpoint;
    `shared=False` gives them values of their own.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((path / "config.json").read_text())
    have = tensors(path)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    if f"{last}mlp.gate.weight" not in have:
        raise ValueError("the last layer is dense: there is no sparse layer to model the MTP layer on")
    embed, head = have["model.embed_tokens.weight"], have["lm_head.weight"]
    like: dict[str, torch.Tensor] = {f"{mtp}{n.removeprefix(last)}": t for n, t in have.items() if n.startswith(last)}
    like |= {f"{mtp}{name}.weight": embed.new_empty(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    like |= {f"{mtp}eh_proj.weight": embed.new_empty(hidden, 2 * hidden)}
    like |= {f"{mtp}embed_tokens.weight": embed, f"{mtp}shared_head.head.weight": head}
    new = {name: _random(name, tensor.shape).to(tensor.dtype) for name, tensor in like.items()}
    if shared:
        new |= {f"{mtp}embed_tokens.weight": embed.clone(), f"{mtp}shared_head.head.weight": head.clone()}

    where = _weight_map(path)
    save_file(new, path / "model-mtp.safetensors", metadata={"format": "pt"})
    _write_index(path, where | dict.fromkeys(new, "model-mtp.safetensors"))
    config["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return path


def to_bin(path: Path, shards: int = 1) -> Path:
    """Rewrites a safetensors directory as `pytorch_model*.bin`, the form that older repositories have."""
    import torch

    have = tensors(path)
    names = sorted(have)
    files = ["pytorch_model.bin"]
    if shards > 1:
        files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    where = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        torch.save({name: have[name] for name in names if where[name] == file}, path / file)
    for old in (*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")):
        old.unlink()
    if shards > 1:
        _write_index(path, where, "pytorch_model.bin.index.json", have)
    return path


CUSTOM_CODE = '"""Code of the model\'s own, carried along unread."""\n\nANSWER = 42\n'
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_side_files(path: Path) -> Path:
    """A tokenizer, chat template, generation config, custom code, and files in a folder: what must be carried over."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 20))]  # shorter than the vocabulary
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    generation = {"bos_token_id": 1, "eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    (path / "modeling_x.py").write_text(CUSTOM_CODE)
    (path / "README.md").write_text("# A tiny model\n")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return path


# ---------------------------------------------------------------------------------------------------------------------


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """Builds a directory of the session's cache if it is not there. Workers may race: a rename decides, one wins."""
    root = Path(os.environ.get(CACHE_ENV) or Path(tempfile.gettempdir()) / f"areal-test-models-{os.getpid()}")
    root.mkdir(parents=True, exist_ok=True)
    done = root / name
    if not done.exists():
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        build(scratch)
        try:
            scratch.rename(done)
        except OSError:
            shutil.rmtree(scratch)
            if not done.exists():
                raise
    return done


def _save_model(config: dict[str, Any], path: Path, dtype: str, max_shard_size: int | str, fused: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    parsed = AutoConfig.for_model(config["model_type"], **fields)
    _set_layout(parsed)
    # `dtype=` keeps the fp32 of DeepSeek's router correction, where `.to(bfloat16)` would round it.
    model = AutoModelForCausalLM.from_config(parsed, dtype=getattr(torch, dtype))
    for name, value in _values(model):
        if name.endswith("mlp.gate.weight"):  # transformers keeps DeepSeek's in fp32, the published one is bf16
            value.data = value.data.to(getattr(torch, dtype))
        value.data.copy_(_random(name, value.shape))
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not fused)


def _set_layout(config: Any) -> None:
    """One plain expert loop: the grouped kernels sum in another order, which is noise in a comparison of logits."""
    config._experts_implementation = "eager"


def _values(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _random(name: str, shape: tuple[int, ...]) -> Any:
    """Values that keep activations near 1 at any depth, so that a tolerance on logits means something."""
    import torch

    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1 + 0.25 * noise
    return 0.2 * noise  # biases, and the correction of a router


def _mtp_prefix(config: Any) -> str:
    if not getattr(config, "num_nextn_predict_layers", 0):
        return ""
    return f"model.layers.{config.num_hidden_layers}."


def _weight_map(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    where: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            where |= dict.fromkeys(opened.keys(), file.name)
    return where


def _write_index(
    path: Path,
    where: dict[str, str],
    name: str = "model.safetensors.index.json",
    have: dict[str, Any] | None = None,
) -> None:
    have = have or tensors(path)
    size = sum(tensor.numel() * tensor.element_size() for tensor in have.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (path / name).write_text(json.dumps(index, indent=2) + "\n")
