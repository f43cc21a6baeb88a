"""A warning of data that are sorted by label and mixed only inside shards, or a few of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl_torch.core.plan import Plan
from edl_torch.readers.base import AbstractDataReader
from edl_torch.system.user_warnings import warn_user

_FEW = 0.5  # of all classes: what a shard that mixes has more of


def warn_of_sorted_labels(reader: AbstractDataReader, plan: Plan) -> None:
    """Warn where the records of a window, which alone are mixed, have few of the dataset's classes.

    Known of readers that have `targets`, the class of each record, as torchvision's datasets have.
    """
    spec = plan.spec
    targets = getattr(reader, "targets", None)
    if targets is None or spec.shuffle or not spec.shuffle_in_shard or len(spec.sources) != 1:
        return
    labels = _one_dimensional(targets)
    if labels is None or len(labels) != plan.size or np.any(labels[1:] < labels[:-1]):
        return
    changes = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    classes = len(changes) + 1
    mixed = _classes_mixed(changes, classes, plan)
    if mixed <= _FEW * classes:
        per = spec.records_per_shard
        where = "shards" if plan.window == 1 else f"windows of {plan.window} shards"
        warn_user(
            f"the records of {spec.name!r} are sorted by label and mixed only inside {where} of "
            f"{per} records: a batch has some {mixed:.1f} of the {classes} classes, "
            f"and models learn badly from that. Give ElasticDataLoader(reader, shuffle=True), or "
            f"DataShardService(shuffle=True), which mix all records; where records are read in blocks, "
            f"shuffle_window={16 * plan.window}, which mixes those of so many shards; or shuffle the data "
            f"where they lie"
        )


def _classes_mixed(changes: Any, classes: int, plan: Plan) -> float:
    """Return how many classes are in a window, on average; `changes` are the first records of classes."""
    per = plan.spec.records_per_shard
    if not plan.spec.shuffle_shards:
        return float(1 + np.count_nonzero(changes % (per * plan.window)) / plan.num_windows)
    in_a_shard = 1 + np.count_nonzero(changes % per) / plan.num_shards
    return float(
        in_a_shard if plan.window == 1 else classes * (1 - (1 - in_a_shard / classes) ** plan.window)
    )


def _one_dimensional(targets: Any) -> Any:
    """Return the labels as an array of numbers, None where they are something else."""
    try:
        labels = np.asarray(targets)
    except ValueError:  # lists of unequal length, as of boxes
        return None
    return labels if labels.ndim == 1 and labels.dtype.kind in "iub" else None
