"""Packing lengths into bins, and batches into micro-batches and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.data import batches
from areal_convert.engines.data.packing import fewest_bins, first_fit_decreasing, karmarkar_karp, pack


@dataclass
class Spec:
    n_mbs: int | None = 1
    granularity: int = 1
    max_tokens_per_mb: int | None = None
    n_mbs_divisor: int = 1
    packing_algorithm: str = "ffd"


def sums(lengths: list[int], bins: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in items) for items in bins]


# ------------------------------------------------------------------------------------------------ packing


def test_first_fit_decreasing_by_hand() -> None:
    # 7 | 6 4 would be opened by 7, 6; 4 goes to 6, 3 to 7, 2 nowhere but into a third.
    assert first_fit_decreasing([4, 7, 3, 6, 2], 10) == [[1, 2], [0, 3], [4]]


def test_karmarkar_karp_by_hand() -> None:
    # Differencing 8 7 6 5 4 in two: 8-7=1, 6-5=1, 4-1=3, 3-1=2; the sums are 16 and 14.
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, karmarkar_karp(lengths, 2))) == [14, 16]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(50, 120) | st.none(),
    st.integers(1, 6),
    st.sampled_from(["ffd", "kk"]),
)
def test_every_item_is_in_one_bin_and_no_bin_too_full(
    lengths: list[int], limit: int | None, more: int, algorithm: str
) -> None:
    count = fewest_bins(lengths, limit) + more
    bins = pack(lengths, limit, count, algorithm)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert len(bins) == count
    assert sum(1 for items in bins if items) == min(count, len(lengths)), "an empty bin where one could have been split"
    assert limit is None or max(sums(lengths, bins)) <= limit
    assert bins == sorted(bins, key=lambda items: items or [len(lengths)]), "empty bins stand last"


def test_kk_balances_better_than_ffd() -> None:
    lengths = torch.randint(10, 500, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    count = fewest_bins(lengths, 2048)
    spread = {a: max(s) - min(s) for a in ("ffd", "kk") for s in [sums(lengths, pack(lengths, 3000, count + 1, a))]}
    assert spread["kk"] <= 10 < spread["ffd"], spread


def test_all_items_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="2 of 3 sequences do not fit a micro-batch of 10 tokens") as error:
        fewest_bins([11, 4, 12], 10)
    assert [p.about for p in error.value.problems] == ["sequence 0", "sequence 2"]
    with pytest.raises(ConfigError, match="packing_algorithm is 'best'"):
        pack([1], 10, 1, "best")


# ------------------------------------------------------------------------------------------------ packed and padded


def batch(lengths: list[int], **more: Any) -> batches.Batch:
    """Values that name their origin: token t of sequence s is 100·s + t."""
    rows = [torch.arange(n) + 100 * s for s, n in enumerate(lengths)]
    made = batches.from_sequences(rows, loss_mask=[row % 2 == 0 for row in rows])
    return made | {"reward": torch.arange(len(lengths)) * 1.5, "current_version": 7} | more


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype if torch.is_tensor(a[k]) else a[k] == b[k] for k in a
    )


def test_padded_and_packed_are_the_same_batch() -> None:
    packed = batch([3, 1, 4])
    padded = batches.unpack(packed, pad_id=9)
    assert padded["input_ids"].tolist() == [[0, 1, 2, 9], [100, 9, 9, 9], [200, 201, 202, 203]]
    assert padded["attention_mask"].sum(1).tolist() == [3, 1, 4]
    assert same(batches.pack(padded), packed)


def test_left_padding_is_taken_away_too() -> None:
    left = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    packed = batches.pack(left)
    assert packed["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert packed["cu_seqlens"].tolist() == [0, 2, 5] and packed["cu_seqlens"].dtype == torch.int32


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(SourceError, match=r"input_ids: expected \(batch, length\).*found \(5,\)"):
        batches.pack({"input_ids": torch.arange(5)})
    with pytest.raises(SourceError, match=r"rows \[1\] are padding"):
        batches.pack({"input_ids": torch.ones(2, 2), "attention_mask": torch.tensor([[1, 1], [0, 0]])})
    with pytest.raises(SourceError, match="loss_mask does not have the 3 values"):
        batches.from_sequences([torch.arange(3)], loss_mask=[torch.ones(2)])
    with pytest.raises(SourceError, match="without a sequence"):
        batches.from_sequences([])


def test_shifting_stays_inside_sequences() -> None:
    packed = batch([3, 1, 2])
    cu = packed["cu_seqlens"]
    assert batches.shift(packed["input_ids"], cu).tolist() == [1, 2, 0, 0, 201, 0]
    assert batches.unshift(batches.shift(packed["input_ids"], cu), cu).tolist() == [0, 1, 2, 0, 0, 201]
    assert batches.position_ids(packed).tolist() == [0, 1, 2, 0, 0, 1]


def test_padding_tokens_are_a_sequence_that_nobody_learns() -> None:
    packed = batch([3, 2])
    padded = batches.pad_tokens(packed, 9, pad_id=5)
    assert padded["cu_seqlens"].tolist() == [0, 3, 5, 9]
    assert padded["input_ids"][5:].tolist() == [5] * 4 and not padded["loss_mask"][5:].any()
    assert padded["reward"].tolist() == [0, 1.5, 0] and padded["max_seqlen"] == 4
    assert same(batches.pad_tokens(packed, 5), packed)
    with pytest.raises(ConfigError, match="of 5 tokens cannot be padded to 4"):
        batches.pad_tokens(packed, 4)


# ------------------------------------------------------------------------------------------------ micro-batches


def test_concatenating_the_parts_in_order_gives_the_whole() -> None:
    whole = batch([5, 2, 7, 3, 4, 6])
    parts = batches.split(whole, Spec(max_tokens_per_mb=10))
    assert all(int(p["cu_seqlens"][-1]) <= 10 for p in parts.parts)
    joined = batches.concatenate(parts.parts)
    back = [i for items in parts.order for i in items]
    assert same(batches.select(joined, [back.index(i) for i in range(6)]), whole)
    assert torch.equal(parts.restore([p["input_ids"] for p in parts.parts]), whole["input_ids"])


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(30, 60) | st.none(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["ffd", "kk"]),
)
def test_outputs_come_back_in_order(
    lengths: list[int], limit: int | None, least: int, divisor: int, algorithm: str
) -> None:
    whole = batch(lengths)
    spec = Spec(least, 1, limit, divisor, algorithm)
    parts = batches.split(whole, spec)
    assert len(parts) >= least and len(parts) % divisor == 0
    outputs = [torch.cat([p["input_ids"] * 2, torch.full((3,), -1)]) for p in parts.parts]  # padding at the end
    assert torch.equal(parts.restore(outputs), whole["input_ids"] * 2)
    targets = sum(int(p["loss_mask"].sum()) for p in parts.parts)
    assert targets == int(whole["loss_mask"].sum()), "stand-ins have no targets"


def test_neighbours_stay_together() -> None:
    parts = batches.split(batch([4, 4, 1, 1, 3, 3]), Spec(granularity=2, max_tokens_per_mb=8))
    assert parts.order == [[0, 1], [2, 3, 4, 5]]
    with pytest.raises(ConfigError, match=r"5 sequences do not divide into groups of mb_spec\.granularity=2"):
        batches.split(batch([1] * 5), Spec(granularity=2))


def test_ranks_agree_on_the_number() -> None:
    """One rank has one short sequence, the other four long ones: both make four parts, three of them stand-ins."""
    asked = []

    def agree(mine: int) -> int:
        asked.append(mine)
        return 4

    few = batches.split(batch([3]), Spec(max_tokens_per_mb=10), agree)
    many = batches.split(batch([9, 9, 9, 9]), Spec(max_tokens_per_mb=10), agree)
    assert asked == [1, 4] and len(few) == len(many) == 4
    assert few.order == [[0], [], [], []]
    for stand_in in few.parts[1:]:
        assert stand_in["input_ids"].numel() == 1 and not stand_in["loss_mask"].any()
        assert stand_in["cu_seqlens"].tolist() == [0, 1]
        assert stand_in.keys() == few.parts[0].keys() | {batches.STAND_IN}


def test_a_padded_batch_is_split_as_well() -> None:
    whole = batch([3, 5])
    assert same(batches.split(batches.unpack(whole), Spec()).parts[0], whole)
