"""Low-rank adapters by PEFT: put into a model, initialised alike on every layout, merged box by box.

PEFT's own layers do the work, `W x + (alpha / rank) · B A x`, so that what is trained here is what PEFT loads. The base
weights are frozen and stay in the checkpoint's element type; only A and B have gradients and optimizer states.
Files are `adapter_files`' business, tensor parallelism `fsdp.lora_styles`'.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..converter.checkpoint import Checkpoint
from ..converter.codecs import widest
from ..converter.dtypes import BY_NAME
from ..converter.errors import ConfigError, Problems
from ..converter.roots import unwrap
from .api.configs import TrainEngineConfig
from .sharded_optim import like, local
from .state.entries import Entry, pieces_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from .api.metas import SaveLoadMeta

ALL = "all-linear"
"""PEFT's word for every linear layer but the output layer; what no target at all means here."""

_ADAPTER = "default"
_BASE = ".base_layer."


@dataclass(frozen=True)
class Lora:
    """The adapters of one model. `config` is PEFT's LoraConfig, with its targets resolved."""

    model: nn.Module
    config: Any

    # -------------------------------------------------------------------------------------------- what there is

    def adapters(self) -> dict[str, nn.Parameter]:
        """`model.layers.0.self_attn.q_proj.lora_A.weight` → parameter; in the order of the model."""
        return {plain(n): p for n, p in self.model.named_parameters() if is_adapter(n)}

    def entries(self) -> dict[str, Entry]:
        """Which boxes of the whole adapters this rank holds, and where."""
        return {name: entry_of(name, parameter) for name, parameter in self.adapters().items()}

    def base(self) -> dict[str, Tensor]:
        """The frozen weights (and persistent buffers) under the names that they have without adapters."""
        state = self.model.state_dict()
        return {n.replace(_BASE, "."): value for n, value in state.items() if not is_adapter(n)}

    def layers(self) -> Iterator[tuple[str, Any]]:
        """(name, PEFT's layer) of every layer with an adapter."""
        for name, module in self.model.named_modules():
            if is_lora_layer(module):
                yield unwrap(name), module

    # -------------------------------------------------------------------------------------------- values

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """A as PEFT draws it (kaiming-uniform with a=√5: ±1/√inputs), B zero: at first the model is the base model.

        Each tensor is drawn whole from the seed and its name, and every rank takes what it holds.
        """
        for name, parameter in self.adapters().items():
            if ".lora_B." in name:
                local(parameter).zero_()
                continue
            bound = 1.0 / math.sqrt(parameter.shape[1])
            source = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=source)
            for box, region in entry_of(name, parameter).regions():
                region.copy_(whole[tuple(map(slice, box.lo, box.hi))])

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """`base()` with W + (alpha / rank) · B A in the place of every adapted W; the model itself is not changed.

        Collective. The sum is taken in fp32 and rounded once, to W's element type. Merged matrices lie in host memory,
        each rank's own boxes only; all others are the model's.
        """
        found = self.base()
        for name, layer in self.layers():
            weight, scale = layer.base_layer.weight, layer.scaling[_ADAPTER]
            a, b = (_whole(side[_ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
            copy = like(weight, local(weight.detach()).cpu().clone())
            for box, region in Entry(name, tuple(weight.shape), local(copy), pieces_of(weight)).regions():
                rows, columns = map(slice, box.lo, box.hi)
                region.copy_(region.float() + scale * (b[rows] @ a[:, columns]))
            found[f"{name}.weight"] = copy
        return found

    # -------------------------------------------------------------------------------------------- files

    def save(self, meta: SaveLoadMeta, group: dist.ProcessGroup | None = None) -> None:
        """In PEFT's form; see `adapter_files.save_adapter`."""
        from .adapter_files import save_adapter

        small = [saved for saved in (meta.tokenizer, meta.processor) if saved is not None]
        save_adapter(self, meta.path, group, base=meta.base_model_path or "", small=small)

    def load(self, path: str, group: dist.ProcessGroup | None = None) -> None:
        """From PEFT's form; see `adapter_files.load_adapter`."""
        from .adapter_files import load_adapter

        load_adapter(self, path, group)

    @staticmethod
    def is_saved_at(path: str) -> bool:
        """Whether there is an adapter (and not a model) in a directory."""
        from .adapter_files import is_adapter_directory

        return is_adapter_directory(path)


def inject(model: nn.Module, config: TrainEngineConfig, dtype: torch.dtype) -> Lora:
    """Put adapters of `dtype` into a model on the meta device, and freeze everything else.

    Raises ConfigError naming every target that is no linear layer of the model.
    """
    from peft import LoraConfig

    targets, layers = _targets(model, config.target_modules)
    peft = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    inject_into(model, peft, dtype)
    lora = Lora(model, peft)
    found = {name for name, _ in lora.layers()}
    if found != layers:
        odd = ", ".join(sorted(found ^ layers)[:4])
        raise ConfigError(f"PEFT gives adapters to other layers than target_modules names: {odd}.")
    return lora


def inject_into(model: nn.Module, peft: Any, dtype: torch.dtype) -> None:
    """Adapters of `dtype` as PEFT's config says (None: none here), and everything else frozen."""
    from peft import inject_adapter_in_model

    if peft is not None:
        with torch.device("meta"):
            inject_adapter_in_model(peft, model, _ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def base_dtype(checkpoint: Checkpoint, otherwise: torch.dtype) -> torch.dtype:
    """In which frozen weights are held: the type to which all of the checkpoint's widen without loss.

    Of a checkpoint in types that torch does not compute in (FP8): `otherwise`.
    """
    name = widest({slot.dtype for slots in checkpoint.slots.values() for slot in slots})
    found = getattr(torch, BY_NAME[name].torch, None)
    return found if found in (torch.bfloat16, torch.float16, torch.float32) else otherwise


def is_lora_layer(module: nn.Module) -> bool:
    """Whether a module is PEFT's layer around a linear one."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain(name: str) -> str:
    """Without wrappers' segments (`_orig_mod.`) and without the adapter's name: as PEFT's files have it."""
    return unwrap(name).replace(f".{_ADAPTER}.", ".")


def entry_of(name: str, parameter: Tensor) -> Entry:
    """Which boxes of an adapter this rank holds, and where."""
    return Entry(name, tuple(parameter.shape), local(parameter.detach()), pieces_of(parameter))


def _whole(parameter: Any) -> Tensor:
    """All of an adapter, in fp32, in host memory. Collective."""
    value = parameter.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).float().cpu()


def _targets(model: Any, wanted: list[str]) -> tuple[list[str] | str, set[str]]:
    """Targets as PEFT takes them, and the names of the layers that they mean.

    PEFT passes over a target that stands beside one that it finds: here it is an error. Of a mixture of experts only
    the attention gets adapters: PEFT takes `gate_proj` there for the stacked experts, wherever else it may stand.
    """
    names: dict[str, nn.Module] = dict(model.named_modules())
    sparse = any(hasattr(module, "experts") for module in names.values())
    linear = {n for n, m in names.items() if isinstance(m, nn.Linear) and not (sparse and ".mlp." in n)}
    head = model.get_output_embeddings()
    meant = {target: _matched(names, target) for target in wanted}
    if not wanted or wanted == [ALL]:
        linear -= {name for name in linear if names[name] is head}
        return (sorted(_leaves(linear)) if sparse else ALL), linear
    problems = Problems()
    tied = getattr(model.config, "tie_word_embeddings", False)
    for target, matched in meant.items():
        problem = ""
        if not matched:
            problem = f"no such layer in {type(model).__name__}"
        elif other := sorted(matched - linear):
            kind = type(names[other[0]]).__name__
            problem = f"{other[0]} is a {kind}, " + ("of a mixture of experts" if sparse else "no linear layer")
        elif tied and any(names[name] is head for name in matched):
            problem = "shares its weights with the embedding, which merging would change as well"
        if problem:
            note = " (experts are stacked tensors, which get no adapters)" if sparse else ""
            hint = f"there are: {', '.join(sorted(_leaves(linear)))}{note}"
            problems.add(f"target_modules: {target}", problem, hint)
    problems.raise_as(ConfigError, "The adapters do not fit the model:")
    return list(wanted), set().union(*meant.values())


def _matched(names: Iterable[str], target: str) -> set[str]:
    """As PEFT matches: the whole name, or its end."""
    return {name for name in names if name == target or name.endswith(f".{target}")}


def _leaves(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def adapter_fields(config: Any) -> Mapping[str, Any]:
    """adapter_config.json as plain data."""
    fields = {k: sorted(v) or None if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {**fields, "inference_mode": True}
