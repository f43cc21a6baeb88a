"""Jobs under torchrun: agents are killed and join, and each record counts once in the final model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_kit import Cluster, alive
from torchrun_worker import EPOCHS, RECORDS, SAVE_EVERY

from edl_torch import cli
from edl_torch.testing import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()
    for agent in cluster.agents:  # shown where the test has failed
        print(f"--- {agent.name}\n{agent.log[-6000:]}")


@pytest.mark.parametrize("with_master", [False, True])
def test_an_agent_is_killed_and_another_one_joins(
    cluster: Cluster, with_master: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"LATE": "1"}
    first = cluster.start("first", **late if with_master else {})
    cluster.await_rendezvous()
    victim = cluster.start("victim", **{} if with_master else late)
    third = cluster.start("third", **late if with_master else {})
    wait_until(lambda: cluster.most_steps(3) > 2 * SAVE_EVERY, timeout_s=100)
    assert victim.has_master == with_master
    (orphan,) = {note["pid"] for note in cluster.diary() if note["agent"] == victim.process.pid}

    victim.kill()
    wait_until(lambda: not alive(orphan), timeout_s=20)
    wait_until(lambda: cluster.most_steps(2) > SAVE_EVERY, timeout_s=60)

    before = cluster.pids()
    fourth = cluster.start("fourth")
    wait_until(lambda: cluster.most_steps(3, not_by=before) > SAVE_EVERY, timeout_s=60)
    (cluster.folder / "go").touch()
    for agent in (first, third, fourth):
        assert agent.process.wait(60) == 0
    assert len({note["world_size"] for note in cluster.diary()}) >= 2

    weights = json.loads((cluster.folder / "weights.json").read_text())
    counts = [[-round(weight) for weight in epoch] for epoch in weights]
    assert counts == [[1] * RECORDS] * EPOCHS
    assert cli.main(["audit", str(cluster.folder / "audit")]) == 0, capsys.readouterr().out
    assert not any(alive(pid) for pid in cluster.pids())
