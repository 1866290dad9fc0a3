"""The training loop with an engine of one number: order of things, stopping, resuming, skipping, watching."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter.errors import RankError
from areal_convert.engines.api.base import TrainEngine
from areal_convert.engines.api.metas import DeviceStats
from areal_convert.engines.api.reading import read_config
from areal_convert.engines.api.run import LossConfig, RunConfig
from areal_convert.engines.data import batches
from areal_convert.engines.data.loader import Loader
from areal_convert.engines.data.policy import Completion
from areal_convert.engines.loop import Diverged, Evaluation, Trainer
from areal_convert.engines.losses import PolicyLoss
from areal_convert.engines.metrics import Meter, Reduce, alone
from areal_convert.engines.tracking import Trackers
from areal_convert.engines.watchdog import Watchdog, lost_others


class Data:
    """Sample i is [i, i + 1]."""

    digest = "numbers"

    def __len__(self) -> int:
        return 12

    def batch(self, which: Sequence[int]) -> batches.Batch:
        rows = [torch.tensor([i, i + 1]) for i in which]
        return batches.from_sequences(rows, loss_mask=[torch.ones(2, dtype=torch.bool)] * len(rows))


def fake(**kinds: Any) -> Fake:
    """An engine of which most is not needed, and not there."""
    concrete: Any = type("Concrete", (Fake,), {})
    concrete.__abstractmethods__ = frozenset()
    return concrete(**kinds)


class Fake(TrainEngine):
    """Its model is the sum of all it has seen; the loss is the first token of the batch."""

    backend = "fake"

    def __init__(self, bad: Sequence[int] = (), on_step: Callable[[int], None] = lambda step: None) -> None:
        self._version, self.seen = 0, 0
        self.calls: list[str] = []
        self.steps, self.bad, self.on_step = 0, bad, on_step

    def train(self, mode: bool = True) -> Fake:
        self.mode = mode
        return self

    def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        assert self.mode
        self.steps += 1
        self.on_step(self.steps)
        self.seen = self.seen * 3 + int(input_["input_ids"][0])
        self.calls.append("step")
        bad = self.steps in self.bad
        norm = math.nan if bad else 1.0
        loss = math.nan if bad else float(input_["input_ids"][0])
        return {
            "update_successful": float(not bad), "grad_norm": norm, "lr": 0.1, "num_micro_batches": 1.0, "loss": loss,
        }  # fmt: skip

    def lr_scheduler_step(self) -> None:
        self.calls.append("lr")

    def eval_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> torch.Tensor:
        assert not self.mode
        self.calls.append("eval")
        return torch.tensor(float(input_["input_ids"][0]))

    def forward_batch(self, input_: Any, output_seqlens: Any = None, aggregate_fn: Any = None) -> torch.Tensor:
        assert not self.mode and output_seqlens == batches.lengths(input_)
        return torch.where(batches.shift(torch.ones(len(input_["input_ids"])), input_["cu_seqlens"]) > 0, -0.5, 0.0)

    def get_device_stats(self) -> DeviceStats:
        return DeviceStats("cpu", 1, 1, 7, 1, 1)


class Memory:
    """Training states in a dict."""

    def __init__(self, engine: Fake, held: dict[int, Any]) -> None:
        self.engine, self.held = engine, held

    def save(self, step: int, trainer: Mapping[str, Any]) -> Path:
        self.held[step] = (self.engine.seen, dict(trainer))
        self.engine.calls.append(f"save {step}")
        return Path(f"step-{step}")

    def load(self) -> Mapping[str, Any] | None:
        if not self.held:
            return None
        self.engine.seen, trainer = self.held[max(self.held)]
        return trainer

    def wait(self) -> None:
        self.engine.calls.append("wait")


class Lines:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, kind: str, line: Mapping[str, Any]) -> None:
        self.lines.append({"kind": kind, **line})

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def make(
    engine: Fake, *overrides: str, total: int = 6, held: dict[int, Any] | None = None, **more: Any
) -> tuple[Trainer, Lines]:
    config: RunConfig = read_config(None, ["dir=x", "data.path=x", "engine.path=x", *overrides])
    lines = Lines()
    states = Memory(engine, held if held is not None else {})
    loader = Loader(Data(), 4, seed=1)

    def weight(batch: Mapping[str, Any]) -> float:
        return float(len(batch["input_ids"]))

    made = Trainer(
        engine, config, loader, total, lambda *a: None, weight, states=states, trackers=Trackers([lines]), **more
    )
    return made, lines


def evaluation() -> Evaluation:
    def some() -> Iterator[batches.Batch]:
        yield Data().batch([1, 2, 3])
        yield Data().batch([8])

    return Evaluation(some)


# ------------------------------------------------------------------------------------------------ the order of things


def test_a_run_in_order() -> None:
    engine = fake()
    trainer, lines = make(engine, "save.every=2", "eval.every=3", "eval_data.path=x", total=4, evaluation=evaluation())
    outcome = trainer.run()
    step = ["step", "lr"]
    evaluated = ["eval", "eval"]
    assert engine.calls == [*step, *step, "save 2", *step, *evaluated, *step, *evaluated, "save 4", "wait"]
    assert (outcome.step, outcome.signal) == (4, None)
    assert [line["step"] for line in lines.of("train")] == [1, 2, 3, 4]
    assert lines.of("train")[0]["memory_bytes"] == 7
    assert lines.of("eval")[0]["eval_loss"] == (1 * 6 + 8 * 2) / 8, "each target counts once, not each batch"
    assert lines.of("start")[0]["backend"] == "fake" and lines.of("end")[0]["step"] == 4


def test_logging_every_third_step_has_the_first_and_the_last() -> None:
    trainer, lines = make(fake(), "log.every=3", total=5)
    trainer.run()
    assert [line["step"] for line in lines.of("train")] == [1, 3, 5]


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped() -> None:
    straight = fake()
    make(straight, total=9)[0].run()
    held: dict[int, Any] = {}
    make(fake(), total=9, held=held)[0].run(until=4)
    second = fake()
    trainer, lines = make(second, total=9, held=held)
    assert trainer.run().step == 9
    assert second.seen == straight.seen and second.steps == 5
    assert [line["step"] for line in lines.of("train")] == [5, 6, 7, 8, 9]
    assert lines.of("train")[-1]["total_tokens"] == 9 * 8


def test_a_finished_run_takes_no_step_again() -> None:
    held: dict[int, Any] = {}
    make(fake(), held=held)[0].run()
    engine = fake()
    assert make(engine, held=held)[0].run().step == 6 and "step" not in engine.calls


# ------------------------------------------------------------------------------------------------ stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step(number: signal.Signals) -> None:
    held: dict[int, Any] = {}
    before = signal.getsignal(number)
    engine = fake(on_step=lambda step: os.kill(os.getpid(), number) if step == 2 else None)
    trainer, lines = make(engine, held=held)
    outcome = trainer.run()
    assert (outcome.step, outcome.signal) == (2, number) and list(held) == [2]
    assert f"{number.name} after step 2" in lines.of("event")[-1]["message"]
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_wait() -> None:
    def twice(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        make(fake(on_step=twice))[0].run()


def test_another_ranks_signal_stops_this_one_too() -> None:
    def reduce(values: Sequence[float], how: str) -> list[float]:
        told = len(values) == 1 and how == "max" and engine.steps == 3
        return [float(signal.SIGTERM)] if told else alone(values, how)

    engine = fake()
    other: Reduce = reduce
    trainer, _ = make(engine, reduce=other)
    assert trainer.run().signal == signal.SIGTERM and engine.steps == 3


def test_skipped_steps_are_counted_and_several_in_a_row_end_the_run() -> None:
    trainer, lines = make(fake(bad=[2, 4]), "max_failed_steps=2", total=5)
    trainer.run()
    assert [line["skipped_steps"] for line in lines.of("train")] == [0, 1, 1, 2, 2]
    assert "step 2: the gradient norm is nan (loss nan), skipped" in lines.of("event")[0]["message"]
    engine = fake(bad=[3, 4])
    with pytest.raises(Diverged, match=r"Step 4: 2 steps in a row had no finite gradient \(loss nan") as error:
        make(engine, "max_failed_steps=2")[0].run()
    assert "engine.optimizer.lr" in error.value.hint
    assert not any(call.startswith("save") for call in engine.calls), "what has diverged is not saved"


# ------------------------------------------------------------------------------------------------ watching


class Store:
    """As much of a torch store as the watchdog uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.lock = threading.Lock()

    def _there(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str | bytes) -> None:
        self._there()
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._there()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._there()
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.set(key, value)


