"""Jobs under torchrun: agents are killed and join, and each record counts once in the final model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from processes import alive
from torchrun_kit import ASYNCHRONOUS, Agent, Cluster
from torchrun_worker import EPOCHS, RECORDS, SAVE_EVERY

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(480),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # At least two, so that the first does not begin alone, and again with the others.
    cluster = Cluster(tmp_path, least=2, last_call_s=1)
    yield cluster
    cluster.close()
    for agent in cluster.agents:  # shown where the test has failed
        print(f"--- {agent.name}\n{agent.log[-6000:]}")


@pytest.mark.parametrize("with_master", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_agent_is_killed_and_another_one_joins(
    cluster: Cluster, with_master: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    soon = {"EDL_MASTER_TIMEOUT_S": "3"}
    late = soon | {"LATE": "1"}
    first = cluster.start("first", **late if with_master else soon)
    cluster.await_rendezvous()
    victim = cluster.start("victim", **soon if with_master else late)
    third = cluster.start("third", **late if with_master else soon)
    wait_until(lambda: cluster.most_steps(3) > SAVE_EVERY + 1, timeout_s=100)
    assert victim.has_master == with_master
    (orphan,) = {note["pid"] for note in cluster.diary() if note["agent"] == victim.process.pid}

    victim.kill()
    wait_until(lambda: not alive(orphan), timeout_s=20)
    if with_master:
        wait_until(
            lambda: "draining" in victim.master_log, timeout_s=20, what="the master ends with its agent"
        )
    wait_until(lambda: cluster.most_steps(2) > SAVE_EVERY, timeout_s=60)

    before = cluster.pids()
    fourth = cluster.start("fourth", **soon)
    wait_until(lambda: cluster.most_steps(3, not_by=before) > SAVE_EVERY, timeout_s=60)
    (cluster.folder / "go").touch()
    for agent in (first, third, fourth):
        assert agent.process.wait(60) == 0
    assert len({note["world_size"] for note in cluster.diary()}) >= 2

    weights = json.loads((cluster.folder / "weights.json").read_text())
    counts = [[-round(weight) for weight in epoch] for epoch in weights]
    assert counts == [[1] * RECORDS] * EPOCHS
    assert main(["audit", str(cluster.folder / "audit")]) == 0, capsys.readouterr().out
    assert not any(alive(pid) for pid in cluster.pids())


@pytest.mark.parametrize("agents_store", [True, pytest.param(False, marks=pytest.mark.long)])
def test_trainers_with_models_of_their_own_are_restarted_around_one_master(
    tmp_path: Path, agents_store: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1", str(ASYNCHRONOUS)]
    disable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not agents_store))}
    agent = Agent("node", tmp_path, [*command, str(tmp_path)], **disable)
    try:
        assert agent.process.wait(100) == 0, agent.log
    finally:
        agent.kill()
    masters = [file.read_text() for file in tmp_path.glob("master-*")]
    assert len(masters) == 4, "two workers, started twice"
    assert len(set(masters)) == 1
    assert main(["audit", "--expect", "delivered", str(tmp_path / "audit")]) == 0, capsys.readouterr().out
    assert seconds_until_released(agent.master_log) < 15.0, "not by the timeout, of 30 s"
    wait_until(lambda: "draining" in agent.master_log, timeout_s=10, what="the master ends with its agent")


def seconds_until_released(log: str) -> float:
    """From when a killed trainer's stream broke until its leases were free."""
    broke = re.search(r"^(\S+ \S+) .* stream broke session=(\w+)", log, re.MULTILINE)
    assert broke
    free = re.search(rf"^(\S+ \S+) .* released .*session={broke[2]} why=expired", log, re.MULTILINE)
    assert free, log
    first, last = (datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f") for match in (broke, free))
    return (last - first).total_seconds()
