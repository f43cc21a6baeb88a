"""The benchmarks run to their end and write what they promise. Their numbers are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def run(script: str, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Standard output and the JSON of a benchmark in its quick form."""
    written = tmp_path / "results" / "out.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / script),
        "--quick",
        "--json",
        str(written),
        *arguments,
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(written.read_text())


@pytest.mark.long
def test_loader_benchmark_measures_every_contest_and_writes_it(tmp_path: Path) -> None:
    printed, body = run("loader.py", tmp_path)
    titles = [result["title"] for result in body["results"]]
    contests = ("JPEG", "tiny", "columnar", "map-style")
    assert [title.split()[0] for title in titles] == [name for name in contests for _ in range(2)]
    for result in body["results"]:
        assert result["title"] in printed
        assert all(len(rounds) == body["rounds"] for rounds in result["throughputs"].values())
        for ratio in result["ratios"]:
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            assert {ratio["ours"], ratio["theirs"]} <= set(result["throughputs"])
            assert (ratio["met"] is None) == (ratio["target"] is None)
    assert body["quick"] is True
    assert body["environment"]["packages"]["torch"]


@pytest.mark.long
def test_loader_benchmark_decodes_the_pictures_that_it_is_given(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from pictures import write_pictures
    finally:
        sys.path.pop(0)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    write_pictures(pictures, 2)
    arguments = ["--images", str(pictures), "--only", "jpeg", "--workers", "0", "--rounds", "3", "--float"]
    _, body = run("loader.py", tmp_path, *arguments)
    (result,) = body["results"]
    assert body["rounds"] == 3
    assert all(value > 0 for rounds in result["throughputs"].values() for value in rounds)


@pytest.mark.long
def test_threads_benchmark_compares_memory_and_throughput(tmp_path: Path) -> None:
    _, body = run("threads.py", tmp_path, "--only", "uint8", "memory", "scaled")
    assert [result["title"].split()[0] for result in body["results"]] == ["JPEG", "a"]
    assert set(body["memory"]["bytes"]) == {"two threads", "two threads in a worker", "plain, two workers"}


@pytest.mark.long
def test_dispatch_benchmark_meets_the_targets_for_a_huge_dataset(tmp_path: Path) -> None:
    printed, body = run("dispatch.py", tmp_path)
    huge = [finding for finding in body["findings"] if finding["most"] is not None][:4]
    assert [finding["unit"] for finding in huge] == ["ms", "MB", "KB", "ms"]
    assert "token of 1,000,000,000 records, 64 trainers" in huge[2]["what"]
    assert all(finding["met"] for finding in huge)
    assert "over grpc" in printed
    assert "with journal / without" in printed


@pytest.mark.long
def test_recovery_benchmark_measures_every_death_in_every_round(tmp_path: Path) -> None:
    printed, body = run("recovery.py", tmp_path)
    found = body["distributions"]
    assert [one["what"].split(",")[0].split(":")[0] for one in found] == [
        *("trainer killed", "trainer stopped", "trainer gone with its machine"),
        *["master started again"] * 4,
    ]
    for one in found:
        assert one["what"] in printed
        assert len(one["seconds"]) == 2
        assert one["unit"] == "s"
        assert 0 < one["min"] <= one["median"] <= one["p90"] <= one["max"]
        assert one["met"] == (None if one["most"] is None else one["max"] <= one["most"])
    killed, stopped, vanished, ready, answered, confirmed, _ = found
    assert killed["min"] > 0.9  # the grace
    assert min(stopped["min"], vanished["min"]) > 0.9  # two thirds of the timeout
    assert ready["min"] < answered["min"] < confirmed["min"]


@pytest.mark.long
def test_makespan_benchmark_runs_every_race_and_counts_every_batch(tmp_path: Path) -> None:
    printed, body = run("makespan.py", tmp_path)
    found = body["findings"]
    kinds = [(one["race"]["workers"], len(one["race"]["steps_s"]), one["first"]) for one in found]
    assert kinds == [(workers, 2, first) for workers in (0, 2) for first in (True, False)]
    for one in found:
        assert one["race"]["title"] in printed
        assert all(epoch["makespan_s"] > 0 < epoch["ideal_s"] for epoch in one["epochs"])
        assert one["over_steps"] > 1
        assert (one["met"] is None) == (one["race"]["goal"] is None)


@pytest.mark.long
def test_synchronous_benchmark_compares_agreed_steps_with_others(tmp_path: Path) -> None:
    printed, body = run("synchronous.py", tmp_path, "--ranks", "2")
    (result,) = body["synchronous"]
    assert result["title"] in printed
    assert set(result["throughputs"]) == {"steps agreed on", "steps not agreed on"}


@pytest.mark.long
def test_readers_benchmark_races_every_reader_against_its_peer(tmp_path: Path) -> None:
    for package in ("pyarrow", "odps", "recordio", "cramjam", "webdataset"):
        pytest.importorskip(package)
    contests = ["recordio", "tar", "csv", "text", "parquet", "odps"]
    printed, body = run("readers.py", tmp_path, "--workers", "0", "--only", *contests)
    assert {result["title"].split()[0].strip(",").lower() for result in body["results"]} == set(contests)
    for result in body["results"]:
        assert result["title"] in printed
        assert len(result["load"]) == 2
        for ratio in result["ratios"]:
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            assert ratio["processor"] > 0
    targets = [ratio["target"] for result in body["results"] for ratio in result["ratios"] if ratio["target"]]
    assert sorted(targets) == [5.0] * 6 + [10.0] * 3 + [50.0] * 6
    assert body["starts"] == []


@pytest.mark.long
def test_readers_benchmark_measures_a_workers_start(tmp_path: Path) -> None:
    arguments = ["--only", "start", "--methods", "fork", "--readers", "text"]
    printed, body = run("readers.py", tmp_path, *arguments)
    assert [start["kind"] for start in body["starts"]] == ["text"]
    for start in body["starts"]:
        assert start["kind"] in printed
        assert start["records"] == 10_000
        assert min(start["first_batch_s"]) > 0
        assert min(start["private_mb"]) > 1
        assert start["met"] == (start["extra_mb"] < 50 and start["times"] < 2)


@pytest.mark.long
def test_scale_benchmark_counts_memory_work_and_latencies_of_both_masters(tmp_path: Path) -> None:
    printed, body = run("scale.py", tmp_path)
    assert body["sizes"]["trainers"] == 20
    for title in ("in memory", "with journal"):
        found = {one["what"].strip(): one for one in body["findings"] if one["master"] == title}
        assert 1 < found["memory of the master for a trainer"]["value"] < 1000
        p50, p99 = found["lease or report, 100 a second: p50"], found["p99, median of the rounds"]
        assert 0 < p50["value"] <= p99["value"]
        assert all(what in printed for what in found)
        assert all(
            one["met"] == (None if one["most"] is None else one["value"] <= one["most"])
            for one in found.values()
        )


@pytest.mark.long
def test_watching_benchmark_counts_what_pages_take_of_masters_at_rest_and_busy(tmp_path: Path) -> None:
    _, body = run("watching.py", tmp_path)
    assert [finding["most"] for finding in body["findings"]] == [0.01, 0.01, 0.01, None, 0.01, None]
    for share, frames in (body["findings"][2:4], body["findings"][4:]):
        assert frames["value"] > 0
        assert 0 <= share["value"] < 1


@pytest.mark.long
def test_shuffle_benchmark_measures_every_order(tmp_path: Path) -> None:
    printed, body = run("shuffle.py", tmp_path)
    assert {"in shard", "window 16", "global", "torch RandomSampler"} < set(body["mixing"])
    assert body["mixing"]["global"]["entropy_over_global"] == 1.0
    assert len(body["rates"]) == 3
    assert "| window 64 |" in printed


@pytest.mark.long
def test_window_classes_are_those_that_the_formula_expects(tmp_path: Path) -> None:
    printed, body = run("window_classes.py", tmp_path, "--svg", str(tmp_path / "curves.svg"))
    (row,) = body["rows"]
    assert 0 < row["share"] < 1 < row["needed"] <= row["shards"]
    assert "| 100 × 20 | 32 |" in printed
    assert "</svg>" in (tmp_path / "curves.svg").read_text()


def test_frameworks_benchmark_says_what_is_not_installed(tmp_path: Path) -> None:
    printed, body = run("frameworks.py", tmp_path, "--only", "deepspeed", "lightning")
    for name in ("deepspeed", "lightning"):
        assert f"make test-{name}" in printed or any(
            found["framework"] == name for found in body["frameworks"]
        )


def test_the_interval_of_a_median_is_that_of_its_order_statistics() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from frameworks import median_with_interval, verdict
    finally:
        sys.path.pop(0)
    assert median_with_interval([float(n) for n in range(1, 21)]) == (10.5, 6.0, 15.0)
    assert median_with_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)
    assert median_with_interval([1.0]) == (1.0, 1.0, 1.0)
    assert [verdict(*pair) for pair in ((0.9, 1.02), (1.01, 1.03), (1.03, 1.2))] == [
        "met",
        "not decided",
        "missed",
    ]


@pytest.mark.long
def test_mixing_benchmark_measures_mixtures_against_one_dataset(tmp_path: Path) -> None:
    _, body = run("mixing.py", tmp_path)
    assert [len(contest["ratios"]) for contest in body["contests"]] == [2, 1, 1]
