"""Answers as OpenAI and vLLM write them, whole or in chunks, with the weight version of every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .sequences import Chosen, Sequence_
from .text import Text

Endpoint = Literal["completions", "chat"]
_OBJECTS = {
    ("completions", False): "text_completion",
    ("completions", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}


@dataclass(frozen=True)
class Form:
    """How one request wants its answers. `adapter`: name and version of the one that answers beside the base."""

    endpoint: Endpoint
    id: str
    model: str
    text: Text
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    as_ids: bool = False
    echo: bool = False
    special: bool = False
    adapter: tuple[str, int | None] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, choices: list[dict[str, Any]], version: int, *, chunk: bool = False) -> dict[str, Any]:
        """`weight_version`: the newest that had a part in it; every choice tells its own, token by token."""
        head: dict[str, Any] = {"id": self.id, "object": _OBJECTS[self.endpoint, chunk], "created": self.created}
        found = {**head, "model": self.model, "choices": choices, "weight_version": version}
        return found if self.adapter is None else {**found, "adapter_version": self.adapter[1]}

    def whole(self, sequences: Sequence[Sequence_], current: int) -> dict[str, Any]:
        """The answer to a request whose sequences are done."""
        choices = [self.choice(sequence) for sequence in sequences]
        newest = max((span.version for s in sequences for span in s.spans), default=current)
        answer = self.envelope(choices, newest)
        answer["weight_versions"] = sequences[0].versions() if len(sequences) == 1 else None
        answer["usage"] = usage(sequences)
        if self.endpoint == "chat":
            answer |= self._prompt_parts(sequences[0])
        return answer

    def choice(self, sequence: Sequence_) -> dict[str, Any]:
        text = sequence.detokenizer.text if sequence.detokenizer is not None else ""
        part = self._common(sequence, 0, len(sequence.out))
        if self.endpoint == "chat":
            return {"message": {"role": "assistant", "content": text}, **part}
        if self.echo:
            text = self._prompt_text(sequence) + text
        return {"text": text, **part, **self._prompt_parts(sequence)}

    def delta(self, sequence: Sequence_, begin: int, end: int, text: str, first: bool) -> dict[str, Any]:
        """What a chunk says of tokens `begin` to `end`."""
        part = self._common(sequence, begin, end, first=first)
        if end < len(sequence.out):
            part["finish_reason"] = part["stop_reason"] = None
        if self.endpoint == "chat":
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            return {"delta": delta, **part}
        if self.echo and first:
            text = self._prompt_text(sequence) + text
        return {"text": text, **part, **(self._prompt_parts(sequence) if first else {})}

    def _common(self, sequence: Sequence_, begin: int, end: int, first: bool = True) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": sequence.index,
            "logprobs": self._logprobs(sequence, begin, end, first) if self.logprobs else None,
            "finish_reason": sequence.finish,
            "stop_reason": sequence.stop_reason,
            "weight_versions": [
                {"version": span.version, "start": max(span.start, begin), "end": min(span.end, end)}
                for span in list(sequence.spans)
                if span.start < end and span.end > begin
            ],
        }
        part["weight_version"] = part["weight_versions"][-1]["version"] if part["weight_versions"] else None
        if self.token_ids:
            part["token_ids"] = sequence.out[begin:end]
        return part

    def _prompt_parts(self, sequence: Sequence_) -> dict[str, Any]:
        part: dict[str, Any] = {"prompt_token_ids": list(sequence.prompt)} if self.token_ids else {}
        if self.prompt_logprobs:
            known = [self._ranked(chosen) for chosen in sequence.prompt_chosen]
            part["prompt_logprobs"] = [None, *known]
        return part

    def _ranked(self, chosen: Chosen) -> dict[str, Any]:
        """vLLM's form of a prompt's token: the most likely ones and the token itself, by id, with rank."""
        entries = {token: (logprob, rank) for rank, (token, logprob) in enumerate(chosen.top, 1)}
        entries.setdefault(chosen.token, (chosen.logprob, chosen.rank))
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._token(token)}
            for token, (logprob, rank) in entries.items()
        }

    def _prompt_text(self, sequence: Sequence_) -> str:
        return self.text.decode(sequence.prompt, special=self.special)

    def _token(self, token: int) -> str:
        return self.text.token(token, as_id=self.as_ids)

    # ---------------------------------------------------------------------------------------------- logprobs

    def _logprobs(self, sequence: Sequence_, begin: int, end: int, first: bool) -> dict[str, Any]:
        chosen = sequence.chosen[begin:end]
        if self.endpoint == "chat":
            return {"content": [self._chat_logprob(one) for one in chosen]}
        entries: list[Chosen | int] = list(chosen)
        if self.echo and first:
            entries = [sequence.prompt[0], *sequence.prompt_chosen, *entries] if sequence.prompt else entries
        return self._completion_logprobs(entries, self._offset(sequence, begin, first))

    def _offset(self, sequence: Sequence_, begin: int, first: bool) -> int:
        before = "".join(self._token(token) for token in sequence.out[:begin])
        prompt = "".join(self._token(token) for token in sequence.prompt) if self.echo and not first else ""
        return len(prompt) + len(before)

    def _completion_logprobs(self, entries: Sequence[Chosen | int], offset: int) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token
            text = self._token(token)
            found["tokens"].append(text)
            found["text_offset"].append(offset)
            offset += len(text)
            if isinstance(entry, int):  # nothing comes before the first token of a prompt
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            found["token_logprobs"].append(entry.logprob)
            top = {self._token(t): logprob for t, logprob in entry.top}
            found["top_logprobs"].append({**top, text: entry.logprob} if entry.top else {text: entry.logprob})
        return found

    def _chat_logprob(self, chosen: Chosen) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            **entry(chosen.token, chosen.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in chosen.top],
        }


def usage(sequences: Sequence[Sequence_]) -> dict[str, int]:
    """Tokens, a prompt counted once however many sequences share it."""
    prompts = {id(s.prompt): len(s.prompt) for s in sequences}
    prompt, out = sum(prompts.values()), sum(len(s.out) for s in sequences)
    return {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}
