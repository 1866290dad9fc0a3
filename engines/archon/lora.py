"""Adapters of a decoder, whole or in stages: PEFT's layers under Archon's names, files and first values under PEFT's.

What is trained here goes on in another engine, and the other way round: `layers.0.attention.wq` is called
`model.layers.0.self_attn.q_proj` in files and states, as the family's table says. Of a mixture of experts only the
attention has adapters, as in the other engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...converter.errors import ConfigError, Problems
from ...converter.roots import unwrap
from ...mappings import table
from ..api.configs import TrainEngineConfig
from ..lora import ALL, Lora, inject_into, is_adapter, is_lora_layer, plain
from .model import Decoder

_WEIGHT = ".weight"


@dataclass(frozen=True)
class ArchonLora(Lora):
    """The adapters of this rank's stages. `called`: the name of an adapted module → what it is called in files."""

    called: Mapping[str, str]

    def _parts(self) -> Iterator[nn.Module]:
        yield from self.model.children()

    def adapters(self) -> dict[str, nn.Parameter]:
        found = {}
        for part in self._parts():
            for name, parameter in part.named_parameters():
                if is_adapter(name):
                    module, _, side = plain(name).rpartition(".lora_")
                    found[f"{self.called[module]}.lora_{side}"] = parameter
        return found

    def base(self) -> dict[str, Tensor]:
        return {name: value for part in self._parts() for name, value in Lora(part, self.config).base().items()}

    def layers(self) -> Iterator[tuple[str, Any]]:
        for part in self._parts():
            yield from Lora(part, self.config).layers()


def inject(parts: Sequence[Decoder], whole: Decoder, config: TrainEngineConfig, dtype: torch.dtype) -> ArchonLora:
    """Put adapters of `dtype` into this rank's stages, on the meta device, and freeze everything else.

    whole  the whole model on the meta device, without adapters: what there is to be adapted, the same on every rank

    Raises ConfigError naming every target that is no linear layer, or that gets no adapters here.
    """
    from peft import LoraConfig

    called = names_in_files(whole)
    targets, adapted = _targets(whole, called, config.target_modules)
    settings: dict[str, Any] = {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.path,
    }
    for part in parts:
        here = sorted(name for name, _ in part.named_modules() if name in adapted)
        inject_into(part, LoraConfig(target_modules=here, **settings) if here else None, dtype)
        found = {unwrap(name) for name, module in part.named_modules() if is_lora_layer(module)}
        if found != set(here):
            odd = ", ".join(sorted(found ^ set(here))[:4])
            raise ConfigError(f"PEFT gives adapters to other layers than target_modules names: {odd}.")
    peft = LoraConfig(target_modules=targets, **settings)
    return ArchonLora(nn.ModuleList(parts), peft, {name: called[name] for name in adapted})


def names_in_files(model: Decoder) -> dict[str, str]:
    """Module → what Hugging Face calls it, for every module that is one there."""
    known = table(model.args.family)
    theirs: dict[tuple[str, ...], str] = {}
    for row in known.hf:
        if row.name.endswith(_WEIGHT):
            theirs.setdefault(tuple(atom.name for atom in row.atoms), row.name.removesuffix(_WEIGHT))
    modules, found = dict(model.named_modules()), dict[str, str]()
    for row in known.archon:
        other = theirs.get(tuple(atom.name for atom in row.atoms))
        if other is None or "{e}" in other:
            continue
        ours = row.name.removesuffix(_WEIGHT)
        for layer in range(model.args.layers) if "{i}" in ours else (0,):
            name = ours.format(i=layer)
            if name in modules:
                found.setdefault(name, other.format(i=layer))
    return found


def _targets(whole: Decoder, called: Mapping[str, str], wanted: list[str]) -> tuple[list[str] | str, set[str]]:
    """Targets as PEFT takes them, and the modules that they mean. Everything that is wrong is told at once."""
    sparse, modules = any(whole.args.sparse), dict(whole.named_modules())
    linear = {name for name in called if isinstance(modules[name], nn.Linear)}
    if sparse:  # PEFT would take `gate_proj` for the stacked experts, wherever else it stands
        linear = {name for name in linear if ".attention." in name or "." not in name}
    head = "output"
    if not wanted or wanted == [ALL]:
        chosen = linear - {head}
        return (sorted({_leaf(called[name]) for name in chosen}) if sparse else ALL), chosen
    problems, chosen = Problems(), set[str]()
    for target in wanted:
        matched = {name for name, other in called.items() if other == target or other.endswith(f".{target}")}
        problem = ""
        if not matched:
            problem = f"no such layer in a {whole.args.family}"
        elif other := sorted(matched - linear):
            kind = type(modules[other[0]]).__name__
            what = "belongs to a mixture of experts" if sparse and kind == "Linear" else f"is a {kind}, no linear layer"
            problem = f"{called[other[0]]} {what}"
        elif whole.args.tied and head in matched:
            problem = "shares its weights with the embedding, which merging would change as well"
        if problem:
            note = " (experts are stacked tensors, which get no adapters)" if sparse else ""
            there = ", ".join(sorted({_leaf(called[name]) for name in linear}))
            problems.add(f"target_modules: {target}", problem, f"there are: {there}{note}")
        chosen |= matched
    problems.raise_as(ConfigError, "The adapters do not fit the model:")
    return list(wanted), chosen


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
