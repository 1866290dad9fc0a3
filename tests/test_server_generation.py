"""The worker that generates: the same tokens and log-probabilities as transformers, whoever shares the batch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter import convert
from areal_convert.converter.errors import ConfigError
from areal_convert.converter.remote.mounts import unmount_all
from areal_convert.converter.sync.server.adapters import Adapters
from areal_convert.converter.sync.server.batch import Batch, Copy, Model, cache_name
from areal_convert.converter.sync.server.generation import Engine, Room
from areal_convert.converter.sync.server.loading import Served, load_model
from areal_convert.converter.sync.server.metrics import Metrics
from areal_convert.converter.sync.server.refusing import RequestRefused
from areal_convert.converter.sync.server.sequences import Demand, Event, Sampling, Sequence_
from areal_convert.converter.sync.server.text import Detokenizer, Text
from hub_server import HubServer
from sync_server import greedy

Models = Callable[..., Path]
PROMPTS = [[5, 6, 7], [900, 3, 3, 17, 44], list(range(30, 60)), [11]]


class Client:
    """Submits sequences, and waits for their ends."""

    def __init__(self, served: Served, room: Room | None = None) -> None:
        self.module, self.adapters = served.module, Adapters(served.module)
        model = Model(served.device, served.eos, cache_name(served.module), self.adapters.active)
        self.engine = Engine(model, Copy(served.module, 0), Metrics(), room)
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def _sink(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def make(self, prompt: list[int], adapter: Any = None, demand: Demand | None = None, **how: Any) -> Sequence_:
        sampling = Sampling(**{"temperature": 0.0, "ignore_eos": True, "top_logprobs": 0, **how})
        return Sequence_(0, prompt, sampling, demand or Demand(), self._sink, adapter)

    def submit(self, prompt: list[int], **how: Any) -> Sequence_:
        sequence = self.make(prompt, **how)
        self.engine.submit([sequence])
        return sequence

    def wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(until, 30), "nothing came within 30 s"

    def finish(self, *sequences: Sequence_) -> None:
        self.wait(lambda: all(s.done for s in sequences))
        assert [s.error for s in sequences] == [None] * len(sequences)

    def run(self, prompt: list[int], **how: Any) -> Sequence_:
        sequence = self.submit(prompt, **how)
        self.finish(sequence)
        return sequence


@pytest.fixture
def clients() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(path: Path, room: Room | None = None, **how: Any) -> Client:
        made.append(Client(load_model(path, device="cpu", **how), room))
        return made[-1]

    yield make
    for client in made:
        client.engine.close(0)


def logprobs(module: Any, sequence: Sequence_) -> list[float]:
    """Of all tokens after the first, from one pass without a cache."""
    with torch.inference_mode():
        scores = module(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].float().log_softmax(-1)
    return [float(scores[n, token]) for n, token in enumerate(sequence.tokens[1:])]


# ------------------------------------------------------------------------------------------------ equal to transformers


@pytest.mark.parametrize("family", ["qwen3", "llama_tied", "mixtral", "deepseek_v3", "qwen2_moe_mixed", "mistral"])
def test_whoever_shares_the_batch_tokens_and_logprobs_are_those_of_transformers(
    family: str, model: Models, clients: Callable[..., Client]
) -> None:
    client, draw = clients(model(family)), random.Random(family)
    asked = []
    for n in range(10):
        prompt = [draw.randrange(3, 1000) for _ in range(draw.choice([1, 2, 9, 33]))]
        tops = 1 if n % 4 == 0 else None
        asked.append(client.submit(prompt, max_tokens=draw.randrange(1, 12), prompt_logprobs=tops))
        if n % 3 == 0:
            client.wait(lambda s=asked[0]: bool(s.out))  # later ones join while others run
    client.finish(*asked)
    for sequence in asked:
        tokens, _ = greedy(client.module, sequence.prompt, sequence.sampling.max_tokens)
        assert sequence.out == tokens
        known = logprobs(client.module, sequence)
        found = [*(c.logprob for c in sequence.prompt_chosen), *(c.logprob for c in sequence.chosen)]
        assert found == pytest.approx(known[len(known) - len(found) :], abs=1e-4)
        assert len(sequence.prompt_chosen) == (len(sequence.prompt) - 1 if sequence.sampling.prompt_logprobs else 0)


@pytest.mark.parametrize("lengths", [[3, 30, 9, 1], [30, 2, 14, 40]])
def test_rows_join_and_leave_a_running_batch(lengths: list[int], model: Models) -> None:
    """Without the worker, so that who is padded against whom is no matter of chance."""
    served, draw = load_model(model("qwen3"), device="cpu"), random.Random(1)
    batch = Batch(Model(served.device, cache_name=cache_name(served.module)), Copy(served.module, 0))
    prompts = [[draw.randrange(3, 1000) for _ in range(n)] for n in lengths]
    wanted = [5, 14, 9, 11]
    asked = [
        Sequence_(n, prompt, Sampling(temperature=0.0, max_tokens=wanted[n], top_logprobs=0), Demand(), lambda _: None)
        for n, prompt in enumerate(prompts)
    ]
    for step in range(25):
        picked = batch.step() if batch.rows else []
        if step % 2 == 0 and step // 2 < len(asked):
            picked += batch.start([asked[step // 2]])
        for sequence, token, chosen in picked:
            sequence.add(token, 0, chosen)
            if len(sequence.out) == sequence.sampling.max_tokens:
                sequence.finish = "length"
        batch.drop_done()
    assert batch.rows == [] and batch.cache is None
    for sequence in asked:
        tokens, scores = greedy(served.module, sequence.prompt, sequence.sampling.max_tokens)
        assert sequence.out == tokens and [c.logprob for c in sequence.chosen] == pytest.approx(scores, abs=1e-4)


def test_generate_of_transformers_gives_the_same(model: Models, clients: Callable[..., Client]) -> None:
    from transformers import AutoModelForCausalLM

    path = model("qwen3")
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    client = clients(path)
    for prompt in PROMPTS:
        options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        known = theirs.generate(torch.tensor([prompt]), **options)[0].tolist()
        assert client.run(prompt, max_tokens=9).tokens == known


def test_a_window_of_attention_is_kept(model: Models, clients: Callable[..., Client]) -> None:
    path = model("mistral", sliding_window=8)
    client = clients(path)
    asked = [client.submit(prompt, max_tokens=14) for prompt in PROMPTS]
    client.finish(*asked)
    for sequence in asked:
        assert sequence.out == greedy(client.module, sequence.prompt, 14)[0]
    assert client.module.config.sliding_window == 8


def test_long_prompts_go_through_in_chunks(
    model: Models, clients: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    from areal_convert.converter.sync.server import batch

    monkeypatch.setattr(batch, "CHUNK", 7)
    monkeypatch.setattr(batch, "FULL_CHUNK", 5)
    client = clients(model("qwen3"))
    asked = [
        client.submit(p, max_tokens=3, prompt_logprobs=n) for n, p in zip([None, 2, None, 0], PROMPTS, strict=True)
    ]
    client.finish(*asked)
    for sequence in asked:
        assert sequence.out == greedy(client.module, sequence.prompt, 3)[0]
        known = logprobs(client.module, sequence)
        if sequence.sampling.prompt_logprobs is not None:
            assert [c.logprob for c in sequence.prompt_chosen] == pytest.approx(
                known[: len(sequence.prompt) - 1], abs=1e-4
            )
            assert [c.token for c in sequence.prompt_chosen] == sequence.prompt[1:]


def test_another_format_is_served_through_the_hub(
    model: Models, clients: Callable[..., Client], tmp_path: Path
) -> None:
    path = model("qwen3")
    convert(path, tmp_path / "megatron", "torch_dist")
    client = clients(tmp_path / "megatron")
    assert client.run(PROMPTS[1], max_tokens=6).out == clients(path).run(PROMPTS[1], max_tokens=6).out


def test_a_model_of_the_hub_is_served_with_its_tokenizer(
    model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model("qwen3", side_files=True)
    with HubServer(tmp_path / "hub") as hub:
        hub.patch(monkeypatch)
        monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
        hub.add_repo("org/name", path)
        served = load_model("hf://org/name", device="cpu")
    unmount_all()
    assert served.eos == (2, 7) and served.text.encode("w1 w2") == [5, 6] and served.source.startswith("hf://org/name@")
    here = load_model(path, device="cpu").module.state_dict()
    assert all(torch.equal(value, here[name]) for name, value in served.module.state_dict().items())


# ------------------------------------------------------------------------------------------------ sampling


def test_a_seed_gives_the_same_tokens_alone_and_in_company(model: Models, clients: Callable[..., Client]) -> None:
    client = clients(model("qwen3"))
    how: dict[str, Any] = {"temperature": 1.3, "seed": 11, "max_tokens": 12, "top_k": 50, "top_p": 0.9}
    alone = client.run(PROMPTS[0], **how)
    crowd = [client.submit(PROMPTS[0], **how), *(client.submit(p, temperature=1.0, max_tokens=20) for p in PROMPTS)]
    client.finish(*crowd)
    assert crowd[0].out == alone.out
    assert client.run(PROMPTS[0], **{**how, "seed": 12}).out != alone.out


def test_filters_leave_what_they_say(model: Models, clients: Callable[..., Client]) -> None:
    client = clients(model("qwen3"))
    with torch.inference_mode():
        scores = client.module(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    order = scores.argsort(descending=True).tolist()
    shares = (scores / 3).softmax(-1)
    nucleus = int((shares[order].cumsum(-1) < 0.01).sum()) + 1

    def drawn(**how: Any) -> set[int]:
        asked = [client.submit(PROMPTS[0], temperature=3.0, max_tokens=1, seed=n, **how) for n in range(60)]
        client.finish(*asked)
        return {s.out[0] for s in asked}

    assert drawn(top_k=2) == set(order[:2])
    assert drawn(top_p=0.01) == set(order[:nucleus])
    least = float(shares.max()) * 0.95
    assert drawn(min_p=0.95) <= {t for t in order if float(shares[t]) >= least}
    assert len(drawn()) > 30
    assert drawn(top_p=1e-9) == {order[0]}


def test_draws_follow_the_distribution(model: Models, clients: Callable[..., Client]) -> None:
    """Two tokens left by top-k: their counts are those of a coin with the model's odds."""
    client = clients(model("qwen3"), Room(rows=512, queue=512))
    with torch.inference_mode():
        top = client.module(input_ids=torch.tensor([PROMPTS[3]])).logits[0, -1].float().topk(2)
    share = float(top.values.softmax(-1)[0])
    asked = [client.make(PROMPTS[3], temperature=1.0, max_tokens=1, top_k=2) for _ in range(400)]
    client.engine.submit(asked)
    client.finish(*asked)
    first = sum(s.out[0] == int(top.indices[0]) for s in asked)
    assert abs(first - 400 * share) < 5 * (400 * share * (1 - share)) ** 0.5


