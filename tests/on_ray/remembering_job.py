"""A job of Ray Train whose workers are killed and whose nodes go and come; its model counts what it learns.

    python tests/on_ray/remembering_job.py FOLDER --ranks 2 --accumulation 4 --kills 10 --seed 1

Nodes stay where it has one rank.

Checkpoints are Ray's own. FOLDER/outcome.json has how many workers were killed, all that happened, which
ranks saved a checkpoint as a node was about to go, and of each epoch the number of records that the model of
the last checkpoint has learnt once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.integrations.ray import master_client, start_master

BATCH, EPOCHS, SIZE = 4, 2, 1602  # the last batch of an epoch is a partial one
STEP_S = 0.1  # while there is still somebody to kill
CHECKPOINT_EVERY = 7  # batches: in an open window too
BEGUN, TRAINS = "begun", "trains"  # folders with a note of each worker
UNDER_FIRE, JUST_IN_TIME = "under-fire", "just-in-time"
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}


class Memory(nn.Module):
    """Has a weight for each record of each epoch: how often it was learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.zeros(EPOCHS, SIZE))

    def forward(self, epoch: int, records: torch.Tensor) -> torch.Tensor:
        return self.learnt[epoch, records]


class Counter(torch.optim.Optimizer):
    """Adds up how often each record is in the gradient, which has to be that of the mean over all of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if abs(float(gradient.sum()) - 1) > 1e-4:
                    raise AssertionError(f"no gradient of a mean: {gradient.sum()}")
                parameter.add_(torch.round(gradient / gradient[gradient > 0].min()))


def train(config: dict[str, Any]) -> None:
    """What each worker runs, and all of them again after each change."""
    folder, accumulation = Path(config["folder"]), config["accumulation"]
    context = ray.train.get_context()
    (folder / BEGUN / str(os.getpid())).touch()
    memory = Memory()
    optimizer = Counter(memory.parameters())
    model = prepare_model(memory)
    with (
        master_client() as client,
        ElasticDataLoader(
            range(SIZE),
            BATCH,
            num_epochs=EPOCHS,
            shuffle=True,
            num_workers=config["workers"],
            synchronous=True,
            master_client=client,
            audit_dir=folder / "audit",
        ) as loader,
    ):
        loader.attach(optimizer)
        loader.load_state_dict(load(memory))
        batches, saved = 0, False
        for epoch in loader.epochs():
            for records in loader:
                loader.weigh(model(epoch, records).mean()).backward()
                batches += 1
                if batches == 1:
                    (folder / TRAINS / str(os.getpid())).write_text(str(context.get_world_size()))
                if batches % accumulation == 0:
                    step(loader, optimizer)
                if (folder / UNDER_FIRE).exists():
                    time.sleep(STEP_S)
                leaving = ray.train.get_preemption_info() is not None and not saved
                if batches % CHECKPOINT_EVERY == 0 or leaving:
                    report(memory, loader)
                if leaving:
                    saved = True
                    (folder / JUST_IN_TIME).open("a").write(f"{context.get_world_rank()}\n")
            if batches % accumulation:
                step(loader, optimizer)  # the last window of the epoch
                batches = 0
            report(memory, loader)


def step(loader: ElasticDataLoader, optimizer: Counter) -> None:
    loader.scale_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def load(memory: Memory) -> Any:
    """The model of Ray's checkpoint; returns its data position."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt")
    memory.load_state_dict(saved["model"])
    return saved["data"]


def report(memory: Memory, loader: ElasticDataLoader) -> None:
    state = {"model": memory.state_dict(), "data": loader.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint)


