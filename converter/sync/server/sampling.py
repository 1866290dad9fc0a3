"""From logits to tokens. Every row is drawn from a generator of its own: who else is in the batch changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .sequences import Chosen, Sampling, Sequence_

if TYPE_CHECKING:
    import torch


COLDEST = 1e-5
"""Below it a temperature is 0: dividing by less would leave the numbers of fp32, and fail the whole batch."""


def choose(
    sequences: Sequence[Sequence_], logits: torch.Tensor, eos: Sequence[int] = ()
) -> list[tuple[int, Chosen | None]]:
    """The next token of every sequence (logits: rows × vocabulary), with its log-probability where it was asked for."""
    logits = logits.float()
    greedy = logits.argmax(-1).tolist()
    found: list[tuple[int, Chosen | None]] = []
    for row, sequence in enumerate(sequences):
        how = sequence.sampling
        own = logits[row]
        scores = _adjusted(sequence, own, eos)
        if how.temperature < COLDEST:
            token = greedy[row] if scores is own else int(scores.argmax())
        else:
            token = _draw(sequence, scores)
        chosen = None
        if how.top_logprobs is not None:
            chosen = chosen_of(own, token, how.top_logprobs)
        found.append((token, chosen))
    return found


def _adjusted(sequence: Sequence_, logits: torch.Tensor, eos: Sequence[int]) -> torch.Tensor:
    """Penalties for tokens that came before, and no end before `min_tokens`; the row itself where there is neither."""
    how = sequence.sampling
    held = [*eos, *how.stop_ids] if len(sequence.out) < how.min_tokens else []
    if not (how.presence or how.frequency or held):
        return logits
    logits = logits.clone()
    if how.presence or how.frequency:
        for token, count in Counter(sequence.out).items():
            logits[token] -= how.presence + how.frequency * count
    if held:
        logits[held] = float("-inf")
    return logits


def _draw(sequence: Sequence_, logits: torch.Tensor) -> int:
    """Temperature, then top-k, top-p and min-p, as transformers orders them; then one draw."""
    import torch

    how = sequence.sampling
    scores = logits / how.temperature
    if 0 < how.top_k < scores.shape[-1]:
        least = torch.topk(scores, how.top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if how.top_p < 1:
        scores = _top_p(scores, how.top_p)
    if how.min_p > 0:
        shares = scores.softmax(-1)
        scores = scores.masked_fill(shares < how.min_p * shares.max(), float("-inf"))
    if sequence.generator is None:
        sequence.generator = torch.Generator(device=scores.device)
        if how.seed is None:
            sequence.generator.seed()
        else:
            sequence.generator.manual_seed((how.seed + sequence.index) & (2**63 - 1))
    return int(torch.multinomial(scores.softmax(-1), 1, generator=sequence.generator))


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Only the most likely tokens whose probabilities sum up to `top_p`; at least one."""
    values, order = scores.sort(descending=True)
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares
    drop = before >= top_p
    drop[0] = False
    return scores.masked_fill(drop.scatter(0, order, drop), float("-inf"))


def chosen_of(logits: torch.Tensor, token: int, top: int) -> Chosen:
    """A token's log-probability and rank, and the `top` most likely ones."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs[token]
    best: tuple[tuple[int, float], ...] = ()
    if top > 0:
        found = logprobs.topk(min(top, logprobs.shape[-1]))
        best = tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
    return Chosen(token, float(own), int((logprobs > own).sum()) + 1, best)


def prompt_chosen(logits: torch.Tensor, tokens: Sequence[int], sampling: Sampling) -> list[Chosen]:
    """For consecutive tokens of a prompt, each with the logits of the position before it."""
    return [chosen_of(logits[n], token, sampling.prompt_logprobs or 0) for n, token in enumerate(tokens)]
