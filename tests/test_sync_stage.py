"""`Stage`: two copies of a server's weights, blocks into one of them, and the swap."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_convert.converter import PlanError, open_checkpoint
from areal_convert.converter.errors import Problems
from areal_convert.converter.execute import Limits
from areal_convert.converter.sync.homes import describe_server
from areal_convert.converter.sync.ledger import layout_key, root_of
from areal_convert.converter.sync.memory import bytes_of, free
from areal_convert.converter.sync.refusals import Refused
from areal_convert.converter.sync.stage import Stage
from areal_convert.converter.sync.views import Memory, _DeviceView
from areal_convert.converter.sync.wire import Atom, ProtocolError
from areal_convert.converter.verify import copies_digests
from models import FAMILIES, logits, sample_tokens
from sync_parts import Values, config_of, halves, manifest_of, module_of, same, stage_all, tiny_state

Model = Callable[..., Path]


def tiny_stage(seed: int = 1, **options: Any) -> Stage:
    state, config = tiny_state(seed)
    return Stage(state, config, **options)


def push(stage: Stage, target: Any, config: dict[str, Any], *, version: int = 1, **fields: Any) -> Values:
    """A whole push, up to the install."""
    values = Values(target, config, manifest_of(stage.layout, version=version, **fields))
    stage_all(stage, values)
    stage.install()
    stage.drop()
    return values


# ------------------------------------------------------------------------------------------------ what a module holds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_push_into_transformers_own_module(model: Model, family: str) -> None:
    """All weights, to the bit, for every family: fused experts, tied heads, corrections in fp32."""
    path = model(family, layers=2)
    served, new, config = module_of(path, scale=-2.0), module_of(path), config_of(path)
    stage = Stage(served, config)
    assert not same(served, new)
    push(stage, new, config, block=1 << 14, bucket=1 << 20)
    assert same(stage.current(), new) and stage.current() is not served
    assert not same(served, new), "the old copy was written to"
    assert stage.version == 1 and stage.root is not None


@pytest.mark.parametrize("family", ["qwen3_moe", "llama_tied", "deepseek_v3"])
def test_what_was_pushed_answers_as_transformers_does(model: Model, family: str) -> None:
    path = model(family, layers=2)
    served, new, config = module_of(path, scale=0.5), module_of(path), config_of(path)
    served.config._experts_implementation = "eager"
    served.set_attn_implementation("eager")
    stage = Stage(served, config)
    push(stage, new, config, senders=halves(stage.layout), block=1 << 14, bucket=1 << 20)
    with torch.no_grad(), stage.reading() as (module, _):
        found = module(input_ids=sample_tokens(), use_cache=False).logits
    assert torch.equal(found, logits(path, sample_tokens()))


def test_whole_atoms_have_the_digests_of_the_checkpoint(model: Model) -> None:
    """However the blocks are cut, and whatever the names: the receipt compares servers with files."""
    path = model("qwen3_moe", layers=2)
    ckpt, config = open_checkpoint(path), config_of(path)
    stage = Stage(module_of(path, scale=3.0), config)
    assert stage.digests() != (found := {k: v[0] for k, v in copies_digests(ckpt, Limits(), lambda n: None).items()})
    push(stage, module_of(path), config, senders=halves(stage.layout), block=1 << 12, bucket=1 << 16)
    assert stage.digests() == found


def test_ties_are_one_atom_with_two_names(model: Model) -> None:
    path = model("llama_tied", layers=2)
    served = module_of(path)
    layout = describe_server(served, config_of(path))
    assert "head" not in layout.atoms and layout.ties == [["lm_head.weight", "model.embed_tokens.weight"]]
    stage = Stage(served, config_of(path))
    push(stage, module_of(path, scale=4.0), config_of(path), block=1 << 14, bucket=1 << 20)
    twin = stage.current()
    assert twin.lm_head.weight is twin.model.embed_tokens.weight, "the twin's tie is another"
    assert twin.lm_head.weight.data_ptr() != served.lm_head.weight.data_ptr()


def test_a_tied_head_with_memory_of_its_own_is_written_twice() -> None:
    state, config = tiny_state(1)
    config["tie_word_embeddings"] = True
    new = {**tiny_state(2)[0]}
    new["lm_head.weight"] = new["model.embed_tokens.weight"].clone()
    stage = Stage(state, config)
    assert len(stage.layout.homes["embed"]) == 2
    push(stage, new, config)
    assert same(stage.current(), new)
    broken = {**new, "lm_head.weight": new["lm_head.weight"] + 1}
    layout = describe_server(broken, config)
    assert list(Memory(broken, layout.homes).differing("embed", (11, 8))) == ["lm_head.weight"] or list(
        Memory(broken, layout.homes).differing("embed", (11, 8))
    ) == ["model.embed_tokens.weight"]


def test_shared_memory_that_the_config_does_not_know_of_is_refused() -> None:
    state, config = tiny_state(1)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with pytest.raises(PlanError, match=r"shares its memory with .*another tensor"):
        Stage(state, config)


def test_what_is_no_tensor_of_the_family_is_named() -> None:
    state, config = tiny_state(1)
    state["score.weight"] = torch.zeros(1, 8)
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 8)
    with pytest.raises(PlanError) as refused:
        Stage(state, config)
    text = str(refused.value)
    assert "score.weight" in text and "model.norm.weight" in text and "[5, 8]" in text
    state = {**tiny_state(1)[0], "score.weight": torch.ones(1, 8)}
    stage = Stage(state, config, keep=[r"score\..*"])
    push(stage, {**tiny_state(2)[0]}, config)
    assert torch.equal(stage.current()["score.weight"], torch.ones(1, 8)), "kept as it was, in both copies"


def test_strided_views_of_one_memory() -> None:
    """A server that keeps gate and up in one tensor, and a matrix that lies transposed."""
    state, config = tiny_state(1)
    both = torch.zeros(6, 2, 8, dtype=torch.bfloat16)
    state["model.layers.0.mlp.gate_proj.weight"] = both[:, 0]
    state["model.layers.0.mlp.up_proj.weight"] = both[:, 1]
    state["model.layers.0.mlp.down_proj.weight"] = torch.zeros(6, 8, dtype=torch.bfloat16).T
    new = tiny_state(2)[0]
    stage = Stage(state, config)
    values = push(stage, new, config, block=64)
    assert same(stage.current(), new)
    twin = stage.current()
    gate, up = twin["model.layers.0.mlp.gate_proj.weight"], twin["model.layers.0.mlp.up_proj.weight"]
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert stage.root == values.root


def test_memory_of_a_gpu_is_written_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same views over memory that numpy does not see; here it lies on the CPU."""
    monkeypatch.setattr(Memory, "_view", lambda self, home: _DeviceView(self._tensors[home.tensor], home))
    state, config = tiny_state(1)
    state["model.layers.0.mlp.down_proj.weight"] = torch.zeros(6, 8, dtype=torch.bfloat16).T
    stage = Stage(state, config)
    first = push(stage, tiny_state(2)[0], config, senders=halves(stage.layout))
    assert same(stage.current(), tiny_state(2)[0])
    monkeypatch.undo()
    assert first.root == push(tiny_stage(), tiny_state(2)[0], config, senders=halves(stage.layout)).root


