"""Train on a Ray cluster with records shared out by a master that is an actor of the same cluster.

    python examples/ray/train.py --storage /shared/run
    python examples/ray/train.py --storage /tmp/run --kill-one    # a worker dies in mid-epoch

Ranks step together (`synchronous=True`), and each of Ray's checkpoints holds model, optimizer and data
position. When a worker dies Ray Train starts all of them again, and they go on from the newest checkpoint: in
the model that comes out each record of each epoch counts once, which the audit at the end proves.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit
from edl_torch.integrations.ray import master_client, start_master

BATCH, EPOCHS, SIZE = 16, 3, 4000
CHECKPOINT_EVERY = 60  # steps


class Points:
    """Record i is a point and the side of a plane it is on. Any reader of edl_torch would do in its place."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return point, (point.sum() > 0).float()


def train(config: dict[str, Any]) -> None:
    """What each worker runs; after a worker's death all of them again."""
    storage = Path(config["storage"])
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    with (
        master_client() as client,
        ElasticDataLoader(
            Points(),
            BATCH,
            num_epochs=EPOCHS,
            shuffle=True,
            synchronous=True,
            master_client=client,
            audit_dir=storage / "audit",
        ) as loader,
    ):
        loader.load_state_dict(load(network, optimizer))
        steps = 0
        for epoch in loader.epochs():
            for points, sides in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], sides)
                optimizer.zero_grad()
                loader.weigh(loss).backward()  # type: ignore[no-untyped-call]
                loader.scale_gradients(optimizer)
                optimizer.step()
                steps += 1
                if steps % CHECKPOINT_EVERY == 0:
                    save(network, optimizer, loader, {"epoch": epoch, "loss": loss.item()})
                if config["kill_one"] and steps == CHECKPOINT_EVERY + CHECKPOINT_EVERY // 2:
                    die_once(storage / "killed")
            save(network, optimizer, loader, {"epoch": epoch, "loss": loss.item()})


def load(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load Ray's newest checkpoint, if there is one; returns its data position."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder, "state.pt"))
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    data: dict[str, Any] = saved["data"]
    return data


def save(
    network: nn.Module, optimizer: torch.optim.Optimizer, loader: ElasticDataLoader, metrics: dict[str, Any]
) -> None:
    """Report a checkpoint; every worker calls it at the same step."""
    data = loader.state_dict()  # on every rank
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "data": data}
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def die_once(mark: Path) -> None:
    """The last rank, as a machine that goes away."""
    context = ray.train.get_context()
    if context.get_world_rank() == context.get_world_size() - 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    """Start the master, train, and let the audit judge."""
    parser = argparse.ArgumentParser(description="Train on Ray with shards from an edl_torch master.")
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--insecure", action="store_true", help="several nodes, on a network of your own")
    parser.add_argument("--kill-one", action="store_true", help="kill a worker in mid-epoch")
    options = parser.parse_args(arguments)
    storage = options.storage.absolute()
    ray.init(ignore_reinit_error=True)
    host = None if options.insecure else "127.0.0.1"
    with start_master(state=storage / "master", host=host, insecure=options.insecure):
        ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"storage": str(storage), "kill_one": options.kill_one},
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=options.workers),
            run_config=RunConfig(
                name="train",
                storage_path=str(storage / "ray"),
                failure_config=FailureConfig(max_failures=5),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
    (verdict,) = audit([storage / "audit"])
    if not verdict.proven or verdict.acknowledged != EPOCHS * SIZE:
        print(f"the audit does not prove it: {verdict}")
        return 1
    outcomes = f"{verdict.acknowledged} outcomes in lineage {verdict.lineage}"
    print(f"{outcomes}: every record of each epoch counted once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
