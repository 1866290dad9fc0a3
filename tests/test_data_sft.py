"""From files of conversations and texts to tokens, masks and batches; and the position in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_convert.converter.errors import ConfigError, SourceError
from areal_convert.engines.data.chat import Encoder, NoSample
from areal_convert.engines.data.loader import Loader, order
from areal_convert.engines.data.sft import SFTDataset

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # as templates that drop earlier thoughts: what was said before is written otherwise later
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}[cut]{% else %}{{ m['content'] }}"
    "{% endif %}<|im_end|>{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes, with a few special tokens: what is decoded is what was written."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate([*special, *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=special[2:]
    )
    made.chat_template = CHATML
    return made


def learned(tokenizer: Any, tokens: Any) -> str:
    """The text of the targets, `|` between those that are apart."""
    parts, last = [], False
    for i, m in zip(tokens.ids, tokens.mask, strict=True):
        if m:
            piece = tokenizer.convert_ids_to_tokens(i).replace("Ġ", " ").replace("Ċ", "\n")
            parts.append(piece if last else f"|{piece}")
        last = m
    return "".join(parts)[1:]


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


# ------------------------------------------------------------------------------------------------ masks


def test_only_what_the_assistant_says_is_learned(tokenizer: Any) -> None:
    tokens = Encoder(tokenizer)({"messages": turns("hi", "ho ho", "and?", "no")})
    assert learned(tokenizer, tokens) == "ho ho<|im_end|>|no<|im_end|>"
    whole = tokenizer(tokenizer.apply_chat_template(turns("hi", "ho ho", "and?", "no"), tokenize=False))["input_ids"]
    assert tokens.ids == whole, "the tokens are the template's, nothing added"


def test_a_prompt_is_not_learned(tokenizer: Any) -> None:
    tokens = Encoder(tokenizer)({"prompt": "Q: x", "completion": " A: y"})
    assert learned(tokenizer, tokens) == " A: y</s>"
    assert learned(tokenizer, Encoder(tokenizer, add_eos=False)({"prompt": "Q", "response": "A"})) == "A"
    assert learned(tokenizer, Encoder(tokenizer, train_on_prompt=True)({"prompt": "Q", "response": "A"})) == "QA</s>"
    chat = Encoder(tokenizer, as_chat=True)({"prompt": "Q", "completion": "A"})
    assert learned(tokenizer, chat) == "A<|im_end|>"


def test_prompt_and_completion_as_messages(tokenizer: Any) -> None:
    """The assistant's turns in the prompt are not learned."""
    sample = {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    assert learned(tokenizer, Encoder(tokenizer)(sample)) == "d<|im_end|>"


def test_text_is_learned_whole_and_ends_once(tokenizer: Any) -> None:
    assert learned(tokenizer, Encoder(tokenizer)({"text": "abc"})) == "abc</s>"
    assert learned(tokenizer, Encoder(tokenizer)({"text": "abc</s>"})) == "abc</s>"


def test_a_template_that_ends_no_turn_gets_an_end(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert learned(tokenizer, Encoder(tokenizer)({"messages": turns("hi", "ho")})) == "ho|</s>"


def test_an_unstable_template_is_refused_where_it_matters(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL)
    assert learned(tokenizer, Encoder(tokenizer)({"messages": turns("hi", "ho")})) == "ho<|im_end|>"
    with pytest.raises(NoSample, match="not prefix-stable: it writes messages 0 to 1 otherwise when more follow"):
        Encoder(tokenizer)({"messages": turns("hi", "ho", "and?", "no")})


def test_a_template_may_mark_what_is_generated(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    tokens = Encoder(tokenizer)({"messages": turns("hi", "ho", "and?", "no")})
    assert learned(tokenizer, tokens) == "ho<|im_end|>|no<|im_end|>"


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"question": "x"}, "has none of messages, prompt, text, input_ids; found: question"),
        ({"prompt": "x"}, "neither completion nor response"),
        ({"text": 3}, "text is int"),
        ({"text": ""}, "is empty"),
        ({"messages": []}, "no list with entries"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ],
)
def test_what_is_no_sample(tokenizer: Any, sample: dict[str, Any], why: str) -> None:
    with pytest.raises(NoSample, match=why):
        Encoder(tokenizer, add_eos=False)(sample)


