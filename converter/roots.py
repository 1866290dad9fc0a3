"""Names as frameworks wrap them: `_orig_mod.` of torch.compile, FSDP's and DDP's segments, roots such as `model.`.

A wrapper's segment is removed wherever it stands. A root is removed when more of the names mean something without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})
"""torch.compile, FSDP1, activation checkpointing, FlatParameter wrapper."""

ROOTS = (
    "",
    "model.",
    "module.",
    "app.model.",
    "state_dict.",
    "dcp.model.",
    "app.",
    "model.module.",
    "model_state_dict.",
)
"""`model.`: accelerate and most scripts; `app.model.`: torch's DCP tutorial; `dcp.model.`: AReaL."""

GROUPS = {
    "optimizer": "optimizer state",
    "optim": "optimizer state",
    "optimizers": "optimizer state",
    "lr_scheduler": "learning-rate schedule",
    "opt_param_scheduler": "learning-rate schedule",
    "scheduler": "learning-rate schedule",
    "rng_state": "random-number state",
    "rng": "random-number state",
    "dataloader": "data position",
    "train_state": "trainer's counters",
    "trainer_extra": "what a trainer keeps beside the model",
    "rerun_state_machine": "trainer's counters",
    "common_state": "Megatron's common state",
    "chained_0": "optimizer state",
    "chained_1": "optimizer state",
}
"""First segments of what a training checkpoint holds beside weights: reported as a group, never in the way."""


def unwrap(name: str) -> str:
    """The name without wrappers' segments.

    >>> unwrap("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    if "_" not in name and not name.startswith("module."):
        return name
    parts = [p for p in name.split(".") if p not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def best_root(names: Iterable[str], known: Callable[[str], bool]) -> str:
    """The root under which most of the (unwrapped) names are known; the shortest of equals."""
    names = list(names)
    scores = {root: sum(known(n.removeprefix(root)) for n in names if n.startswith(root)) for root in ROOTS}
    return max(scores, key=lambda root: (scores[root], -len(root)))


def group_of(name: str) -> str | None:
    """What a name that is no weight belongs to, or None."""
    for segment in name.split("/")[0].split(".")[:3]:
        if segment in GROUPS:
            return GROUPS[segment]
    if "_extra_state" in name:
        return "extra states (Transformer Engine's FP8 bookkeeping)"
    return None
