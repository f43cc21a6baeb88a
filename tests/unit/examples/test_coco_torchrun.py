"""train.py under torchrun: ranks train one model, and go on when one of them was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import generate
import pytest

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "examples" / "coco" / "train.py"
EPOCHS, CAPTIONS = 2, 300


def workers_of(agent: int) -> list[int]:
    """torchrun's own children that run train.py."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_is_killed_and_the_job_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = tmp_path / "data", tmp_path / "output"
    generate.generate(data, generate.Recipe(images=60, val=4, size=32))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=2"),
        *("--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=coco", "--rdzv-endpoint=localhost:0"),
        *("--rdzv-conf", "last_call_timeout=1"),
        *("--monitor-interval=0.1", "--log-dir", str(tmp_path / "logs"), str(TRAIN)),
        *("--images", str(data / "images/train"), "--annotations", str(data / "captions_train.json")),
        *("--val-images", str(data / "images/val"), "--val-annotations", str(data / "captions_val.json")),
        *("--output", str(output), "--audit", str(tmp_path / "audit"), "--epochs", str(EPOCHS)),
        *("--batch-size", "4", "--width", "16", "--image-size", "32", "--device", "cpu", "--threads", "1"),
        *("--workers", "0", "--checkpoint-steps", "5"),
    ]
    foreign = ("EDL_MASTER", "TORCH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("wb") as file:
        job = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=tmp_path)
    try:
        wait_until(lambda: (output / "checkpoints" / "00000002").exists(), timeout_s=80)
        os.kill(workers_of(job.pid)[1], signal.SIGKILL)
        assert job.wait(80) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert f"delivered {CAPTIONS * EPOCHS} of {CAPTIONS * EPOCHS} annotations, each once" in log.read_text()
    metrics = json.loads((output / "metrics.json").read_text())
    assert [(row["epoch"], row["records"]) for row in metrics["epochs"]] == [(0, CAPTIONS), (1, CAPTIONS)]
    said = re.findall(r"epoch (\d)/2: loss \d\.\d+, (\d+) records", log.read_text())
    assert set(said) == {("1", str(CAPTIONS)), ("2", str(CAPTIONS))}, "of all ranks"
    assert main(["audit", str(tmp_path / "audit")]) == 0, capsys.readouterr().out
    assert "Sending process" in log.read_text(), "torchrun restarted nothing"
