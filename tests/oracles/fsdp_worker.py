"""torch as judge: FSDP2, DTensor and DCP themselves load, save and lay out models over gloo on the CPU.

Started by `fsdp.Torch` as `python fsdp_worker.py FOLDER`. Jobs come as one JSON line each (see `Job`); every job runs
on as many forked processes as its mesh has ranks, and is answered by one line: what each rank found, or null.

Nothing of areal_convert's own mapping, placement or file code is used here (but for `via="load_into"`, which asks ours
to fill what torch built). Two models are known: transformers' own, and a bare tree of parameters under Archon's names,
distributed as Archon does it (areal/experimental/models/archon/{parallel_dims,expert_parallel}.py and
qwen3/infra/parallelize.py of AReaL), with a mapping of names written by hand.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass
class Sizes:
    """dp is FSDP's size, replicate the outer one of HSDP; ep lies within dp, and tp where etp is 1, as in Archon."""

    dp: int = 1
    tp: int = 1
    replicate: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.dp * self.tp


@dataclass
class Job:
    task: str  # load, save or places
    hf_dir: str  # config.json, and the weights that are right
    dir: str = ""  # the checkpoint to load or to save; for places: where each rank's codes go
    naming: str = "hf"  # or archon
    mesh: Sizes = field(default_factory=Sizes)
    backend: str = "gloo"  # fake: no rank hears of another (places only)
    # load
    root: str = ""  # names in the checkpoint begin with it
    via: str = "dcp"  # or load_into: areal_convert fills the module
    meta: bool = False  # build on the meta device
    logits: bool = True
    # save
    state: str = ""  # dotted path at which the model's state dict stands
    optimizer: str = ""  # dotted path of AdamW's state: what get_optimizer_state_dict gives
    flat: bool = False  # flattened, as Archon saves it
    raw: bool = False  # optimizer.state_dict(), keyed by numbers
    wrap: str = ""  # compile, compile_layers, checkpoint_layers or ddp
    writer: str = ""  # hf: DCP's own safetensors writer, the shards left as the ranks wrote them
    set: dict[str, float] = field(default_factory=dict)  # parameters whose name matches are filled with a constant

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Job:
        return cls(**{**raw, "mesh": Sizes(**raw.get("mesh", {}))})


class Refused(Exception):
    """A check of ours failed: the message says what torch found."""


# ------------------------------------------------------------------------------------------------ two models


def hf_config(job: Job) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.hf_dir)
    config._experts_implementation = "eager"
    return config


REFERENCES: dict[str, Any] = {}
"""transformers' own reading of every directory that jobs name: made before forking, so that ranks find it there."""


def hf_reference(job: Job) -> Any:
    """The right model; a rank may do with it what it likes. Raises Refused when the files are not a whole one."""
    from transformers import AutoModelForCausalLM

    if job.hf_dir not in REFERENCES:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            job.hf_dir, config=hf_config(job), attn_implementation="eager", output_loading_info=True
        )
        model, info = loaded
        if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise Refused(f"{job.hf_dir} is not a whole model: {info}")
        REFERENCES[job.hf_dir] = model.eval()
    return REFERENCES[job.hf_dir]


def hf_empty(job: Job) -> Any:
    """The same architecture with NaN in every parameter and persistent buffer, or on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta" if job.meta else "cpu"):
        config = hf_config(job)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=config.dtype)
    return model.eval()


class Tree(nn.Module):
    """Parameters under dotted names, without any computation."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module, last = self._home(name)
            module.register_parameter(last, nn.Parameter(tensor))

    def _home(self, name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]  # type: ignore[assignment]
        return module, last


ARCHON = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "moe.router.gate",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


