"""Jobs that get SIGTERM at random moments, save and go on; `make chaos` has the long version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

RUN = Path(__file__).with_name("notices_run.py")


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("seed", "spawn"),
    [
        pytest.param(4, 0.0, id="forked workers", marks=pytest.mark.long),
        pytest.param(21, 1.0, id="spawned workers", marks=pytest.mark.long),
        pytest.param(9, 0.0, id="two ranks, forked workers"),
        pytest.param(6, 0.0, id="four ranks", marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_told_to_end_goes_on_where_it_was(seed: int, spawn: float, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(RUN), "--first", str(seed), "--spawn", str(spawn)]
    limits = ["--notices", "2", "--each", "2", "--keep", str(tmp_path / "jobs")]
    run = preloaded.Popen([*command, *limits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = run.communicate(timeout=600)
    finally:
        run.terminate()
        run.wait(30)
    print(out)
    assert run.returncode == 0, err
    assert "1 jobs, 0 failed; 2 notices" in out
