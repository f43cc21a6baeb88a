"""A callback by which a Transformers `Trainer` saves and ends, once its job was told to end soon.

Importing it imports transformers. On synchronous ranks all see the notice after the same step.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from edl_torch.data.loader import ElasticDataLoader

Callback: Any = TrainerCallback


class EndOnNotice(Callback):  # type: ignore[misc]
    """Makes the Trainer save a checkpoint after the step under way, and end without evaluating.

    Attributes:
        ended: whether it has ended the training.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self.ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin to listen for SIGTERM."""
        self.ended = False
        _ = self._loader.preempted

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ask for a checkpoint and the end of the training after a notice."""
        if self._loader.preempted:
            self.ended = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave out what the Trainer does after an epoch: this one is not over, and time is short."""
        if self.ended:
            control.should_save = False
            control.should_evaluate = False
