"""Requests as OpenAI and vLLM have them. What is not carried out is refused by name; what cannot matter is let pass."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .refusing import RequestRefused
from .sequences import Demand, Sampling

MAX_LOGPROBS = 20
MAX_N = 128
Version = Annotated[int, Field(ge=0)]
Tops = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Ids = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    prompt_logprobs: Tops | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Ours: which weights may answer.
    weight_version: Version | None = None
    min_weight_version: Version | None = None
    # No influence on the answer here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: int | None = None
    request_id: str | None = None
    # Known to clients, sent with their defaults, and refused otherwise.
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None

    def refuse_unsupported(self) -> None:
        """Raises RequestRefused for what would change the answer and is not done here."""
        unsupported = [
            ("logit_bias", self.logit_bias),
            ("repetition_penalty", self.repetition_penalty not in (None, 1.0)),
        ]
        for name, given in unsupported:
            if given:
                raise RequestRefused("invalid_request", f"{name} is not supported.", "Leave it out.", param=name)

    def sampling(self, max_tokens: int, top_logprobs: int | None, prompt_logprobs: int | None) -> Sampling:
        """As the worker takes it. Raises RequestRefused."""
        self.refuse_unsupported()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stop:
            raise RequestRefused("invalid_request", "stop: an empty text stops nothing.", param="stop")

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return Sampling(
            max_tokens=max_tokens,
            temperature=given(self.temperature, 1.0),
            top_p=given(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=stop,
            stop_ids=frozenset(self.stop_token_ids or ()),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            presence=self.presence_penalty or 0.0,
            frequency=self.frequency_penalty or 0.0,
        )

    def demand(self, headers: Any) -> Demand:
        """The version that is demanded, by a field or by a header (`X-Weight-Version`, `X-Min-Weight-Version`)."""
        minimum = _either(self.min_weight_version, headers.get("x-min-weight-version"), "min_weight_version")
        return Demand(minimum, _either(self.weight_version, headers.get("x-weight-version"), "weight_version"))


def _either(field: int | None, header: str | None, name: str) -> int | None:
    if header is None:
        return field
    if not header.isdecimal() or len(header) > 18:
        raise RequestRefused(
            "invalid_request", f"The header for {name} is {header[:40]!r}; a number was expected.", param=name
        )
    if field is not None and field != int(header):
        raise RequestRefused(
            "invalid_request", f"{name} is {field} in the body and {header} in the header.", param=name
        )
    return int(header)


class CompletionRequest(Generation):
    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Tops | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise RequestRefused("invalid_request", "suffix is not supported.", "Leave it out.", param="suffix")
        if self.best_of not in (None, self.n or 1):
            raise RequestRefused("invalid_request", "best_of is not supported unless it equals n.", param="best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestRefused(
                "invalid_request", "max_tokens is 0: there would be nothing to answer.", "echo=true gives the prompt.",
                param="max_tokens",
            )  # fmt: skip


class Message(BaseModel):
    """One turn; further fields (tool calls, names) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.response_format is not None and self.response_format.get("type", "text") != "text":
            raise RequestRefused("invalid_request", "Only response_format text is supported.", param="response_format")
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused("invalid_request", "top_logprobs needs logprobs=true.", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestRefused(
                "invalid_request", "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )  # fmt: skip

    def turns(self) -> list[dict[str, Any]]:
        """Messages for the template: contents that come in parts are joined. Raises RequestRefused for images."""
        turns = []
        for message in self.messages:
            turn = message.model_dump(exclude_none=True)
            if isinstance(message.content, list):
                if any(part.get("type") != "text" for part in message.content):
                    raise RequestRefused("invalid_request", "Only text can be sent to this model.", param="messages")
                turn["content"] = "".join(str(part.get("text", "")) for part in message.content)
            turns.append(turn)
        return turns

    def template_options(self) -> dict[str, Any]:
        options = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            **(self.chat_template_kwargs or {}),
        }
        return options | ({"tools": self.tools} if self.tools else {})
