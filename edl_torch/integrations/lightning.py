"""An `ElasticDataLoader` in Lightning's Trainer, by a callback.

Importing it imports Lightning. The callback tells the loader which batch the training step gets, and
Lightning where epochs end; what counts as trained on is the loader's to say.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import CheckpointError, InvalidArgument
from edl_torch.integrations.adapter import ModelPosition, check_synchronous, needed_by, read_ahead
from edl_torch.system.user_warnings import warn_user

with needed_by("lightning"):
    from lightning.pytorch import callbacks
    from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["ElasticCallback"]

Callback: Any = callbacks.Callback
log = logging.getLogger("edl_torch.client")


class ElasticCallback(Callback):  # type: ignore[misc]
    """Lets `Trainer.fit` train on an `ElasticDataLoader`, and keeps the data position in its checkpoints.

    `Trainer(callbacks=[ElasticCallback(loader)])`, and `fit` gets the same loader, by an argument or from
    `train_dataloader()`.

    A batch counts once every optimizer of the model has stepped on it. Each `fit` begins where its model
    does: at the position in the checkpoint that it loads, and without one at the beginning of the data; a
    later `fit` with the same callback goes on where the one before has ended. It stops when the master says
    that every epoch is over.

    With a synchronous loader `training_step` returns `loader.weigh(loss)`; gradients are scaled here.

    On a notice (SIGTERM, `loader.preempt()`) `fit` saves a checkpoint after the step under way, on all ranks
    after the same one, and raises Lightning's `SIGTERMException`, which ends the program with status 143.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        read_ahead(loader)  # Lightning does, by one batch
        self._loader = loader
        self._fitting = False
        self._position = ModelPosition(loader)
        self._is_in_use = False  # by this fit
        self._has_read = False
        self._optimizers: list[Any] = []
        self._pass: Any = None
        self._is_read = False  # to its end
        self._notices: _Notices | None = None

    def __repr__(self) -> str:
        return f"<ElasticCallback {self._loader!r}>"

    # The loader in Lightning's place ----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the loader iterated as the master says, wherever Lightning gets it from."""
        self._fitting = stage == "fit"
        if not self._fitting:
            return
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise InvalidArgument(
                "training_step(dataloader_iter) reads batches by itself, as many as it likes: with "
                "ElasticCallback it takes a batch"
            )
        ranks: int = trainer.world_size
        check_synchronous(self._loader, ranks, f"Lightning trains one model on {ranks} ranks")
        self._is_in_use = self._has_read = False
        self._position.leave()  # what had no step in an earlier fit comes again
        process = trainer.strategy.process_dataloader

        def processed(dataloader: Any) -> Any:
            if dataloader is not self._loader:
                return process(dataloader)
            self._is_in_use = True
            return _Epochs(self._epoch)

        trainer.strategy.process_dataloader = processed
        self._notices = _Notices(self._loader)
        trainer.callbacks.append(self._notices)

    def _epoch(self) -> Iterator[Any]:
        """Read the epoch that runs, and nothing after the last one."""
        self._position.begin()
        self._has_read, self._is_read = True, False
        self._pass = iter(()) if self._loader.service.finished else iter(self._loader)
        yield from self._pass
        self._is_read = True  # Lightning has yet to train on the last batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise InvalidArgument where `fit` trains on something else than the loader, or on windows that it
        does not end."""
        if not self._is_in_use:
            raise InvalidArgument(
                f"Trainer.fit trains on something else than the loader of {self!r}: give it that one"
            )
        is_limited = trainer.num_training_batches != float("inf") and not trainer.fast_dev_run
        if is_limited and trainer.accumulate_grad_batches > 1:
            raise InvalidArgument(
                "with limit_train_batches Lightning does not see the last batch of the data, and throws away "
                "the gradients of a window that it makes no whole one of: leave out limit_train_batches, or "
                "accumulate_grad_batches"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch that was read ahead reaches the training step."""
        self._loader.passed_on()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop where the master has the outcome of every record of every epoch."""
        if self._is_read:
            self._loader.passed_on()  # Lightning asks for more, and there is none
        self._end_pass()
        if self._loader.service.finished:
            trainer.should_stop = True
        waiting = self._loader.service.record_count > 0  # in a window that was left
        waiting = trainer.strategy.reduce_boolean_decision(waiting, all=False)
        if waiting and pl_module.automatic_optimization:  # as Lightning does with the next batch
            pl_module.zero_grad()
            self._position.leave()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn of an end that is not that of the data."""
        epochs = trainer.max_epochs
        ended = epochs is not None and 0 <= epochs <= trainer.current_epoch
        if ended and not self._loader.service.finished:
            warn_user(
                f"Trainer.fit has ended with max_epochs={epochs}, and {self._loader!r} has more to train on: "
                f"its num_epochs says how many epochs there are, so leave max_epochs=-1"
            )

    # Optimizers -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the model's optimizers, as the precision plugin steps them."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # A model without optimizers gets one that never steps.
        self._optimizers = [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]
        for optimizer in self._optimizers:
            self._loader.attach(optimizer, scaler=scaler)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Make gradients of synchronous ranks the mean over all records of all ranks, before clipping."""
        if not self._loader.synchronous:
            return
        self._loader.scale_gradients(optimizer)
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:  # Lightning has divided every loss of the window by this
                        parameter.grad.mul_(trainer.accumulate_grad_batches)

    def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        """Leave optimizers and Trainer as they were."""
        if self._fitting:
            self._fitting = False
            vars(trainer.strategy).pop("process_dataloader", None)
            if self._notices in trainer.callbacks:
                trainer.callbacks.remove(self._notices)
        self._end_pass()  # before the optimizers go: the batch that they have not stepped on goes back
        while self._optimizers:
            self._loader.detach(self._optimizers.pop())

    on_exception = teardown

    def _end_pass(self) -> None:
        if hasattr(self._pass, "close"):
            self._pass.close()
        self._pass = None

    # Checkpoints ------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The name of the data position in a checkpoint."""
        return f"{type(self).__qualname__} {self._loader.service.dataset_name!r}"

    def state_dict(self) -> dict[str, Any]:
        """The data position. Synchronous ranks take it together, as Lightning does."""
        return self._loader.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a checkpoint whose model has learnt from nobody knows which records."""
        if self._fitting and self.state_key not in checkpoint["callbacks"]:
            raise CheckpointError(
                f"the checkpoint has no position of dataset {self._loader.service.dataset_name!r}: it was "
                f"saved without ElasticCallback(loader), so nobody knows which records its model has learnt"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a checkpoint's position, where it is loaded to be trained on.

        Raises InvalidArgument where Lightning has read ahead already.
        """
        if not self._fitting:
            return
        if self._has_read:
            raise InvalidArgument(
                "Lightning has begun to read before it loaded the checkpoint, as it does where "
                "configure_optimizers asks for estimated_stepping_batches under a strategy that restores "
                "late (FSDP, DeepSpeed): compute the number of steps from len(loader). A Tuner does so too: "
                "let it search with a plain DataLoader, and a Trainer without ElasticCallback"
            )
        self._position.load(state_dict)


