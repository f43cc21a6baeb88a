"""At the end of a job whose trainer was killed, all that shows it tells the same."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import preloaded
import pytest
from master_kit import EDL, MakeMaster, MasterProcess
from processes import quiet_port
from prometheus_client.parser import text_string_to_metric_families

from edl_torch.testing import wait_until

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
