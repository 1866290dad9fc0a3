"""Configurations of the engines: the forms that users know, types, spellings, files, overrides, and the way back."""

from __future__ import annotations

import abc
import ast
import copy
import dataclasses
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_convert.engines as engines
from areal_convert.converter import ConfigError
from areal_convert.engines.api import configs
from areal_convert.engines.api.base import TrainEngine
from areal_convert.engines.api.configs import (
    SCHEDULES,
    ArchonEngineConfig,
    FP8EngineConfig,
    MegatronEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelStrategy,
    TrainEngineConfig,
)
from areal_convert.engines.api.fields import build
from areal_convert.engines.api.metas import FinetuneSpec, ParamSpec, SaveLoadMeta, StepInfo, WeightUpdateMeta
from areal_convert.engines.api.reading import dump_config, read_config, to_dict
from areal_convert.engines.api.run import DataConfig, RunConfig


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, str]:
    """What is wrong, by field."""
    return {p.about: f"{p.what} ({p.hint})" for p in error.value.problems}


# ------------------------------------------------------------------------------------------------ forms users know


def test_the_forms_that_users_know() -> None:
    megatron = MegatronEngineConfig(
        tensor_parallel_size=4, pipeline_parallel_size=2, virtual_pipeline_parallel_size=1, use_fp8=True
    )
    assert megatron.fp8_config == FP8EngineConfig()
    config = TrainEngineConfig(
        path="m",
        dtype="bfloat16",
        fsdp=dict(offload_params=True, memory_efficient_load=True),  # noqa: C408
        archon=dict(pp_schedule="dual_pipe_v", offload_params=True),  # noqa: C408
        parallel_strategy=ParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, context_parallel_size=1),
    )
    assert config.fsdp == configs.FSDPEngineConfig(offload_params=True, memory_efficient_load=True)
    assert config.archon.pp_schedule == "dual_pipe_v"
    assert config.parallel_strategy is not None and config.parallel_strategy.world_size == 4


def test_fp8_is_on_either_way() -> None:
    assert MegatronEngineConfig(fp8_config={"mode": "hybrid"}).use_fp8
    assert MegatronEngineConfig().fp8_config is None and not MegatronEngineConfig().use_fp8


def test_defaults_are_areals() -> None:
    """A sample of those that a wrong one would change results with."""
    config = TrainEngineConfig()
    assert (config.dtype, config.grad_reduce_dtype, config.optimizer_dtype) == ("bfloat16", "float32", "float32")
    assert (config.attn_impl, config.temperature, config.logprobs_chunk_size) == ("flash_attention_2", 1.0, 1024)
    assert (config.lora_rank, config.lora_alpha, config.target_modules, config.peft_type) == (32, 16, [], "lora")
    assert config.optimizer is None and config.weight_update_mode == "xccl"
    assert dataclasses.astuple(MicroBatchSpec()) == (1, 1, None, 1, "ffd")
    expected = (
        "adam", 1e-3, 0.01, 0.9, 0.999, 1e-8, 0.0, "constant", 0.001, None, 2.0**32, 1.0, 5.0, 2, 1.0
    )  # fmt: skip
    assert dataclasses.astuple(OptimizerConfig()) == expected
    archon = ArchonEngineConfig()
    assert (archon.attn_type, archon.ac_mode, archon.selective_ac_option) == ("varlen", "selective", "op")
    assert archon.pp_schedule == "interleaved_1f1b" and not archon.enable_compile
    assert archon.fp8_config.exclude_modules == ["output", "router", "score"]
    megatron = MegatronEngineConfig()
    assert megatron.ddp.use_distributed_optimizer and megatron.ddp.grad_reduce_in_fp32 and megatron.wrap_with_ddp
    assert (megatron.recompute_granularity, megatron.recompute_method, megatron.recompute_num_layers) == (
        "full", "uniform", 1
    )  # fmt: skip


def test_two_configurations_share_no_list() -> None:
    one, two = TrainEngineConfig(), TrainEngineConfig()
    one.target_modules.append("q_proj")
    one.archon.fp8_config.exclude_modules.append("x")
    assert two.target_modules == [] and "x" not in two.archon.fp8_config.exclude_modules


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv_zero_bubble"),
        ("dual-pipe-v", "dual_pipe_v"),
        ("ScheduleDualPipeV", "dual_pipe_v"),
        ("my/Schedule.csv", "my/Schedule.csv"),
    ],
)
def test_schedules_have_one_name_each(given: str, name: str) -> None:
    assert ArchonEngineConfig(pp_schedule=given).pp_schedule == name


