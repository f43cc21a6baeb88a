"""`edl-torch weights`: give a mixture other weights while it is trained on."""

from __future__ import annotations

import argparse
import uuid

from edl_torch.cli.status import client_of
from edl_torch.core.limits import printable
from edl_torch.errors import InvalidArgument


def run(options: argparse.Namespace) -> int:
    """Set the weights, and print from which index on they hold."""
    weights = dict(map(_weight, options.weights))
    with client_of(options) as client:
        segment = client.set_weights(options.dataset, weights, key=uuid.uuid4().hex)
    total = sum(segment.parts)
    shares = ", ".join(f"{name} {weights[name]:g}" for name in sorted(weights))
    print(printable(f"{options.dataset}: {shares} from index {segment.start:,} on, in parts of {total:,}"))
    return 0


def _weight(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InvalidArgument(f"{text!r} is no weight: give each as NAME=WEIGHT, as web=0.5") from None
