"""Stand-ins for servers of others: SGLang 0.5.10 and 0.5.23, vLLM 0.19 and 0.33, AReaL's vLLM and SGLang.

They take the documented request forms and nothing else (a field too many is 422, a call out of turn 400), meet in real
process groups, as the real ones make them, and receive real tensors. What they answer to a prompt is a digest of the
weights that they hold, so that half an update is neither version's answer. `Faults` makes them misbehave.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

Kind = Literal["sglang-0.5.10", "sglang-0.5.23", "vllm-0.19", "vllm-0.30", "areal-vllm", "areal-sglang"]
KINDS: tuple[Kind, ...] = ("sglang-0.5.10", "sglang-0.5.23", "vllm-0.19", "vllm-0.30", "areal-vllm", "areal-sglang")


@dataclass
class Faults:
    """no_transfer  says 200 and receives nothing;  fail_at  500 at this tensor of an update, `times` times
    slow  seconds before every bucket;  lost_pause  answers /pause with 504 although it paused, so many times
    lost_commit  the same of the call that sets the version"""

    no_transfer: bool = False
    fail_at: int | None = None
    times: int = 1
    slow: float = 0.0
    lost_pause: int = 0
    lost_commit: int = 0


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class GroupForm(Form):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class StageGroupForm(GroupForm):
    pp_rank: int


class ArealGroupForm(Form):
    master_address: str
    master_port: str
    rank_offset: int
    world_size: int
    backend: str
    group_name: str


class NameForm(Form):
    group_name: str = "weight_update_group"


class UpdateForm(Form):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    torch_empty_cache: bool = False


class NewUpdateForm(UpdateForm):
    selector: Literal["target", "draft", "all"] = "all"


class ArealMetaForm(Form):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str


class DiskForm(Form):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class SelectorForm(Form):
    selector: Literal["target", "draft", "all"] = "all"


class PauseForm(Form):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class VersionForm(Form):
    new_version: str
    abort_all_requests: bool = True


class VllmVersionForm(Form):
    new_version: str


class CheckerForm(Form):
    action: Literal["checksum", "snapshot", "reset_tensors", "compare"]


class SamplingForm(Form):
    temperature: float
    max_new_tokens: int
    ignore_eos: bool = False


class GenerateForm(Form):
    input_ids: list[int]
    sampling_params: SamplingForm
    return_logprob: bool = False


class InitInfo(Form):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout: float


class InitForm(Form):
    init_info: InitInfo


class UpdateInfo(Form):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class VllmUpdateForm(Form):
    update_info: UpdateInfo


class FinishForm(Form):
    weight_version: str | None = None


class RpcForm(Form):
    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionForm(Form):
    model: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    temperature: float
    logprobs: int
    return_tokens_as_token_ids: bool
    ignore_eos: bool


class Nothing(Form):
    """An empty body."""


def greedy(weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """What these weights "answer": every bit of them counts."""
    digest = hashlib.sha256(repr(prompt).encode())
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found = digest.digest()[:count]
    return list(found), [-b / 64 for b in found]


@dataclass
class StandIn:
    """One server. `weights` by Hugging Face's names; `calls` (method, path) in order; `answers` given to prompts."""

    kind: Kind
    weights: dict[str, torch.Tensor]
    faults: Faults = field(default_factory=Faults)
    fp8: bool = False
    version: str = "default"
    paused: bool = False
    asleep: bool = False
    open: bool = False
    flushed: int = 0
    tensors: int = 0
    calls: list[str] = field(default_factory=list)
    groups: dict[str, Any] = field(default_factory=dict)
    meta: ArealMetaForm | None = None
    receipt: Any = None
    url: str = ""
    forms: list[Any] = field(default_factory=list)

    def restart(self, weights: dict[str, torch.Tensor]) -> None:
        """As a process that died and came back: version 0, nobody's group, no fence."""
        self.leave_all()
        self.weights, self.version, self.paused, self.open = dict(weights), "default", False, False

    # -------------------------------------------------------------------------------------------- groups

    def join_as_torch(self, form: GroupForm | ArealGroupForm, rank: int) -> None:
        """As SGLang and AReaL do it, with torch's own helper."""
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world
        from torch.distributed.rendezvous import rendezvous

        if form.group_name in self.groups:
            raise HTTPException(400, f"group {form.group_name} exists")
        where = f"tcp://{form.master_address}:{form.master_port}"
        store, rank, world = next(rendezvous(where, rank, form.world_size, timeout=timedelta(seconds=10)))
        store.set_timeout(timedelta(seconds=10))
        prefix = PrefixStore(form.group_name, store)
        helper: Any = _new_process_group_helper
        made = helper(world, rank, [], form.backend, prefix, group_name=form.group_name, timeout=timedelta(seconds=10))
        group = made[0]
        _world.pg_group_ranks[group] = {i: i for i in range(world)}
        self.groups[form.group_name] = (group, lambda t: dist.broadcast(t, src=0, group=group))

    def join_engine(self, info: InitInfo) -> None:
        """As `vllm_gloo.py` does it."""
        wait = timedelta(seconds=10)
        store = TCPStore(info.master_address, info.master_port, None, False, wait, wait_for_workers=False)
        group: Any = ProcessGroupGloo(PrefixStore(info.group_name, store), info.rank_offset, info.world_size, wait)
        self.groups = {"engine": (group, lambda t: group.broadcast(t.reshape(-1).view(torch.uint8), 0).wait())}

    def leave_all(self) -> None:
        for name in list(self.groups):
            self.leave(name)

    def leave(self, name: str) -> None:
        group, _ = self.groups.pop(name)
        if name != "engine":
            dist.destroy_process_group(group)

    # -------------------------------------------------------------------------------------------- updates

    def receive(self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]], flat: bool) -> None:
        """Tensor for tensor straight into the weights, as the real ones do."""
        if self.asleep:
            raise HTTPException(500, "the engine died: its weights' memory is not there")
        time.sleep(self.faults.slow)
        if self.faults.no_transfer:
            return
        broadcast = self.groups[name][1]
        found = []
        if flat:
            sizes = [getattr(torch, d).itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True)]
            raw = torch.empty(sum(sizes), dtype=torch.uint8)
            broadcast(raw)
            parts = zip(names, dtypes, shapes, raw.split(sizes), strict=True)
            found = [(n, p.clone().view(getattr(torch, d)).view(s)) for n, d, s, p in parts]
        for tensor_name, dtype, shape in () if flat else zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(tensor)
            found.append((tensor_name, tensor))
            self.take(found.pop(), dtype)
        for one in found:
            self.take(one, str(one[1].dtype).removeprefix("torch."))

    def take(self, one: tuple[str, torch.Tensor], dtype: str) -> None:
        name, tensor = one
        self.tensors += 1
        if self.faults.fail_at == self.tensors and self.faults.times:
            self.faults.times -= 1
            self.tensors = 0
            raise HTTPException(500, f"failed at {name}")
        mine = self.weights.get(name)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            raise HTTPException(
                500, f"{name}: {list(tensor.shape)} {tensor.dtype} is not {mine if mine is None else mine.shape}"
            )
        self.weights[name] = tensor.clone()
        if self.receipt is not None:
            self.receipt.update(f"{name} {dtype} {list(tensor.shape)}".encode())
            self.receipt.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def from_disk(self, path: str) -> None:
        from safetensors.torch import load_file

        self.weights = dict(load_file(f"{path}/model.safetensors"))

    def lose(self, what: str) -> JSONResponse | None:
        """The answer that gets lost on the way, where this is one to be lost."""
        left = getattr(self.faults, what)
        if left:
            setattr(self.faults, what, left - 1)
            return JSONResponse({}, 504)
        return None

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        if self.paused:
            raise HTTPException(503, "paused")
        return greedy(self.weights, prompt, count)


