"""Training loops of other frameworks that would lose count of records, and what to use with them instead.

It looks at who calls, and imports none of them.
"""

from __future__ import annotations

import sys
from types import FrameType

from edl_torch.errors import InvalidArgument

_ADAPTERS = {  # module of the loop: the attribute that its adapter has, and what to do
    "transformers.trainer": (
        "elastic_loader",
        "a transformers Trainer fixes the steps of an epoch before it reads, skips batches when it resumes, "
        "and saves no data position: records would be lost or repeated. Declare class MyTrainer("
        "ElasticTrainer, Trainer), with edl_torch.integrations.transformers.ElasticTrainer, and give it "
        "elastic_loader=ElasticDataLoader(…), not train_dataset=; evaluate on a dataset of torch's own",
    ),
}


def refuse_foreign_trainer() -> None:
    """Raise InvalidArgument where the caller is such a loop, without its adapter."""
    if sys.modules.keys().isdisjoint(_ADAPTERS):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        attribute, message = _ADAPTERS.get(frame.f_globals.get("__name__", ""), ("", ""))
        if message:
            if hasattr(frame.f_locals.get("self"), attribute):
                return
            raise InvalidArgument(message)
        frame = frame.f_back
