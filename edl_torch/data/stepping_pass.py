"""Base of passes whose steps several trainers take together: one without a batch steps on a padding batch.

It does not know when a step is due: its subclasses do.
"""

from __future__ import annotations

from typing import Any

from edl_torch.client.session import Session
from edl_torch.data.inner_loader import InnerLoader
from edl_torch.data.loader_pass import LoaderPass
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
        self._passes.pad()
        if not self._is_told:
            self._weights.step(0)
        self._statistics.keep()
        return self._padding.batch()

    def close(self) -> None:
        """End the pass."""
        self._statistics.let_go()
        super().close()