# ------------------------------------------------------------------------------------------------ the endpoints


def wanted(condition: bool, what: str) -> None:
    if not condition:
        raise HTTPException(400, what)


def done(message: str = "ok") -> dict[str, Any]:
    return {"success": True, "message": message}


def sglang(app: FastAPI, s: StandIn) -> None:
    new = s.kind == "sglang-0.5.23"
    group_form = StageGroupForm if s.kind == "areal-sglang" else GroupForm
    update_form = NewUpdateForm if new else UpdateForm

    @app.get("/server_info")
    def info() -> dict[str, Any]:
        return {"version": s.kind.rsplit("-", 1)[-1], "tp_size": 1, "dp_size": 1, "pp_size": 1}

    @app.get("/model_info")
    def model_info() -> dict[str, Any]:
        return {"model_path": "policy", "weight_version": s.version}

    @app.get("/get_load")
    def load() -> dict[str, Any]:
        return {"num_reqs": 0}

    @app.post("/init_weights_update_group")
    def init(form: group_form) -> Any:  # type: ignore[valid-type]
        s.join_as_torch(form, form.rank_offset)
        return done()

    @app.post("/destroy_weights_update_group")
    def destroy(form: NameForm) -> Any:
        wanted(form.group_name in s.groups, "no such group")
        s.leave(form.group_name)
        return done()

    @app.post("/update_weights_from_distributed")
    def update(form: update_form) -> Any:  # type: ignore[valid-type]
        wanted(s.paused, "a stand-in takes weights behind a fence only")
        wanted(s.open or not new, "begin_weight_update comes first")
        wanted(form.group_name in s.groups, f"no group {form.group_name}")
        wanted(form.weight_version is None and not form.abort_all_requests, "labels a bucket, not a version")
        s.receive(form.group_name, form.names, form.dtypes, form.shapes, form.load_format is not None)
        return done()

    @app.post("/update_weights_from_disk")
    def disk(form: DiskForm) -> Any:
        wanted(s.paused, "a stand-in takes weights behind a fence only")
        s.from_disk(form.model_path)
        return done() | {"num_paused_requests": 0}

    @app.post("/pause_generation")
    def pause(form: PauseForm) -> Any:
        s.forms.append(form)
        s.paused = True
        return s.lose("lost_pause") or {"message": "paused", "status": "ok"}

    @app.post("/continue_generation")
    def resume(form: Nothing) -> Any:
        s.paused = False
        return {"message": "continued", "status": "ok"}

    @app.post("/flush_cache")
    def flush() -> Any:
        s.flushed += 1
        return PlainTextResponse("flushed") if s.flushed % 2 == 0 else PlainTextResponse("busy", 400)

    @app.post("/update_weight_version")
    def version(form: VersionForm) -> Any:
        wanted(not form.abort_all_requests, "would abort everything")
        s.version = form.new_version
        return s.lose("lost_commit") or {"success": True, "new_version": s.version}

    @app.post("/generate")
    def generate(form: GenerateForm) -> Any:
        tokens, logprobs = s.answer(form.input_ids, form.sampling_params.max_new_tokens)
        rows = [[p, t, None] for t, p in zip(tokens, logprobs, strict=True)]
        return {"text": "", "meta_info": {"output_token_logprobs": rows, "weight_version": s.version}}

    if new:

        @app.post("/begin_weight_update")
        def begin(form: SelectorForm) -> Any:
            wanted(not s.open, "begun already")
            s.open = True
            return done()

        @app.post("/end_weight_update")
        def end(form: Nothing) -> Any:
            wanted(s.open, "not begun")
            s.open = False
            return done()

        @app.post("/weights_checker")
        def checker(form: CheckerForm) -> Any:
            return done() | {"ranks": [], "per_engine_checksum": str(greedy(s.weights, [], 16)[0])}

    if s.kind == "areal-sglang":

        @app.post("/awex/report_weight_meta")
        def meta() -> Any:
            return {}


