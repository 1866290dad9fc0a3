"""`RunConfig`: everything about one run of `areal-convert train`. The engine's part is `TrainEngineConfig`."""

# `option` and `part` are dataclasses.field by another name.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...converter.errors import ConfigError, Problems
from .configs import OptimizerConfig, TrainEngineConfig
from .fields import config, maybe, nothing, of, option, part, settle

__all__ = ["DataConfig", "EvalConfig", "LogConfig", "LossConfig", "ProfileConfig", "RunConfig", "SaveConfig"]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Samples: `messages`, `prompt` with `completion`, or `text`."""

    path: str = option("", "JSONL file or directory of them, saved dataset, or a name that `datasets` knows")
    split: str = option("train", "split of a dataset")
    as_chat: bool = option(False, "wrap textual prompts and completions with the chat template")
    add_eos: bool = option(True, "end samples without chat template with the end-of-sequence token")
    train_on_prompt: bool = option(False, "learn prompts too")
    max_length: int | None = option(None, "tokens of a sample, at most", least=2)
    too_long: Literal["error", "truncate", "drop"] = option(
        "error", "what becomes of longer samples", names={"refuse": "error"}
    )
    limit: int | None = option(None, "read so many samples only", least=1)
    batch_size: int = option(8, "samples of one step, of all ranks together", least=1)
    shuffle: bool = option(True, "another order in each epoch (grpo: of groups)")
    seed: int | None = option(None, "seed of that order; null: the run's", least=0)

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """When the evaluation data is gone through."""

    every: int = option(0, "steps between evaluations; 0: none on the way", least=0)
    at_start: bool = option(False, "before the first step")
    at_end: bool = option(True, "after the last step")
    max_batches: int | None = option(None, "batches of one evaluation, at most", least=1)

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """What is minimised. All but `kind` is for the policy losses."""

    kind: Literal["sft", "grpo", "ppo"] = option(
        "sft", "sft; grpo: advantages within groups of rewards; ppo: advantages given"
    )
    eps_clip: float = option(0.2, "the ratio of policies is clipped at 1 minus this", above=0, most=1)
    eps_clip_higher: float | None = option(None, "… and at 1 plus this; null: eps_clip", above=0)
    dual_clip: float | None = option(None, "bound on the loss of bad tokens, times their advantage", above=1)
    behaviour_cap: float | None = option(None, "tokens whose off-policy weight is larger are left out", above=0)
    kl_coef: float = option(0.0, "weight of the divergence from ref_logprobs", least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "how the divergence is estimated")
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0)
    normalization: Literal["token", "sequence"] = option("token", "what the loss is a mean of")
    ratio_level: Literal["token", "sequence"] = option("token", "sequence: clip whole sequences (GSPO)")
    group_size: int = option(8, "grpo: samples with the same prompt, side by side", least=2)
    scale_advantages: bool = option(True, "grpo: divide by the group's standard deviation")
    leave_one_out: bool = option(False, "grpo: compare with the others' mean (RLOO)")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class SaveConfig:
    """Training states in `{dir}/checkpoints`, and the trained model."""

    every: int = option(0, "steps between training states; 0: none on the way", least=0)
    at_end: bool = option(True, "a training state after the last step")
    keep_latest_k: int = option(2, "training states that are kept; 0: all", least=0)
    async_save: bool = option(False, "write while the training goes on")
    async_in: Literal["thread", "process"] | None = option(
        None, "what writes then: a thread, or a process; null: a process for archon, else a thread"
    )
    hf_at_end: bool = option(True, "export a Hugging Face directory to {dir}/model after the last step")

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Where the numbers of each step go."""

    every: int = option(1, "steps between two lines", least=1)
    console: bool = option(True, "a table in the terminal")
    jsonl: bool = option(True, "{dir}/metrics.jsonl")
    tensorboard: bool = option(True, "{dir}/tensorboard")
    wandb: bool = option(False, "Weights & Biases, where it is installed")
    wandb_project: str = option("areal-convert", "its project")
    peak_tflops: float | None = option(None, "of one device, for the MFU; null: by the device's name", above=0)

    def __post_init__(self) -> None:
        settle(self)


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch's profiler over some steps, a trace a rank in `{dir}/profile`."""

    start: int | None = option(None, "first step; null: no profile", least=0)
    steps: int = option(3, "how many", least=1)
    memory: bool = option(False, "record allocations too (CUDA)")

    def __post_init__(self) -> None:
        settle(self)