def archon_tensors(hf_dir: str) -> dict[str, torch.Tensor]:
    """Archon's tensors from Hugging Face's files: renamed, the experts of a layer stacked (E, out, in)."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(Path(hf_dir).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name in ARCHON:
                found[ARCHON[name]] = tensor
            elif part := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", name):
                layer, expert, what = part.groups()
                experts.setdefault(f"layers.{layer}.moe.experts.{ARCHON[what]}", {})[int(expert)] = tensor
            elif part := re.fullmatch(r"model\.(layers\.\d+)\.(.+)\.(weight|bias)", name):
                found[f"{part[1]}.{ARCHON[part[2]]}.{part[3]}"] = tensor
            else:
                raise Refused(f"no name for {name} in Archon")
    for name, parts in experts.items():
        found[name] = torch.stack([parts[n] for n in range(len(parts))])
    return found


def build(job: Job, fill: Callable[[str, torch.Tensor], torch.Tensor] | None) -> tuple[Any, bool]:
    """The model, whole, every value as `fill` makes it of the right one; and whether it is tied."""
    config = json.loads((Path(job.hf_dir) / "config.json").read_text())
    tied = bool(config.get("tie_word_embeddings"))
    if job.naming == "archon":
        tensors = archon_tensors(job.hf_dir)
        if tied:
            tensors["output.weight"] = tensors["tok_embeddings.weight"].clone()
        return Tree({name: fill(name, t) if fill else t for name, t in tensors.items()}), tied
    if fill is None:
        return hf_reference(job), tied
    model = hf_empty(job)
    if not job.meta:
        with torch.no_grad():
            for name, value in model.state_dict(keep_vars=True).items():
                value.copy_(fill(name, value))
    return model, tied


# ------------------------------------------------------------------------------------------------ distributing them

TP_PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
"""What AReaL's FSDP engine does by Hugging Face's names, without sequence parallelism; experts and norms stay whole."""


def distribute(model: Any, job: Job, tied: bool) -> None:
    """TP (and EP), then FSDP2 on every layer and the root."""
    sizes = job.mesh
    if job.naming == "archon":
        distribute_archon(model, sizes)
        if tied:
            model.output.weight = model.tok_embeddings.weight  # after FSDP, as Archon does it
        return
    mesh = init_device_mesh("cpu", (sizes.replicate, sizes.dp, sizes.tp), mesh_dim_names=("replicate", "dp", "tp"))
    if sizes.tp > 1:
        plan = {k: v for k, v in TP_PLAN.items() if any(re.fullmatch(_glob(k), n) for n, _ in model.named_modules())}
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
    data = mesh["replicate", "dp"] if sizes.replicate > 1 else mesh["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)


def _glob(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def distribute_archon(model: Any, sizes: Sizes) -> None:
    """Archon's meshes (without PP and CP), its placements, its FSDP wrapping."""
    if sizes.ep == 1:
        mesh = init_device_mesh("cpu", (sizes.dp, sizes.tp), mesh_dim_names=("dp", "tp"))
        data, outer, expert_mesh = mesh["dp"], None, mesh["tp"] if sizes.tp > 1 else None
        experts = {"w1": [Shard(1)], "w3": [Shard(1)], "w2": [Shard(2)]}
    else:
        inside = sizes.ep if sizes.etp == sizes.tp else sizes.ep // sizes.tp
        modulo = sizes.dp // inside
        mesh = init_device_mesh("cpu", (modulo, inside, sizes.tp), mesh_dim_names=("modulo", "inside", "tp"))
        data, outer = mesh["modulo", "inside"]._flatten("dp"), mesh["modulo"]
        if sizes.tp > 1 and sizes.etp == sizes.tp:
            expert_mesh = mesh["inside", "tp"]
            experts = {w: [Shard(0), Shard(dim)] for w, dim in (("w1", 1), ("w3", 1), ("w2", 2))}
        else:
            expert_mesh = mesh["inside", "tp"]._flatten("ep")
            experts = {w: [Shard(0)] for w in ("w1", "w3", "w2")}
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            where, placements = (mesh["tp"], [_archon_tp(f"{name}.{key}")]) if sizes.tp > 1 else (None, [])
            if name.endswith("moe.experts"):
                where, placements = expert_mesh, experts[key]
            if where is not None:
                part = distribute_tensor(parameter.data, where, placements, src_data_rank=None)
                module.register_parameter(key, nn.Parameter(part))
    fully_shard(model.tok_embeddings, mesh=data)
    for layer in model.layers.children():
        if outer is not None and hasattr(layer, "moe"):
            many = outer.size() * sizes.ep > len(layer.moe.experts.w1)
            fully_shard(layer.moe.experts, mesh=outer, shard_placement_fn=(lambda _: Shard(1)) if many else None)
        fully_shard(layer, mesh=data)
    fully_shard([model.norm, *([model.output] if hasattr(model, "output") else [])], mesh=data)
    fully_shard(model, mesh=data)


