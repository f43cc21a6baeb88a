"""Statuses written by hand: of a dataset, a trainer, a master; and the sessions that a dispatcher knows."""

from __future__ import annotations

from typing import Any

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.status import DatasetStatus, MasterStatus, TrainerStatus
from edl_torch.shard import TaskType


def dataset_status(name: str = "training", **fields: Any) -> DatasetStatus:
    """Ten records in one shard, twice; all wait. A test names the fields that it is about."""
    counts = ("leased", "leases", "acknowledged", "quarantined", "dropped", "trainers")
    given = dict.fromkeys(counts, 0) | {"epoch": 0, "num_epochs": 2, "size": 10, "shards": 1} | fields
    values = {"todo": given["size"], "shards_left": given["shards"], "finished": False} | given
    return DatasetStatus(dataset=name, ledger="l", lineage=1, task_type=TaskType.TRAINING, **values)


def trainer_status(name: str = "w", **fields: Any) -> TrainerStatus:
    """One that holds nothing, and was heard of a second ago."""
    given = {"session": f"s-{name}", "datasets": (), "leased": 0, "idle_s": 1.0}
    return TrainerStatus(worker_id=name, **(given | fields))


def master_status(**fields: Any) -> MasterStatus:
    """One with a journal, without datasets and trainers."""
    return MasterStatus(**({"ledger": "l", "durable": True, "datasets": (), "trainers": ()} | fields))


def sessions_of(dispatcher: Dispatcher, dataset: str) -> set[str]:
    """The sessions that have joined a dataset."""
    return {member.session for member in dispatcher.members if dataset in member.datasets}
