"""Log-probabilities and entropy of tokens: against torch's own, whole and with the vocabulary cut over ranks."""

from __future__ import annotations

import pytest
import torch

from areal_convert.engines.token_logprobs import Vocabulary, logprobs_and_entropy, next_tokens, without_ends
from engine_worker import run_ranks


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def sample(tokens: int = 11, vocabulary: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(tokens, vocabulary, generator=g)
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    return logits, labels, torch.randn(tokens, generator=g), torch.randn(tokens, generator=g)


@pytest.mark.parametrize("chunk", [1, 4, 11, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_torchs(chunk: int, temperature: float) -> None:
    logits, labels, weight, other = sample()
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = logprobs_and_entropy(mine, labels, temperature=temperature, chunk=chunk)
    expected = plain(theirs, labels, temperature)
    torch.testing.assert_close([x.double() for x in got], list(expected), rtol=1e-5, atol=1e-5)
    ((got[0] * weight).sum() + (got[1] * other).sum()).backward()
    ((expected[0] * weight).sum() + (expected[1] * other).sum()).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_only_what_the_loss_uses_gets_a_gradient() -> None:
    logits, labels, _, _ = sample()
    for which in (0, 1):
        mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        logprobs_and_entropy(mine, labels)[which].sum().backward()
        plain(theirs, labels, 1.0)[which].sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, labels, _, _ = sample(vocabulary=4000)
    got, _ = logprobs_and_entropy(logits.bfloat16(), labels)
    torch.testing.assert_close(got.double(), plain(logits.bfloat16(), labels, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_labels_stay_in_their_sequence() -> None:
    ids, cu = torch.tensor([10, 11, 12, 20, 30, 31]), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    labels = next_tokens(ids, cu)
    assert labels.tolist() == [11, 12, 10, 20, 31, 30]
    assert without_ends(labels, cu).tolist() == [11, 12, 0, 0, 31, 0]


def cut_vocabulary(size: int) -> list[torch.Tensor]:
    """Columns of the whole cut as torch.chunk cuts them; loss and gradient, the gradient put together again."""
    import torch.distributed as dist

    logits, labels, weight, other = sample(vocabulary=size)
    parts = logits.chunk(dist.get_world_size(), 1)
    rank = dist.get_rank()
    mine = parts[rank].clone().requires_grad_()
    where = Vocabulary(sum(p.shape[1] for p in parts[:rank]), mine.shape[1], dist.group.WORLD)
    got = logprobs_and_entropy(mine, labels, where, temperature=0.7, chunk=4)
    ((got[0] * weight).sum() + (got[1] * other).sum()).backward()
    assert mine.grad is not None
    return [got[0].detach(), got[1].detach(), mine.grad]


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [36, 37])
def test_a_cut_vocabulary_gives_the_same(size: int) -> None:
    found = run_ranks(2, cut_vocabulary, size=size)
    logits, labels, weight, other = sample(vocabulary=size)
    logits.requires_grad_()
    expected = plain(logits, labels, 0.7)
    ((expected[0] * weight).sum() + (expected[1] * other).sum()).backward()
    for logprobs, entropy, _ in found:
        torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([g for *_, g in found], 1), logits.grad, rtol=1e-5, atol=1e-6)
