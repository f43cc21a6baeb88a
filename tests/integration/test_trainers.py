"""Several trainer processes on one `edl-torch master`: each record of each epoch exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
from image_files import write_coco
from master_kit import EDL, MakeMaster, MasterProcess
from processes import quiet_port
from prometheus_client.parser import text_string_to_metric_families

from edl_torch.client.grpc.client import MasterClient
from edl_torch.testing import wait_until

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
        ("generated", 2, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [("real", 4, 3), *FURTHER]),
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


# At the end of a job whose trainer was killed, all that shows it tells the same -----------------------------


pytest.importorskip("aiohttp")


TRAINER = Path(__file__).with_name("doomed_trainer.py")
SIZE = 20
COUNTS = ("acknowledged", "quarantined", "dropped")


def train_and_watch(master: MasterProcess, audit_dir: Path, report: int, when: str) -> None:
    arguments = [master.address, str(audit_dir), str(SIZE), str(report), when]
    preloaded.run([sys.executable, "-W", "ignore", str(TRAINER), *arguments], timeout=60, stdout=-3)


def said(*arguments: str) -> Any:
    done = preloaded.run([*EDL, *arguments], capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_page_top_metrics_status_and_audit_agree(start_master: MakeMaster, tmp_path: Path) -> None:
    http = f"127.0.0.1:{quiet_port()}"
    master = start_master("--grace-s", "0.2", "--http", http, durable=True)
    assert f"page on http://{http}/" in master.log
    client = master.client()
    train_and_watch(master, tmp_path / "audit", 3, "after")
    wait_until(lambda: not client.status().trainers)
    train_and_watch(master, tmp_path / "audit", 0, "never")
    wait_until(lambda: not client.status().trainers)

    page = json.loads(fetched(f"http://{http}/api/status"))
    shown = said("status", "--json", "--addr", master.address)
    for value in (page, shown):
        value.pop("time")  # rates sink with it
        for of_dataset in value["datasets"]:
            of_dataset.pop("rate")
    assert page == shown

    (dataset,) = client.status().datasets  # what `top` draws
    (of_page,) = page["datasets"]
    counts = {name: of_page[name] for name in COUNTS}
    assert (
        {name: getattr(dataset, name) for name in COUNTS}
        == counts
        == {
            "acknowledged": SIZE,
            "quarantined": 0,
            "dropped": 0,
        }
    )
    samples = [
        sample
        for family in text_string_to_metric_families(fetched(f"http://{http}/metrics"))
        for sample in family.samples
    ]
    outcomes = {s.labels["outcome"]: s.value for s in samples if s.name == "edl_records_total"}
    assert outcomes == counts
    kinds = {s.labels["kind"]: s.value for s in samples if s.name == "edl_events_total"}
    assert kinds == page["event_counts"]
    assert (kinds["died"], kinds["left"], kinds["finished"]) == (1, 1, 1)

    died = page["departed"][0]
    assert (died["worker_id"], died["died"], died["trained"]) == ("doomed", True, 12)
    assert died["records"] == of_page["returned_records"] > 0
    assert (of_page["finished"], of_page["percent"], of_page["epochs_done"]) == (True, 100.0, 1)

    master.stop()
    (audited,) = said("audit", str(tmp_path / "audit"), "--state", str(master.state), "--json")["datasets"]
    assert (audited["verdict"], audited["acknowledged"]) == ("DELIVERED", SIZE)
