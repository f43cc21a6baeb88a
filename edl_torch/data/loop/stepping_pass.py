"""Passes whose steps several trainers take together: one that has no batch steps on a padding batch.

When a step is due is said by subclasses; that of synchronous ranks is in `lockstep_pass`.
"""

from __future__ import annotations

from typing import Any

from edl_torch.client.session import Session
from edl_torch.data.loop.inner_loader import InnerLoader
from edl_torch.data.loop.loader_pass import LoaderPass
from edl_torch.data.padding import PaddingBatch, Statistics
from edl_torch.data.weights import Weights


class SteppingPass(LoaderPass):
    """The iterator. `padding`, `statistics` and `weights` are the loader's and outlive it."""

    def __init__(
        self,
        loader: InnerLoader,
        session: Session,
        whole_batch: int | None,
        weights: Weights,
        *,
        padding: PaddingBatch,
        statistics: Statistics,
        epoch: int,
    ) -> None:
        self._padding = padding
        self._statistics = statistics
        self._stepped = False
        super().__init__(loader, session, whole_batch, weights, epoch)

    def _request(self) -> None:
        self._statistics.let_go()
        self._weights.warn_of_padding()
        super()._request()

    def _pad(self) -> Any:
        """Return a padding batch, and note that the loop gets one."""
        self._session.do(self._passes.pad)
        if not self._is_told:
            self._weights.step(0)
        self._statistics.keep()
        return self._padding.batch()

    @property
    def _is_over(self) -> bool:
        return self._session.do(lambda: self._passes.is_over)

    def close(self) -> None:
        """End the pass."""
        self._statistics.let_go()
        super().close()


FIRST_WAIT_S = 1.0  # a trainer that never had a batch has none to pad with


class PaddedPass(SteppingPass):
    """The iterator."""

    def _step(self) -> tuple[Any, int]:
        envelope = None
        while envelope is None:
            envelope = self._pull(self._look, self._session.hand)
            if envelope is None and self._is_over:
                raise StopIteration
            if envelope is None and self._padding.made:
                self._stepped = True
                return self._pad(), 0
        self._stepped = True
        self._padding.keep(envelope.batch)
        if not self._is_told:
            self._weights.step(envelope.size)
        return envelope.batch, envelope.size

    def _look(self) -> bool:
        wait_s = 0.0 if self._padding.made else FIRST_WAIT_S
        more = self._session.run(self._passes.look_for_more(wait_s))
        if not more and not self._stepped and self._is_over:
            self._session.run(self._passes.settle_stuck())
        return more
