"""Models on a device that remember what they learnt, a stream that lags behind, and steps in CUDA graphs.

On the processor all is done at once. It does not know how the loaders count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

LAG_CYCLES = 20_000_000  # some 10 ms of a GPU


class Pictures:
    """Record `i` is a picture full of `i`. Batches of 4 are so large that their memory is used again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 240, 240), float(index))


class Learner:
    """A model with a weight for each record, which each time that it is learnt makes less by 1: exactly."""

    def __init__(self, records: int, device: torch.device, **options: Any) -> None:
        self.device = device
        self.weight = torch.nn.Parameter(torch.zeros(records, device=device))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, **options)

    def loss(self, records: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, records).sum()

    def learn(self, records: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(records.to(self.device, non_blocking=True)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @property
    def learnt(self) -> list[int]:
        """How often each record was."""
        return [-int(weight) for weight in self.weight.tolist()]


def lag(device: torch.device) -> None:
    """Keep the current stream busy for some milliseconds: what it is told next is done later."""
    if device.type == "cuda":
        torch.cuda._sleep(LAG_CYCLES)


def settle(device: torch.device) -> None:
    """Wait until all is done that the device was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def side_stream(device: torch.device) -> Iterator[Any]:
    """Another stream is the current one; the usual one waits for it in the end."""
    if device.type != "cuda":
        yield None
        return
    stream, usual = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        yield stream
    usual.wait_stream(stream)


@contextmanager
def no_wait_for(device: torch.device) -> Iterator[None]:
    """Whatever waits for the GPU in here raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Prefetcher:
    """Copies a batch to the device, beside what the loop computes on the one before."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def __iter__(self) -> Iterator[torch.Tensor]:
        ready = None
        for batch in self._loader:
            ready, before = self._sent(batch), ready
            del batch
            if before is not None:
                self._loader.passed_on()
                yield self._arrived(before)
        if ready is not None:
            self._loader.passed_on()
            yield self._arrived(ready)
        self._loader.passed_on()

    def _sent(self, batch: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return batch.clone()
        with torch.cuda.stream(self._stream):
            lag(self._device)
            return batch.to(self._device, non_blocking=True)

    def _arrived(self, batch: torch.Tensor) -> torch.Tensor:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            batch.record_stream(torch.cuda.current_stream())
        return batch


class Graphs:
    """Captures steps of an optimizer without state into CUDA graphs.

    On the processor it plays the part: `step` is called while torch says that it captures, and changes no
    weight; to replay it changes them, and calls no hook.
    """

    def __init__(self, device: torch.device, patch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._capturing = False
        if device.type != "cuda":
            patch.setattr(torch.cuda, "is_initialized", lambda: self._capturing)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self._capturing)

    def capture(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Callable[[], object]:
        """Return what does the step. It is not done yet."""
        optimizer.zero_grad()  # the graph has gradients of its own
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            return graph.replay
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        self._capturing = True
        step()
        self._capturing = False
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)

        def replay() -> None:
            hooks = optimizer._optimizer_step_post_hooks
            optimizer._optimizer_step_post_hooks = OrderedDict()
            optimizer.zero_grad()
            step()
            optimizer._optimizer_step_post_hooks = hooks

        return replay
