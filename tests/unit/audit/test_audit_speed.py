"""2·10^7 records in 6·10^5 acknowledgements are judged in a second or so, not record by record."""

from __future__ import annotations

import time

import numpy as np
import pytest
from audited_job import WORD

from edl_torch.audit.log import write_event
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.core.codec import object_of
from edl_torch.shard import DatasetSpec, Source

BATCH, SHARD, RECORDS, TRAINERS = 32, 256, 20_000_000, 4
GENEROUS_S = 40.0


def write_log(folder, spec: DatasetSpec, trainer: int) -> int:
    """Every fourth shard of a permuted order, in batches, each answered. Returns the number of batches."""
    shards = np.random.default_rng(0).permutation(-(-RECORDS // SHARD))[trainer::TRAINERS]
    lines = []
    for task, shard in enumerate(shards.tolist()):
        length = min(SHARD, RECORDS - shard * SHARD)
        number = trainer + TRAINERS * task
        lines += [
            f"0 {shard} {start} {min(start + BATCH, length)} {number} 1 {task} {task}\n=\n"
            for start in range(0, length, BATCH)
        ]
    header = {"edl_audit": 3, "session": f"s{trainer}", "worker_id": f"w{trainer}", "opened": 1.0}
    fence = {"ledger": "L", "lineage": 1, "member": 1}
    dataset = {"batch_size": BATCH, "known_by": "none", "dataset": object_of(spec)}
    head = write_event(header) + write_event({"event": "joined", **fence, **dataset, "ms": 0})
    head += write_event({"event": "model", **object_of(WORD), "ms": 0})
    head += write_event({"event": "way", "way": "step", "ms": 0})
    (folder / f"w{trainer}.audit").write_bytes(head + "".join(lines).encode())
    return len(lines)


@pytest.mark.slow
def test_twenty_million_records_are_proven_in_seconds(tmp_path):
    sources = tuple(Source(name=f"part-{n}", count=RECORDS // 1000) for n in range(1000))
    spec = DatasetSpec(name="d", sources=sources, records_per_shard=SHARD, shuffle=True, shuffle_shards=True)
    batches = sum(write_log(tmp_path, spec, trainer) for trainer in range(TRAINERS))
    started = time.perf_counter()
    (verdict,) = audit([tmp_path])
    took = time.perf_counter() - started
    print(f"{batches} acknowledgements of {RECORDS} records judged in {took:.1f} s")
    assert verdict.outcome is Outcome.PROVEN
    assert (verdict.acknowledged, batches) == (RECORDS, RECORDS // BATCH)
    assert took < GENEROUS_S
