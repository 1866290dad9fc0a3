"""Sequences that one copy of the weights generates together, a token each at a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

from .cache import merge, new_cache, select
from .sampling import choose, prompt_chosen
from .sequences import Chosen, Sequence_

if TYPE_CHECKING:
    import torch

CHUNK = 512
"""Columns of a prompt that go through the model at once."""

FULL_CHUNK = 128
"""The same, where the logits of all positions are wanted (prompt logprobs): a row of these is the vocabulary."""

Picked = list[tuple[Sequence_, int, Chosen | None]]


@dataclass(eq=False)
class Copy:
    """One copy of the weights: a module, its version, and what to call when nobody needs it any more."""

    module: Any
    version: int
    root: str | None = None
    release: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Model:
    """What all copies have in common. `adapted` makes a context in which an adapter acts on them."""

    device: Any
    eos: tuple[int, ...] = ()
    cache_name: str = "past_key_values"
    adapted: Callable[[Any], AbstractContextManager[None]] = nullcontext

    def forward(self, copy: Copy, adapter: Any, **inputs: Any) -> Any:
        """A copy's output, with an adapter if one is given."""
        import torch

        inputs[self.cache_name] = inputs.pop("cache")
        with torch.inference_mode(), self.adapted(adapter):
            return copy.module(**inputs, use_cache=True)


def cache_name(module: Any) -> str:
    """What this transformers calls the cache."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


@dataclass(eq=False)
class Batch:
    """Rows of sequences over one cache. `mask` (rows × columns) is 0 where a shorter row is padded, on its left."""

    model: Model
    copy: Copy
    adapter: Any = None
    rows: list[Sequence_] = field(default_factory=list)
    cache: Any = None
    mask: torch.Tensor | None = None

    def start(self, sequences: Sequence[Sequence_]) -> Picked:
        """Take sequences in: run all of their tokens, choose the next one. Equal prompts are run once."""
        rows, places = _unique(sequences)
        prompts = [row.tokens for row in rows]
        cached, mask, last = self._prefill(rows, prompts)
        if len(sequences) != len(rows):
            import torch

            select(cached, places, 0)
            mask, last = mask[places], last[torch.tensor(places, device=last.device)]
            for sequence, place in zip(sequences, places, strict=True):
                sequence.prompt_chosen = list(rows[place].prompt_chosen)
        picked = self._pick(sequences, last)
        self._take_in(sequences, cached, mask)
        return picked

    def _prefill(self, rows: list[Sequence_], prompts: list[list[int]]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        import torch

        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        full = any(row.sampling.prompt_logprobs is not None and not row.prompt_chosen for row in rows)
        cached, logits, step = new_cache(), None, FULL_CHUNK if full else CHUNK
        for begin in range(0, width, step):
            end = min(width, begin + step)
            logits = self.model.forward(
                self.copy,
                self.adapter,
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                cache=cached,
                logits_to_keep=0 if full else 1,
            ).logits
            if full:
                _keep_prompt(rows, prompts, logits, begin, width)
        assert logits is not None
        return cached, mask, logits[:, -1]

    def _take_in(self, sequences: Sequence[Sequence_], cached: Any, mask: torch.Tensor) -> None:
        import torch

        if not self.rows or self.mask is None:
            self.rows, self.cache, self.mask = list(sequences), cached, mask
            return
        self.cache = merge(self.cache, cached)
        width = max(self.mask.shape[1], mask.shape[1])
        padded = [torch.nn.functional.pad(m, (width - m.shape[1], 0)) for m in (self.mask, mask)]
        self.mask = torch.cat(padded)
        self.rows = [*self.rows, *sequences]

    def step(self) -> Picked:
        """One more token for every row."""
        import torch

        assert self.mask is not None
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        logits = self.model.forward(
            self.copy,
            self.adapter,
            input_ids=torch.tensor([[row.out[-1]] for row in self.rows], device=self.model.device),
            attention_mask=self.mask,
            position_ids=torch.tensor([[row.length - 1] for row in self.rows], device=self.model.device),
            cache=self.cache,
        ).logits
        return self._pick(self.rows, logits[:, -1])

    def _pick(self, sequences: Sequence[Sequence_], logits: torch.Tensor) -> Picked:
        found = choose(sequences, logits, self.model.eos)
        return [(sequence, token, chosen) for sequence, (token, chosen) in zip(sequences, found, strict=True)]

    def drop_done(self) -> None:
        """Let go of the rows that are finished, and of columns that are padding in all that remain."""
        left = [n for n, row in enumerate(self.rows) if not row.done]
        if len(left) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in left]
        if not left or self.mask is None:
            self.cache = self.mask = None
            return
        mask = self.mask[left]
        skip = mask.shape[1] - int(mask.sum(-1).max())
        select(self.cache, left, skip)
        self.mask = mask[:, skip:]


def _unique(sequences: Sequence[Sequence_]) -> tuple[list[Sequence_], list[int]]:
    """One sequence for each different prompt, and which of them every sequence has."""
    seen: dict[Any, int] = {}
    rows: list[Sequence_] = []
    places = []
    for sequence in sequences:
        key = (tuple(sequence.tokens), sequence.sampling.prompt_logprobs)
        if key not in seen:
            seen[key] = len(rows)
            rows.append(sequence)
        places.append(seen[key])
    return rows, places


def _keep_prompt(rows: list[Sequence_], prompts: list[list[int]], logits: Any, begin: int, width: int) -> None:
    """Log-probabilities of prompt tokens from one chunk of columns: column c says what column c + 1 is."""
    for n, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        want = len(row.prompt) - 1 - len(row.prompt_chosen)
        if row.sampling.prompt_logprobs is None or want <= 0:
            continue
        pad = width - len(prompt)
        first = max(begin, pad)
        count = min(begin + logits.shape[1] - first, want)
        if count > 0:
            at = first - pad
            row.prompt_chosen += prompt_chosen(
                logits[n, first - begin :], prompt[at + 1 : at + 1 + count], row.sampling
            )
