"""One epoch of a trainer that others wait for at each step: it never waits for records that they hold.

Where it has none it hands out a batch that stands in, so that the loop takes its step. The group that steps
together may change at any time, and is not known here.
"""

from __future__ import annotations

from typing import Any

from edl_torch.client.session import Session
from edl_torch.core.calls import NEW_PASS
from edl_torch.data.inner_loader import InnerLoader
from edl_torch.data.loader_pass import LoaderPass, Sizes
from edl_torch.data.padding import PaddingBatch, Statistics

FIRST_WAIT_S = 1.0  # a trainer that never had a batch has none to stand in


class PaddedPass(LoaderPass):
    """The iterator. `padding`, `statistics` and `weights` are the loader's and outlive it."""

    def __init__(
        self,
        loader: InnerLoader,
        session: Session,
        whole_batch: int | None,
        weights: Sizes,
        *,
        padding: PaddingBatch,
        statistics: Statistics,
        epoch: int = NEW_PASS,
    ) -> None:
        self._padding = padding
        self._statistics = statistics
        self._steps = 0
        super().__init__(loader, session, whole_batch, weights, epoch)

    def _next_step(self) -> tuple[Any, int]:
        self._statistics.let_go()
        self._weights.warn_of_padding()
        self._request()
        going_on = False
        try:
            envelope = None
            while envelope is None and not going_on:
                envelope = self._pull(self._look, self._passes.hand)
                if envelope is None and self._passes.is_over:
                    break
                going_on = envelope is not None or self._padding.made
        finally:
            if not going_on:
                self.close()
        if not going_on:
            raise StopIteration
        self._steps += 1
        if envelope is None:
            return self._stand_in(), 0
        self._padding.keep(envelope.batch)
        self._weights.step(envelope.size)
        return envelope.batch, envelope.size

    def _look(self) -> bool:
        more = self._passes.look_for_more(0.0 if self._padding.made else FIRST_WAIT_S)
        if not more and not self._steps and self._passes.is_over:
            self._passes.settle_stuck()
        return more

    def _stand_in(self) -> Any:
        self._passes.pad()
        self._weights.step(0)
        self._statistics.keep()
        return self._padding.batch()

    def close(self) -> None:
        """End the pass."""
        self._statistics.let_go()
        super().close()
