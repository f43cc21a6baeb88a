"""A refusal of the loader that `ray.train.torch.prepare_data_loader` makes around another one.

It reads one batch ahead and says nothing of it: batches would count before they are trained on.
"""

from __future__ import annotations

from types import FrameType

from edl_torch.errors import InvalidArgument

_MODULE = "ray.train.torch.train_loop_utils"


def refuse_ray_wrapper(caller: FrameType) -> None:
    """Raise InvalidArgument where `caller` is Ray's wrapper: nothing else tells it from a loop."""
    if caller.f_globals.get("__name__") == _MODULE:
        raise InvalidArgument(
            "Ray's prepare_data_loader() reads one batch ahead, so that batches would count before they are "
            "trained on. Leave it out, or give move_to_device=False: the records are shared out without it. "
            "Move each batch in the loop, to ray.train.torch.get_device()"
        )
