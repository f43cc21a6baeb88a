"""Several trainer processes on one `edl-torch master`: each record of each epoch exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from image_files import write_coco
from master_kit import MasterProcess

from edl_torch.client.grpc.client import MasterClient

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REAL = ROOT.parent / "shared" / "data" / "coco_mini"
EPOCHS = 2


@pytest.fixture
def master(start_master: Callable[..., MasterProcess]) -> str:
    """A master's address."""
    return start_master().address


@pytest.fixture
def captions(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, int]:
    """Images, annotations and the number of captions."""
    if request.param == "real":
        if not REAL.is_dir():
            pytest.skip(f"the real COCO sample is not beside the checkout ({REAL.name})")
        images, annotations = str(REAL / "images"), str(REAL / "annotations" / "captions_mini.json")
    else:
        images, annotations, _ = write_coco(tmp_path, images=20)
    return images, annotations, len(json.loads(Path(annotations).read_text())["annotations"])


def train(
    tmp_path: Path, address: str, captions: tuple[str, str, int], workers: int, delays: list[float]
) -> Counter[tuple[int, int]]:
    """One trainer per delay; what they were done with, over all of them."""
    environment = {**os.environ, "EDL_MASTER_ADDR": address, "PYTHONPATH": str(ROOT)}
    images, annotations, _ = captions
    out = tmp_path / "seen"
    process = preloaded.run(
        [
            *(sys.executable, "-W", "ignore", HERE / "trainer_process.py", images, annotations, out),
            *("--workers", str(workers), "--epochs", str(EPOCHS), "--delays", *map(str, delays)),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        timeout=200,
        check=False,
    )
    errors = process.stderr.decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    lines = [
        line for number in range(len(delays)) for line in Path(f"{out}.{number}").read_text().splitlines()
    ]
    return Counter((int(epoch), int(number)) for epoch, number in map(str.split, lines))


def check(seen: Counter[tuple[int, int]], address: str, count: int) -> None:
    assert seen == Counter({(epoch, number): 1 for epoch in range(EPOCHS) for number in range(count)})
    client = MasterClient(address, "test", master_timeout_s=5)
    try:
        status = client.dataset_status("training")
    finally:
        client.close()
    assert status.finished
    assert status.acknowledged == EPOCHS * count
    assert (status.todo, status.leased, status.quarantined, status.dropped) == (0, 0, 0, 0)


FURTHER = [
    ("generated", 2, 0),
    ("generated", 4, 0),
    ("generated", 2, 3),
    ("generated", 4, 1),
    ("generated", 4, 3),
    ("real", 2, 1),
    ("real", 4, 0),
]


@pytest.mark.parametrize(
    ("captions", "trainers", "workers"),
    [
        *[("generated", 2, 1), ("real", 4, 3)],
        *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER),
    ],
    indirect=["captions"],
)
def test_trainers_cover_each_record_once(
    tmp_path: Path, master: str, captions: tuple[str, str, int], trainers: int, workers: int
) -> None:
    slow = [0.004] * (trainers - 1) + [0.016]  # the last one is four times slower
    check(train(tmp_path, master, captions, workers, slow), master, captions[2])


@pytest.mark.parametrize("captions", ["generated"], indirect=True)
def test_trainers_of_one_speed_cover_each_record_once(
    tmp_path: Path, master: str, captions: tuple[str, str, int]
) -> None:
    check(train(tmp_path, master, captions, 0, [0.0, 0.0]), master, captions[2])