def test_a_conversation_needs_a_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(SourceError, match="the tokenizer has no chat template"):
        Encoder(tokenizer)({"messages": turns("hi", "ho")})


def test_without_offsets_pieces_give_the_same(tokenizer: Any) -> None:
    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **more: Any) -> Any:
            return tokenizer(text, **more)

    sample = {"messages": turns("hi", "ho ho", "and?", "no")}
    assert Encoder(Slow())(sample) == Encoder(tokenizer)(sample)


# ------------------------------------------------------------------------------------------------ files


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_every_fault_of_a_file_is_named_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl",
        {"text": "good"},
        "{broken",
        "",
        [1],
        {"prompt": "x"},
        {"text": "much too long for this"},
        {"messages": turns("q")},
    )
    with pytest.raises(SourceError, match="cannot be trained on") as error:
        SFTDataset.make(path, Encoder(tokenizer), max_length=20)
    assert [p.about.rpartition(":")[2] for p in error.value.problems] == ["2", "4", "5", "6", "7"]
    text = str(error.value)
    for words in (
        "is no JSON",
        "is list, expected an object",
        "23 tokens, at most 20",
        "is a target",
        "data.too_long=",
    ):
        assert words in text, text


def test_long_samples_are_dropped_or_truncated_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "abc"}, {"text": "abcdefgh"}, {"text": "ab"})
    cut = SFTDataset.make(path, Encoder(tokenizer), max_length=4, too_long="truncate")
    assert [len(i) for i in cut.ids] == [4, 4, 3]
    assert cut.counts == {"samples": 3, "tokens": 11, "targets": 8, "dropped": 0, "truncated": 1}
    less = SFTDataset.make(path, Encoder(tokenizer), max_length=4, too_long="drop")
    assert [len(i) for i in less.ids] == [4, 3] and less.counts["dropped"] == 1
    with pytest.raises(SourceError, match=r"no sample in it\. All 3 were longer than 2 tokens"):
        SFTDataset.make(path, Encoder(tokenizer), max_length=2, too_long="drop")
    with pytest.raises(ConfigError, match="Known: error, truncate, drop"):
        SFTDataset.make(path, Encoder(tokenizer), too_long="keep")


def test_an_answer_that_truncation_took_is_a_fault(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "a long prompt", "completion": "y"})
    with pytest.raises(SourceError, match=r"x\.jsonl:1: none of its 5 tokens is a target"):
        SFTDataset.make(path, Encoder(tokenizer), max_length=5, too_long="truncate")


def test_a_tokenizer_of_another_model_is_found(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "ab"}, {"text": "é"})
    with pytest.raises(
        SourceError, match=r"x\.jsonl:2: token \d+ \('.'\) is not in the model's vocabulary of 104"
    ) as e:
        SFTDataset.make(path, Encoder(tokenizer), vocab_size=104)
    assert "tokenizer is that of another model" in str(e.value)


def test_files_that_are_not_there_or_empty(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        SFTDataset.make(str(tmp_path / "no.jsonl"), Encoder(tokenizer))
    with pytest.raises(SourceError, match="there is no sample in it"):
        SFTDataset.make(write(tmp_path / "x.jsonl"), Encoder(tokenizer))
    (tmp_path / "dir").mkdir()
    with pytest.raises(SourceError, match="neither"):
        SFTDataset.make(str(tmp_path / "dir"), Encoder(tokenizer))


def test_a_directory_of_files_and_a_limit(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"text": "b1"})
    write(tmp_path / "a.jsonl", {"text": "a1"}, {"text": "a2"})
    made = SFTDataset.make(str(tmp_path), Encoder(tokenizer, add_eos=False))
    assert [tokenizer.decode(i) for i in made.ids] == ["a 1", "a 2", "b 1"]
    assert len(SFTDataset.make(str(tmp_path), Encoder(tokenizer), limit=2)) == 2


def test_a_dataset_of_the_datasets_package(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}, {"prompt": "r", "completion": "b"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "d"))
    assert len(SFTDataset.make(str(tmp_path / "d"), Encoder(tokenizer))) == 2
    with pytest.raises(SourceError, match="has no split 'test'") as error:
        SFTDataset.make(str(tmp_path / "d"), Encoder(tokenizer), split="test")
    assert "It has: train" in str(error.value)


