"""One of torchrun's workers that each train a model of their own, for `test_torchrun.py`.

    torchrun … torchrun_trainer.py FOLDER

Each writes its master's address to a file of its own. In the first incarnation rank 1 is killed with -9 while
both hold leases.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import quick_imports
from torchrun_worker import Numbers

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.testing import wait_until


def main(folder: Path) -> None:
    quick_imports.over()
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    reader = Numbers()
    with DataShardService(4, reader=reader, audit_dir=folder / "audit", shuffle_shards=True) as service:
        (folder / f"master-{rank}-{restart}").write_text(service.session.master.address)
        loader = ElasticDataLoader(ShardedDataset(service, reader))
        taken = 0
        while not service.finished:
            for _ in loader:
                taken += 1
                if restart == "0" and taken == 5:
                    (folder / f"holds-{rank}").touch()
                    wait_until(
                        lambda: (folder / "holds-0").exists() and (folder / "holds-1").exists(), timeout_s=60
                    )
                    if rank == "1":
                        os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()  # until torchrun ends this one too


if __name__ == "__main__":
    main(Path(sys.argv[1]))
