"""A trainer as a process that dies at one of its reports.

    python doomed_trainer.py ADDRESS AUDIT_DIR SIZE REPORT before|after|never

It kills itself at the REPORT-th report that says something: `before` the master can hear of it, or `after`
the master has answered and before anybody here has seen the answer; `never` lets it train to the end. It
prints what it trained on, a record a line. It needs no torch, so that it starts fast.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TypeVar

from edl_torch.client.grpc.client import MasterClient
from edl_torch.client.service import DataShardService
from edl_torch.core.calls import ReportCall, Request

A = TypeVar("A")

BATCH = 4


class DoomedClient(MasterClient):
    """Kills its process at one report."""

    def __init__(self, address: str, report: int, when: str) -> None:
        super().__init__(address, "doomed" if report else "heir", master_timeout_s=20.0)
        self._left = report
        self._when = when

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        if not isinstance(request, ReportCall):
            return super().call(request, wait_s)
        self._left -= bool(request.acknowledgements)
        if self._left == 0 and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().call(request)
        if self._left == 0 and self._when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def main(address: str, audit_dir: str, size: str, report: str, when: str) -> None:
    """Train."""
    with (
        DoomedClient(address, int(report), when) as client,
        DataShardService(
            BATCH, client, dataset_size=int(size), records_per_shard=2 * BATCH, audit_dir=audit_dir
        ) as service,
    ):
        while not service.finished:
            while (shard := service.fetch_shard()) is not None:
                for start in range(shard.start, shard.end, BATCH):
                    for record in range(start, min(start + BATCH, shard.end)):
                        print(record, flush=True)
                    service.report_batch_done(min(BATCH, shard.end - start))
                    service.session.flush()  # a report for each batch


if __name__ == "__main__":
    main(*sys.argv[1:])