def test_schedule_names_are_torchs() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in SCHEDULES:
        camel = name.replace("_", "")
        assert get_schedule_class(camel) is not None


def test_spellings_of_dtypes() -> None:
    torch = importlib.import_module("torch")
    spellings: list[Any] = ["bf16", "bfloat16", "BFloat16", torch.bfloat16]
    for word in spellings:
        assert TrainEngineConfig(dtype=word).dtype == "bfloat16"
    assert MegatronEngineConfig(exp_avg_dtype="fp32").exp_avg_dtype == "float32"  # pyright: ignore[reportArgumentType]
    assert OptimizerConfig(type="AdamW").type == "adam"  # pyright: ignore[reportArgumentType]


def test_warm_up_in_steps_or_as_a_part() -> None:
    assert OptimizerConfig(warmup_steps_proportion=0.1).warmup_of(200) == 20
    assert OptimizerConfig(warmup_steps_proportion=0.1, warmup_steps=3).warmup_of(200) == 3


# ------------------------------------------------------------------------------------------------ what is wrong


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        build(
            TrainEngineConfig,
            {
                "pathh": "m",
                "dtype": "bfloat17",
                "fsdp": {"offload_param": True, "enable_compile": 1},
                "mb_spec": {"n_mbs": 0, "max_tokens_per_mb": "many"},
                "optimizer": {"lr": "fast", "type": "adamx", "beta1": 2},
                "archon": {"pp_schedule": "zbv", "fp8_config": {"mode": "tensorwise"}},
                "parallel_strategy": {"expert_parallel_size": 3, "data_parallel_size": 2},
                "target_modules": [1.5],
                "seed": True,
                "megatron": 3,
                "backend": None,
            },
        )
    assert problems(error) == {
        "pathh": "no such field in TrainEngineConfig (did you mean path?)",
        "dtype": "'bfloat17', expected one of float32, float16, bfloat16 (did you mean bfloat16?)",
        "fsdp.offload_param": "no such field in FSDPEngineConfig (did you mean offload_params?)",
        "fsdp.enable_compile": "1, expected true or false ()",
        "mb_spec.n_mbs": "0 is out of range, expected at least 1 ()",
        "mb_spec.max_tokens_per_mb": "'many', expected an integer or null ()",
        "optimizer.lr": "'fast', expected a number ()",
        "optimizer.type": "'adamx', expected one of adam, sgd, adam_bf16 (did you mean adam?)",
        "optimizer.beta1": "2.0 is out of range, expected at most 1 ()",
        "archon.fp8_config.mode": "'tensorwise', expected one of disabled, blockwise ()",
        "parallel_strategy.expert_parallel_size": "pp·ep·etp = 1·3·1 = 3 does not divide the world of "
        "dp·cp·tp·pp = 2 ranks (the experts share the same ranks)",
        "target_modules[0]": "1.5, expected text ()",
        "seed": "True, expected an integer ()",
        "megatron": "3, expected a mapping with the fields of MegatronEngineConfig ()",
        "backend": "null, expected text ()",
    }


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        TrainEngineConfig(archon={"pp_schedule": "dualpipe"})
    found = problems(error)["archon.pp_schedule"]
    assert "did you mean dual_pipe_v?" in found and "gpipe" in found and "CSV" in found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", 10**400])
def test_numbers_are_finite(value: Any) -> None:
    with pytest.raises(ConfigError, match="lr"):
        OptimizerConfig(lr=value)


def test_whole_floats_are_integers_and_others_are_not() -> None:
    assert MicroBatchSpec(max_tokens_per_mb=1e3).max_tokens_per_mb == 1000  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="max_tokens_per_mb"):
        MicroBatchSpec(max_tokens_per_mb=1.5)  # pyright: ignore[reportArgumentType]


def test_strategies_that_contradict_themselves() -> None:
    with pytest.raises(ConfigError) as error:
        ParallelStrategy(data_parallel_size=4, data_parallel_replicate_size=3, expert_parallel_size=8)
    assert set(problems(error)) == {"data_parallel_replicate_size", "expert_parallel_size"}


