"""Losses: by numbers computed by hand, and against the same formulas written plainly on padded tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.data import batches
from areal_convert.engines.losses import (
    PolicyLoss,
    group_advantages,
    interpolated_logprobs,
    per_token,
    sft_loss,
    sft_weight,
)


def make(lengths: list[int], seed: int = 0, **fields: Any) -> tuple[torch.Tensor, torch.Tensor, batches.Batch]:
    """Logprobs and entropy as an engine gives them, and a batch with everything a loss may want."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def rand() -> torch.Tensor:
        return -torch.rand(total, generator=g) * 2

    batch: batches.Batch = {
        "input_ids": torch.arange(total),
        "cu_seqlens": batches.cu_seqlens(lengths),
        "max_seqlen": max(lengths),
        "loss_mask": torch.rand(total, generator=g) > 0.3,
        "advantages": torch.randn(total, generator=g),
        "old_logprobs": rand(),
        "prox_logprobs": rand(),
        "ref_logprobs": rand(),
    }
    ends = batch["cu_seqlens"][1:].long() - 1
    logprobs, entropy = rand(), -rand()
    logprobs[ends] = entropy[ends] = 0
    return logprobs.requires_grad_(), entropy, batch | fields


# ------------------------------------------------------------------------------------------------ supervised


def test_sft_by_hand() -> None:
    """Two sequences; targets are tokens 1 and 2 of the first and 1 of the second: predicted at 0, 1 and at 3."""
    batch = {
        "loss_mask": torch.tensor([1, 1, 1, 0, 1]),  # the very first token cannot be a target
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    logprobs = torch.tensor([-1.0, -2.0, -50.0, -6.0, -70.0], requires_grad=True)
    loss = sft_loss(logprobs, None, batch)
    assert loss.item() == pytest.approx((1 + 2 + 6) / 3)
    assert sft_weight(batch).item() == 3
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0, -1 / 3, 0])


def test_sft_without_targets_is_zero_with_a_gradient() -> None:
    batch = {"loss_mask": torch.tensor([1]), "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
    logprobs = torch.zeros(1, requires_grad=True)
    loss = sft_loss(logprobs, None, batch)
    loss.backward()
    assert loss.item() == 0 == sft_weight(batch).item() and logprobs.grad is not None


def test_sft_equals_cross_entropy_of_a_padded_batch() -> None:
    lengths = [4, 7, 2]
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 11, (n,), generator=g) for n in lengths]
    batch = batches.from_sequences(rows, loss_mask=[torch.rand(n, generator=g) > 0.4 for n in lengths])
    logits = torch.randn(sum(lengths), 11, generator=g)
    labels = batches.shift(batch["input_ids"], batch["cu_seqlens"])
    logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    padded = batches.unpack(batch | {"logits": logits})
    target = padded["input_ids"].masked_fill(~padded["loss_mask"], -100)[:, 1:]
    expected = torch.nn.functional.cross_entropy(padded["logits"][:, :-1].transpose(1, 2), target, ignore_index=-100)
    assert sft_loss(logprobs, None, batch).item() == pytest.approx(expected.item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------ advantages


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    std = math.sqrt(4 * 0.25 / 3)
    got = group_advantages(rewards, 4, eps=0)
    assert got[:4].tolist() == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std])
    got = group_advantages(rewards, 4)
    assert got[4:].tolist() == [0, 0, 0, 0], "equal rewards say nothing"
    plain = group_advantages(rewards, 4, scale=False, leave_one_out=True)
    assert plain[:2].tolist() == pytest.approx([1 - 1 / 3, 0 - 2 / 3])
    with pytest.raises(ConfigError, match="8 rewards do not divide into groups of 3"):
        group_advantages(rewards, 3)


def test_values_of_sequences_at_their_tokens() -> None:
    _, _, batch = make([2, 1, 3])
    assert per_token(torch.tensor([1.0, 2.0, 3.0]), batch).tolist() == [1, 1, 2, 3, 3, 3]


def test_interpolation_by_version() -> None:
    """Current is 5, so the policy before is 4: a token of version 3 stands half-way, of 4 and 5 at the old value or
    near; a prompt (−1) keeps what it has."""
    old, new = torch.full((5,), -2.0), torch.full((5,), -1.0)
    versions = torch.tensor([3, 4, 5, 1, -1])
    got = interpolated_logprobs(old, new, versions, 5)
    assert got.tolist() == pytest.approx([-1.5, -2.0, -2.0, -2 + 3 / 4, -2.0])


# ------------------------------------------------------------------------------------------------ policy gradient


def one(ratio: float, advantage: float, **kinds: Any) -> float:
    """The loss of a single target with that ratio."""
    batch = {
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1]),
        "advantages": torch.tensor([0.0, advantage]),
        "old_logprobs": torch.tensor([0.0, -1.0]),
    }
    logprobs = torch.tensor([-1.0 + math.log(ratio), 0.0])
    return PolicyLoss(**kinds)(logprobs, torch.zeros(2), batch).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "kinds", "expected"),
    [
        (1.1, 2.0, {}, -2.2),  # inside the bounds
        (1.5, 2.0, {}, -2.4),  # too far up already: no more than 1.2 counts
        (0.5, 2.0, {}, -1.0),  # wrong way: counts in full
        (0.5, -2.0, {}, 1.6),
        (1.5, -2.0, {}, 3.0),
        (9.0, -2.0, {}, 18.0),
        (9.0, -2.0, {"dual_clip": 3.0}, 6.0),  # 3 × |−2|
        (9.0, 2.0, {"dual_clip": 3.0}, -2.4),
        (1.5, 2.0, {"eps_clip_higher": 0.4}, -2.8),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, kinds: dict[str, Any], expected: float) -> None:
    assert one(ratio, advantage, **kinds) == pytest.approx(expected, rel=1e-5)


