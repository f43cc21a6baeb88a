"""The program of a job under Slurm: ranks that save and end when they are told to.

    python slurm_program.py FOLDER

It is the chaos runs' trainer on less data; its ranks are those that Slurm has started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "chaos"))

import quick_imports  # isort: skip
import noticed_trainer
import torch
import torch.distributed as dist

noticed_trainer.RECORDS = 240


def main(folder: Path) -> int:
    quick_imports.over()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = noticed_trainer.Settings(folder=folder, ranks=dist.get_world_size(), step_s=0.02, status=143)
    status = noticed_trainer.train(settings, dist.get_rank())
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