def dog(store: Store, rank: int, stopped: list[str], silent: float = 5.0, ranks: int = 2) -> Watchdog:
    return Watchdog(store, rank, ranks, silent=silent, period=0.02, grace=0.1, stop=stopped.append)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_that_fails_tells_the_others_why() -> None:
    store, stopped = Store(), list[str]()
    with dog(store, 0, stopped) as mine:
        with pytest.raises(ValueError), dog(store, 1, []):
            raise ValueError("boo\nand more")
        found = mine.explain(RuntimeError("Connection closed by peer"))
        until(lambda: stopped)
    assert isinstance(found, RankError) and str(found).startswith("Rank 1 failed: ValueError: boo\n")
    assert stopped == ["Rank 1 failed: ValueError: boo"]


def test_a_silent_rank_is_named_by_all() -> None:
    """Rank 1 of three never beats: rank 0, which watches it, tells, and rank 2 hears of it."""
    store, stopped = Store(), list[str]()
    with dog(store, 0, stopped, silent=0.2, ranks=3), dog(store, 2, stopped, silent=0.2, ranks=3):
        until(lambda: len(stopped) == 2)
    assert all(s.startswith("Rank 1 has given no sign of life") for s in stopped), stopped


def test_a_rank_that_leaves_in_peace_is_not_missed() -> None:
    store, stopped = Store(), list[str]()
    with dog(store, 0, stopped, silent=0.2):
        with dog(store, 1, stopped, silent=0.2):
            pass
        time.sleep(0.5)
    assert stopped == [] and "areal/failed" not in store.values


