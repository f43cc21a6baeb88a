"""Metrics of a master, and the page of an embedded one."""

from __future__ import annotations

import json
import logging
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from make_dashboard import dashboard
from prometheus_client.parser import text_string_to_metric_families
from statuses import dataset_status, master_status, trainer_status

from edl_torch.client.service import default_master
from edl_torch.core.status import BUCKETS, ComponentStatus, DatasetStatus, Histogram, Measures, TrainerState
from edl_torch.errors import MasterStartError
from edl_torch.master.embedded import LocalMaster
from edl_torch.master.web import show, web_port
from edl_torch.master.web.metrics import LABEL_CHARS, METRICS, MOST, MOST_DATASETS, OTHERS, exposition

pytest.importorskip("prometheus_client")


ROOT = Path(__file__).parents[3]
NASTY = 'a"b\\c\nd\x1b[31m<script>'


def dataset(name: str = "training", **fields: Any) -> DatasetStatus:
    return dataset_status(name, **({"acknowledged": 5, "trainers": 1} | fields))


def part(name: str) -> ComponentStatus:
    return ComponentStatus(name=name, size=4, share=0.5, wanted=9.5, given=10, open=1)


def samples(**fields: Any) -> dict[tuple[str, ...], float]:
    """What Prometheus reads: by name and values of labels."""
    families = text_string_to_metric_families(exposition(master_status(**fields)).decode())
    order = {label: place for metric in METRICS for place, label in enumerate((*metric.labels, "le"))}
    return {
        (s.name, *(s.labels[label] for label in sorted(s.labels, key=order.__getitem__))): s.value
        for family in families
        for s in family.samples
    }


def test_each_metric_is_of_its_kind_and_described() -> None:
    waited = Histogram(counts=(1,) * BUCKETS, sum_s=3.0)
    status = master_status(
        datasets=(dataset(rate=1.0, components=(part("c"),)),),
        trainers=(trainer_status(measures=Measures(waited=waited, stepped=waited)),),
        event_counts={"died": 1},
    )
    families = {f.name: f for f in text_string_to_metric_families(exposition(status).decode())}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind
        assert family.documentation == metric.says
        assert family.samples
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    assert not families


def test_names_follow_prometheus_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"edl_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")


def test_outcomes_are_those_of_the_status() -> None:
    found = samples(datasets=(dataset(acknowledged=7, quarantined=2, dropped=1),))
    assert found["edl_records_total", "training", "acknowledged"] == 7
    assert found["edl_records_total", "training", "quarantined"] == 2
    assert found["edl_records_total", "training", "dropped"] == 1
    assert found["edl_dataset_done_ratio", "training"] == 0.5


def test_a_histogram_counts_what_is_below_each_bound() -> None:
    counts = [0] * BUCKETS
    counts[0], counts[10], counts[-1] = 3, 2, 1
    found = samples(
        trainers=(trainer_status(measures=Measures(waited=Histogram(counts=tuple(counts), sum_s=9.0))),)
    )
    below = {k[-1]: v for k, v in found.items() if k[0] == "edl_trainer_batch_wait_seconds_bucket"}
    assert list(below.values()) == sorted(below.values())
    assert (below["+Inf"], below["512"]) == (6, 5)
    assert min(below.values()) == 3
    assert found["edl_trainer_batch_wait_seconds_sum", "w", "s-w"] == 9.0
    assert found["edl_trainer_batch_wait_seconds_count", "w", "s-w"] == 6


def test_reading_and_transforming_are_sums_beside_the_number_of_batches() -> None:
    found = samples(trainers=(trainer_status(measures=Measures(timed=4, read_s=3.0, transform_s=1.0)),))
    names = ("timed_batches", "read_seconds", "transform_seconds")
    assert [found[f"edl_trainer_{name}_total", "w", "s-w"] for name in names] == [4, 3.0, 1.0]


def test_what_is_not_known_is_absent() -> None:
    found = samples(datasets=(dataset(),), trainers=(trainer_status(),))
    names = {key[0] for key in found}
    assert "edl_dataset_eta_seconds" not in names
    assert "edl_trainer_batch_wait_seconds_sum" not in names


