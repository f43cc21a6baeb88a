"""A trainer of a mixture as a process that may be killed at any moment.

    python mixture_process.py ADDRESS AUDIT_DIR LOADER_WORKERS BATCHES_OF_ONE_COMPONENT

It trains to the end, and prints each record before it is acknowledged: component, pass, number, in a line.
"""

from __future__ import annotations

import sys

from edl_torch import ElasticDataLoader, MasterClient, Mixture

SIZES = {"code": 37, "math": 5, "web": 400}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}
RECORDS = 4_200
BATCH = 10


def main(address: str, audit_dir: str, workers: str, by_turns: str) -> None:
    """Train."""
    parts = {name: range(size) for name, size in SIZES.items()}
    mixture = Mixture(parts, WEIGHTS, num_records=RECORDS, one_component=by_turns == "True")
    with (
        MasterClient(address, f"trainer-{sys.argv[0]}", master_timeout_s=60.0) as client,
        ElasticDataLoader(
            mixture,
            BATCH,
            master_client=client,
            records_per_shard=8 * BATCH,
            collate_fn=list,
            num_workers=int(workers),
            audit_dir=audit_dir,
        ) as loader,
    ):
        for _ in loader.epochs():
            for batch in loader:
                indices = loader.records
                assert indices.passes is not None
                lines = []
                for (name, number), turn, value in zip(indices, indices.passes.tolist(), batch, strict=True):
                    assert value == number
                    lines.append(f"{name.partition(':')[0]} {turn} {number}")
                if by_turns == "True":
                    assert len({line.split()[0] for line in lines}) == 1, lines
                print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