class _Notices(Callback):  # type: ignore[misc]
    """Ends `fit` once this job was told to end soon.

    It is the last of the callbacks: the others have seen the end of the batch when it saves.
    """

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self._steps = 0  # of optimizers, when the batch before ended
        _ = loader.preempted  # listens from here on
        self._handler = signal.getsignal(signal.SIGTERM)

    def _take_sigterm(self) -> None:
        """Put the handler back that Lightning has put its own in front of.

        Lightning's would end this rank alone, and on several ranks it waits for the others, in the midst of
        what the ranks do together.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has just installed its handler."""
        self._take_sigterm()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has installed its handler, where it checks nothing before."""
        self._take_sigterm()
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save and leave after a notice, at the end of a window: on all ranks after the same batch."""
        before, self._steps = self._steps, trainer.global_step
        in_window = pl_module.automatic_optimization and self._steps == before
        if self._loader.preempted and not in_window:
            _save_last(trainer)
            raise SIGTERMException(128 + signal.SIGTERM)


def _save_last(trainer: Any) -> None:
    """Save a checkpoint that `ckpt_path="last"` finds, in the folder of a `ModelCheckpoint`."""
    folders = [
        saves
        for saves in trainer.checkpoint_callbacks
        if isinstance(saves, callbacks.ModelCheckpoint) and not saves.save_weights_only
    ]
    if not folders:
        log.warning(
            "no checkpoint was saved on the notice: the Trainer has no ModelCheckpoint. Training will go on "
            "from the last checkpoint that the program has saved"
        )
        return
    saves = next((saves for saves in folders if saves.save_last), folders[0])
    if not saves.last_model_path:
        metrics = {"epoch": trainer.current_epoch, "step": trainer.global_step, **trainer.callback_metrics}
        saves.last_model_path = saves.format_checkpoint_name(metrics, saves.CHECKPOINT_NAME_LAST)
    trainer.save_checkpoint(saves.last_model_path)
    log.warning("saved %s on the notice, after step %d", saves.last_model_path, trainer.global_step)


class _Epochs:
    """The loader without a length, by which Lightning would end epochs, and without a state of its own."""

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # A generator: what is raised before the first batch is asked for, Lightning's own error would hide.
        return self._epoch()
