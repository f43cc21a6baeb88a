"""Jobs under torchrun that are told to end, or to make room for a node: no step is lost, nor done twice."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_kit import WORKER, Agent, Cluster
from torchrun_worker import EPOCHS, RECORDS

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(480),
]
SETTINGS = {"NOTICES": "1", "SAVE_EVERY": "1000000", "EDL_MASTER_TIMEOUT_S": "5"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, last_call_s=1)  # nodes come one after the other
    yield cluster
    cluster.close()
    for agent in cluster.agents:  # shown where the test has failed
        print(f"--- {agent.name}\n{agent.log[-6000:]}")


def start(cluster: Cluster, name: str, ranks: int) -> Agent:
    """A job of one node."""
    command = [f"--nproc-per-node={ranks}", "--monitor-interval=0.1", str(WORKER), str(cluster.folder)]
    agent = Agent(name, cluster.folder, command, **SETTINGS, LOADER_WORKERS="2")
    cluster.agents.append(agent)
    return agent


def judge(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has learnt each record once, and no checkpoint was ever older than the steps before it."""
    weights = json.loads((cluster.folder / "weights.json").read_text())
    assert [[-round(weight) for weight in epoch] for epoch in weights] == [[1] * RECORDS] * EPOCHS
    assert main(["audit", str(cluster.folder / "audit")]) == 0
    assert "rolled back 0 " in capsys.readouterr().out, "a step was lost"


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4)])
def test_torchrun_is_told_to_end_and_started_again(
    cluster: Cluster, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for life in range(2):
        agent = start(cluster, f"life-{life}", ranks)
        before = cluster.pids()
        wait_until(lambda before=before: cluster.most_steps(ranks, not_by=before) > 4, timeout_s=100)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(30) != 0
        assert "exiting via" not in agent.log, "torchrun had to kill a worker"
        told = {
            note["told_at"] for note in cluster.diary() if "told_at" in note and note["pid"] not in before
        }
        assert len(told) == 1, "saved at different steps"
    (cluster.folder / "go").touch()
    assert start(cluster, "last", ranks).process.wait(100) == 0
    judge(cluster, capsys)


def test_a_node_joins_and_another_is_told_to_end(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun stops its workers with SIGTERM for a node that joins, too."""
    first = cluster.start("first", **SETTINGS)
    wait_until(lambda: cluster.most_steps(1) > 3, timeout_s=100)
    second = cluster.start("second", **SETTINGS)
    wait_until(lambda: cluster.most_steps(2) > 3, timeout_s=100)
    before = cluster.pids()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(40) != 0
    wait_until(lambda: cluster.most_steps(1, not_by=before) > 3, timeout_s=100)
    (cluster.folder / "go").touch()
    assert first.process.wait(100) == 0
    judge(cluster, capsys)
