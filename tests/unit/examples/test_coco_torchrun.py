"""train.py under torchrun: ranks train one model, and go on when one of them was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import generate
import preloaded
import pytest

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

ROOT = Path(__file__).parents[3]
TORCHRUN = ROOT / "tests" / "preloaded_torchrun.py"
TRAIN = ROOT / "examples" / "coco" / "train.py"
EPOCHS, CAPTIONS = 2, 300


def workers_of(agent: int) -> list[int]:
    """torchrun's own children that run train.py."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Job:
    """train.py under torchrun with two ranks, over generated pictures; it may be started more than once."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self._folder = folder
        data = folder / "data"
        generate.generate(data, generate.Recipe(images=60, val=4, size=32))
        self._command = [
            *(sys.executable, str(TORCHRUN), "--nnodes=1:3", "--nproc-per-node=2"),
            *("--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=coco", "--rdzv-endpoint=localhost:0"),
            *("--rdzv-conf", "last_call_timeout=1"),
            *("--monitor-interval=0.1", "--log-dir", str(folder / "logs"), str(TRAIN)),
            *("--images", str(data / "images/train"), "--annotations", str(data / "captions_train.json")),
            *("--val-images", str(data / "images/val"), "--val-annotations", str(data / "captions_val.json")),
            *("--output", str(self.output), "--audit", str(folder / "audit"), "--epochs", str(EPOCHS)),
            *("--batch-size", "4", "--width", "16", "--image-size", "32", "--device", "cpu"),
            *("--threads", "1", "--workers", "0"),
        ]

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    @contextmanager
    def started(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        foreign = ("EDL_MASTER", "TORCH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        command = [*self._command, *more]
        with (self._folder / "log").open("ab") as file:
            job = preloaded.Popen(command, stdout=file, stderr=file, env=environment, cwd=self._folder)
        try:
            yield job
        finally:
            job.kill()
            job.wait()

    def judge(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It has finished, and each record counts once."""
        count = CAPTIONS * EPOCHS
        assert f"delivered {count} of {count} annotations, each once" in self.log
        metrics = json.loads((self.output / "metrics.json").read_text())
        assert [(row["epoch"], row["records"]) for row in metrics["epochs"]] == [(0, CAPTIONS), (1, CAPTIONS)]
        said = re.findall(r"epoch (\d)/2: loss \d\.\d+, (\d+) records", self.log)
        assert set(said) == {("0", str(CAPTIONS)), ("1", str(CAPTIONS))}, "of all ranks"
        assert main(["audit", str(self._folder / "audit")]) == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_is_killed_and_the_job_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    with job.started("--checkpoint-steps", "5") as process:
        wait_until(lambda: (job.output / "checkpoints" / "00000002").exists(), timeout_s=80)
        os.kill(workers_of(process.pid)[1], signal.SIGKILL)
        assert process.wait(80) == 0, job.log
    job.judge(capsys)
    assert "Sending process" in job.log, "torchrun restarted nothing"


def test_a_job_that_is_told_to_end_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    with job.started("--checkpoint-steps", "5") as process:
        wait_until(lambda: (job.output / "checkpoints" / "00000002").exists(), timeout_s=80)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) != 0
    assert "stopped: go on with the same command" in job.log
    assert "exiting via" not in job.log, "torchrun had to kill a rank"
    with job.started() as process:
        assert process.wait(80) == 0, job.log
    job.judge(capsys)
    capsys.readouterr()
    main(["audit", str(tmp_path / "audit")])
    assert "rolled back 0 " in capsys.readouterr().out, "a step was lost"
