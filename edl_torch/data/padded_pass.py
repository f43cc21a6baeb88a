"""One epoch of a trainer that others wait for at each step: it never waits for records that they hold.

Where it has none it hands out a padding batch, so that the loop takes its step. The group that steps together
may change at any time, and is not known here.
"""

from __future__ import annotations

from typing import Any

from edl_torch.data.stepping_pass import SteppingPass

FIRST_WAIT_S = 1.0  # a trainer that never had a batch has none to pad with


class PaddedPass(SteppingPass):
    """The iterator."""

    def _step(self) -> tuple[Any, int]:
        envelope = None
        while envelope is None:
            envelope = self._pull(self._look, self._passes.hand)
            if envelope is None and self._passes.is_over:
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
        more = self._passes.look_for_more(0.0 if self._padding.made else FIRST_WAIT_S)
        if not more and not self._stepped and self._passes.is_over:
            self._passes.settle_stuck()
        return more
