"""Where a run's numbers go: JSON lines always; the console, TensorBoard and Weights & Biases where they are wanted.

Only the rank that tells (`Trackers.none` on all others) writes anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..converter.errors import ConfigError
from ..converter.human import size_text

__all__ = ["JsonLines", "Trackers", "read_lines"]

Line = Mapping[str, Any]


class Tracker(Protocol):
    """Takes lines: `kind` is `start`, `train`, `eval`, `event` or `end`."""

    def log(self, kind: str, line: Line) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`, a line for each record, on disk at once: a run that dies leaves all it told.

    A number that is not finite is written as text ("nan"), since JSON has no word for it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = path.open("a", encoding="utf-8")

    def log(self, kind: str, line: Line) -> None:
        plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self.file.write(json.dumps({"kind": kind, **plain}, ensure_ascii=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `JsonLines` wrote, non-finite numbers as floats again. A last line that was cut off is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found.append({k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in line.items()})
    return found


class Console:
    """A line for each step on standard error, coloured on a terminal."""

    def __init__(self, total: int | None = None) -> None:
        from rich.console import Console as Rich

        self.rich = Rich(stderr=True, highlight=False, soft_wrap=True)
        self.total = total

    def log(self, kind: str, line: Line) -> None:
        text = {"train": self._train, "eval": self._eval}.get(kind, self._other)(line)
        if text:
            self.rich.print(text)

    def _step(self, line: Line) -> str:
        width = len(str(self.total or ""))
        of = f"/{self.total}" if self.total else ""
        return f"[bold]step {line['step']:>{width}}{of}[/]"

    def _train(self, line: Line) -> str:
        parts = [
            self._step(line),
            f"loss [green]{line['loss']:.4f}[/]",
            f"grad {line['grad_norm']:.3f}",
            f"lr {line['lr']:.2e}",
            f"{line['tokens_per_second']:,.0f} tok/s",
        ]
        if "tflops_per_device" in line:
            rate = line["tflops_per_device"]
            parts.append(f"{rate:.1f} TFLOP/s" if rate >= 1 else f"{1000 * rate:.1f} GFLOP/s")
        if "mfu" in line:
            parts.append(f"MFU [cyan]{line['mfu']:.1%}[/]")
        parts += [f"mem {size_text(line['memory_bytes'])}", f"data {line['data_share']:.0%}"]
        if line["skipped_steps"]:
            parts.append(f"[red]skipped {line['skipped_steps']}[/]")
        return "  ".join(parts)

    def _eval(self, line: Line) -> str:
        return f"{self._step(line)}  [magenta]eval loss {line['eval_loss']:.4f}[/]"

    def _other(self, line: Line) -> str:
        from rich.markup import escape

        return escape(str(line["message"])) if "message" in line else ""

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalars in the run's directory."""

    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed.", hint='pip install "areal-convert[train]"') from error
        self.writer = SummaryWriter(str(path))

    def log(self, kind: str, line: Line) -> None:
        if kind in ("train", "eval"):
            for name, value in line.items():
                if name != "step" and isinstance(value, (int, float)):
                    self.writer.add_scalar(f"{kind}/{name}", value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project, with the configuration."""

    def __init__(self, project: str, name: str, path: Path, config: Mapping[str, Any]) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError("Weights & Biases is not installed.", hint="pip install wandb") from error
        self.run: Any = wandb.init(project=project, name=name, dir=str(path), config=dict(config), resume="allow")

    def log(self, kind: str, line: Line) -> None:
        if kind in ("train", "eval"):
            self.run.log({f"{kind}/{k}": v for k, v in line.items() if k != "step"}, step=line["step"])

    def close(self) -> None:
        self.run.finish()


class Trackers:
    """All of a run's trackers as one."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = list(trackers)

    def log(self, kind: str, line: Line) -> None:
        for tracker in self.trackers:
            tracker.log(kind, line)

    def say(self, message: str, **more: Any) -> None:
        """An event that is no number of a step."""
        self.log("event", {"message": message, **more})

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