@pytest.mark.gpu
def test_a_push_into_a_model_on_a_gpu() -> None:
    state, config = tiny_state(1)
    stage = Stage({name: value.cuda() for name, value in state.items()}, config)
    push(stage, tiny_state(2)[0], config, senders=halves(stage.layout))
    assert same(stage.current(), tiny_state(2)[0]) and stage.device.startswith("cuda")
    assert (there := free(stage.device)) is not None and there > 0


# ------------------------------------------------------------------------------------------------ blocks

BASE, CONFIG = tiny_state(1)
NEW = tiny_state(2)[0]
LAYOUT = describe_server(BASE, CONFIG)


@settings(max_examples=40)
@given(st.data())
def test_either_the_root_is_equal_or_it_refuses(data: st.DataObject) -> None:
    """Blocks in any order, left out, sent twice, with a flipped bit."""
    senders = halves(LAYOUT) if data.draw(st.booleans()) else None
    values = Values(NEW, CONFIG, manifest_of(LAYOUT, senders, block=data.draw(st.sampled_from([64, 100, 4096]))))
    numbers = data.draw(st.permutations(range(values.blocks.count)))
    fault = data.draw(st.sampled_from(["none", "omit", "twice", "flip", "beyond", "other"]))
    stage = Stage(BASE, CONFIG)
    ledger = stage.begin(values.manifest, values.blocks, 1.0)
    victim = data.draw(st.sampled_from(numbers))
    if fault == "omit":
        numbers = [n for n in numbers if n != victim]
    if fault == "twice":
        numbers = [*numbers, victim]
    if fault == "beyond":
        numbers = [*numbers, values.blocks.count + data.draw(st.integers(0, 1000))]
    root = ""
    try:
        for n in numbers:
            sender = 0 if n < values.blocks.of_sender(0).stop else 1
            if fault == "other" and n == victim and len(values.manifest.senders) > 1:
                sender = 1 - sender
            one = np.array([n])
            ledger.claim(min(sender, len(values.manifest.senders) - 1), one)
            block = values.block(n).copy()
            if fault == "flip" and n == victim:
                block[data.draw(st.integers(0, block.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
            import xxhash

            stage.put(n, block)
            ledger.record(one, np.frombuffer(xxhash.xxh3_128_digest(block.tobytes()), np.uint8)[None])
        root = ledger.root()
    except ProtocolError:
        refused = True
    else:
        refused = root != values.root
    right = fault == "none" or (fault == "other" and len(values.manifest.senders) == 1)
    assert refused is not right
    if not refused:
        stage.finish(root)
        stage.install()
        assert same(stage.current(), NEW)
    else:
        stage.drop()
        with pytest.raises(Refused, match="Nothing is staged"):
            stage.install()
        assert stage.current() is BASE and stage.version == 0


def test_unaligned_bytes_and_blocks_of_one_element() -> None:
    stage = tiny_stage()
    values = Values(NEW, CONFIG, manifest_of(stage.layout, block=1))
    ledger = stage.begin(values.manifest, values.blocks, 1.0)
    assert values.blocks.count == sum(int(np.prod(a.shape)) for a in stage.layout.atoms.values())
    for n in range(values.blocks.count):
        raw = np.zeros(3, np.uint8)
        raw[1:] = values.block(n)
        stage.put(n, raw[1:])
    ledger.claim(0, np.arange(values.blocks.count))
    ledger.record(np.arange(values.blocks.count), values.digests)
    stage.finish(ledger.root())
    stage.install()
    assert same(stage.current(), NEW)


def test_roots_and_layouts() -> None:
    """The root depends on how blocks are cut; the digests of whole atoms do not."""
    a, b = tiny_stage(), tiny_stage(3)
    one = push(a, NEW, CONFIG)
    two = push(b, NEW, CONFIG, senders=halves(b.layout), block=100)
    assert a.root == one.root != b.root == two.root
    assert layout_key(one.manifest) != layout_key(two.manifest)
    assert a.digests() == b.digests()
    assert root_of(one.digests) == one.root


# ------------------------------------------------------------------------------------------------ checks before a push


def test_everything_that_does_not_fit_is_named() -> None:
    stage = tiny_stage()
    manifest = manifest_of(stage.layout)
    manifest.model = {"family": "qwen3"}
    manifest.atoms[0] = Atom("embedding", (11, 8), "BF16")
    manifest.atoms[1] = Atom(manifest.atoms[1].name, (9,), "BF16")
    manifest.atoms[2] = Atom(manifest.atoms[2].name, manifest.atoms[2].shape, "F32")
    problems = Problems()
    stage.check(manifest, problems)
    text = "\n".join(map(str, problems.found))
    assert len(problems.found) == 5, text
    for part in ("is 'qwen3'", "embedding: is no tensor", "[9]", "is F32; this server's is BF16", "embed: is not"):
        assert part in text


def test_too_little_memory_is_refused_with_figures() -> None:
    stage = tiny_stage(free=lambda device: 1000)
    values = Values(NEW, CONFIG, manifest_of(stage.layout))
    with pytest.raises(Refused, match=r"A push needs 1\.\d+ kB on cpu; 1\.00 kB are free") as refused:
        stage.begin(values.manifest, values.blocks, 1.0)
    assert refused.value.code == "memory" and refused.value.facts["free"] == 1000
    assert stage.spare() is None, "memory was taken"
    assert refused.value.facts["needed"] == bytes_of(BASE)["cpu"] + 2 * values.manifest.bucket


def test_an_allocation_that_fails_is_refused() -> None:
    def twin(target: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes\nmore")

    stage = tiny_stage(twin=twin)
    values = Values(NEW, CONFIG, manifest_of(stage.layout))
    with pytest.raises(Refused, match=r"cannot be allocated: DefaultCPUAllocator.*1 bytes\.") as refused:
        stage.begin(values.manifest, values.blocks, 1.0)
    assert refused.value.code == "memory" and stage.spare() is None


def test_a_copy_that_is_still_written_to_is_not_used_again() -> None:
    """A push that was called off may have left a collective that still writes: its memory is waited for, not long, and
    then given up."""
    stage = tiny_stage()
    manifest = manifest_of(stage.layout)
    values = Values(NEW, CONFIG, manifest)
    stage_all(stage, values)
    first, waited = stage.spare(), list[float]()

    def settled(answers: list[bool]) -> Callable[[float], bool]:
        return lambda timeout: waited.append(timeout) or answers.pop(0)

    stage.drop(settled([False, True]))
    stage.begin(manifest, values.blocks, 0.5)
    assert stage.spare() is first and waited == [0, 0.5]
    stage.drop(settled([False, False]))
    stage.begin(manifest, values.blocks, 60.0)
    assert stage.spare() is not first and waited[2:] == [0, 2.0]
    stage.drop(settled([True]))
    second = stage.spare()
    stage_all(stage, values)
    assert stage.spare() is second and waited[4:] == [0]
    stage.install()
    assert same(stage.current(), NEW)


def test_a_module_that_was_changed_behind_our_back() -> None:
    stage = tiny_stage()
    push(stage, NEW, CONFIG)
    stage.spare()["model.norm.weight"] = torch.zeros(8)  # type: ignore[index]
    values = Values(NEW, CONFIG, manifest_of(stage.layout, version=2))
    with pytest.raises(Refused, match=r"model\.norm\.weight is no longer what it was"):
        stage.begin(values.manifest, values.blocks, 1.0)


def test_memory_that_is_free() -> None:
    assert (there := free("cpu")) is not None and there > 1 << 20
    module = torch.nn.Linear(4, 3)
    module.tied = module.weight
    assert bytes_of(module) == {"cpu": 4 * (12 + 3)}


# ------------------------------------------------------------------------------------------------ who reads


def test_readers_keep_their_copy_and_its_memory() -> None:
    stage = tiny_stage()
    before = copy.deepcopy(stage.current())
    with stage.reading() as (old, version):
        push(stage, NEW, CONFIG)
        assert version == 0 and same(old, before)
        assert stage.readers == {"current": 0, "previous": 1}
        values = Values(BASE, CONFIG, manifest_of(stage.layout, version=2))
        with pytest.raises(Refused, match="1 requests still read version 0") as refused:
            stage.begin(values.manifest, values.blocks, 0.05)
        assert refused.value.code == "busy" and refused.value.retryable
        assert same(old, before), "written to while somebody read it"
    push(stage, BASE, CONFIG, version=2)
    assert stage.current() is old and same(old, BASE), "the same memory serves again"


def test_a_push_waits_for_the_last_reader() -> None:
    stage = tiny_stage()
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with stage.reading():
            entered.set()
            leave.wait(5)

    reader = threading.Thread(target=read)
    reader.start()
    entered.wait(5)
    push(stage, NEW, CONFIG)
    threading.Timer(0.1, leave.set).start()
    values = Values(BASE, CONFIG, manifest_of(stage.layout, version=2))
    start = time.monotonic()
    stage.begin(values.manifest, values.blocks, 5.0)
    assert 0.05 < time.monotonic() - start < 4
    reader.join(5)


def test_an_install_can_be_taken_back() -> None:
    stage = tiny_stage()
    values = Values(NEW, CONFIG, manifest_of(stage.layout))
    stage_all(stage, values)
    first = stage.current()
    stage.install()
    stage.undo()
    assert stage.current() is first and (stage.version, stage.root) == (0, None)
    assert stage.digests(staged=True) == {**stage.digests(staged=True)} != stage.digests()
    stage.install()
    assert same(stage.current(), NEW) and (stage.version, stage.root) == (1, values.root)
    stage.drop()
    with pytest.raises(Refused):
        stage.undo()


# ------------------------------------------------------------------------------------------------ delta


def changed(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A few other values."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: value.clone() for name, value in state.items()}
    for name in sorted(found)[seed % 3 :: 3]:
        flat = found[name].view(-1)
        flat[int(torch.randint(flat.numel(), (1,), generator=generator))] += 1
    return found


def delta(stage: Stage, before: Values, target: Any, version: int, config: Any = CONFIG, **fields: Any) -> Values:
    """Push only the blocks that differ."""
    base = (stage.version, stage.root)
    fields = {"senders": before.manifest.senders, "block": before.manifest.block} | fields
    manifest = manifest_of(stage.layout, version=version, mode="delta", base=base, **fields)
    values = Values(target, config, manifest)
    stage_all(stage, values, np.flatnonzero((values.digests != before.digests).any(1)))
    return values


def test_changed_blocks_alone() -> None:
    """Again and again, with aborted and full pushes in between; the spare copy catches up each time."""
    stage = tiny_stage()
    target = NEW
    values = push(stage, target, CONFIG)
    for version in range(2, 9):
        target = changed(target, version)
        if version == 5:
            values = push(stage, target, CONFIG, version=version)
            continue
        if version in (4, 7):  # begun, and dropped
            delta(stage, values, changed(target, 99), version)
            stage.drop()
        values = delta(stage, values, target, version)
        assert stage.version == version - 1
        stage.install()
        stage.drop()
        assert same(stage.current(), target), version
        assert stage.root == values.root


def test_only_what_differs_is_copied() -> None:
    stage = tiny_stage()
    values = push(stage, NEW, CONFIG)
    copied: list[int] = []
    inner = stage._copy
    stage._copy = lambda s, t, m, b, numbers, known: (copied.append(len(numbers)), inner(s, t, m, b, numbers, known))[1]  # type: ignore[method-assign]
    target = NEW
    for version in range(2, 5):
        target = changed(target, version)
        values = delta(stage, values, target, version)
        stage.install()
        stage.drop()
    assert copied[0] == values.blocks.count and max(copied[1:]) < values.blocks.count / 2


def test_what_is_stored_twice_is_verified_twice() -> None:
    """A tied head with memory of its own: the digests are those of the embedding, which nobody wrote to."""
    state, config = tiny_state(1)
    config["tie_word_embeddings"] = True
    new = tiny_state(2)[0]
    new["lm_head.weight"] = new["model.embed_tokens.weight"].clone()
    stage = Stage(state, config)
    target, values = new, push(stage, new, config)
    for version in range(2, 5):
        target = {**target, "model.norm.weight": target["model.norm.weight"] + 1}
        if version < 4:
            values = delta(stage, values, target, version, config)
            stage.install()
            stage.drop()
            assert same(stage.current(), target)
    spare = stage.spare()
    assert spare is not None
    spare["lm_head.weight"][0, 0] += 1
    with pytest.raises(Refused, match="embed is not what was pushed any more") as refused:
        delta(stage, values, target, 4, config)
    assert refused.value.code == "base_mismatch"


def test_a_base_that_nobody_pushed() -> None:
    """A server that loaded its weights from disk can take a delta: it hashes what it has."""
    stage = Stage(copy.deepcopy(NEW), CONFIG)
    before = Values(NEW, CONFIG, manifest_of(stage.layout))
    stage.root = before.root
    delta(stage, before, changed(NEW, 1), 1)
    stage.install()
    assert same(stage.current(), changed(NEW, 1))


def test_other_cuts_than_the_last_time() -> None:
    stage = tiny_stage()
    push(stage, NEW, CONFIG)
    manifest = manifest_of(stage.layout, halves(stage.layout), version=1, block=100)
    before = Values(NEW, CONFIG, manifest)
    stage.root = before.root  # what a hub that cuts so would say
    delta(stage, before, changed(NEW, 1), 2)
    stage.install()
    assert same(stage.current(), changed(NEW, 1))


@pytest.mark.parametrize("wrong", ["version", "root", "own"])
def test_another_base_is_refused(wrong: str) -> None:
    stage = tiny_stage()
    before = push(stage, NEW, CONFIG)
    base = {"version": (0, before.root), "root": (1, "0" * 32), "own": (1, "0" * 32)}[wrong]
    if wrong == "own":
        stage._known = None  # nothing is remembered: the weights themselves are hashed
    manifest = manifest_of(stage.layout, version=2, mode="delta", base=base)
    values = Values(changed(NEW, 1), CONFIG, manifest)
    with pytest.raises(Refused, match="The blocks are changes of version") as refused:
        stage.begin(manifest, values.blocks, 1.0)
    assert refused.value.code == "base_mismatch" and "in full" in refused.value.hint
    push(stage, BASE, CONFIG, version=2)
    assert same(stage.current(), BASE)


def test_weights_that_were_changed_in_place_are_no_base() -> None:
    stage = tiny_stage()
    before = push(stage, NEW, CONFIG)
    stage.current()["model.norm.weight"][0] += 1
    manifest = manifest_of(stage.layout, version=2, mode="delta", base=(1, before.root))
    with pytest.raises(Refused, match="no longer those that were pushed"):
        stage.begin(manifest, before.blocks, 1.0)
