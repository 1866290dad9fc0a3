"""Log-probability and entropy of every token from logits, a few rows at a time, with the vocabulary cut or whole.

The softmax is neither kept nor gathered: forward stores two numbers a row, backward makes the probabilities of a few
rows again. Under tensor parallelism every rank has its own columns; three numbers a row are reduced over the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CACHED = 1 << 17
"""Elements whose few temporaries fit into a core's own cache."""


@dataclass(frozen=True)
class Vocabulary:
    """Which columns of the logits are here: `size` of them from `start`, the rest on the other ranks of `group`.

    widest  columns of the rank that has most: by it, and not by their own, ranks know how many rows they take at a time
    """

    start: int = 0
    size: int = -1
    group: dist.ProcessGroup | None = None
    widest: int = 0


def next_tokens(input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The label of every position: the token behind it, inside its own sequence. (T,) → (T,).

    The last position of a sequence has none; it gets the first token of its sequence (as rolling does), and whatever
    is computed from it has to be masked: see `without_ends`.
    """
    labels = torch.empty_like(input_ids)
    labels[:-1] = input_ids[1:]
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    begins, ends = cu_seqlens[:-1][lengths > 0].long(), cu_seqlens[1:][lengths > 0].long()
    labels[ends - 1] = input_ids[begins]
    return labels


def without_ends(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`values` (T,) with 0 at the last position of every sequence: there is no token behind it."""
    inner = torch.ones_like(values, dtype=torch.bool)
    inner[cu_seqlens[1:].long() - 1] = False
    return torch.where(inner, values, torch.zeros_like(values))


def logprobs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of the distribution, in fp32.

    logits  (T, V), any floating type; V is this rank's part under tensor parallelism
    labels  (T,), numbers in the whole vocabulary
    chunk   rows whose probabilities are in memory at a time

    Returns (T,) and (T,).
    """
    vocabulary = vocabulary or Vocabulary()
    return _TokenLogprobs.apply(logits, labels, vocabulary, temperature, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = _rows(logits, vocabulary, chunk)
        found = [
            _forward_rows(x, y, vocabulary, temperature)
            for x, y in zip(logits.split(rows), labels.split(rows), strict=True)
        ]
        if not found:
            empty = logits.new_zeros(0, dtype=torch.float32)
            found = [(empty, empty, empty)]
        logprobs, entropies, log_z = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.set_materialize_grads(False)  # most losses leave the entropy alone: nothing is computed for it then
        ctx.save_for_backward(logits, labels, log_z, entropies)
        ctx.vocabulary, ctx.temperature, ctx.rows = vocabulary, temperature, rows
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, labels, log_z, entropies = ctx.saved_tensors
        by_logprob, by_entropy = grads
        result = torch.empty_like(logits)
        for begin in range(0, len(labels), ctx.rows):
            rows = slice(begin, begin + ctx.rows)
            log_p = _scaled(logits[rows], ctx.temperature) - log_z[rows, None]
            factor = torch.zeros_like(log_z[rows, None]) if by_logprob is None else -by_logprob[rows, None]
            if by_entropy is None:
                grad = log_p.exp_().mul_(factor)
            else:
                p = log_p.exp()
                grad = log_p.add_(entropies[rows, None]).mul_(-by_entropy[rows, None]).add_(factor).mul_(p)
            if by_logprob is not None:
                here, column = _columns(labels[rows], grad.shape[1], ctx.vocabulary)
                own = torch.where(here, by_logprob[rows], 0.0)
                grad.scatter_add_(1, column[:, None], own[:, None])
            result[rows] = grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)
        return result, None, None, None, None, None


def _rows(logits: Tensor, vocabulary: Vocabulary, chunk: int) -> int:
    """Rows at a time, the same number on all ranks of the group: on the CPU no more than stay in its cache from one
    pass to the next."""
    width = logits.shape[1] if vocabulary.group is None else vocabulary.widest
    if logits.device.type == "cpu" and width:
        chunk = min(chunk, _CACHED // width)
    return max(1, chunk)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _columns(labels: Tensor, width: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Whether a label's column is here, and which one it is (0 where it is not)."""
    column = labels - vocabulary.start
    size = width if vocabulary.size < 0 else vocabulary.size
    here = (column >= 0) & (column < size)
    return here, torch.where(here, column, 0)


def _forward_rows(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log p, entropy and log Z of some rows."""
    x = _scaled(logits, temperature)
    top = x.amax(-1)
    if vocabulary.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=vocabulary.group)
    here, column = _columns(labels, x.shape[1], vocabulary)
    own = torch.where(here, x.gather(1, column[:, None])[:, 0], 0.0)
    shifted = x - top[:, None]
    e = shifted.exp()
    packed = torch.stack([e.sum(-1), own, torch.linalg.vecdot(e, shifted)])
    if vocabulary.group is not None:
        dist.all_reduce(packed, group=vocabulary.group)
    z, own, weighted = packed.unbind(0)
    log_z = z.log() + top
    # Σ p·log p = Σ p·(x - top) - log Σ exp(x - top)
    return own - log_z, z.log() - weighted / z, log_z
