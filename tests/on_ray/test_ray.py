"""A job on a local Ray cluster whose workers and whose master are killed. `make test-ray` runs these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_trainer import BATCH, Trainer

from edl_torch.audit.chain import final_words
from edl_torch.audit.verdict import audit
from edl_torch.errors import InvalidArgument, MasterStartError, MasterUnavailable
from edl_torch.integrations.ray import master_address, master_client, start_master, stop_master
from edl_torch.master.journal import view
from edl_torch.testing import wait_until

pytestmark = pytest.mark.timeout(300)

SIZE = 200 * BATCH
StartTrainer = Callable[..., Any]


@pytest.fixture
def master(ray_cluster: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"master-{request.node.name}"
    state = tmp_path / "state"
    with start_master(name, state=state, host="127.0.0.1", lease_timeout_s=20.0, grace_s=0.5):
        yield name


@pytest.fixture
def start_trainer(ray_cluster: Any, master: str, tmp_path: Path) -> Iterator[StartTrainer]:
    actors: list[Any] = []

    def start(name: str, step_s: float = 0.02) -> Any:
        remote = ray_cluster.remote(Trainer).options(num_cpus=0, max_concurrency=2)
        actors.append(remote.remote(master, name, str(tmp_path), SIZE, step_s))
        return actors[-1]

    yield start
    for actor in actors:
        ray_cluster.kill(actor)


def trained(folder: Path, *names: str) -> Counter[int]:
    """How often each record was trained on, by these trainers together."""
    files = [folder / name for name in names if (folder / name).exists()]
    return Counter(int(word) for file in files for word in file.read_text().split())


def check(folder: Path, *names: str, doubled: int = 0) -> None:
    """Every record has one outcome, by the trainers' notes, their audit logs, and the master's journal."""
    counts = trained(folder, *names)
    assert set(counts) == set(range(SIZE))
    assert counts.total() <= SIZE + doubled
    (verdict,) = audit([folder / "audit"], words=final_words(view(folder / "state")))
    assert verdict.delivered
    assert verdict.acknowledged == SIZE


def kill(ray: Any, actor: Any) -> None:
    """As `kill -9` of its process does."""
    os.kill(ray.get(actor.process.remote()), signal.SIGKILL)


def test_a_worker_actor_that_is_killed_costs_a_batch(
    ray_cluster: Any, start_trainer: StartTrainer, tmp_path: Path
) -> None:
    doomed, living = start_trainer("doomed"), start_trainer("living")
    wait_until(lambda: len(trained(tmp_path, "doomed")) > 10 * BATCH, timeout_s=60)
    kill(ray_cluster, doomed)
    ray_cluster.get(living.done.remote(), timeout=90)
    check(tmp_path, "doomed", "living", doubled=BATCH)


def test_a_master_that_is_killed_is_started_again_and_its_trainers_find_it(
    ray_cluster: Any, master: str, start_trainer: StartTrainer, tmp_path: Path
) -> None:
    first = master_address(master)
    trainers = [start_trainer(name) for name in ("one", "two")]
    wait_until(
        lambda: all(len(trained(tmp_path, name)) > 10 * BATCH for name in ("one", "two")), timeout_s=60
    )
    kill(ray_cluster, ray_cluster.get_actor(master))
    with master_client(master, master_timeout_s=60.0) as client:  # who comes meanwhile waits for it
        assert client.status().durable
    ray_cluster.get([trainer.done.remote() for trainer in trainers], timeout=120)
    assert master_address(master) != first
    check(tmp_path, "one", "two")


def test_starting_it_twice_is_starting_it_once(master: str, tmp_path: Path) -> None:
    again = start_master(master, state=tmp_path / "other")
    assert again.address == master_address(master)
    with master_client(master, master_timeout_s=5.0) as client:
        assert client.status().durable


def test_without_an_actor_of_the_name_the_error_says_how_to_start_one(ray_cluster: Any) -> None:
    with pytest.raises(MasterUnavailable, match=r"no actor 'nobody'.*start_master\('nobody', state=…\)"):
        master_client("nobody")
    with pytest.raises(InvalidArgument, match="no actor 'nobody' to stop"):
        stop_master("nobody")


def test_an_address_that_others_can_reach_has_to_be_asked_for(ray_cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(MasterStartError, match="can be reached from other machines"):
        start_master("exposed", state=tmp_path / "state", host="0.0.0.0")


def test_the_example_trains_to_its_end_though_a_worker_dies(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples/ray/train.py", "--storage", tmp_path, "--kill-one"],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every record of each epoch counted once" in done.stdout