def _archon_tp(name: str) -> Placement:
    if re.search(r"(wo|feed_forward\.w2)\.weight$", name):
        return Shard(1)
    if re.search(r"(w[qkv]|feed_forward\.w[13]|tok_embeddings|output)\.(weight|bias)$", name):
        return Shard(0)
    return Replicate()  # norms (SequenceParallel) and the router


# ------------------------------------------------------------------------------------------------ tasks


def nan(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


def codes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Every element's number in the whole tensor; exact in fp32 up to 2²⁴."""
    assert tensor.numel() < 1 << 24
    return torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def placements(values: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted({str(v.placements) if isinstance(v, DTensor) else "plain" for v in values.values()})


def load(job: Job) -> dict[str, Any]:
    """Plain `dcp.load` into the distributed model; then every tensor and the logits against the right ones."""
    model, tied = build(job, nan)
    distribute(model, job, tied)
    right = hf_reference(job) if job.naming == "hf" else None
    if job.meta:
        assert right is not None
        model.to_empty(device="cpu")
        model.load_state_dict({n: nan(n, v) for n, v in model.state_dict().items()}, assign=True)
        for (_, mine), (_, theirs) in zip(model.named_buffers(), right.named_buffers(), strict=True):
            mine.copy_(theirs)
    state = model.state_dict()
    not_nan = [name for name, value in state.items() if not local(value).isnan().all()]
    if not_nan:
        raise Refused(f"not poisoned: {not_nan}")
    casts: list[str] = []
    if job.via == "load_into":
        fill_with_ours(model, job)
    else:
        stored: dict[str, Any] = dcp.FileSystemReader(job.dir).read_metadata().state_dict_metadata
        mine, theirs = {job.root + name for name in state}, set(stored)
        if mine != theirs:
            missing, left = sorted(mine - theirs), sorted(theirs - mine)
            raise Refused(f"missing in the checkpoint: {missing}; not in the model: {left}")
        casts = [n for n, v in state.items() if stored[job.root + n].properties.dtype != v.dtype]  # torch says nothing
        dcp.load(nest(job.root.rstrip("."), state), checkpoint_id=job.dir)
    expected = right.state_dict() if right is not None else build(job, None)[0].state_dict()
    result: dict[str, Any] = {
        "tensors": len(state),
        "placements": placements(state),
        "casts": casts,
        "differ": [n for n, v in model.state_dict().items() if not torch.equal(whole(v), expected[n])],
    }
    if right is not None and job.logits:
        vocab = right.config.vocab_size
        tokens = torch.randint(3, vocab, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = (whole(m(input_ids=tokens, use_cache=False).logits) for m in (model, right))
        result["logits"] = float((ours - theirs).abs().max())
        result["scale"] = float(theirs.abs().max())
    return result


def fill_with_ours(model: nn.Module, job: Job) -> None:
    from areal_convert.converter.loading import load_into
    from areal_convert.converter.mesh import Mesh
    from areal_convert.converter.opening import open_checkpoint

    sizes = job.mesh
    mesh = Mesh(dp_shard=sizes.dp, tp=sizes.tp, ep=sizes.ep, etp=sizes.etp if sizes.ep > 1 else None)
    load_into(open_checkpoint(job.dir), model, mesh, rank=dist.get_rank())


def nest(path: str, value: Any) -> dict[str, Any]:
    """`nest("app.model", x)` is `{"app": {"model": x}}`; with no path, `x`."""
    for step in reversed(path.split(".") if path else []):
        value = {step: value}
    return value


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    both = {k: merge(a[k], b[k]) if isinstance(a.get(k), dict) else b[k] for k in b}
    return {**a, **both}


class App(Stateful):
    """torch's DCP tutorial wraps model and optimizer like this."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def save(job: Job) -> dict[str, Any]:
    """`dcp.save` of the right weights as a trainer does it, with what else a trainer has in the same state dict."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, tied = build(job, None)
    for pattern, value in job.set.items():
        for name, parameter in model.named_parameters():
            if re.search(pattern, name):
                parameter.data.fill_(value)
    layers: Any = model.model.layers if job.naming == "hf" else model.layers
    compiled: Any = functools.partial(torch.compile, backend="eager")  # nothing runs: inductor need not be imported
    wrappers = {"compile_layers": compiled, "checkpoint_layers": checkpoint_wrapper}
    if job.wrap in wrappers:
        for name, layer in list(layers.named_children()):
            layers.register_module(name, wrappers[job.wrap](layer))
    if job.wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        distribute(model, job, tied)
    if job.wrap == "compile":
        model = compiled(model)
    state = dict(model.state_dict())
    if job.wrap == "checkpoint_layers":  # its own state_dict() hides the wrapper
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
        state = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    full = nest(job.state, state)
    if job.optimizer:
        full = merge(full, nest(job.optimizer, optimizer_state(model, job)))
        full = merge(full, {"rng_state": torch.get_rng_state(), "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}})
    if job.state.startswith("app."):
        full["app"] = App(full["app"])
    Path(job.dir).mkdir(parents=True, exist_ok=True)
    if job.writer == "hf":
        dcp.save(full, storage_writer=dcp.HuggingFaceStorageWriter(job.dir, save_distributed=True))
    else:
        dcp.save(full, checkpoint_id=job.dir)
    return {"names": sorted(state), "placements": placements(state)}


def optimizer_state(model: nn.Module, job: Job) -> dict[str, Any]:
    """AdamW's state after a step that moves no weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if job.raw:
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=job.flat))


def places(job: Job) -> dict[str, Any]:
    """Which elements of every tensor this rank really holds, and what DTensor says about it."""
    from safetensors.torch import save_file

    model, tied = build(job, codes)
    distribute(model, job, tied)
    state = model.state_dict()
    said: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            said[name] = {"shape": shape, "offset": offset, "placements": str(value.placements)}
    Path(job.dir).mkdir(parents=True, exist_ok=True)
    held = {name: local(value).to(torch.int32).contiguous() for name, value in state.items()}
    save_file(
        {name: value.clone() for name, value in held.items()}, Path(job.dir) / f"rank{dist.get_rank()}.safetensors"
    )
    return {"shapes": {name: list(value.shape) for name, value in state.items()}, "said": said}


TASKS: dict[str, Callable[[Job], dict[str, Any]]] = {"load": load, "save": save, "places": places}


# ------------------------------------------------------------------------------------------------ processes


def run_rank(job: Job, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if job.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.mesh.world)
    else:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.mesh.world)
    result = TASKS[job.task](job)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if job.backend != "fake":
        dist.barrier()
    dist.destroy_process_group()


def child(job: Job, rank: int, folder: Path) -> None:
    try:
        run_rank(job, rank, folder)
    except BaseException as error:
        text = str(error) if isinstance(error, Refused) else traceback.format_exc()
        sys.stderr.write(f"[rank {rank}] {text}\n")
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: gloo's threads may still be in it


def run_job(job: Job, folder: Path) -> list[Any] | None:
    """Fork a process for each rank; when one fails, end the others (they would wait for it)."""
    folder.mkdir(parents=True)
    try:
        hf_reference(job)
    except Exception:
        traceback.print_exc()
        return None
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=child, args=(job, rank, folder)) for rank in range(job.mesh.world)]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            time.sleep(1)  # let the others say what they saw
            for process in ranks:
                process.kill()
        time.sleep(0.01)
    if any(process.exitcode for process in ranks):
        return None
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.mesh.world)]


def main() -> None:
    # Whatever the ranks would import each for itself.
    import torch.distributed.checkpoint._fsspec_filesystem
    import torch.testing._internal.distributed.fake_pg
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.compile(nn.Linear(1, 1), backend="eager")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    folder = Path(sys.argv[1])
    answers.write("ready\n")
    answers.flush()
    for number, line in enumerate(sys.stdin):
        found = run_job(Job.parse(json.loads(line)), folder / f"job{number}")
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