def vllm(app: FastAPI, s: StandIn) -> None:
    new = s.kind == "vllm-0.30"

    @app.get("/version")
    def version() -> dict[str, Any]:
        return {"version": "0.33.0" if new else "0.19.1"}

    @app.get("/get_world_size")
    def world(include_dp: bool = True) -> dict[str, Any]:
        return {"world_size": 1}

    @app.get("/is_sleeping")
    def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": s.asleep or (new and s.paused)}

    @app.get("/metrics")
    def metrics() -> Any:
        lines = [f'vllm:engine_sleep_state{{engine="{n}",sleep_state="awake"}} {float(not s.asleep)}' for n in (0, 1)]
        return PlainTextResponse("# TYPE vllm:engine_sleep_state gauge\n" + "\n".join(lines) + "\n")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "policy", "owned_by": "vllm"}]}

    @app.post("/v1/completions")
    def completions(form: CompletionForm) -> Any:
        tokens, logprobs = s.answer(form.prompt, form.max_tokens)
        found = {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": logprobs}
        return {"choices": [{"text": "", "logprobs": found}]}

    if s.kind == "areal-vllm":
        areal(app, s)
        return

    @app.post("/pause")
    def pause(mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Any:
        s.forms.append(mode)
        s.paused = True
        return s.lose("lost_pause") or {"status": "paused"}

    @app.post("/resume")
    def resume() -> Any:
        s.paused = False
        return {"status": "resumed"}

    @app.get("/is_paused")
    def is_paused() -> Any:
        return {"is_paused": s.paused}

    @app.post("/init_weight_transfer_engine")
    def init(form: InitForm) -> Any:
        s.join_engine(form.init_info)
        return {"message": "Weight transfer initialized"}

    @app.post("/update_weights")
    def update(form: VllmUpdateForm) -> Any:
        wanted(s.paused, "a stand-in takes weights behind a fence only")
        wanted(s.open or not new, "start_weight_update comes first")
        info = form.update_info
        s.receipt = s.receipt or hashlib.blake2b(digest_size=16)
        s.receive("engine", info.names, info.dtype_names, info.shapes, False)
        return {"message": "Weights updated"}

    @app.post("/collective_rpc")
    def rpc(form: RpcForm) -> Any:
        if form.method == "reload_weights":
            wanted(s.paused, "a stand-in takes weights behind a fence only")
            s.from_disk(form.kwargs["weights_path"])
            return {"results": ["None"]}
        wanted(form.method == "areal_convert_receipt", f"no method {form.method}")
        digest, s.receipt = s.receipt.hexdigest() if s.receipt else "", None
        return {"results": [{"engine": "areal-convert", "digest": digest, "tensors": s.tensors}]}

    @app.post("/reset_prefix_cache")
    def reset() -> Any:
        s.flushed += 1
        return JSONResponse({"success": True}) if new else PlainTextResponse("")

    if not new:
        return

    @app.post("/start_weight_update")
    def start() -> Any:
        wanted(not s.open and s.paused, "begun already, or not paused")
        s.open = True
        return {"message": "started"}

    @app.post("/finish_weight_update")
    def finish(form: FinishForm) -> Any:
        wanted(s.open, "not begun")
        wanted(form.weight_version is None, "the version is set before anything was verified")
        s.open = False
        return {"message": "finished"}

    @app.post("/shutdown_weight_transfer_engine")
    def shutdown() -> Any:
        s.groups = {}
        return {"message": "Weight transfer shut down"}

    @app.post("/update_weight_version")
    def set_version(form: VllmVersionForm) -> Any:
        s.version = form.new_version
        return s.lose("lost_commit") or {"success": True, "new_version": s.version}

    @app.get("/weight_info")
    def weight_info() -> Any:
        return {"weight_version": s.version}

    @app.post("/weight_checker")
    def checker(form: CheckerForm) -> Any:
        empty = hashlib.sha256(b"").hexdigest()
        return {"checksums": {f"0:0:0:0:{name}": empty for name in s.weights}}


def areal(app: FastAPI, s: StandIn) -> None:
    """Resumes the engine after every bucket; the gate is only in front of completions (`paused`)."""

    @app.post("/areal_init_weights_update_group")
    def init(form: ArealGroupForm) -> Any:
        s.join_as_torch(form, form.rank_offset)
        return done()

    @app.post("/areal_set_update_weight_meta")
    def meta(form: ArealMetaForm) -> Any:
        s.meta = form
        return done()

    @app.post("/areal_update_weights_xccl")
    def update(form: Nothing) -> Any:
        wanted(s.meta is not None and s.paused, "no meta, or not paused")
        assert s.meta is not None
        try:
            s.receive(s.meta.group_name, s.meta.names, s.meta.dtypes, s.meta.shapes, False)
        except HTTPException as error:
            return JSONResponse({"success": False, "message": f"TP rank: 0 failed. reason: {error.detail}"}, 400)
        finally:
            s.meta = None
        return done("TP rank: 0 success\n")

    @app.post("/areal_update_weights")
    def disk(form: DiskForm) -> Any:
        s.from_disk(form.model_path)
        return done()

    @app.post("/areal_pause_generation")
    def pause(form: Nothing) -> Any:
        s.paused = True
        return s.lose("lost_pause") or done()

    @app.post("/areal_continue_generation")
    def resume(form: Nothing) -> Any:
        s.paused = False
        return done()


@contextmanager
def standing(kind: Kind, weights: dict[str, torch.Tensor], **faults: Any) -> Iterator[StandIn]:
    """A stand-in at an address, in a thread."""
    stand_in = StandIn(kind, dict(weights), Faults(**faults))
    app = FastAPI()

    @app.middleware("http")
    async def count(request: Any, call_next: Any) -> Any:
        stand_in.calls.append(f"{request.method} {request.url.path}")
        return await call_next(request)

    @app.get("/health")
    def health() -> Any:
        return PlainTextResponse("")

    (vllm if "vllm" in kind else sglang)(app, stand_in)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    stand_in.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield stand_in
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        stand_in.leave_all()