def test_penalties_and_least_lengths(model: Models, clients: Callable[..., Client]) -> None:
    client = clients(model("qwen3"))
    plain = client.run(PROMPTS[0], max_tokens=30).out
    end = plain[3]
    client.engine.model.eos = (end,)
    ended = client.run(PROMPTS[0], max_tokens=30, ignore_eos=False)
    assert (ended.out, ended.finish, ended.stop_reason) == (plain[: plain.index(end) + 1], "stop", None)
    held = client.run(PROMPTS[0], max_tokens=30, ignore_eos=False, min_tokens=8)
    assert len(held.out) > 8 and end not in held.out[:8]
    varied = client.run(PROMPTS[0], max_tokens=30, presence=2.0, frequency=2.0).out
    assert len(set(varied)) == 30 or len(set(varied)) > len(set(plain))
    stopped = client.run(PROMPTS[0], max_tokens=30, stop_ids=frozenset({plain[2]}))
    assert (stopped.finish, stopped.stop_reason) == ("stop", plain[2])


# ------------------------------------------------------------------------------------------------ limits


def test_the_queue_is_bounded_and_what_is_cancelled_makes_room(model: Models, clients: Callable[..., Client]) -> None:
    client = clients(model("qwen3"), Room(rows=1, queue=2))
    running = client.submit(PROMPTS[0], max_tokens=200)
    client.wait(lambda: bool(running.out))
    waiting = [client.submit(PROMPTS[1], max_tokens=2) for _ in range(2)]
    with pytest.raises(RequestRefused, match="wait already") as refused:
        client.submit(PROMPTS[1], max_tokens=2)
    assert (refused.value.status, refused.value.retryable) == (429, True)
    client.engine.cancel([running, waiting[0]])
    client.finish(running, *waiting)
    assert [running.finish, waiting[0].finish, waiting[1].finish] == ["abort", "abort", "length"]
    assert waiting[0].out == [] and len(running.out) < 200


