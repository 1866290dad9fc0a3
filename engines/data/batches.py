"""Batches: many sequences in one row, cut into micro-batches and put back together.

A *packed batch* is a dict with `input_ids` (T,), `cu_seqlens` (n+1,) int32: where each of the n sequences begins, and
`max_seqlen`. Any other tensor with T in front has a value per token, one with n in front a value per sequence;
everything else (numbers, strings) belongs to the whole batch. A *padded batch* has `input_ids` (B, S) and
`attention_mask` (B, S), whose ones need not stand on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ...converter.errors import ConfigError, Problems, SourceError
from .packing import fewest_bins
from .packing import pack as pack_lengths

__all__ = [
    "Batch",
    "MicroBatches",
    "concatenate",
    "fewest",
    "from_sequences",
    "is_packed",
    "joined",
    "lengths",
    "pack",
    "pad_tokens",
    "position_ids",
    "select",
    "shift",
    "split",
    "split_into",
    "unpack",
    "unshift",
]

Batch = dict[str, Any]
STAND_IN = "stand_in"
"""The key of a micro-batch that is there for its collectives alone: none of its tokens is anybody's."""
Agree = Callable[[int], int]
"""Takes this rank's number, gives the largest of all data-parallel ranks."""


class Spec(Protocol):
    """What `split` reads of a MicroBatchSpec."""

    @property
    def n_mbs(self) -> int | None: ...
    @property
    def granularity(self) -> int: ...
    @property
    def max_tokens_per_mb(self) -> int | None: ...
    @property
    def n_mbs_divisor(self) -> int: ...
    @property
    def packing_algorithm(self) -> str: ...


# ------------------------------------------------------------------------------------------------ packed batches


def is_packed(batch: Mapping[str, Any]) -> bool:
    return "cu_seqlens" in batch


def lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each sequence of a packed batch."""
    return batch["cu_seqlens"].diff().tolist()


def cu_seqlens(lens: Sequence[int], device: torch.device | None = None) -> Tensor:
    """(n+1,) int32: 0, then where each sequence ends."""
    ends = torch.tensor([0, *lens], dtype=torch.int64, device=device).cumsum(0)
    return ends.to(torch.int32)


def from_sequences(ids: Sequence[Tensor], **per_token: Sequence[Tensor]) -> Batch:
    """A packed batch of sequences (each 1-D), with further per-token values given sequence by sequence.

    Raises SourceError when there is none, one is empty, or a value has another length than its sequence.
    """
    problems = Problems()
    if not ids:
        raise SourceError("A batch without a sequence.")
    for i, row in enumerate(ids):
        if row.numel() == 0:
            problems.add(f"sequence {i}", "is empty")
        for name, rows in per_token.items():
            if len(rows) != len(ids) or rows[i].shape[0] != row.shape[0]:
                problems.add(f"sequence {i}", f"{name} does not have the {row.shape[0]} values of input_ids")
    problems.raise_as(SourceError, "These sequences make no batch.")
    lens = [row.shape[0] for row in ids]
    batch: Batch = {"input_ids": torch.cat(list(ids)), "cu_seqlens": cu_seqlens(lens), "max_seqlen": max(lens)}
    return batch | {name: torch.cat(list(rows)) for name, rows in per_token.items()}


def position_ids(batch: Mapping[str, Any]) -> Tensor:
    """(T,): 0, 1, 2, … anew in every sequence."""
    cu = batch["cu_seqlens"].long()
    count = torch.arange(int(cu[-1]), device=cu.device)
    return count - torch.repeat_interleave(cu[:-1], cu.diff())


def shift(values: Tensor, cu: Tensor) -> Tensor:
    """(T,) → (T,): at t the value of token t+1 of the same sequence; 0 at the last token of each.

    It brings what stands at a token (its mask, advantage, old logprob) to where the model predicts that token.
    """
    moved = torch.roll(values, -1, 0)
    moved[cu[1:].long() - 1] = 0
    return moved


def unshift(values: Tensor, cu: Tensor) -> Tensor:
    """The inverse: logprobs as an engine gives them, each at the token that it is the logprob of; 0 at the first."""
    moved = torch.roll(values, 1, 0)
    moved[cu[:-1].long()] = 0
    return moved


def _kind(value: Any, tokens: int, sequences: int) -> str:
    """`token`, `sequence` or `batch`. Where every sequence has one token both are the same."""
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape[0] == tokens:
            return "token"
        if value.shape[0] == sequences:
            return "sequence"
    return "batch"


def select(batch: Mapping[str, Any], which: Sequence[int]) -> Batch:
    """Those sequences of a packed batch, in the order given."""
    cu = batch["cu_seqlens"]
    bounds = cu.tolist()
    sequences, tokens = len(bounds) - 1, bounds[-1]
    spans = [slice(bounds[i], bounds[i + 1]) for i in which]
    lens = [span.stop - span.start for span in spans]
    chosen: Batch = {"cu_seqlens": cu_seqlens(lens, cu.device), "max_seqlen": max(lens, default=0)}
    index = torch.tensor(list(which), dtype=torch.long, device=cu.device)
    for name, value in batch.items():
        if name in chosen:
            continue
        kind = _kind(value, tokens, sequences)
        if kind == "token":
            value = torch.cat([value[span] for span in spans]) if spans else value[:0]
        elif kind == "sequence":
            value = value[index]
        chosen[name] = value
    return chosen


def joined(batches: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Batch:
    """One packed batch of a batch or of several, packed or padded. Raises SourceError as `pack` and `concatenate`."""
    return pack(batches) if isinstance(batches, Mapping) else concatenate([pack(batch) for batch in batches])


def concatenate(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """One packed batch of several with the same keys; what belongs to the whole batch comes from the first."""
    if not batches:
        raise SourceError("There is no batch: an empty list was given.")
    first = batches[0]
    lens = [n for batch in batches for n in lengths(batch)]
    whole: Batch = {"cu_seqlens": cu_seqlens(lens, first["cu_seqlens"].device), "max_seqlen": max(lens)}
    sizes = [(int(b["cu_seqlens"][-1]), len(b["cu_seqlens"]) - 1) for b in batches]
    for name, value in first.items():
        if name in whole:
            continue
        kinds = {_kind(b[name], *size) for b, size in zip(batches, sizes, strict=True)}
        whole[name] = value if kinds == {"batch"} else torch.cat([b[name] for b in batches])
    return whole


def pad_tokens(batch: Mapping[str, Any], total: int, pad_id: int = 0) -> Batch:
    """The batch with one more sequence of `pad_id` that fills it up to `total` tokens; nothing of it is a target.

    Per-token values there are 0, per-sequence values too. Unchanged when it has `total` tokens already; ConfigError
    when it has more.
    """
    cu = batch["cu_seqlens"]
    tokens, sequences = int(cu[-1]), len(cu) - 1
    missing = total - tokens
    if missing < 0:
        raise ConfigError(f"A micro-batch of {tokens} tokens cannot be padded to {total}.")
    if missing == 0:
        return dict(batch)
    padded: Batch = {}
    for name, value in batch.items():
        kind = _kind(value, tokens, sequences)
        if kind != "batch" and name != "cu_seqlens":
            rows = missing if kind == "token" else 1
            fill = value.new_full((rows, *value.shape[1:]), pad_id if name == "input_ids" else 0)
            value = torch.cat([value, fill])
        padded[name] = value
    padded["cu_seqlens"] = torch.cat([cu, cu.new_tensor([total])])
    padded["max_seqlen"] = max(int(batch["max_seqlen"]), missing)
    return padded


# ------------------------------------------------------------------------------------------------ padded batches


def pack(batch: Mapping[str, Any]) -> Batch:
    """A padded batch as a packed one; a packed one as it is. Tensors (B, S, …) lose their padding.

    Raises SourceError when `input_ids` is not (B, S), or a row is padding from end to end; of a packed batch, when
    `cu_seqlens` does not say where its sequences are; of either, when a mask has another shape.
    """
    ids = batch.get("input_ids")
    if is_packed(batch):
        _check_bounds(ids, batch["cu_seqlens"])
        _check_mask(batch, (int(batch["cu_seqlens"][-1]),))
        return dict(batch)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise SourceError(
            f"input_ids: expected (batch, length), or (tokens,) with cu_seqlens; found {found}.",
            hint="Give attention_mask with padded batches, cu_seqlens with packed ones.",
        )
    _check_mask(batch, tuple(ids.shape))
    mask = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
    lens: list[int] = mask.sum(1).tolist()
    empty = [i for i, n in enumerate(lens) if n == 0]
    if empty:
        raise SourceError(f"attention_mask: rows {empty[:20]} are padding from end to end.")
    packed: Batch = {"cu_seqlens": cu_seqlens(lens, ids.device), "max_seqlen": max(lens)}
    for name, value in batch.items():
        if name == "attention_mask":
            continue
        per_token = isinstance(value, Tensor) and value.shape[:2] == ids.shape
        packed[name] = value[mask] if per_token else value
    return packed


def _check_bounds(ids: Any, cu: Tensor) -> None:
    bounds: list[int] = cu.tolist()
    found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
    if found != (bounds[-1],):
        raise SourceError(f"cu_seqlens ends at {bounds[-1]}, and input_ids is {found}, expected ({bounds[-1]},).")
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise SourceError(f"cu_seqlens is {bounds[:20]}, expected 0 first, and every sequence with a token at least.")


def _check_mask(batch: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """A mask of another length would be taken for something that belongs to the whole batch."""
    for name in ("attention_mask", "loss_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) != shape:
            raise SourceError(f"{name}: expected {shape}, a value for each of input_ids; found {tuple(mask.shape)}.")


def unpack(batch: Mapping[str, Any], pad_id: int = 0) -> Batch:
    """A packed batch padded on the right: (T, …) → (n, max_seqlen, …), with `attention_mask`."""
    lens = lengths(batch)
    width, sequences, tokens = max(lens), len(lens), sum(lens)
    cu = batch["cu_seqlens"]
    mask = torch.arange(width, device=cu.device)[None, :] < cu.diff()[:, None]
    padded: Batch = {"attention_mask": mask}
    for name, value in batch.items():
        if name in ("cu_seqlens", "max_seqlen"):
            continue
        if _kind(value, tokens, sequences) == "token":
            rows = value.new_full((sequences, width, *value.shape[1:]), pad_id if name == "input_ids" else 0)
            rows[mask] = value
            value = rows
        padded[name] = value
    return padded


# ------------------------------------------------------------------------------------------------ micro-batches


@dataclass(frozen=True)
class MicroBatches:
    """A packed batch in parts. `order[i]` lists the sequences of part i by their place in the whole.

    Every data-parallel rank has the same number of parts, since their collectives meet. A rank with too few sequences
    gets stand-ins at the end: one token that is nobody's target, in `order` an empty list.
    """

    parts: list[Batch]
    order: list[list[int]]

    def __len__(self) -> int:
        return len(self.parts)

    def restore(self, outputs: Sequence[Tensor]) -> Tensor:
        """Per-token outputs (T_i, …) of the parts as one (T, …) in the order of the whole batch. What was computed for
        padding at the end of a part, and for stand-ins, is dropped."""
        rows: dict[int, Tensor] = {}
        for part, items, output in zip(self.parts, self.order, outputs, strict=True):
            bounds = part["cu_seqlens"].tolist()
            for place, item in enumerate(items):
                rows[item] = output[bounds[place] : bounds[place + 1]]
        return torch.cat([rows[i] for i in sorted(rows)])


def split(batch: Mapping[str, Any], spec: Spec, agree: Agree | None = None) -> MicroBatches:
    """Cut a packed or padded batch into micro-batches.

    `granularity` neighbours stay together; no part has more than `max_tokens_per_mb` tokens; there are at least
    `n_mbs`, a multiple of `n_mbs_divisor`, and as many as on the rank that needs most (`agree`).
    Raises ConfigError when the groups do not come out even, or one does not fit.
    """
    packed = pack(batch)
    wanted = fewest(packed, spec)
    return split_into(packed, spec, agree(wanted) if agree else wanted)


def fewest(batch: Mapping[str, Any], spec: Spec) -> int:
    """How many micro-batches a packed batch needs by itself. Raises ConfigError as `split`."""
    return fewest_bins(_groups(batch, spec), spec.max_tokens_per_mb, spec.n_mbs or 1)


def split_into(batch: Mapping[str, Any], spec: Spec, number: int) -> MicroBatches:
    """A packed batch in at least so many micro-batches, which are not fewer than `fewest`, and fewer than
    `n_mbs_divisor` more."""
    size, divisor = spec.granularity, max(spec.n_mbs_divisor, 1)
    count = -(-number // divisor) * divisor
    bins = pack_lengths(_groups(batch, spec), spec.max_tokens_per_mb, count, spec.packing_algorithm)
    order = [[g * size + k for g in items for k in range(size)] for items in bins]
    parts = [select(batch, items) if items else _stand_in(batch) for items in order]
    return MicroBatches(parts, order)


def _groups(batch: Mapping[str, Any], spec: Spec) -> list[int]:
    """Tokens of every group of neighbours that stay together."""
    lens = lengths(batch)
    size = spec.granularity
    if size < 1 or len(lens) % size:
        raise ConfigError(
            f"{len(lens)} sequences do not divide into groups of mb_spec.granularity={size}.",
            hint="Give each data-parallel rank a multiple of the granularity.",
        )
    return [sum(lens[i : i + size]) for i in range(0, len(lens), size)]


def _stand_in(batch: Mapping[str, Any]) -> Batch:
    """The first token of the batch, as a sequence whose every mask and value is 0; it says so (`STAND_IN`)."""
    cu = batch["cu_seqlens"]
    tokens, sequences = int(cu[-1]), len(cu) - 1
    one: Batch = {}
    for name, value in batch.items():
        kind = _kind(value, tokens, sequences)
        if name == "input_ids":
            value = value[:1]
        elif kind != "batch":
            value = torch.zeros_like(value[:1])
        one[name] = value
    return one | {"cu_seqlens": cu_seqlens([1], cu.device), "max_seqlen": 1, STAND_IN: True}
