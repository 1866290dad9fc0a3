"""Allocation strings: AReaL's language, both ways, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from areal_convert.converter import ConfigError
from areal_convert.engines.api.allocation import ModelAllocation, parse_allocations
from areal_convert.engines.api.parallel import ParallelStrategy


def sizes(text: str) -> ParallelStrategy:
    return ModelAllocation.from_str(text).parallel


def test_sizes_of_a_backend() -> None:
    found = ModelAllocation.from_str("fsdp:d4t2")
    assert found == ModelAllocation("fsdp", ParallelStrategy(data_parallel_size=4, tensor_parallel_size=2))
    assert found.world_size == 8
    assert sizes("megatron:d4p2t2c2e4") == ParallelStrategy(
        data_parallel_size=4,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        context_parallel_size=2,
        expert_parallel_size=4,
    )
    assert sizes("archon:t2d4") == sizes("archon:d4t2") == sizes(" archon : d4 t2 ")
    assert sizes("fsdp:d8r2").dp_shard_size == 4


def test_attention_and_experts_on_two_grids() -> None:
    """The example of AReaL's documentation: 32 ranks."""
    found = sizes("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)")
    assert found == ParallelStrategy(
        data_parallel_size=4, pipeline_parallel_size=2, tensor_parallel_size=2, context_parallel_size=2,
        expert_parallel_size=2, expert_tensor_parallel_size=4,
    )  # fmt: skip
    assert found.world_size == 32 and found.expert_data_parallel_size == 2
    for same in ("(attn:d4p2t2c2|ffn:t4e2)", "attn:d4p2t2c2|ffn:t4e2", "(attn:d4p2t2c2|ffn:p2t4e2)"):
        assert sizes(f"megatron:{same}") == found
    assert sizes("archon:(attn:d1p12t4|ffn:d1p12e4)") == ParallelStrategy(
        pipeline_parallel_size=12, tensor_parallel_size=4, expert_parallel_size=4
    )


def test_inference_has_data_tensor_and_pipeline_sizes() -> None:
    for backend in ("sglang", "vllm"):
        found = ModelAllocation.from_str(f"{backend}:d2t4p2")
        assert found.world_size == 16 and found.backend == backend


def test_names() -> None:
    assert ModelAllocation.from_str("fsdp[actor]:d4").name == "actor"
    assert ModelAllocation.from_str("fsdp:d4", name="critic").name == "critic"
    assert ModelAllocation.from_str("megatron[a]:(attn:d4|ffn:e2)").name == "a"


