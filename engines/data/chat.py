"""From a sample of text to token ids with a mask: 1 where a token is to be learned.

A conversation is written by the tokenizer's own chat template, and what the assistant says is found in the text: the
template written up to a turn of the assistant must be a prefix of the template written up to its end. Templates that
rewrite earlier turns (that drop earlier thoughts, say) are refused, unless they mark what is generated themselves
(`{% generation %}`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...converter.errors import SourceError

__all__ = ["Encoder", "Tokens"]

Span = tuple[int, int]


class NoSample(Exception):
    """This is no sample that can be learned from; the message says why."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids and mask of one sample, equally long."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Encoder:
    """Turns samples into tokens.

    A sample has `messages` (with `role` and `content`; turns of the assistant are learned), or `prompt` with
    `completion` or `response` (the latter learned; both texts, or both lists of messages), or `text` (all learned), or
    `input_ids` with `loss_mask` (as they are). `as_chat` wraps textual prompts and completions as a user's and an
    assistant's turn.
    """

    tokenizer: Any
    as_chat: bool = False
    add_eos: bool = True
    train_on_prompt: bool = False

    def __call__(self, sample: Mapping[str, Any]) -> Tokens:
        """Raises NoSample with the reason."""
        if sample.get("input_ids") is not None:
            return _ready(sample["input_ids"], sample.get("loss_mask"))
        if sample.get("messages") is not None:
            return self._chat(sample["messages"], 0, sample.get("tools"))
        if sample.get("prompt") is not None:
            key = next((k for k in ("completion", "response") if sample.get(k) is not None), None)
            if key is None:
                raise NoSample("has a prompt, but neither completion nor response")
            return self._prompted(sample["prompt"], sample[key], key)
        if sample.get("text") is not None:
            return self._pieces([(_text(sample["text"], "text"), True)])
        found = ", ".join(sample) or "nothing"
        raise NoSample(f"has none of messages, prompt, text, input_ids; found: {found}")

    def _prompted(self, prompt: Any, answer: Any, key: str) -> Tokens:
        if isinstance(prompt, list) and isinstance(answer, list):
            return self._chat(prompt + answer, len(prompt), None)
        prompt, answer = _text(prompt, "prompt"), _text(answer, key)
        if self.as_chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self._chat(turns, 1, None)
        return self._pieces([(prompt, self.train_on_prompt), (answer, True)])

    def _pieces(self, pieces: Sequence[tuple[str, bool]]) -> Tokens:
        """Plain text, with whatever the tokenizer puts in front and the end-of-sequence token behind."""
        spans, text = [], ""
        for piece, learned in pieces:
            if learned:
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        return self._end(self._encode(text, spans, special=True))

    def _end(self, tokens: Tokens) -> Tokens:
        """With the end-of-sequence token, unless it stands there already."""
        eos = self.tokenizer.eos_token_id
        if not self.add_eos or eos is None or tokens.ids[-1:] == [eos]:
            return tokens
        return Tokens([*tokens.ids, eos], [*tokens.mask, True])

    # ---------------------------------------------------------------------------------------- conversations

    def _chat(self, messages: Any, first: int, tools: Any) -> Tokens:
        _check_messages(messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise SourceError(
                "Samples are conversations, but the tokenizer has no chat template.",
                hint="Use the instruct model's tokenizer (data.tokenizer), or give prompt and completion as text.",
            )
        if "{% generation" in self.tokenizer.chat_template or "{%- generation" in self.tokenizer.chat_template:
            return self._marked(messages, tools)
        text = self._write(messages, tools)
        spans = [(0, len(text))] if self.train_on_prompt else self._answers(messages, first, tools, text)
        tokens = self._encode(text, spans, special=False)
        if messages[-1]["role"] == "assistant" and not self._closed(text):
            return self._end(tokens)
        return tokens

    def _closed(self, text: str) -> bool:
        """Whether the template ends a turn itself, with a special token."""
        return any(text.rstrip().endswith(token) for token in self.tokenizer.all_special_tokens)

    def _write(self, messages: Sequence[Any], tools: Any, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # whatever a template raises, jinja2's own errors among it
            raise NoSample(f"the chat template refuses it: {error}") from error

    def _answers(self, messages: Sequence[Any], first: int, tools: Any, text: str) -> list[Span]:
        """Where the assistant's turns stand in the text, with the token that ends each and no white space behind."""
        spans = []
        for i, message in enumerate(messages):
            if i < first or message["role"] != "assistant":
                continue
            before, upto = self._write(messages[:i], tools, prompt=True), self._write(messages[: i + 1], tools)
            if not (upto.startswith(before) and text.startswith(upto)):
                raise NoSample(
                    f"the chat template is not prefix-stable: it writes messages 0 to {i} otherwise when more follow, "
                    "so that what the assistant says cannot be told apart; give one turn of the assistant per sample, "
                    "or a template with {% generation %}"
                )
            spans.append((len(before), len(before) + len(upto[len(before) :].rstrip())))
        return spans

    def _marked(self, messages: Sequence[Any], tools: Any) -> Tokens:
        """By the template's own marks."""
        try:
            made = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:
            raise NoSample(f"the chat template refuses it: {error}") from error
        ids = list(made["input_ids"])
        mask = [True] * len(ids) if self.train_on_prompt else [bool(m) for m in made["assistant_masks"]]
        return Tokens(ids, mask)

    # ---------------------------------------------------------------------------------------- tokens

    def _encode(self, text: str, spans: Sequence[Span], *, special: bool) -> Tokens:
        """The text as a whole, so that tokens are those that it has anywhere else. A token that begins in a span is
        learned."""
        if not text:
            raise NoSample("is empty")
        if not self.tokenizer.is_fast:
            return self._encode_pieces(text, spans, special=special)
        made = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        starts = [False] * len(made["input_ids"])
        for i, (begin, end) in enumerate(made["offset_mapping"]):
            # Some tokenizers count the space before a word to the token: what counts is where the word begins.
            begin += len(text[begin:end]) - len(text[begin:end].lstrip(" ")) if text[begin:end].strip() else 0
            starts[i] = end > begin and any(low <= begin < high for low, high in spans)
        return Tokens(list(made["input_ids"]), starts)

    def _encode_pieces(self, text: str, spans: Sequence[Span], *, special: bool) -> Tokens:
        """Without offsets: piece by piece, which has to give what the whole text gives."""
        whole = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        ids: list[int] = []
        mask: list[bool] = []
        bounds = sorted({0, len(text), *(edge for span in spans for edge in span)})
        for low, high in pairwise(bounds):
            upto = list(self.tokenizer(text[:high], add_special_tokens=special)["input_ids"])
            if upto != whole[: len(upto)]:
                raise NoSample("this tokenizer gives no offsets, and a token reaches across the end of a turn")
            learned = any(a <= low and high <= b for a, b in spans)
            mask += [learned] * (len(upto) - len(ids))
            ids = upto
        return Tokens(whole, mask + [False] * (len(whole) - len(mask)))


def _ready(ids: Any, mask: Any) -> Tokens:
    """Tokens that somebody else has made; all of them are learned when no mask says otherwise."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise NoSample("input_ids is no list of token numbers")
    mask = [True] * len(ids) if mask is None else mask
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise NoSample(f"loss_mask does not have the {len(ids)} values of input_ids")
    return Tokens(ids, [bool(m) for m in mask])


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise NoSample(f"{name} is {type(value).__name__}, expected text")
    return value


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise NoSample("messages is no list with entries")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NoSample(f"messages[{i}] has no role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise NoSample(f"messages[{i}] has no content")
