"""`edl-torch weights`: give a mixture other weights while it is trained on."""

from __future__ import annotations

import argparse
import math
import uuid

from edl_torch.cli.status import client_of
from edl_torch.core.limits import printable
from edl_torch.errors import InvalidArgument, UnknownDataset


def run(options: argparse.Namespace) -> int:
    """Set the weights, and print from which index on they hold."""
    weights: dict[str, float] = {}
    for name, weight in map(_weight, options.weights):
        if name in weights:
            raise InvalidArgument(f"{name!r} has two weights, {weights[name]:g} and {weight:g}: give it one")
        weights[name] = weight
    with client_of(options) as client:
        try:
            segment = client.set_weights(options.dataset, weights, key=uuid.uuid4().hex)
            (dataset,) = [each for each in client.status().datasets if each.dataset == options.dataset]
        except UnknownDataset as exc:
            known = ", ".join(each.dataset for each in client.status().datasets if each.components) or "none"
            raise UnknownDataset(
                f"the master has no mixture {options.dataset!r} (it has {known}). One is there when its "
                "first trainer has asked for data; until then change weights= of the program. For a mixture "
                "of another name give --dataset"
            ) from exc
    total = sum(segment.parts)
    shares = ", ".join(f"{name} {weights[name]:g}" for name in sorted(weights))
    if any(component.mean_length for component in dataset.components):
        shares += " of tokens"
    print(printable(f"{options.dataset}: {shares} from index {segment.start:,} on, in parts of {total:,}"))
    return 0


def _weight(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not (name and math.isfinite(weight) and weight >= 0):
        raise InvalidArgument(f"{text!r} is no weight: give each as NAME=WEIGHT, as web=0.5")
    return name, weight