@config
class RunConfig:
    """One run of `areal-convert train`. `epochs` and `max_steps`: whichever is reached first; neither: one epoch."""

    dir: str = option("", "where everything of the run is written")
    engine: TrainEngineConfig = part(
        default_factory=TrainEngineConfig,
        converter=of(TrainEngineConfig),
        help="the engine; its optimizer is OptimizerConfig's defaults if null",
    )
    tokenizer: str = option("", "directory or name; empty: engine.path")
    data: DataConfig = part(default_factory=DataConfig, converter=of(DataConfig), help="training data")
    eval_data: DataConfig | None = part(
        default_factory=nothing, converter=maybe(DataConfig), help="evaluation data, with the fields of data"
    )
    eval: EvalConfig = part(default_factory=EvalConfig, converter=of(EvalConfig), help="evaluation")
    loss: LossConfig = part(default_factory=LossConfig, converter=of(LossConfig), help="loss")
    epochs: int | None = option(None, "times through the data", least=1)
    max_steps: int | None = option(None, "optimizer steps", least=1)
    save: SaveConfig = part(default_factory=SaveConfig, converter=of(SaveConfig), help="saving")
    resume: str = option("auto", "auto: from the newest training state in dir, if any; never; or the path of one")
    log: LogConfig = part(default_factory=LogConfig, converter=of(LogConfig), help="logging")
    profile: ProfileConfig = part(default_factory=ProfileConfig, converter=of(ProfileConfig), help="profiling")
    seed: int = option(1, "seed of the run: data order, dropout, new weights", least=0)
    max_failed_steps: int = option(5, "steps without a finite gradient in a row before the run stops", least=1)
    timeout: float = option(600.0, "seconds that ranks wait for one another", above=0)

    def __post_init__(self) -> None:
        settle(self)
        if self.engine.optimizer is None:
            self.engine = replace(self.engine, optimizer=OptimizerConfig())  # the given one is its owner's

    def check(self) -> None:
        """Raises ConfigError for whatever is missing or contradicts another field, all at once."""
        problems = Problems()
        for name, value, hint in (
            ("dir", self.dir, "dir=runs/first"),
            ("engine.path", self.engine.path, "engine.path=MODEL or engine.path=hf://OWNER/NAME"),
            ("data.path", self.data.path, "data.path=FILE.jsonl"),
        ):
            if not value:
                problems.add(name, "is required and not given", hint)
        if self.eval.every and self.eval_data is None:
            problems.add("eval.every", f"{self.eval.every}, and there is no eval_data", "eval_data.path=FILE.jsonl")
        if self.eval_data is not None and not self.eval_data.path:
            problems.add("eval_data.path", "is required and not given", "eval_data=null for no evaluation")
        limit = self.engine.mb_spec.max_tokens_per_mb
        for name, data in (("data", self.data), ("eval_data", self.eval_data)):
            if data and limit and data.max_length and data.max_length > limit:
                what = f"{data.max_length} tokens do not fit a micro-batch of {limit}"
                problems.add(f"{name}.max_length", what, "engine.mb_spec.max_tokens_per_mb")
        if self.loss.kind == "grpo" and self.data.batch_size % self.loss.group_size:
            what = f"{self.data.batch_size} samples are not whole groups of {self.loss.group_size}"
            problems.add("data.batch_size", what, "a multiple of loss.group_size")
        if self.loss.kind != "sft" and self.engine.is_critic:
            problems.add("engine.is_critic", f"a critic has no policy for {self.loss.kind}")
        if self.profile.start is not None and self.max_steps is not None and self.profile.start >= self.max_steps:
            problems.add("profile.start", f"{self.profile.start}, and max_steps={self.max_steps}")
        problems.raise_as(ConfigError, "This run cannot be.")