def test_several_parts() -> None:
    generate, train = parse_allocations("sglang:d4t2+fsdp:d8")
    assert (generate.backend, train.backend) == ("sglang", "fsdp")
    parts = parse_allocations("sglang[r]:d2 + fsdp[a]:d4|megatron[c]:(attn:d4|ffn:e2)")
    assert [(p.name, p.colocated_with, p.world_size) for p in parts] == [("r", None, 2), ("a", None, 4), ("c", "a", 0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a backend has to stand before the sizes"),
        ("d4t2", "a backend has to stand before the sizes"),
        ("[actor]:d4", "a backend has to stand before the sizes"),
        ("(attn:d2|ffn:e2)", "a backend has to stand before the sizes"),
        ("attn:d2|ffn:e2", "a backend has to stand before the sizes"),
        ("fsdp:d4+", "a backend has to stand before the sizes"),
        ("fsdp.d4", "a colon stands between"),
        ("fsdp", "without sizes"),
        ("fsdp:", "without sizes"),
        ("fdsp:d4", "did you mean fsdp"),
        ("fsdp:d4p2", "megatron's and archon's"),
        ("fsdp:d4e2", "megatron's and archon's"),
        ("megatron:d4r2", "fsdp's and archon's"),
        ("sglang:d4c2", "has no context parallel size"),
        ("vllm:d4e2", "has no expert parallel size"),
        ("fsdp:x3", "no kind of parallelism"),
        ("fsdp:D4", "no kind of parallelism"),
        ("fsdp:d0", "1 or more"),
        ("fsdp:d04", "1 or more"),
        ("fsdp:d-4", "is no size"),
        ("fsdp:d", "is no size"),
        ("fsdp:4", "is no size"),
        ("fsdp:d4,t2", "is no size"),
        ("fsdp:d٣", "is no size"),
        ("fsdp:d" + "9" * 5000, "is no size"),
        ("fsdp:d4d2", "given twice"),
        ("fsdp:d8r3", "does not divide"),
        ("megatron:d2e4", "does not divide"),
        ("fsdp:(attn:d2|ffn:e2)", "no grid of its own"),
        ("megatron:(attn:d4p2|ffn:p4)", "attn has p2 and ffn p4"),
        ("megatron:(attn:d4p2|ffn:d3)", "attn has 8 ranks and ffn 6"),
        ("megatron:(attn:d4p2|ffn:e3)", "do not divide"),
        ("megatron:(attn:d4e2|ffn:e2)", "e belongs to ffn"),
        ("megatron:(attn:d4|ffn:c2e2)", "c belongs to attn"),
        ("megatron:(attn:|ffn:e2)", "is no size"),
        ("megatron:(attn:d4|ffn:)", "is no size"),
        ("megatron:(attn:d4|ffn:e2", "is no size"),
        ("fsdp[a]:d2|fsdp:d2", "need names"),
        ("fsdp:d2|fsdp[b]:d2", "need names"),
        ("fsdp[a]:d2|fsdp[b]:d4", "a has 2, b has 4"),
        ("fsdp[a]:d2+fsdp[a]:d4", "a is given twice"),
        ("fsdp:d1+fsdp:d2+fsdp:d3", "not all of them named"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_allocations(text)
    assert says in str(error.value)


def test_every_wrong_size_is_told() -> None:
    with pytest.raises(ConfigError) as error:
        parse_allocations("fsdp:d4p2e2x3t0")
    assert len(error.value.problems) == 4


def test_one_part_where_one_is_expected() -> None:
    with pytest.raises(ConfigError, match="2 parts, expected one"):
        ModelAllocation.from_str("sglang:d1+fsdp:d1")


def test_allocations_made_by_hand_are_checked() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        ModelAllocation("fsdp", ParallelStrategy(pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="is no backend"):
        ModelAllocation("deepspeed", ParallelStrategy())


def test_as_text() -> None:
    for text in (
        "fsdp:d1",
        "fsdp:d4t2",
        "fsdp[actor]:d8c2r2",
        "megatron:d4p2t2c2e4",
        "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)",
        "sglang[gen]:d2p2t4",
    ):
        assert str(ModelAllocation.from_str(text)) == text


powers = st.sampled_from([1, 2, 3, 4, 8])


@given(
    st.sampled_from(["fsdp", "megatron", "archon", "sglang", "vllm"]),
    st.none() | st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.lists(powers, min_size=7, max_size=7),
)
def test_there_and_back(backend: str, name: str | None, many: list[int]) -> None:
    d, t, p, c, e, et, r = many
    if backend in ("sglang", "vllm"):
        c = e = et = r = 1
    if backend == "fsdp":
        p = e = et = 1
    if backend == "megatron":
        r = 1
    assume(d % r == 0 and math.prod((d, t, p, c)) % (p * e * et) == 0)
    strategy = ParallelStrategy(
        data_parallel_size=d,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=c,
        expert_parallel_size=e,
        expert_tensor_parallel_size=et,
        data_parallel_replicate_size=r,
    )
    made = ModelAllocation(backend, strategy, name)
    assert ModelAllocation.from_str(str(made)) == made


@given(st.text(alphabet="fsdpmegatron:()|+[]attnffn0123456789 dptcexr", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        parts = parse_allocations(text)
    except ConfigError:
        return
    alone = [part for part in parts if part.colocated_with is None]
    assert parse_allocations("+".join(map(str, alone))) == alone
