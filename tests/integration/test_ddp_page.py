"""The program of docs/ddp.md under torchrun: a rank is killed, and other numbers of ranks go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edl_torch.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
DIES = """
                if steps in (30, 50) and dist.get_rank() == 1 and loader.epoch < 2:
                    __import__("os").kill(__import__("os").getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_job_of_the_page_is_killed_and_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (command,) = re.findall(r"^\$ torchrun (.*) train\.py$", PAGE.read_text(encoding="utf-8"), re.M)
    assert "steps += 1\n" in program
    (tmp_path / "train.py").write_text(program.replace("steps += 1\n", "steps += 1" + DIES), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    env |= {"OMP_NUM_THREADS": "1"}
    ran = {}
    for ranks, restarts in ((2, 1), (3, 3)):
        options = command.replace("--nproc-per-node=2", f"--nproc-per-node={ranks}")
        options = options.replace("--max-restarts=3", f"--max-restarts={restarts}")
        ran[ranks] = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options.split(), "train.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert ran[2].returncode != 0, "it was killed twice, and may be started again once"
    assert ran[3].returncode == 0, ran[3].stderr
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "acknowledged 4000 " in capsys.readouterr().out
