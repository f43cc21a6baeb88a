"""The demo as a process: it says what it does, kills a rank and the master, and proves the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import demo
import pytest

from edl_torch.errors import EdlError

ROOT = Path(__file__).parents[3]
TINY = (
    *("--demo-images", "40", "--epochs", "4", "--batch-size", "2", "--width", "16", "--image-size", "32"),
    *("--checkpoint-steps", "10", "--device", "cpu"),
)
RECORDS = 40 * 5 * 4


@pytest.mark.slow
def test_a_rank_and_the_master_are_killed_and_the_result_is_proven(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()  # of an earlier run: it is not gone on from
    (tmp_path / "checkpoints" / "00000009").mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/coco/demo.py"), "--output", str(tmp_path), *TINY],
        env={**os.environ, "PYTHONPATH": str(ROOT), "EDL_MASTER_ADDR": "localhost:1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    story = [
        r"edl-torch master --addr \S+ --state \S+",
        *([r"Watch it at http://127.0.0.1:\d+/"] if find_spec("aiohttp") else []),
        "Two ranks train one model",
        r"Rank 1 was just killed \(kill -9 \d+\)",
        "They go on from the last checkpoint",
        r"the master is killed \(kill -9 \d+\)",
        r"edl-torch master --addr \S+ --state \S+",
        f"delivered {RECORDS} of {RECORDS} annotations, each once",
        "captions.png",
        r"drawn in \S+audit.html",
        "PROVEN, data the same by names\n",
    ]
    assert re.search(".*".join(story), done.stdout, re.S), done.stdout
    assert f"acknowledged {RECORDS} " in done.stdout
    assert "✓ PROVEN" in (tmp_path / "audit.html").read_text("utf-8")
    assert (tmp_path / "captions.png").stat().st_size > 1000
    assert json.loads((tmp_path / "metrics.json").read_text())["deliveries"]["repeated"] == 0


def test_wrong_input_is_one_line_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--quiet", "--output", str(tmp_path / "out"), "--epochs", "none"]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == "error: argument --epochs: 'none' is not a whole number from 1 (--help lists the arguments)\n"
    )
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_a_job_that_ends_before_anybody_was_killed_is_an_error(tmp_path: Path) -> None:
    class Ended(demo.Job):
        over = True
        last_words = "no reason"

        def __init__(self) -> None:
            self.output = tmp_path

    with pytest.raises(EdlError, match="ended before anybody was killed:\nno reason"):
        Ended().wait_until(lambda: False)
