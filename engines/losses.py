"""Losses on packed 1-D tensors: supervised, and policy gradient with clipped ratios (PPO, GRPO and their kin).

A loss is called as `loss_fn(logprobs, entropy, input_data)` and gives the mean over its own weight; the weight comes
from a second function of the micro-batch. The engine multiplies, adds up over micro-batches and data-parallel ranks,
and divides by the total, so that the result does not depend on how a batch was cut.

`logprobs` (T,) and `entropy` (T,) stand at the position that predicts: at t the logprob of token t+1, 0 at the last
token of a sequence. Whatever the batch carries (`loss_mask`, `advantages`, `old_logprobs`, …) stands at the token
itself and is shifted here. Logprobs that `forward_batch` gave stand where they predict: `data.batches.unshift` brings
them to their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..converter.errors import ConfigError, Problems, SourceError
from .data.batches import shift

__all__ = [
    "PolicyLoss",
    "group_advantages",
    "interpolated_logprobs",
    "per_token",
    "sft_loss",
    "sft_weight",
    "target_mask",
]

Stats = dict[str, float]


def target_mask(input_data: Mapping[str, Any]) -> Tensor:
    """(T,) bool: where the model predicts a token that counts. The first token of a sequence is never predicted."""
    return shift(input_data["loss_mask"].bool(), input_data["cu_seqlens"])


# ------------------------------------------------------------------------------------------------ supervised


def sft_loss(logprobs: Tensor, entropy: Tensor | None, input_data: Mapping[str, Any], **_: Any) -> Tensor:
    """Mean negative logprob of the targets; 0, with a gradient of zeros, where there is none."""
    mask = target_mask(input_data)
    return -torch.where(mask, logprobs, 0.0).sum() / mask.sum().clamp(min=1)


def sft_weight(input_data: Mapping[str, Any]) -> Tensor:
    """The number of targets."""
    return target_mask(input_data).sum().float()


# ------------------------------------------------------------------------------------------------ advantages


def group_advantages(
    rewards: Tensor, group_size: int, *, scale: bool = True, leave_one_out: bool = False, eps: float = 1e-6
) -> Tensor:
    """(n,) → (n,): each reward against the others on the same prompt, which stand side by side.

    GRPO: minus the group's mean, divided by its standard deviation (n−1) where `scale`. `leave_one_out` compares with
    the mean of the others (RLOO). A group whose rewards are all equal gets zeros. Raises ConfigError.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ConfigError(
            f"{rewards.numel()} rewards do not divide into groups of {group_size}, which must have two or more members."
        )
    rows = rewards.float().view(-1, group_size)
    centred = rows - rows.mean(1, keepdim=True)
    if leave_one_out:
        centred = centred * (group_size / (group_size - 1))
    if scale:
        centred = centred / (rows.std(1, keepdim=True) + eps)
    return centred.view(-1)


def per_token(values: Tensor, input_data: Mapping[str, Any]) -> Tensor:
    """(n,) → (T,): the value of a sequence at each of its tokens."""
    return torch.repeat_interleave(values, input_data["cu_seqlens"].long().diff())


def interpolated_logprobs(old: Tensor, new: Tensor, versions: Tensor, current: int) -> Tensor:
    """(T,) logprobs under the policy one version before `current`, without a forward pass (AReaL's `loglinear`).

    `old` were made by the policy of version `versions` (−1: not generated), `new` by `current`. On the line between
    the two, at (current − 1 − v) / (current − v); a token of the current policy keeps its own.
    """
    age = (current - versions).float()
    alpha = torch.where((age > 0) & (versions >= 0), (age - 1) / age.clamp(min=1), torch.zeros_like(age))
    return old + alpha * (new.detach() - old)


# ------------------------------------------------------------------------------------------------ policy gradient


