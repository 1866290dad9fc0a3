"""Megatron-Core as judge: runs it on the CPU over gloo and reports what it names, loads, computes and saves.

Started by `mcore.run_mcore` as `python mcore_worker.py JOBS.json`. A job is a dict (see `Job`); every job runs on as
many forked processes as its mesh has ranks, and leaves one JSON result per rank beside the job file.

Nothing of areal_convert's own mapping is used here: `Weights` below is a second, independent hand-written mapping
from Hugging Face tensors to Megatron's, so that the two can contradict each other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Megatron-Core's writer spawns a process on every rank, which imports this file again: keep that cheap.
if TYPE_CHECKING or __name__ == "__main__":
    import torch


@dataclass
class MeshArgs:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    layout: str | None = None
    first: int | None = None
    last: int | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def world(self) -> int:
        """The fewest ranks that hold the mesh: dense and expert layers divide one stage in two different ways."""
        return self.pp * math.lcm(self.tp, self.ep * self.expert_tp)


@dataclass
class Job:
    mode: str  # names, forward or save
    hf_dir: str  # holds config.json, and the weights where they are needed
    out: str  # where files are written: logits.safetensors; for save the checkpoint directory
    vocab: int  # padded vocabulary; the rows that no token has are 7.0 in what is saved
    mesh: MeshArgs = field(default_factory=MeshArgs)
    dtype: str = "float32"
    mtp: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig
    # forward
    load: str = "torch_dist"  # torch_dist, mp_rank or hf
    dir: str = ""
    strict: str = "assume_ok_unexpected"  # Megatron-LM's own default
    tokens: str = ""  # safetensors with `tokens` (or `ids`) [batch, sequence]
    # save
    formats: tuple[str, ...] = ("torch_dist",)
    metadata: dict[str, Any] | None = None  # for sharded_state_dict; None: what Megatron-LM 0.16 gives it
    release: bool = False  # below `release/` instead of `iter_0000001/`
    extra_state: bool = True  # keep the `_extra_state` objects in what is saved

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Job:
        return cls(
            **{**raw, "mesh": MeshArgs(**raw.get("mesh", {})), "formats": tuple(raw.get("formats", ("torch_dist",)))}
        )


# ---- Hugging Face weights as Megatron's tensors: written by hand, independent of mappings/ ------------------------


class Weights:
    """Full (TP 1) Megatron tensors from a Hugging Face directory, by live Megatron name with global indices."""

    def __init__(self, hf_dir: str, config: dict[str, Any], vocab: int) -> None:
        from safetensors.torch import load_file

        self.hf: dict[str, torch.Tensor] = {}
        for path in sorted(Path(hf_dir).glob("*.safetensors")):
            self.hf |= load_file(path)
        self.config = config
        self.vocab = vocab
        self.used: set[str] = set()

    def take(self, *names: str) -> torch.Tensor:
        for name in names:
            if name in self.hf:
                self.used.add(name)
                return self.hf[name]
        raise KeyError(f"none of {names} in the Hugging Face weights")

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        # Padding is filled with something that would show in any result: a reader that does not trim it is wrong.
        full = torch.full((self.vocab, *tensor.shape[1:]), 7.0, dtype=tensor.dtype)
        full[: len(tensor)] = tensor
        return full

    def full(self, name: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The whole tensor; of a gated fc1 its two halves, which tensor parallelism cuts one by one."""
        if name == "embedding.word_embeddings.weight":
            return self.padded(self.take("model.embed_tokens.weight"))
        if name == "output_layer.weight":
            return self.padded(self.take("lm_head.weight", "model.embed_tokens.weight"))
        if name == "decoder.final_layernorm.weight":
            return self.take("model.norm.weight")
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            return self.layer(f"model.layers.{match[1]}.", match[2])
        if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
            prefix = f"model.layers.{self.config['num_hidden_layers'] + int(match[1])}."
            if inner := re.fullmatch(r"(?:transformer_layer|mtp_model_layer)\.(.+)", match[2]):
                return self.layer(prefix, inner[1])
            names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
            return self.take(prefix + names[match[2].removesuffix(".weight")] + ".weight")
        raise KeyError(name)

    def layer(self, layer: str, rest: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        attention = layer + "self_attn."
        simple = {
            "input_layernorm.weight": layer + "input_layernorm.weight",
            "pre_mlp_layernorm.weight": layer + "post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": attention + "o_proj.weight",
            "self_attention.linear_proj.bias": attention + "o_proj.bias",
            "self_attention.q_layernorm.weight": attention + "q_norm.weight",
            "self_attention.k_layernorm.weight": attention + "k_norm.weight",
            "self_attention.linear_q_proj.weight": attention + "q_proj.weight",
            "self_attention.linear_q_down_proj.weight": attention + "q_a_proj.weight",
            "self_attention.linear_q_up_proj.weight": attention + "q_b_proj.weight",
            "self_attention.linear_kv_down_proj.weight": attention + "kv_a_proj_with_mqa.weight",
            "self_attention.linear_kv_up_proj.weight": attention + "kv_b_proj.weight",
            "self_attention.kv_layernorm.weight": attention + "kv_a_layernorm.weight",
            "mlp.router.expert_bias": layer + "mlp.gate.e_score_correction_bias",
            "mlp.shared_experts.gate_weight": layer + "mlp.shared_expert_gate.weight",
        }
        if self.config["model_type"] == "deepseek_v3":
            simple["self_attention.q_layernorm.weight"] = attention + "q_a_layernorm.weight"
        if rest in simple:
            return self.take(simple[rest])
        if rest == "mlp.router.weight":
            return self.take(layer + "mlp.gate.weight", layer + "block_sparse_moe.gate.weight")
        if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
            q, k, v = (self.take(f"{attention}{which}_proj.{match[1]}") for which in "qkv")
            groups = self.config.get("num_key_value_heads") or self.config["num_attention_heads"]
            parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
            return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])
        if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", rest):
            expert = [layer + f"{block}.experts.{match[1]}." for block in ("mlp", "block_sparse_moe")]
            if match[2] == "2":
                return self.take(expert[0] + "down_proj.weight", expert[1] + "w2.weight")
            return (
                self.take(expert[0] + "gate_proj.weight", expert[1] + "w1.weight"),
                self.take(expert[0] + "up_proj.weight", expert[1] + "w3.weight"),
            )
        if match := re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc([12])\.(weight|bias)", rest):
            blocks = ["mlp.shared_experts.", "mlp.shared_expert."] if match[1] else ["mlp."]
            if match[2] == "2":
                return self.take(*(f"{layer}{block}down_proj.{match[3]}" for block in blocks))
            gate, up = (
                self.take(*(f"{layer}{block}{which}_proj.{match[3]}" for block in blocks)) for which in ("gate", "up")
            )
            return gate, up
        raise KeyError(layer + rest)

    def cut(self, name: str, like: torch.Tensor, rank: int) -> torch.Tensor:
        """This rank's part: along the one axis on which the parameter is smaller than the whole."""
        full = self.full(name)
        if isinstance(full, tuple):
            rows = like.shape[0] // 2
            return torch.cat([half[rank * rows : (rank + 1) * rows] for half in full])
        axes = [axis for axis in range(full.ndim) if full.shape[axis] != like.shape[axis]]
        if len(axes) > 1 or full.ndim != like.ndim:
            raise ValueError(f"{name}: {tuple(full.shape)} does not cut to {tuple(like.shape)}")
        for axis in axes:
            full = full.narrow(axis, rank * like.shape[axis], like.shape[axis])
        return full


