"""A warning of batches that an optimizer's next step counts, though no gradient is left of them."""

from __future__ import annotations

from edl_torch.client.service import DataShardService
from edl_torch.data.gradient_windows import parameters_of
from edl_torch.system.user_warnings import warn_user


def warn_of_lost_gradients(service: DataShardService) -> bool:
    """Warn, as a pass has begun, of batches of those before that wait for a step and left no gradient.

    Returns whether it warned. A `zero_grad()` before the step has thrown their gradients away, or the loop
    only looked at them. Where more than one batch is read ahead, unseen, nobody can say whose gradients were
    in the last step.
    """
    records = service._live_session.elastic.records_unstepped
    if not records or (isinstance(service.lookahead, int) and service.lookahead > 1):
        return False
    parameters = [p for optimizer in service._torch_optimizers for p in parameters_of(optimizer)]
    if not parameters or any(parameter.grad is not None for parameter in parameters):
        return False
    warn_user(
        f"{records} record(s) of {service.dataset_name!r} were handed out after the last optimizer.step(), "
        f"and no attached optimizer has a gradient now: they count at its next step, though the model has "
        f"not learnt from them. Step before zero_grad() at the end of an epoch; after a loop that only looks "
        f"at the data call loader.give_back(window=True)"
    )
    return True