# ------------------------------------------------------------------------------------------------ the position


class Numbers:
    """Sample i is [i, i]."""

    def __init__(self, size: int) -> None:
        self.size, self.digest = size, f"numbers {size}"

    def __len__(self) -> int:
        return self.size

    def batch(self, which: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor(list(which))}


def taken(loader: Loader, steps: int) -> list[list[int]]:
    return [loader.next()["input_ids"].tolist() for _ in range(steps)]


def test_every_sample_once_an_epoch_in_another_order_each_time() -> None:
    loader = Loader(Numbers(10), 2, seed=3)
    first, second = taken(loader, 5), taken(loader, 5)
    assert sorted(i for b in first for i in b) == list(range(10)) == sorted(i for b in second for i in b)
    assert first != second and loader.epoch == 1
    assert taken(Loader(Numbers(10), 2, seed=3), 5) == first
    assert taken(Loader(Numbers(10), 2, seed=4), 5) != first
    assert taken(Loader(Numbers(4), 2, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]


def test_the_order_is_the_same_on_every_machine() -> None:
    assert order(8, 1, 0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


def test_what_is_left_over_is_not_used_in_that_epoch() -> None:
    loader = Loader(Numbers(7), 3)
    assert loader.steps_per_epoch == 2
    taken(loader, 3)
    assert (loader.epoch, loader.index) == (1, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_goes_on_with_the_next_sample_on_any_number_of_ranks(ranks: int) -> None:
    straight = taken(Loader(Numbers(20), 6, seed=5), 8)
    before = Loader(Numbers(20), 6, seed=5)
    taken(before, 4)
    state = json.loads(json.dumps(before.state_dict()))
    loaders = [Loader(Numbers(20), 6, seed=5, rank=r, ranks=ranks) for r in range(ranks)]
    for loader in loaders:
        loader.load_state_dict(state)
    shares = [taken(loader, 4) for loader in loaders]
    for step in range(4):
        assert sorted(i for s in shares for i in s[step]) == sorted(straight[4 + step])
    if ranks == 1:
        assert shares[0] == straight[4:]


def test_groups_stay_together_on_one_rank() -> None:
    for rank in (0, 1):
        for batch in taken(Loader(Numbers(24), 12, seed=5, group=3, rank=rank, ranks=2), 2):
            assert len(batch) == 6 and all(batch[i] % 3 == 0 for i in (0, 3))
            assert all(batch[i + k] == batch[i] + k for i in (0, 3) for k in (1, 2))
    with pytest.raises(ConfigError, match="10 samples are not whole groups of 3"):
        Loader(Numbers(24), 10, group=3)


def test_other_data_is_refused_on_resuming() -> None:
    state = Loader(Numbers(20), 6, seed=5).state_dict()
    with pytest.raises(SourceError, match="cannot be resumed") as error:
        Loader(Numbers(21), 6, seed=4).load_state_dict(state)
    assert {p.about for p in error.value.problems} == {"seed", "samples", "digest"}


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Loader(Numbers(1), 2, ranks=4)
    text = str(error.value)
    assert "2 samples for 4 data-parallel ranks" in text and "has only 1 samples" in text


def test_masks_and_ids_of_a_real_batch(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "ab", "completion": "c"}, {"text": "z"})
    data = SFTDataset.make(path, Encoder(tokenizer))
    batch = data.batch([1, 0])
    assert batch["cu_seqlens"].tolist() == [0, 2, 6] and batch["max_seqlen"] == 4
    assert batch["loss_mask"].tolist() == [True, True, False, False, True, True]
    assert batch["input_ids"].dtype == torch.int64
    assert data.digest != SFTDataset.make(path, Encoder(tokenizer, train_on_prompt=True)).digest


def test_the_chat_template_of_a_model_directory(model: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("qwen3", side_files=True))
    tokens = Encoder(tokenizer)({"messages": turns("w1 w2", "w3 w4")})
    chosen = [t for t, m in zip(tokenizer.convert_ids_to_tokens(tokens.ids), tokens.mask, strict=True) if m]
    assert chosen == ["w3", "w4", "</s>"]