def test_what_follows_from_the_sizes() -> None:
    hybrid = ParallelStrategy(data_parallel_size=8, data_parallel_replicate_size=2, tensor_parallel_size=2)
    assert (hybrid.world_size, hybrid.dp_shard_size, hybrid.dp_replicate_size) == (16, 4, 2)
    assert str(hybrid) == "tp2 dp8 dp_replicate2"
    folded = ParallelStrategy(
        data_parallel_size=4, pipeline_parallel_size=2, tensor_parallel_size=2, context_parallel_size=2,
        expert_parallel_size=2, expert_tensor_parallel_size=4,
    )  # fmt: skip
    assert (folded.world_size, folded.expert_model_parallel_size, folded.edp_size) == (32, 16, 2)
    assert ParallelStrategy(data_parallel_size=4, tensor_parallel_size=2).edp_size == 4


# ------------------------------------------------------------------------------------------------ files and overrides


def test_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        """
        dir: runs/${seed}
        seed: 3
        engine:
          path: m
          optimizer: {lr: 1e-4, type: adamw}
          archon: {pp_schedule: DualPipeV}
        eval_data: {path: e.jsonl}
        """
    )
    config = read_config(
        file,
        [
            "engine.mb_spec.max_tokens_per_mb=1e3",
            "+engine.parallel_strategy.tensor_parallel_size=2",
            "engine.optimizer.lr=5e-5",
            "engine.target_modules=[q_proj, v_proj]",
            "engine.megatron.recompute_granularity=null",
            "engine.fsdp={offload_params: true}",
            "eval_data=null",
            "data.path='a: b'",
            "seed=4",
        ],
    )
    assert config.dir == "runs/4" and config.data.path == "a: b" and config.eval_data is None
    engine = config.engine
    assert engine.optimizer == OptimizerConfig(lr=5e-5) and engine.mb_spec.max_tokens_per_mb == 1000
    assert engine.parallel_strategy == ParallelStrategy(tensor_parallel_size=2) and engine.fsdp.offload_params
    assert engine.target_modules == ["q_proj", "v_proj"] and engine.megatron.recompute_granularity is None
    assert engine.archon.pp_schedule == "dual_pipe_v"


def test_unknown_fields_are_refused_with_a_plus_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("engin: {path: m}\nengine: {optimizer: {learning_rate: 1}}\n")
    with pytest.raises(ConfigError) as error:
        read_config(file, ["+engine.new_field=3", "data.max_len=no"])
    assert set(problems(error)) == {"engin", "engine.optimizer.learning_rate", "engine.new_field", "data.max_len"}
    assert "did you mean engine?" in problems(error)["engin"]
    assert "did you mean max_length?" in problems(error)["data.max_len"]


