"""One sequence that is generated: what was asked for, what has come so far, and which weights made which token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .refusing import RequestRefused

if TYPE_CHECKING:
    import torch

    from .adapters import Adapter
    from .text import Detokenizer

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    temperature       0: the most likely token
    top_k             0: all
    top_logprobs      None: no logprobs; else so many alternatives beside the chosen token
    prompt_logprobs   the same for the prompt's tokens
    stop, stop_ids    texts and tokens that end the sequence; the model's own end tokens do, unless `ignore_eos`
    presence, frequency  OpenAI's penalties on tokens that were generated before
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Which weights may answer: at least this version, exactly that one. None: any."""

    minimum: int | None = None
    exact: int | None = None

    def check(self, current: int) -> None:
        """Raises RequestRefused (409, retryable) when `current` does not do."""
        if self.minimum is not None and current < self.minimum:
            raise self._refusal(f"at least {self.minimum}", current)
        if self.exact is not None and current != self.exact:
            raise self._refusal(f"exactly {self.exact}", current)

    def _refusal(self, wanted: str, current: int) -> RequestRefused:
        return RequestRefused(
            "weight_version",
            f"This server has weight version {current}; {wanted} was demanded.",
            "Try again after the next push, or another server.",
            current=current,
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token with its log-probability (of the model's own distribution, before temperature and filters).

    rank  1 for the most likely token; top: the most likely ones (id, logprob), most likely first
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Span:
    """Tokens `start` to `end` (exclusive; the first generated token is 0) that one version of the weights made."""

    version: int
    start: int
    end: int

    def to_json(self) -> dict[str, int]:
        return {"version": self.version, "start": self.start, "end": self.end}


@dataclass(frozen=True, slots=True)
class Event:
    """What one step brought for one sequence. `finish`: stop, length, or abort; then nothing comes after it."""

    sequence: Sequence_
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None
    error: RequestRefused | None = None


@dataclass(eq=False, slots=True)
class Sequence_:
    """State of one sequence; after it was submitted, only the worker's thread changes it.

    sink     takes events; called on the worker's thread
    chosen   with logprobs, one for each token of `out`; `prompt_chosen` for the prompt's tokens after the first
    """

    index: int
    prompt: Sequence[int]
    sampling: Sampling
    demand: Demand
    sink: Callable[[Event], None]
    adapter: Adapter | None = None
    detokenizer: Detokenizer | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))
    out: list[int] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)
    prompt_chosen: list[Chosen] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    error: RequestRefused | None = None
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    generator: torch.Generator | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt and what came after it."""
        return [*self.prompt, *self.out]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.out)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    def add(self, token: int, version: int, chosen: Chosen | None) -> None:
        """Append a token that this version of the weights made."""
        at = len(self.out)
        self.out.append(token)
        if chosen is not None:
            self.chosen.append(chosen)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = at + 1
        else:
            self.spans.append(Span(version, at, at + 1))

    def versions(self) -> list[dict[str, Any]]:
        return [span.to_json() for span in self.spans]