def test_the_store_may_die_with_its_rank() -> None:
    store, stopped = Store(), list[str]()
    with dog(store, 1, stopped):
        store.gone = True
        until(lambda: stopped)
    assert "The rank that holds the store is gone" in stopped[0]


def test_a_fault_of_ones_own_stays_what_it_is() -> None:
    mine = RuntimeError("shape mismatch")
    with dog(Store(), 0, [], silent=0.1, ranks=1) as alone_:
        assert alone_.explain(mine) is mine
    with dog(Store(), 0, []) as watched:
        assert watched.explain(mine) is mine, "at once"
        closed = RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:31337")
        assert watched.explain(closed, wait=0.1) is closed


def test_what_looks_like_a_lost_rank() -> None:
    lost = RankError("Rank 0 lost the others: …")
    lost.__cause__ = RuntimeError("x")
    assert lost_others(lost) and not lost_others(RankError("Rank 1 cannot write the state"))
    assert lost_others(RuntimeError("Timed out waiting 1000ms for recv operation to complete"))
    assert not lost_others(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_others(OSError("No space left on device"))


def test_a_failing_collective_becomes_the_rank_that_failed() -> None:
    class Explains:
        def explain(self, error: BaseException) -> BaseException:
            return RankError("Rank 3 failed: OSError: disk")

    def fail(step: int) -> None:
        raise RuntimeError("gloo: connection closed")

    with pytest.raises(RankError, match="Rank 3 failed") as error:
        make(fake(on_step=fail), watchdog=Explains())[0].run()
    assert isinstance(error.value.__cause__, RuntimeError)


# ------------------------------------------------------------------------------------------------ policy gradient


def test_batches_are_completed_for_policy_gradient() -> None:
    engine = fake()
    engine.set_version(4)
    batch = Data().batch([1, 2]) | {"reward": torch.tensor([0.0, 2.0]), "versions": torch.tensor([-1, 3, -1, 3])}
    done = Completion(engine, LossConfig(kind="grpo", group_size=2, scale_advantages=False))(batch)
    assert done["advantages"].tolist() == [-1, -1, 1, 1]
    assert done["old_logprobs"].tolist() == [0, -0.5, 0, -0.5], "at the tokens, not where they are predicted"
    assert done["current_version"] == 4
    own = batch | {"old_logprobs": torch.zeros(4), "advantages": torch.ones(4)}
    kept = Completion(engine, LossConfig(kind="ppo"))(own)
    assert kept["old_logprobs"].tolist() == [0] * 4 and kept["advantages"].tolist() == [1] * 4


def test_the_losses_own_numbers_are_logged() -> None:
    trainer, lines = make(fake(), total=1)
    loss = PolicyLoss()
    loss.stats = {"ratio": 1.5}
    trainer.loss = loss
    trainer.run()
    assert lines.of("train")[0]["policy/ratio"] == 1.5


def test_meters_of_the_trainer_see_this_ranks_sequences() -> None:
    trainer, lines = make(fake(), total=1, meter=Meter())
    trainer.run()
    assert lines.of("train")[0]["tokens"] == 8