def test_decoupled_by_hand() -> None:
    """Generated at p=e^-3, proximal e^-2, now e^-1.9: the ratio is against the proximal, weighted by e."""
    batch = {
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1]),
        "advantages": torch.tensor([0.0, 2.0]),
        "old_logprobs": torch.tensor([0.0, -3.0]),
        "prox_logprobs": torch.tensor([0.0, -2.0]),
    }
    logprobs, entropy = torch.tensor([-1.9, 0.0]), torch.zeros(2)
    loss = PolicyLoss()
    assert loss(logprobs, entropy, batch).item() == pytest.approx(-2 * math.exp(0.1) * math.e, rel=1e-5)
    assert loss.stats["ratio"] == pytest.approx(math.exp(0.1), rel=1e-5)
    assert PolicyLoss(behaviour_cap=2.0)(logprobs, entropy, batch).item() == 0, "e is above the cap"
    del batch["prox_logprobs"]
    old = batch | {"versions": torch.tensor([-1, 3]), "current_version": 5}
    near = -3 + 0.5 * (3 - 1.9)
    expected = -2 * min(math.exp(-1.9 - near), 1.2) * math.exp(near + 3)
    assert PolicyLoss()(logprobs, entropy, old).item() == pytest.approx(expected, rel=1e-5)


def plain(logprobs: Any, entropy: Any, batch: batches.Batch, o: PolicyLoss) -> Any:
    """The formulas once more, on padded tensors, without our shift: column t predicts token t+1."""
    p = batches.unpack(batch | {"lp": logprobs, "ent": entropy})
    lp, ent = p["lp"][:, :-1], p["ent"][:, :-1]
    mask, adv, old, ref = (p[k][:, 1:].float() for k in ("loss_mask", "advantages", "old_logprobs", "ref_logprobs"))
    prox = p["prox_logprobs"][:, 1:] if "prox_logprobs" in p else old
    n = mask.sum(1)
    delta = lp - prox
    if o.ratio_level == "sequence":
        delta = ((delta * mask).sum(1) / n.clamp(min=1))[:, None].expand_as(lp)
    ratio = delta.exp()
    high = o.eps_clip if o.eps_clip_higher is None else o.eps_clip_higher
    loss = -torch.min(ratio * adv, ratio.clip(1 - o.eps_clip, 1 + high) * adv)
    if o.dual_clip:
        loss = torch.where(adv < 0, torch.min(loss, -o.dual_clip * adv), loss)
    weight = (prox - old).exp()
    if o.behaviour_cap:
        weight = weight * (weight <= o.behaviour_cap)
    loss = loss * weight
    d = lp - ref
    loss = loss + o.kl_coef * {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}[o.kl_estimator]
    loss = (loss - o.entropy_coef * ent) * mask
    if o.normalization == "token":
        return loss.sum() / n.sum()
    return (loss.sum(1)[n > 0] / n[n > 0]).mean()


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"normalization": "sequence"},
        {"dual_clip": 3.0, "eps_clip_higher": 0.28, "behaviour_cap": 2.0},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_estimator": "k1", "normalization": "sequence"},
        {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01},
        {"ratio_level": "sequence", "normalization": "sequence"},
    ],
    ids=str,
)
@pytest.mark.parametrize("decoupled", [False, True])
def test_policy_loss_and_gradient_equal_the_plain_formulas(kinds: dict[str, Any], decoupled: bool) -> None:
    loss = PolicyLoss(**kinds)
    logprobs, entropy, batch = make([5, 1, 9, 3])
    batch["loss_mask"][15:] = False  # the last sequence has no target
    if not decoupled:
        del batch["prox_logprobs"]
    got, expected = loss(logprobs, entropy, batch), plain(logprobs, entropy, batch, loss)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    (a,), (b,) = torch.autograd.grad(got, logprobs), torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_micro_batches_weighted_add_up_to_the_whole(normalization: str) -> None:
    loss = PolicyLoss(normalization=normalization, kl_coef=0.1)
    logprobs, entropy, batch = make([5, 2, 9, 3, 4])
    full = batch | {"lp": logprobs.detach(), "ent": entropy}
    parts = [batches.select(full, which) for which in ([2, 0], [1, 3, 4])]
    total = sum(loss(p["lp"], p["ent"], p) * loss.weight(p) for p in parts) / sum(loss.weight(p) for p in parts)
    assert float(total) == pytest.approx(loss(logprobs, entropy, batch).item(), rel=1e-5)


def test_what_is_masked_cannot_spoil_the_gradient() -> None:
    logprobs, entropy, batch = make([6])
    batch["loss_mask"][3] = False
    for name in ("advantages", "old_logprobs", "prox_logprobs", "ref_logprobs"):
        batch[name][3] = math.inf
    (grad,) = torch.autograd.grad(PolicyLoss(kl_coef=0.1)(logprobs, entropy, batch), logprobs)
    assert grad.isfinite().all() and grad[2] == 0


def test_wrong_losses_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        PolicyLoss(eps_clip=0, dual_clip=0.5, kl_estimator="k4", normalization="none")
    assert {p.about for p in error.value.problems} == {"eps_clip", "dual_clip", "kl_estimator", "normalization"}
    logprobs, entropy, batch = make([3])
    del batch["advantages"], batch["ref_logprobs"]
    with pytest.raises(SourceError, match="lacks advantages, ref_logprobs"):
        PolicyLoss(kl_coef=0.1)(logprobs, entropy, batch)