def test_hostile_names_stay_labels() -> None:
    found = samples(datasets=(dataset(NASTY),), trainers=(trainer_status(NASTY), trainer_status("x" * 5_000)))
    name = 'a"b\\c\\nd\\x1b[31m<script>'
    assert ("edl_records_rate", name) in found
    assert max(len(value) for key in found for value in key) <= LABEL_CHARS + 1


def test_labels_are_bounded() -> None:
    many = tuple(trainer_status(str(i), pace=1.0, leases=2) for i in range(MOST + 10))
    sets = tuple(dataset(str(i)) for i in range(MOST_DATASETS + 10))
    found = samples(trainers=many, datasets=sets)
    assert sum(key[0] == "edl_trainer_pace_records" for key in found) == MOST + 1
    assert found["edl_trainer_pace_records", OTHERS, OTHERS] == 10.0
    assert found["edl_trainer_leases", OTHERS, OTHERS] == 20
    assert found["edl_trainers", TrainerState.LIVE.value] == MOST + 10
    assert sum(key[0] == "edl_records_rate" for key in found) == MOST_DATASETS


def test_components_of_mixtures_have_labels_up_to_a_bound() -> None:
    parts = [part(f"c{place}") for place in range(MOST - 1)]
    mixed = dataset("mixed", components=tuple(parts))
    found = samples(datasets=(mixed, dataset("other"), dataset("second", components=tuple(parts))))
    values = ("share_ratio", "wanted_records", "given_records", "passes")
    assert [found[f"edl_component_{what}", "mixed", "c7"] for what in values] == [0.5, 9.5, 10, 2.5]
    assert found["edl_component_passes", "second", "c0"] == 2.5
    assert sum(key[0] == "edl_component_passes" for key in found) == MOST


def test_two_sessions_of_one_name_are_two() -> None:
    one, two = trainer_status("w"), trainer_status("w", session="t", idle_s=2.0)
    assert samples(trainers=(one, two))["edl_trainer_heard_seconds", "w", "t"] == 2.0


def test_the_dashboard_is_the_one_that_the_list_makes() -> None:
    file = ROOT / "deploy" / "grafana" / "edl-torch.json"
    assert json.loads(file.read_text()) == dashboard(), "run python tools/make_dashboard.py"


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    asked = set(re.findall(r"\bedl_\w+", (ROOT / "deploy" / "grafana" / "edl-torch.json").read_text()))
    there = {metric.name for metric in METRICS}
    there |= {f"{m.name}_{end}" for m in METRICS if m.kind == "histogram" for end in ("sum", "bucket")}
    assert asked <= there


def test_the_page_about_metrics_names_those_that_there_are() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    labels = {metric.name: ", ".join(metric.labels) for metric in METRICS}
    rows = re.findall(r"^\| (`edl_.*?) \| (.*?) \|", text, re.M)
    assert len(rows) > 5
    for names, given in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert labels[name] == given, name
    assert set(re.findall(r"`(edl_\w+[a-z])`", text)) <= labels.keys()
    for start in re.findall(r"`(edl_\w+_)`", text):
        assert any(name.startswith(start) for name in labels), start


# A master in the trainer's own process has a page where the environment asks for one ------------------------


pytest.importorskip("aiohttp")


def test_the_page_is_that_of_the_master(calls) -> None:
    master = LocalMaster()
    url = show(master, "127.0.0.1:0")
    master.call(calls.register("a"))
    with urllib.request.urlopen(f"{url}api/status", timeout=10) as answer:
        assert json.load(answer)["trainers"][0]["worker_id"] == "w-a"
    master.close()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}api/status", timeout=10)


def test_an_address_of_other_machines_needs_to_be_asked_for() -> None:
    with pytest.raises(MasterStartError, match=r"can be reached from other machines.*--insecure"):
        show(LocalMaster(), "0.0.0.0:0")
    assert web_port(LocalMaster().status, lambda: 0, "0.0.0.0:0", insecure=True)


def test_the_second_service_of_a_process_goes_without_a_page(monkeypatch, caplog) -> None:
    url = show(LocalMaster(), "127.0.0.1:0")
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    monkeypatch.setenv("EDL_HTTP", url.removeprefix("http://").rstrip("/"))
    with caplog.at_level(logging.WARNING, logger="edl_torch"):
        assert isinstance(default_master(), LocalMaster)
    assert "another process has this port" in caplog.text
