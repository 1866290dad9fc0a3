"""Tokens and text: a model directory's tokenizer, text that grows token by token, texts at which a sequence stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .refusing import RequestRefused

NO_TOKENIZER = "Send token ids, or start the server with --tokenizer DIR."


class Text:
    """A tokenizer, or none: then there are token ids only, and a token's text is `token_id:7`."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Raises RequestRefused where there is no tokenizer, and for half of a surrogate pair, which is no text."""
        tokenizer = self._need("The prompt is a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"The text is no Unicode: {error.reason} at character {error.start}."
            raise RequestRefused("invalid_request", what, param="prompt") from None
        return list(tokenizer.encode(text, add_special_tokens=special))

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation, up to where the assistant speaks. Raises RequestRefused."""
        tokenizer = self._need("A conversation is text")
        if not tokenizer.chat_template:
            raise RequestRefused("invalid_request", "This model has no chat template.", "Use /v1/completions.")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template is a program of the model's author and may raise whatever it likes
            raise RequestRefused(
                "invalid_request", f"The chat template refuses this: {error}", param="messages"
            ) from None
        return self.encode(text, special=False)

    def _need(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestRefused("invalid_request", f"{what}, and this model has no tokenizer.", NO_TOKENIZER)
        return self.tokenizer

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def token(self, token: int, *, as_id: bool = False) -> str:
        """One token as text."""
        if self.tokenizer is None or as_id:
            return f"token_id:{token}"
        return self.tokenizer.decode([token])


class Detokenizer:
    """The text of one sequence, while it comes. What may still change, or become a stop text, is held back.

    text      that is final; `stopped` the stop text that was found
    """

    LOOK_BACK = 6
    """Tokens that are decoded again with each new one: the text of a token depends on those before it."""

    def __init__(self, text: Text, stop: Sequence[str], *, include_stop: bool = False, special: bool = False) -> None:
        self._text, self._stop, self._include, self._special = text, tuple(stop), include_stop, special
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._tokens: list[int] = []
        self._prefix = self._read = 0
        self._all, self._sent = "", 0
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All of it so far."""
        return self._all

    def add(self, token: int) -> str:
        """The text that has become final."""
        self._tokens.append(token)
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        if len(now) > len(before) and not now.endswith("�"):
            self._append(now[len(before) :])
            self._read = len(self._tokens)
            self._prefix = max(self._prefix, self._read - self.LOOK_BACK)
        return self._release(self._hold)

    def end(self) -> str:
        """No more tokens come: what was held back."""
        if self.stopped is None:
            before = self._decode(self._prefix, self._read)
            self._append(self._decode(self._prefix, len(self._tokens))[len(before) :])
            self._read = len(self._tokens)
        return self._release(0)

    def _decode(self, begin: int, end: int) -> str:
        return self._text.decode(self._tokens[begin:end], special=self._special) if end > begin else ""

    def _append(self, new: str) -> None:
        start = max(0, len(self._all) - self._hold)
        self._all += new
        hits = [(at, s) for s in self._stop if (at := self._all.find(s, start)) >= 0]
        if hits:
            at, self.stopped = min(hits)
            self._all = self._all[: at + (len(self.stopped) if self._include else 0)]

    def _release(self, hold: int) -> str:
        end = len(self._all) if self.stopped is not None else max(self._sent, len(self._all) - hold)
        new, self._sent = self._all[self._sent : end], max(self._sent, end)
        return new