def test_a_step_that_fails_fails_its_sequences_and_no_later_ones(
    model: Models, clients: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = clients(model("qwen3"))
    before = client.run(PROMPTS[0], max_tokens=4).out
    real = client.engine.model.forward

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(client.engine.model, "forward", broken)
    failed = client.submit(PROMPTS[0], max_tokens=4)
    client.wait(lambda: failed.done)
    assert failed.error is not None and failed.error.status == 500 and "out of memory" in str(failed.error)
    assert "a step failed" in caplog.text
    monkeypatch.setattr(client.engine.model, "forward", real)
    assert client.run(PROMPTS[0], max_tokens=4).out == before


def test_a_tokenizer_that_fails_and_a_fault_of_ours_leave_nobody_waiting(
    model: Models, clients: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = clients(model("qwen3"))

    class Broken:
        def decode(self, *_: Any, **__: Any) -> str:
            raise KeyError("no such token")

    failed, fine = client.make(PROMPTS[0], max_tokens=3), client.make(PROMPTS[1], max_tokens=3)
    failed.detokenizer = Detokenizer(Text(Broken()), ())
    client.engine.submit([failed, fine])
    client.wait(lambda: failed.done and fine.done)
    assert failed.error is not None and "no such token" in str(failed.error) and fine.finish == "length"

    def fault() -> Any:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(client.engine, "_admit", fault)
    lost = client.submit(PROMPTS[0], max_tokens=3)
    client.wait(lambda: lost.done)
    assert lost.error is not None and lost.error.code == "shutting_down" and not client.engine.alive
    assert "the worker ended" in caplog.text
    with pytest.raises(RequestRefused):
        client.engine.swap(1, lambda: Copy(client.module, 1))


def test_after_the_end_nothing_is_taken(model: Models, clients: Callable[..., Client]) -> None:
    client = clients(model("qwen3"))
    running = client.submit(PROMPTS[0], max_tokens=200)
    client.engine.close(0)
    assert running.error is not None and running.error.code == "shutting_down"
    with pytest.raises(RequestRefused, match="shutting down"):
        client.submit(PROMPTS[0])
    with pytest.raises(RequestRefused, match="shutting down"):
        client.engine.swap(1, lambda: Copy(client.module, 1))


def test_models_that_cannot_be_served(model: Models, model_copy: Models, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 256 positions"):
        load_model(model("qwen3"), device="cpu", max_len=1000)
    with pytest.raises(ConfigError, match="--device"):
        load_model(model("qwen3"), device="abacus")
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        load_model(model("qwen3"), device="cpu", tokenizer=tmp_path)


# ------------------------------------------------------------------------------------------------ adapters


def adapter_of(module: Any, rank: int = 3, seed: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A LoRA adapter for all linear layers of the attention, as PEFT names it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and "self_attn" in name:
            out, into = layer.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.2
    return {"r": rank, "lora_alpha": 6, "peft_type": "LORA", "bias": "none"}, tensors


def test_an_adapter_answers_as_peft_does_beside_the_base_model(
    model: Models, clients: Callable[..., Client], tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    client = clients(model("qwen3"))
    config, tensors = adapter_of(client.module)
    client.adapters.install(client.adapters.check("mine", config, tensors, 4))
    adapter = client.adapters.get("mine")
    base = AutoModelForCausalLM.from_pretrained(model("qwen3"), dtype=torch.float32)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    theirs = PeftModel(base, lora)
    left = set_peft_model_state_dict(theirs, tensors)
    assert not left.unexpected_keys
    theirs.eval()
    both = [(p, client.submit(p, adapter=adapter, max_tokens=6), client.submit(p, max_tokens=6)) for p in PROMPTS]
    client.finish(*(s for _, *pair in both for s in pair))
    for prompt, adapted, plain in both:
        tokens, scores = greedy(theirs, prompt, 6)
        assert adapted.out == tokens and [c.logprob for c in adapted.chosen] == pytest.approx(scores, abs=1e-4)
        assert plain.out == greedy(client.module, prompt, 6)[0]
    assert any(adapted.out != plain.out for _, adapted, plain in both)


def test_an_adapter_that_does_not_fit_is_refused_with_all_reasons(
    model: Models, clients: Callable[..., Client]
) -> None:
    client = clients(model("qwen3"))
    client.adapters.reserved = ("policy",)
    config, tensors = adapter_of(client.module)
    name = next(iter(tensors))
    bad = {
        **tensors,
        name: tensors[name][:, 1:],
        "base_model.model.nowhere.lora_A.weight": torch.zeros(3, 3),
        "x": torch.zeros(1),
    }
    with pytest.raises(ConfigError) as refused:
        client.adapters.check("policy", {**config, "use_dora": True, "r": 8}, bad, 1)
    text = str(refused.value)
    assert "use_dora" in text and "nowhere: this model has no such module" in text and "x: is no half" in text
    assert "expected (rank, 64)" in text and "has rank 3, its config says 8" in text and "base model's name" in text
    assert list(client.adapters) == []


# ------------------------------------------------------------------------------------------------ text


class Spelled:
    """A tokenizer whose tokens are bytes: a letter may need several."""

    chat_template = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(t for t in tokens if t < 256 or not skip_special_tokens).decode(errors="replace")


def test_text_comes_in_whole_letters_and_stops_where_it_should() -> None:
    text = Text(Spelled())
    said = "naïve 日本 façade".encode()
    plain = Detokenizer(text, ())
    parts = [plain.add(t) for t in said]
    assert "".join(parts) + plain.end() == "naïve 日本 façade" == plain.text
    assert not any("�" in part for part in parts)
    for stop, include, wanted in [("本 f", False, "naïve 日"), ("本 f", True, "naïve 日本 f"), ("zz", False, None)]:
        one = Detokenizer(text, (stop, "never"), include_stop=include)
        got = ""
        for token in said:
            got += one.add(token)
            assert stop not in got or include
            if one.stopped:
                break
        got += one.end()
        assert (got, one.text, one.stopped) == (
            wanted or "naïve 日本 façade", wanted or "naïve 日本 façade", stop if wanted else None
        )  # fmt: skip
    broken = Detokenizer(text, ())
    assert broken.add(0xE6) == "" and broken.end() == "�"