class Assailant:
    """Kills workers, takes nodes away and brings them back, where there are several."""

    def __init__(self, cluster: Cluster, folder: Path, kills: int, seed: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._kills = kills
        self._random = random.Random(seed)
        self.killed: set[int] = set()
        self.events: list[str] = []

    def run(self, nodes: list[Any]) -> None:
        """Do all that; the last node is the first to go."""
        if len(nodes) > 1:
            self._run_on_several(nodes[-1])
        else:
            for _ in range(self._kills):
                self._kill()
            self._wait_for(1)
        (self._folder / UNDER_FIRE).unlink()

    def _run_on_several(self, node: Any) -> None:
        third = self._kills // 3
        for number in range(self._kills):
            if number == third:
                self._wait_for(2)
                self._note("a node dies")
                self._cluster.remove_node(node, allow_graceful=False)
                self._wait_for(1)
            elif number == 2 * third:
                self._note("a node comes")
                node = add_node(self._cluster)
                self._wait_for(2)
            self._kill()
        self._wait_for(2)
        self._note("a node is drained")
        drain(self._cluster, node)
        self._wait(lambda: len(saved_just_in_time(self._folder)) == 2)
        self._cluster.remove_node(node, allow_graceful=False)
        self._wait_for(1)

    def _note(self, event: str) -> None:
        self.events.append(event)
        print(f"{time.strftime('%X')} {event}", flush=True)

    def _kill(self) -> None:
        """Kill a worker, of four one that has just begun, the others at their training."""
        begun = self._random.random() < 0.25
        while True:
            workers = self._wait(lambda: self._living(BEGUN if begun else TRAINS))
            time.sleep(self._random.uniform(0, 4))
            victim = self._random.choice(workers)
            if victim in self._living(BEGUN):
                break  # else Ray was faster
        os.kill(victim, signal.SIGKILL)
        self.killed.add(victim)
        self._note(f"a worker is killed, of {len(workers)}{' that begin' if begun else ''}")

    def _living(self, kind: str) -> list[int]:
        """Workers that have left a note of this kind."""
        numbers = {int(note.name) for note in (self._folder / kind).iterdir()} - self.killed
        return sorted(number for number in numbers if alive(number))

    def _of_size(self, size: int) -> bool:
        """Whether a group of `size` trains."""
        living = self._living(TRAINS)
        sizes = {(self._folder / TRAINS / str(number)).read_text() for number in living}
        return len(living) == size and sizes == {str(size)}

    def _wait_for(self, size: int) -> None:
        self._wait(lambda: self._of_size(size))
        self._note(f"{size} train")

    def _wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 300
        while not (result := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {self.events}")
            time.sleep(0.05)
        return result


def saved_just_in_time(folder: Path) -> list[str]:
    """The ranks that have saved a checkpoint as a node was about to go."""
    note = folder / JUST_IN_TIME
    return note.read_text().split() if note.exists() else []


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, **NODE)


def drain(cluster: Cluster, node: Any) -> None:
    """Tell the cluster that the node will go."""
    command = ["ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id", node.node_id]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    deadline = ["--deadline-remaining-seconds", "8"]
    subprocess.run([sys.executable, "-m", *command, *reason, *deadline], check=True)


def trainer(folder: Path, ranks: int, accumulation: int, workers: int) -> TorchTrainer:
    size: Any = {"num_workers": 1}
    if ranks > 1:
        size = {"num_workers": (1, ranks), "elastic_resize_monitor_interval_s": 1.0}
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "accumulation": accumulation, "workers": workers},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(**size),
        run_config=RunConfig(
            name="job",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="at most")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.folder.absolute()
    for kind in (BEGUN, TRAINS):
        (folder / kind).mkdir(parents=True)
    (folder / UNDER_FIRE).touch()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "num_cpus": 0, "resources": {"head": 1}},
    )
    try:
        nodes = [add_node(cluster) for _ in range(options.ranks)]
        ray.init(address=cluster.address, log_to_driver=False)
        assailant = Assailant(cluster, folder, options.kills, options.seed)
        with (
            start_master(
                state=folder / "master", host="127.0.0.1", actor_options={"resources": {"head": 0.1}}
            ),
            ThreadPoolExecutor() as beside,  # the main thread starts nodes: they take its signals
        ):
            fit = beside.submit(trainer(folder, options.ranks, options.accumulation, options.workers).fit)
            assailant.run(nodes)
            checkpoint = fit.result().checkpoint
        with checkpoint.as_directory() as last:
            learnt = torch.load(Path(last) / "state.pt")["model"]["learnt"]
        outcome = {
            "kills": len(assailant.killed),
            "events": assailant.events,
            "just_in_time": saved_just_in_time(folder),
            "once": (learnt == 1).sum(dim=1).tolist(),
        }
        (folder / "outcome.json").write_text(json.dumps(outcome))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
