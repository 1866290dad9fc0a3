"""Out of device memory and back, bit for bit: for the time in which an inference engine has the GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..converter.errors import ConfigError
from .sharded_optim import ShardedOptimizer, like, local


class Offloader:
    """Moves parameters, gradients, buffers and optimizer states between the device and host memory.

    On CUDA under torch_memory_saver (preloaded, with its TMS_INIT_ENABLE=1 and TMS_INIT_ENABLE_CPU_BACKUP=1: all that
    was allocated is known to it and comes back with its values) its pause and resume do it, and addresses stay.
    """

    def __init__(self, model: nn.Module, optimizer: ShardedOptimizer | None, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._away = False
        self._homes: dict[int, torch.device] = {}

    @property
    def away(self) -> bool:
        return self._away

    def check_here(self) -> None:
        """Raises ConfigError while everything is away: nothing can be computed or saved then."""
        if self._away:
            raise ConfigError("The engine is offloaded.", hint="Call onload() first.")

    def offload(self) -> None:
        """To host memory. A second call does nothing."""
        if self._away:
            return
        self._away = True
        if saver := self._saver():
            saver.pause()
            return
        # States that have always been in host memory stay there when the rest comes back.
        self._homes = {id(p): p.device for p in self._model.parameters()}
        self._model.to("cpu")
        self._move_states(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Back to where it was. Does nothing when nothing is away."""
        if not self._away:
            return
        self._away = False
        if saver := self._saver():
            saver.resume()
            return
        if any(home.type == "cuda" for home in self._homes.values()):
            self._model.to(self._device)
            self._move_states(self._device)
        else:  # parameters live in host memory (offload_params), buffers do not
            for buffer in self._model.buffers():
                buffer.data = buffer.data.to(self._device)

    def _move_states(self, device: torch.device) -> None:
        if self._optimizer is None or self._optimizer.streaming is not None:
            return
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = like(parameter, local(value).to(device))

    def _saver(self) -> Any:
        everything = all(os.environ.get(name) == "1" for name in ("TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP"))
        if self._device.type != "cuda" or not everything or not find_spec("torch_memory_saver"):
            return None
        from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]

        return torch_memory_saver