def test_overrides_that_are_none() -> None:
    with pytest.raises(ConfigError) as error:
        read_config(None, ["seed", "=3", "~seed=3", "a..b=3", "data.path=[1", "seed=5"])
    assert set(problems(error)) == {"'seed'", "'=3'", "'~seed=3'", "'a..b=3'", "'data.path=[1'"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nseed: 2", "duplicate key seed"),
        ("- 1", "no mapping"),
        ("3", "no mapping"),
        ("seed: [", "no YAML"),
        ("dir: ${nowhere}", "nowhere"),
        ("dir: ${dir}", "dir"),
        ("data: {path: '???'}", "data.path: is required"),
        ("engine: {optimizer: {lr: !!python/object/apply:os.getcwd []}}", "no YAML"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_config(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"dir: \xe9\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path / "latin.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert read_config(tmp_path / "run.yaml") == RunConfig()


def test_another_class_than_the_run(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("path: m\nbackend: fsdp:d4t2\n")
    config = read_config(tmp_path / "engine.yaml", ["use_lora=true"], TrainEngineConfig)
    assert config == TrainEngineConfig(path="m", backend="fsdp:d4t2", use_lora=True)


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = RunConfig(
        dir="r",
        engine=TrainEngineConfig(
            path="m",
            optimizer=OptimizerConfig(lr=1e-5, eps=1e-15),
            parallel_strategy=ParallelStrategy(data_parallel_size=2, expert_parallel_size=2),
            megatron={"use_fp8": True, "recompute_modules": ["core_attn"]},
            fsdp={"wrap_policy": {"transformer_layer_cls_to_wrap": ["A", "B"]}},
            target_modules=["all-linear"],
        ),
        eval_data={"path": "e.jsonl", "split": "test"},
        loss={"kind": "ppo", "eps_clip_higher": 0.3},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.yaml") == config


TRICKY = ["1e3", "null", "true", "~", "a: b", "${seed}", "\\${x}", "\\\\${", "???x", "0x1F", "1_000", "- a", "'", "é\n"]


@pytest.mark.parametrize("text", TRICKY)
def test_texts_that_look_like_something_else_read_back_equal(tmp_path: Path, text: str) -> None:
    config = RunConfig(dir=text, engine=TrainEngineConfig(target_modules=[text]))
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == config


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12), st.floats(0, 1e30))
def test_any_text_and_number_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, text: str, lr: float) -> None:
    if text == "???":  # OmegaConf's word for what has to be given
        return
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    for config in (DataConfig(path=text), OptimizerConfig(lr=lr)):
        file.write_text(dump_config(config), encoding="utf-8")
        assert read_config(file, [], type(config)) == config


def test_omegaconfs_own_structured_configurations() -> None:
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(TrainEngineConfig)
    merged = OmegaConf.merge(schema, {"fsdp": {"offload_params": True}, "optimizer": {"lr": 1e-4}})
    expected = TrainEngineConfig(fsdp={"offload_params": True}, optimizer={"lr": 1e-4})
    assert OmegaConf.to_object(merged) == expected
    assert OmegaConf.to_object(OmegaConf.structured(expected)) == expected
    assert to_dict(expected)["optimizer"]["lr"] == 1e-4


# ------------------------------------------------------------------------------------------------ a run's own rules


def test_a_run_lacks_what_it_needs() -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig().check()
    assert set(problems(error)) == {"dir", "engine.path", "data.path"}


def test_a_run_that_contradicts_itself() -> None:
    config = RunConfig(
        dir="r",
        engine={"path": "m", "is_critic": True, "mb_spec": {"max_tokens_per_mb": 64}},
        data={"path": "d", "max_length": 128, "batch_size": 7},
        loss={"kind": "grpo", "group_size": 4},
        eval={"every": 5},
        max_steps=10,
        profile={"start": 10},
    )
    with pytest.raises(ConfigError) as error:
        config.check()
    assert set(problems(error)) == {
        "eval.every", "data.max_length", "data.batch_size", "engine.is_critic", "profile.start"
    }  # fmt: skip


def test_a_good_run_passes_and_has_an_optimizer() -> None:
    config = RunConfig(dir="r", engine={"path": "m"}, data={"path": "d"})
    config.check()
    assert config.engine.optimizer == OptimizerConfig()


# ------------------------------------------------------------------------------------------------ metas


def test_steps_count_on() -> None:
    step = StepInfo(0, 0, 0, 2)
    assert step.next() == StepInfo(0, 1, 1, 2) and step.next().next() == StepInfo(1, 0, 2, 2)
    spec = FinetuneSpec(3, 10, 4)
    assert (spec.steps_per_epoch, spec.total_train_steps) == (2, 6)
    with pytest.raises(ConfigError) as error:
        FinetuneSpec(-1, 10, 0)
    assert set(problems(error)) == {"total_train_epochs", "train_batch_size"}


def test_weight_updates_have_versions() -> None:
    meta = WeightUpdateMeta.from_disk("exp", "trial", "/root", use_lora=True, lora_name="a")
    assert meta.path == "/root/checkpoints/exp/trial/default/weight_update" and meta.lora_int_id == 1
    third = meta.with_version(3)
    assert third.path == "/root/checkpoints/exp/trial/default/weight_update_v3" and third.version == 3
    assert meta.version is None and third.lora_name == "a"
    with pytest.raises(ConfigError, match="version"):
        meta.with_version(-1)
    assert WeightUpdateMeta.from_megatron_xccl("gen").type == "xccl"
    assert WeightUpdateMeta.from_fsdp_xccl("gen").weight_chunked_mem_mb == 1024
    assert WeightUpdateMeta.from_awex("host:1").nccl_master_address == "host:1"


def test_save_metas_are_checked() -> None:
    assert SaveLoadMeta(Path("x")).path == "x"  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as error:
        SaveLoadMeta("x", "safetensors")  # pyright: ignore[reportArgumentType]
    assert "weight_format" in problems(error)
    with pytest.raises(ConfigError, match="with_optim"):
        SaveLoadMeta("x", "hf", with_optim=True)


def test_sizes_of_parameters() -> None:
    assert ParamSpec("w", (3, 4), "bfloat16").size == 24 and ParamSpec("s", (), "float32").size == 4


# ------------------------------------------------------------------------------------------------ the engine's API


class _Engine(TrainEngine):
    """Nothing but what is shared."""


def _concrete(**members: Any) -> TrainEngine:
    made = {name: (lambda self, *args, **kwargs: None) for name in TrainEngine.__abstractmethods__}
    return type("Concrete", (TrainEngine,), {**made, **members})(TrainEngineConfig())


def test_the_engine_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        _Engine(TrainEngineConfig())  # pyright: ignore[reportAbstractUsage]
    assert issubclass(TrainEngine, abc.ABC)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("create_process_group", ["parallel_strategy"]),
        ("initialize", ["addr", "ft_spec"]),
        ("train", ["mode"]),
        ("train_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        ("eval_batch", ["input_", "loss_fn", "loss_weight_fn"]),
        ("forward_batch", ["input_", "output_seqlens", "aggregate_fn"]),
        ("forward_backward_batch", ["mb_list", "process_output_fn", "forward_only"]),
        ("save", ["meta"]),
        ("load", ["meta"]),
        ("connect_engine", ["engine", "meta"]),
        ("update_weights", ["meta"]),
        ("set_version", ["version"]),
        ("start_memory_profile", ["max_entries"]),
        ("stop_memory_profile", ["snapshot_dir"]),
        ("save_perf_tracer", ["step", "force"]),
    ],
)
def test_arguments_are_called_as_in_areal(method: str, names: list[str]) -> None:
    assert list(inspect.signature(getattr(TrainEngine, method)).parameters)[1:] == names


def test_what_all_engines_share() -> None:
    steps: list[int] = []
    modes: list[bool] = []
    engine = _concrete(
        lr_scheduler_step=lambda self: steps.append(1),
        train=lambda self, mode=True: modes.append(mode),
        forward_batch=lambda self, *args: args,
    )
    engine.set_version(3)
    assert engine.get_version() == 3
    engine.step_lr_scheduler()
    engine.eval()
    assert steps == [1] and modes == [False]
    assert engine.forward({"a": 1}, [2]) == ({"a": 1}, [2], None)
    engine.record_stats({"a": 1.0, "b": 4.0}, weight=1)
    engine.record_stats({"a": 4.0}, weight=2)
    assert engine.export_stats() == {"a": 3.0, "b": 4.0} and engine.export_stats() == {}


def test_stats_are_averaged_over_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    dist: Any = importlib.import_module("torch.distributed")

    def gather(everyone: list[Any], mine: Any, group: Any) -> None:
        assert group == "data"
        everyone[:] = [mine, {"loss": (9.0, 3.0), "theirs": (2.0, 1.0)}]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    engine = _concrete(data_parallel_world_size=2, data_parallel_group="data")
    engine.record_stats({"loss": 5.0, "mine": 1.0})
    assert engine.export_stats() == {"loss": 3.5, "mine": 1.0, "theirs": 2.0}  # (5·1 + 3·3) / 4


def test_a_memory_profile_without_a_gpu_is_none(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    engine = _concrete()
    engine.start_memory_profile()
    engine.stop_memory_profile(str(tmp_path / "snapshots"))
    assert list(tmp_path.iterdir()) == []


def test_configurations_travel() -> None:
    config = TrainEngineConfig(path="m", optimizer=OptimizerConfig(), archon={"pp_schedule": "GPipe"})
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert dataclasses.replace(config, fsdp={"offload_params": True}).fsdp.offload_params


def test_a_run_leaves_the_engine_that_it_is_given_alone() -> None:
    given = TrainEngineConfig(path="m")
    assert RunConfig(engine=given).engine.optimizer == OptimizerConfig() and given.optimizer is None


def test_memory_of_this_process() -> None:
    stats = _concrete().get_device_stats()
    assert 0 < stats.allocated <= stats.peak and stats.used <= stats.total


# ------------------------------------------------------------------------------------------------ public names


def test_every_public_name_is_there() -> None:
    for name in engines.__all__:
        assert getattr(engines, name) is not None, name
    assert set(engines.__all__) <= set(dir(engines))
    with pytest.raises(AttributeError, match="no attribute 'TrainEngin'"):
        _ = engines.TrainEngin


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(str(engines.__file__)).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = [alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(engines.__all__)


def test_the_api_loads_neither_torch_nor_omegaconf() -> None:
    names = [f"areal_convert.engines.api.{path.stem}" for path in Path(configs.__file__).parent.glob("[a-z]*.py")]
    code = f"import sys\nfrom importlib import import_module\nfor m in {names!r}: import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"torch", "omegaconf", "yaml", "numpy", "transformers"} == set()


def test_the_guide_shows_every_field_as_it_is() -> None:
    tool = Path(__file__).parents[1] / "tools" / "config_reference.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
