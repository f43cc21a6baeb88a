"""A torchrun job on two hosts of a network: one variable of torch's is all that it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_kit import Cluster
from torchrun_worker import EPOCHS, RECORDS

from edl_torch.testing import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from network_hosts import Host, Network, why_not

PEERS = Path(__file__).with_name("peers_process.py")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def network() -> Iterator[Network]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with Network("a", "b") as network:
        yield network


def test_a_job_of_two_nodes_has_a_master_that_strangers_cannot_use(network: Network, tmp_path: Path) -> None:
    """It begins on one node, and grows."""
    cluster = Cluster(tmp_path, meeting=network["a"].address)
    interface = {"GLOO_SOCKET_IFNAME": "eth0", "SAVE_EVERY": "20"}
    try:
        first = cluster.start("a", network["a"], **interface)
        wait_until(lambda: cluster.most_steps(1) > 0, timeout_s=100)
        second = cluster.start("b", network["b"], **interface)
        wait_until(lambda: cluster.most_steps(2) > 0, timeout_s=100)
        (address,) = {note["master"] for note in cluster.diary() if "master" in note}
        assert address.startswith(f"{network['a'].address}:")
        (token,) = first.logs.glob("*/edl_torch_master.token")
        refused = status(network["b"], address)
        assert refused.returncode == 1
        assert "token" in refused.stderr
        told = status(network["b"], address, "--token-file", str(token), "--insecure")
        assert json.loads(told.stdout)["datasets"], told.stderr

        (tmp_path / "go").touch()
        assert [agent.process.wait(100) for agent in (first, second)] == [0, 0]
    finally:
        cluster.close()
        for agent in cluster.agents:  # shown where the test has failed
            print(f"--- {agent.name}\n{agent.log[-6000:]}")
    weights = json.loads((tmp_path / "weights.json").read_text())
    assert [[-round(weight) for weight in epoch] for epoch in weights] == [[1] * RECORDS] * EPOCHS


def test_ranks_over_another_backend_than_gloo_find_each_other_by_the_way_to_the_store(
    network: Network,
) -> None:
    """The name of both hosts leads to 127.0.0.1, where gloo alone would look for the other one."""
    ranks = [
        subprocess.Popen(
            [
                *network[host].prefix,
                sys.executable,
                "-W",
                "ignore",
                str(PEERS),
                str(rank),
                network["a"].address,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate("ab")
    ]
    try:
        assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["said by rank 0\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()


def status(host: Host, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What somebody on that host is told by the master."""
    command = [*host.prefix, sys.executable, "-m", "edl_torch", "status", "--json", "--addr", address]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
