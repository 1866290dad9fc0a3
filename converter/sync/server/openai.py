"""`/v1/completions`, `/v1/chat/completions`, `/v1/models`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .adapters import Adapter, Adapters
from .answers import Form, usage
from .generation import Engine
from .refusing import RequestRefused
from .schemas import ChatRequest, CompletionRequest, Generation
from .sequences import Demand, Event, Sampling, Sequence_
from .text import Detokenizer, Text


@dataclass
class Service:
    """What answers requests. `names`: what the base model is called, the first one in answers."""

    engine: Engine
    text: Text
    adapters: Adapters
    names: tuple[str, ...]
    max_len: int
    vocabulary: int
    max_tokens: int | None = None

    def adapter(self, model: str | None) -> Adapter | None:
        """The adapter that a request names; None: the base model. Raises RequestRefused (404)."""
        if model is None or model in self.names:
            return None
        found = self.adapters.get(model)
        if found is None:
            known = [self.names[0], *(adapter.name for adapter in self.adapters)]
            raise RequestRefused(
                "model_not_found", f"There is no model {model!r}.", f"Models: {', '.join(known)}.", param="model"
            )
        return found

    def limit(self, prompt: Sequence[int], wanted: int | None, default: int | None) -> int:
        """Tokens that may be generated. Raises RequestRefused when the context or the server's limit is exceeded."""
        if not prompt:
            raise RequestRefused("invalid_request", "The prompt has no tokens.", param="prompt")
        beyond = next((token for token in prompt if token >= self.vocabulary), None)
        if beyond is not None:
            what = f"Token {beyond} is not in the vocabulary of {self.vocabulary}."
            raise RequestRefused("invalid_request", what, param="prompt")
        room = self.max_len - len(prompt)
        count = wanted if wanted is not None else min(room, default or room)
        if count > room or room < 0 or (room == 0 and wanted != 0):
            raise RequestRefused(
                "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens and {wanted if wanted is not None else 1} are to be generated; "
                f"the model's context is {self.max_len}.",
                param="max_tokens",
            )
        if self.max_tokens is not None and count > self.max_tokens:
            if wanted is not None:
                what = f"max_tokens is {wanted}; this server generates at most {self.max_tokens}."
                raise RequestRefused("invalid_request", what, param="max_tokens")
            count = self.max_tokens
        return count