def global_names(chunk: Any, mesh: MeshArgs, num_experts: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name in the chunk's state_dict, the same with global layer and expert numbers, tensor)."""
    from megatron.core import parallel_state

    numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
    first_expert = parallel_state.get_expert_model_parallel_rank() * (num_experts // mesh.ep)
    for name, tensor in chunk.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{numbers[m[1]]}", name)
        whole = re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{first_expert + int(m[1])}.", whole)
        yield name, whole, tensor


def fill_from_hf(chunks: list[Any], weights: Weights, mesh: MeshArgs) -> None:
    from megatron.core import parallel_state

    tp_rank: Any = parallel_state.get_tensor_model_parallel_rank()
    expert_rank: Any = parallel_state.get_expert_tensor_parallel_rank()
    config = weights.config
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts") or 0
    with torch.no_grad():
        for chunk in chunks:
            for _, whole, tensor in global_names(chunk, mesh, experts):
                rank = expert_rank if ".local_experts." in whole else tp_rank
                tensor.copy_(weights.cut(whole, tensor, rank))


# ---- what a rank does ---------------------------------------------------------------------------------------------


def poison(chunks: list[Any]) -> None:
    """NaN in everything that a checkpoint has to fill: what it lacks shows in the logits."""
    with torch.no_grad():
        for chunk in chunks:
            for tensor in chunk.state_dict().values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.fill_(math.nan)


def still_poisoned(chunks: list[Any]) -> list[str]:
    return [
        f"model{i}: {name}"
        for i, chunk in enumerate(chunks)
        for name, tensor in chunk.state_dict().items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and bool(tensor.isnan().any())
    ]


def model_keys(chunks: list[Any]) -> list[str]:
    """What Megatron-LM calls the chunks in a checkpoint."""
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def content_metadata() -> dict[str, Any]:
    """What Megatron-LM 0.16 puts there without a distributed optimizer."""
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def sharded_state(chunks: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**metadata, "dp_cp_group": group}
    return {
        key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(model_keys(chunks), chunks, strict=True)
    }


def load_torch_dist(chunks: list[Any], job: Job) -> dict[str, Any]:
    """As Megatron-LM's load_checkpoint does it, but what `load_state_dict` refuses stays refused.

    `not_requested` is what the checkpoint holds and no rank asked for: the loader passes over it in silence.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    metadata = dist_checkpointing.load_content_metadata(job.dir) or {}
    requested = sharded_state(chunks, metadata)
    asked: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(asked, {part.key for chunk in requested.values() for part in chunk.values()})
    held = {entry.key for entry in load_sharded_metadata(job.dir).values()}
    state = dist_checkpointing.load(requested, job.dir, strict=job.strict)
    if isinstance(state, tuple):
        raise ValueError(f"strict={job.strict} returns mismatches, use one that raises")
    for key, chunk in zip(model_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(state[key], strict=True)
    return {
        "content_metadata": metadata,
        "common": sorted(key for key in state if not re.fullmatch(r"model\d*", key)),
        "not_requested": sorted(held.difference(*asked)),
    }


def mp_rank_file(directory: str) -> Path:
    """Megatron-LM's get_checkpoint_name below the iteration's directory."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if ps.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if ps.get_expert_model_parallel_world_size() > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return Path(directory) / name / "model_optim_rng.pt"


def load_mp_rank(chunks: list[Any], job: Job) -> dict[str, Any]:
    """`load_state_dict(strict=True)`: every parameter and buffer, nothing else. The `_extra_state` keys (None under the
    local layer spec) may be absent, Megatron-Core's own hooks supply them. Megatron-LM itself tries again with
    strict=False when anything is amiss, and leaves what is missing as it was; not so here."""
    # As Megatron-LM: torch's restricted unpickler, with the classes that Megatron-Core registers.
    state = torch.load(mp_rank_file(job.dir), map_location="cpu")
    for key, chunk in zip(model_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(state[key], strict=True)
    surplus = [key for key in state if re.fullmatch(r"model\d*", key) and key not in model_keys(chunks)]
    if surplus:
        raise ValueError(f"{surplus} in {mp_rank_file(job.dir)}, but this rank has {model_keys(chunks)}")
    return {
        "common": sorted(key for key in state if not re.fullmatch(r"model\d*", key)),
        "checkpoint_version": state.get("checkpoint_version"),
    }


def forward(chunks: list[Any], job: Job, true_vocab: int) -> dict[str, torch.Tensor]:
    """On the last stage: full `logits` [batch, sequence, vocabulary], computed through Megatron's own pipeline
    schedule, and with MTP layers `mtp_logits` [layer, batch, sequence, vocabulary]. Elsewhere nothing."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from safetensors.torch import load_file

    given = load_file(job.tokens)
    tokens = given["tokens" if "tokens" in given else "ids"].long()
    batch, length = tokens.shape
    # Interleaved schedules need a multiple of the stages: repeat the first sequence, and drop the extra results.
    number = -(-batch // job.mesh.pp) * job.mesh.pp
    tokens = torch.cat([tokens, tokens[:1].expand(number - batch, -1)])
    heads: list[torch.Tensor] = []

    def step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        ids = next(iterator)
        # With MTP layers Megatron-Core returns losses only, so that the logits are taken from the output layer below.
        output = model(ids, torch.arange(length).unsqueeze(0), None, labels=ids if job.mtp else None)
        return output, lambda output, non_loss_data=True: output

    def keep(_module: Any, _args: Any, out: tuple[torch.Tensor, Any]) -> None:
        heads.append(out[0].transpose(0, 1).clone())  # the loss works on the logits in place

    if hasattr(chunks[-1], "output_layer"):
        chunks[-1].output_layer.register_forward_hook(keep)
    microbatches = [iter(tokens.split(1)) for _ in chunks]
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=microbatches if len(chunks) > 1 else microbatches[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=number,
            seq_length=length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not ps.is_pipeline_last_stage():
        return {}
    # Of every microbatch, Megatron-Core runs the heads of the MTP layers first and the main one last.
    full = torch.cat([gather_from_tensor_model_parallel_region(head) for head in heads]).float()
    full = full.reshape(number, job.mtp + 1, length, -1)[:batch, ..., :true_vocab].transpose(0, 1)
    found = {"logits": full[-1].contiguous()}
    return {**found, "mtp_logits": full[:-1].contiguous()} if job.mtp else found


def megatron_args(megatron: Any, job: Job, true_vocab: int) -> argparse.Namespace:
    """The arguments of Megatron-LM that describe the model, as a training run keeps them in its checkpoints."""
    core, gpt = megatron.core, megatron.gpt
    same = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
        "add_bias_linear add_qkv_bias qk_layernorm layernorm_epsilon multi_latent_attention params_dtype bf16 fp16 "
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size mtp_num_layers moe_layer_freq moe_ffn_hidden_size "
        "moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias "
        "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_grouped_gemm "
        "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
    )
    values = {name: getattr(core, name) for name in same.split() if hasattr(core, name)}
    return argparse.Namespace(
        **values,
        norm_epsilon=core.layernorm_epsilon,
        group_query_attention=core.num_query_groups != core.num_attention_heads,
        num_experts=core.num_moe_experts,
        swiglu=True,
        untie_embeddings_and_output_weights=not gpt["share_embeddings_and_output_weights"],
        position_embedding_type=gpt["position_embedding_type"],
        rotary_base=gpt.get("rotary_base", getattr(core, "rotary_base", None)),
        rotary_percent=1.0,
        max_position_embeddings=gpt["max_sequence_length"],
        seq_length=gpt["max_sequence_length"],
        make_vocab_size_divisible_by=128,
        vocab_size=true_vocab,
        padded_vocab_size=job.vocab,
        no_save_optim=True,
        no_save_rng=True,
    )


def save(chunks: list[Any], job: Job, args: argparse.Namespace) -> None:
    """What Megatron-LM's save_checkpoint writes, without optimizer: `torch_dist/` and `mp_rank/` below `out`."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    metadata = content_metadata() if job.metadata is None else job.metadata
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 1,
        "num_floating_point_operations_so_far": 0,
    }
    for form in job.formats:
        root = Path(job.out) / form
        directory = root / ("release" if job.release else "iter_0000001")
        directory.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if form == "torch_dist":
            state = {**common, **sharded_state(chunks, metadata)}
            if not job.extra_state:
                for key in model_keys(chunks):
                    state[key] = {k: v for k, v in state[key].items() if not k.endswith("_extra_state")}
            dist_checkpointing.save(state, str(directory), content_metadata=metadata)
        elif ps.get_expert_data_parallel_rank() == 0:
            file = mp_rank_file(str(directory))
            file.parent.mkdir(parents=True, exist_ok=True)
            models = {
                key: chunk.state_dict_for_save_checkpoint()
                for key, chunk in zip(model_keys(chunks), chunks, strict=True)
            }
            torch.save({**common, **models}, file)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (root / "latest_checkpointed_iteration.txt").write_text("release" if job.release else "1")


def names(chunks: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    found: dict[str, Any] = {}
    for key, chunk in zip(model_keys(chunks), chunks, strict=True):
        live: dict[str, Any] = {}
        for name, value in chunk.state_dict().items():
            live[name] = [list(value.shape), str(value.dtype)[6:]] if isinstance(value, torch.Tensor) else repr(value)
        sharded: dict[str, Any] = {}
        for name, item in sharded_state([chunk], metadata)["model"].items():
            parts: Any = item.build() if isinstance(item, ShardedTensorFactory) else item
            for part in parts if isinstance(parts, list) else [parts]:
                entry: dict[str, Any] = {"from": name}
                if isinstance(part, ShardedTensor):
                    entry |= {
                        "shape": list(part.global_shape),
                        "offset": list(part.global_offset),
                        "local": list(part.local_shape),
                        "axes_prepended": part.prepend_axis_num,
                    }
                elif isinstance(part, ShardedObject):
                    entry |= {"object": part.unique_key}
                entry["replica"] = list(part.replica_id) if isinstance(part.replica_id, tuple) else part.replica_id
                sharded.setdefault(part.key, []).append(entry)
        found[key] = {"state_dict": live, "sharded": sharded}
    return found


def run_rank(rank: int, job: Job, store: str) -> dict[str, Any]:
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from safetensors.torch import save_file

    from areal_convert.engines.megatron_cpu import enable
    from areal_convert.engines.megatron_model import build_model, transformer_config

    torch.set_num_threads(1)
    enable()
    mesh = job.mesh
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mesh.world)
    config = json.loads((Path(job.hf_dir) / "config.json").read_text())
    megatron = transformer_config(config, **asdict(mesh), dtype=getattr(torch, job.dtype), mtp=job.mtp, **job.overrides)
    ps.initialize_model_parallel(
        mesh.tp,
        mesh.pp,
        megatron.core.virtual_pipeline_model_parallel_size,  # a pipeline layout may imply it
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.expert_tp,
    )
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    chunks: list[Any] = build_model(megatron, vocab_size=job.vocab)
    for chunk in chunks:
        chunk.eval()
    result: dict[str, Any] = {
        "rank": rank,
        "tp": ps.get_tensor_model_parallel_rank(),
        "pp": ps.get_pipeline_model_parallel_rank(),
        "ep": ps.get_expert_model_parallel_rank(),
        "etp": ps.get_expert_tensor_parallel_rank(),
    }
    if job.mode == "names":
        result["chunks"] = names(chunks, content_metadata() if job.metadata is None else job.metadata)
    else:
        poison(chunks)
        if job.mode == "save" or job.load == "hf":
            weights = Weights(job.hf_dir, config, job.vocab)
            fill_from_hf(chunks, weights, mesh)
            result["hf_unused"] = sorted(set(weights.hf) - weights.used)
        elif job.load == "torch_dist":
            result |= load_torch_dist(chunks, job)
        else:
            result |= load_mp_rank(chunks, job)
        unfilled = still_poisoned(chunks)
        if unfilled:
            raise ValueError(f"loaded without an error, but never filled (or NaN in the checkpoint): {unfilled}")
        if job.mode == "save":
            save(chunks, job, megatron_args(megatron, job, config["vocab_size"]))
        if job.tokens:
            logits = forward(chunks, job, config["vocab_size"])
            if logits and result["tp"] == 0 and ps.get_data_parallel_rank() == 0:
                path = Path(job.out) / "logits.safetensors"
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(logits, path)
                result["logits"] = str(path)
    torch.distributed.barrier()
    ps.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return result


# ---- processes ----------------------------------------------------------------------------------------------------


def child(rank: int, job: Job, folder: Path) -> None:
    try:
        result = run_rank(rank, job, str(folder / "store"))
    except BaseException:
        sys.stderr.write(f"[rank {rank}] {traceback.format_exc()}\n")
        sys.stderr.flush()
        raise SystemExit(1) from None
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def run_job(job: Job, folder: Path) -> bool:
    """Fork a process per rank; when one fails, end the others (they would wait for it)."""
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=child, args=(rank, job, folder)) for rank in range(job.mesh.world)]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            time.sleep(1)  # let the others say what they saw
            for process in ranks:
                process.kill()
        time.sleep(0.02)
    return not any(process.exitcode for process in ranks)


def main() -> int:
    # Imported before forking, so that the ranks share it.
    for module in ("dist_checkpointing", "models.gpt.gpt_layer_specs", "pipeline_parallel"):
        importlib.import_module(f"megatron.core.{module}")
    path = Path(sys.argv[1])
    for number, raw in enumerate(json.loads(path.read_text())):
        if not run_job(Job.parse(raw), path.parent / f"job{number}"):
            sys.stderr.write(f"job {number} failed: {json.dumps(raw)}\n")
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