@dataclass
class PolicyLoss:
    """The clipped policy-gradient loss, with what has been added to it since.

    The batch carries `loss_mask`, `advantages` and `old_logprobs` (under the policy that generated) at every token;
    optionally `prox_logprobs` (under the policy that the ratio is clipped around: decoupled PPO), `ref_logprobs` for
    the KL term, `versions`. Without `prox_logprobs` the policy that generated is the one that is clipped around, or,
    when the batch has `versions` and `current_version`, a policy between the two (`interpolated_logprobs`).

    `normalization` "token": the mean over all tokens; "sequence": over each sequence, then over sequences.
    `ratio_level` "sequence" clips the geometric mean of a sequence's ratios (GSPO).
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    """Upper bound 1 + this, where it differs from the lower one (DAPO)."""
    dual_clip: float | None = None
    """Bounds the loss of a bad token at this × |advantage|; above 1."""
    behaviour_cap: float | None = None
    """Tokens whose weight prox/old is larger are left out."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    normalization: str = "token"
    ratio_level: str = "token"

    def __post_init__(self) -> None:
        problems = Problems()
        if not 0 < self.eps_clip < 1:
            problems.add("eps_clip", f"{self.eps_clip} is not between 0 and 1")
        if self.eps_clip_higher is not None and self.eps_clip_higher <= 0:
            problems.add("eps_clip_higher", f"{self.eps_clip_higher} is not positive")
        if self.dual_clip is not None and self.dual_clip <= 1:
            problems.add("dual_clip", f"{self.dual_clip} is not above 1")
        known = {
            "kl_estimator": ("k1", "k2", "k3"),
            "normalization": ("token", "sequence"),
            "ratio_level": ("token", "sequence"),
        }
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                problems.add(name, f"{getattr(self, name)!r} is none of {', '.join(choices)}")
        problems.raise_as(ConfigError, "This policy loss cannot be.")
        self.stats: Stats = {}
        """Of the last call: means over its targets."""

    def weight(self, input_data: Mapping[str, Any]) -> Tensor:
        """What `__call__` is the mean over: the number of targets, or of sequences that have one."""
        mask = target_mask(input_data)
        if self.normalization == "token":
            return mask.sum().float()
        return (_sums(mask.float(), input_data["cu_seqlens"]) > 0).sum().float()

    def __call__(self, logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], **_: Any) -> Tensor:
        """The loss of one micro-batch, a scalar. Raises SourceError when the batch lacks something."""
        needed = ["advantages", "old_logprobs", *(["ref_logprobs"] if self.kl_coef else [])]
        lacking = [name for name in needed if name not in input_data]
        if lacking:
            raise SourceError(f"The batch lacks {', '.join(lacking)}, which this policy loss needs.")
        cu, mask = input_data["cu_seqlens"], target_mask(input_data)
        advantages, old = (_masked(input_data, name, mask) for name in ("advantages", "old_logprobs"))
        near = self._proximal(logprobs, old, input_data, mask)
        ratio = self._ratio(logprobs, near, mask, cu)
        loss, clipped = self._clipped(ratio, advantages)
        weight, kept = self._behaviour(near, old, mask)
        loss = loss * weight
        if self.kl_coef:
            loss = loss + self.kl_coef * self._kl(logprobs, _masked(input_data, "ref_logprobs", mask))
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        with torch.no_grad():
            told = {"ratio": ratio, "clipped": clipped & kept, "kept": kept, "entropy": entropy}
            told["kl_old"] = old - logprobs
            count = mask.sum().clamp(min=1)
            self.stats = {
                name: (torch.where(mask, value.float(), 0.0).sum() / count).item() for name, value in told.items()
            }
        return self._mean(torch.where(mask, loss, 0.0), mask, cu)

    def _proximal(self, logprobs: Tensor, old: Tensor, input_data: Mapping[str, Any], mask: Tensor) -> Tensor:
        if "prox_logprobs" in input_data:
            return _masked(input_data, "prox_logprobs", mask)
        if "versions" in input_data and "current_version" in input_data:
            versions = shift(input_data["versions"], input_data["cu_seqlens"])
            return interpolated_logprobs(old, logprobs, versions, int(input_data["current_version"]))
        return old

    def _ratio(self, logprobs: Tensor, near: Tensor, mask: Tensor, cu: Tensor) -> Tensor:
        difference = torch.where(mask, logprobs - near, 0.0)
        if self.ratio_level == "token":
            return difference.exp()
        means = _sums(difference, cu) / _sums(mask.float(), cu).clamp(min=1)
        return torch.repeat_interleave(means, cu.long().diff()).exp()

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        high = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        free, bound = -advantages * ratio, -advantages * ratio.clamp(1 - self.eps_clip, 1 + high)
        loss = torch.maximum(free, bound)
        if self.dual_clip is not None:
            loss = torch.minimum(loss, self.dual_clip * advantages.abs())
        return loss, free < bound

    def _behaviour(self, near: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.where(mask, near - old, 0.0).exp()
        kept = mask if self.behaviour_cap is None else mask & (weight <= self.behaviour_cap)
        return torch.where(kept, weight, 0.0), kept

    def _kl(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        d = reference - logprobs
        if self.kl_estimator == "k1":
            return -d
        return d.square() / 2 if self.kl_estimator == "k2" else d.exp() - 1 - d

    def _mean(self, values: Tensor, mask: Tensor, cu: Tensor) -> Tensor:
        if self.normalization == "token":
            return values.sum() / mask.sum().clamp(min=1)
        counts = _sums(mask.float(), cu)
        return (_sums(values, cu) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def _masked(input_data: Mapping[str, Any], name: str, mask: Tensor) -> Tensor:
    """Values where their tokens are predicted, 0 where nothing is a target: an infinity there, times 0, is NaN in the
    backward pass."""
    return torch.where(mask, shift(input_data[name].float(), input_data["cu_seqlens"]), 0.0)


def _sums(values: Tensor, cu: Tensor) -> Tensor:
    """(T,) → (n,): the sum over each sequence."""
    n = len(cu) - 1
    owner = torch.repeat_interleave(torch.arange(n, device=values.device), cu.long().diff())
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add(0, owner, values)