class Answering:
    """One request: its sequences, and the events that come from the worker."""

    def __init__(self, service: Service, request: Request, form: Form) -> None:
        self.service, self.request, self.form = service, request, form
        self.sequences: list[Sequence_] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def add(self, prompt: Sequence[int], sampling: Sampling, demand: Demand, adapter: Adapter | None, n: int) -> None:
        """`n` sequences with one prompt. Raises RequestRefused for ends that would fail the batch that they are in."""
        vocabulary = self.service.vocabulary
        beyond = next((token for token in sampling.stop_ids if token >= vocabulary), None)
        if beyond is not None:
            what = f"Token {beyond} is not in the vocabulary of {vocabulary}."
            raise RequestRefused("invalid_request", what, param="stop_token_ids")
        if len(sampling.stop_ids) > vocabulary // 2:
            what = f"{len(sampling.stop_ids)} of {vocabulary} tokens end the answer; half of them at most may."
            raise RequestRefused("invalid_request", what, param="stop_token_ids")
        for _ in range(n):
            detokenizer = None
            if self.service.text.tokenizer is not None:
                detokenizer = Detokenizer(
                    self.service.text, sampling.stop, include_stop=sampling.include_stop, special=self.form.special
                )
            elif sampling.stop:
                what = "This model has no tokenizer: texts cannot stop it."
                raise RequestRefused("invalid_request", what, "Use stop_token_ids.", param="stop")
            index = len(self.sequences)
            self.sequences.append(Sequence_(index, prompt, sampling, demand, self._sink, adapter, detokenizer))

    def _sink(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has gone, and so has the client
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def answer(self, stream: bool, options: Any) -> Response:
        """Submit, and answer at once or in chunks. Raises RequestRefused before anything was sent."""
        self.service.engine.submit(self.sequences)
        if not stream:
            return JSONResponse(await self._collect())
        first = await self._next_or_gone()
        chunks = self._chunks(first, bool(options and options.include_usage))
        return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _next_or_gone(self) -> Event:
        """The next event; cancels everything when the client leaves before. Raises what the event says went wrong."""
        event = asyncio.ensure_future(self._events.get())
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                raise RequestRefused("aborted", "The client has gone.")
            found = event.result()
            if found.error is not None:
                raise found.error
            return found
        except BaseException:
            self.service.engine.cancel(self.sequences)
            raise
        finally:
            event.cancel()
            gone.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def _collect(self) -> dict[str, Any]:
        left = len(self.sequences)
        gone = asyncio.ensure_future(self._gone())
        try:
            while left:
                event = asyncio.ensure_future(self._events.get())
                await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    raise RequestRefused("aborted", "The client has gone.")
                if (error := event.result().error) is not None:
                    raise error
                left -= event.result().finish is not None
        except BaseException:
            self.service.engine.cancel(self.sequences)
            raise
        finally:
            gone.cancel()
        return self.form.whole(self.sequences, self.service.engine.current.version)

    async def _chunks(self, event: Event, with_usage: bool) -> AsyncIterator[str]:
        done, said = 0, [0] * len(self.sequences)
        try:
            while True:
                if event.error is not None:
                    yield _sse(event.error.to_json())
                    break
                sequence = event.sequence
                begin, end = said[sequence.index], said[sequence.index] + len(event.tokens)
                said[sequence.index] = end
                choice = self.form.delta(sequence, begin, end, event.text, begin == 0)
                choice["finish_reason"] = event.finish
                if event.finish is None:
                    choice["stop_reason"] = None
                version = choice["weight_version"]
                if version is None:
                    version = self.service.engine.current.version
                yield _sse(self.form.envelope([choice], version, chunk=True))
                done += event.finish is not None
                if done == len(self.sequences):
                    if with_usage:
                        newest = max((span.version for s in self.sequences for span in s.spans), default=version)
                        last = self.form.envelope([], newest, chunk=True)
                        yield _sse({**last, "usage": usage(self.sequences)})
                    break
                event = await self._events.get()
            yield "data: [DONE]\n\n"
        finally:
            self.service.engine.cancel(s for s in self.sequences if not s.done)


def _sse(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _prompts(given: Any, text: Text, special: bool) -> list[list[int]]:
    """Token ids of every prompt of a request."""
    if isinstance(given, str):
        return [text.encode(given, special=special)]
    if not given or isinstance(given[0], int):
        return [list(given)]
    return [text.encode(one, special=special) if isinstance(one, str) else list(one) for one in given]


def router(service: Service) -> APIRouter:
    """The three endpoints over a service."""
    routes = APIRouter()

    def form(body: Generation, adapter: Adapter | None, **more: Any) -> Form:
        name = adapter.name if adapter is not None else service.names[0]
        return Form(
            model=name,
            text=service.text,
            token_ids=bool(body.return_token_ids),
            as_ids=bool(body.return_tokens_as_token_ids),
            special=not body.skip_special_tokens,
            adapter=(adapter.name, adapter.version) if adapter is not None else None,
            prompt_logprobs=body.prompt_logprobs is not None,
            **more,
        )

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        adapter = service.adapter(body.model)
        what = form(
            body, adapter, endpoint="completions", id=f"cmpl-{uuid.uuid4().hex}", echo=body.echo,
            logprobs=body.logprobs is not None,
        )  # fmt: skip
        answering, demand = Answering(service, request, what), body.demand(request.headers)
        tops = body.prompt_logprobs if body.prompt_logprobs is not None else body.logprobs if body.echo else None
        for prompt in _prompts(body.prompt, service.text, body.add_special_tokens):
            limit = service.limit(prompt, body.max_tokens, 16)
            answering.add(prompt, body.sampling(limit, body.logprobs, tops), demand, adapter, body.n or 1)
        return await answering.answer(bool(body.stream), body.stream_options)

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        body.refuse_unsupported()
        adapter = service.adapter(body.model)
        what = form(body, adapter, endpoint="chat", id=f"chatcmpl-{uuid.uuid4().hex}", logprobs=bool(body.logprobs))
        prompt = service.text.chat(body.turns(), body.template_options())
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        limit = service.limit(prompt, wanted, None)
        answering, tops = Answering(service, request, what), (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(limit, tops, body.prompt_logprobs)
        answering.add(prompt, sampling, body.demand(request.headers), adapter, body.n or 1)
        return await answering.answer(bool(body.stream), body.stream_options)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        current = service.engine.current
        base = {"max_model_len": service.max_len, "weight_version": current.version, "root": current.root}
        found = [_model(name, **base) for name in service.names]
        found += [_model(a.name, parent=service.names[0], weight_version=a.version) for a in service.adapters]
        return {"object": "list", "data": found}

    return routes


def _model(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "areal-convert", **more}
