"""The prediction example as a job: trainers are killed, and each record has one result."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import preloaded
import pytest
from every_reader import made
from image_files import write_image_folder
from master_kit import MakeMaster

EXAMPLE = Path(__file__).parents[2] / "examples" / "prediction"
sys.path.insert(0, str(EXAMPLE))

import predict  # noqa: E402
import result_log  # noqa: E402

COUNT, BATCH = 60, 4

# Dies at its third batch: after the results are on the disk, or before.
VICTIM = """
import os, signal, sys
import result_log
write = result_log.ResultLog.write
def until_killed(log, records, values, batches=[]):
    batches.append(1)
    if len(batches) == 3 and sys.argv[1] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    write(log, records, values)
    if len(batches) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
result_log.ResultLog.write = until_killed
import predict
predict.main(sys.argv[2:])
"""


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return write_image_folder(tmp_path / "photos", (), COUNT)


def lines(out: Path) -> list[tuple[str, int]]:
    """What all trainers wrote, in whole lines."""
    entries = [json.loads(line) for path in out.glob("part-*") for line in path.read_text().splitlines()]
    return [(entry["name"], entry["index"]) for entry in entries]


def test_each_record_has_one_result_though_trainers_are_killed(
    tmp_path: Path, photos: str, start_master: MakeMaster
) -> None:
    out = tmp_path / "out"
    command = [photos, str(out), "--batch-size", str(BATCH)]
    master = start_master("--prediction_data", photos, "--records_per_task", "12", "--grace-s", "0.2")
    environment = {
        **os.environ,
        "EDL_MASTER_ADDR": master.address,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parents[1]), str(EXAMPLE)]),
    }
    victims = [
        preloaded.Popen([sys.executable, "-c", VICTIM, how, *command], env=environment)
        for how in ("before", "after")
    ]
    assert [victim.wait(100) for victim in victims] == [-signal.SIGKILL] * 2
    script = str(EXAMPLE / "predict.py")
    trainers = [
        preloaded.Popen([sys.executable, script, *command, "--workers", str(n)], env=environment)
        for n in (0, 1)
    ]
    assert [trainer.wait(100) for trainer in trainers] == [0, 0]
    status = master.client().dataset_status("prediction")
    assert status.finished
    assert (status.acknowledged, status.quarantined, status.dropped) == (COUNT, 0, 0)
    merged = result_log.merge(out)
    assert list(merged) == [(photos, index) for index in range(COUNT)]
    written = lines(out)
    assert len(written) == COUNT + BATCH  # one batch was written, and not acknowledged

    alone = tmp_path / "alone"
    assert predict.main([photos, str(alone)]) == 0
    assert result_log.merge(alone) == merged


def test_results_are_merged_by_record_and_a_torn_line_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for values in ((1, 2), (5, 2)):
        with result_log.ResultLog(tmp_path) as log:
            log.write([("a", 10), ("a", 9)], values)
    with open(log.path, "a", encoding="ascii") as file:
        file.write('{"name": "a", "index": 11, "val')
    merged = result_log.merge(tmp_path)
    assert list(merged) == [("a", 9), ("a", 10)]
    assert merged["a", 9] == 2
    assert result_log.main([str(tmp_path), "--expect", "2"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert result_log.main([str(tmp_path), "--expect", "3"]) == 1
    assert "2 results, expected 3" in capsys.readouterr().err


def test_images_with_labels_are_predicted_too(tmp_path: Path) -> None:
    with made("coco_detection", tmp_path / "data") as data:
        assert predict.main([data.data, str(tmp_path / "out"), "--batch-size", "3"]) == 0
    assert len(result_log.merge(tmp_path / "out")) == data.counts[0]
