"""docs/torchtitan.md changes five lines of torchtitan's own configuration at most, and what it shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import quiet_port

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "torchtitan.md").read_text(encoding="utf-8")


def test_five_lines_of_torchtitans_own_configuration_change() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert len(re.findall(r"^\+", block, re.M)) <= 5
    assert len(re.findall(r"^-", block, re.M)) <= 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchtitans_own_model_trains_to_the_end_of_the_data(tmp_path: Path) -> None:
    tokens = [[(7 * n + i) % 2048 for i in range(3 + n)] for n in range(11)]  # the last is short of its batch
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "rows.parquet")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    said = subprocess.run(
        [sys.executable, str(HERE / "page_trainer.py")],
        cwd=tmp_path,
        env=kept
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHDYNAMO_DISABLE": "1"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == "5 22 True\n"
    assert (tmp_path / "checkpoint" / "step-5" / ".metadata").exists()
