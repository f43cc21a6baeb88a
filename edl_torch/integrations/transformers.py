"""A mixin that makes a `transformers.Trainer` train on an `ElasticDataLoader`, exactly.

    class MyTrainer(ElasticTrainer, Trainer):
        pass

    trainer = MyTrainer(model=model, args=args, elastic_loader=loader)
    trainer.train(resume_from_checkpoint=…)       # as ever

Needs the package transformers, which is imported when an ElasticTrainer is made. It keeps no account of
records: the loader does.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from edl_torch.core.mixture import ENDLESS
from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import CheckpointError, IntegrationUnavailable, InvalidArgument, ServiceClosed
from edl_torch.integrations.adapter import check_synchronous, read_ahead, records_read
from edl_torch.system.user_warnings import warn_user
from edl_torch.system.whole_files import whole_file

log = logging.getLogger("edl_torch.client")

POSITION = "elastic_loader.json"  # in a checkpoint's folder; `{}` while the checkpoint is being written
_PRIVATE = ("_init_training_state", "_run_epoch", "_get_num_items_in_batch", "_save_checkpoint")
_LABELS = ("labels", "shift_labels")  # what the Trainer counts


_Trainer: Any = object  # a transformers.Trainer comes behind the mixin


class ElasticTrainer(_Trainer):  # type: ignore[misc]
    """A mixin for `transformers.Trainer` and its subclasses: `class MyTrainer(ElasticTrainer, Trainer)`.

    Batches come from the loader as it is, records count when the optimizer has stepped, and an epoch ends
    when the master says so. Checkpoints of the Trainer hold the data position, and `train()` goes on from
    there, with any number of ranks; without a checkpoint it takes the data back to their beginning.

    On a notice (SIGTERM, `loader.preempt()`) `train()` saves a checkpoint after the step under way, on all
    ranks after the same one, and ends the program with status 143 (`SystemExit`).

    Args:
        elastic_loader: what is trained on, in place of `train_dataset`. Its batch size, workers and collate
            function are those of training; `TrainingArguments` decides how many epochs or steps. Ranks need
            `synchronous=True`.
        args, kwargs: those of the Trainer.

    Raises:
        InvalidArgument: no `ElasticDataLoader`, or arguments of the Trainer that cannot be kept with one.
        IntegrationUnavailable: the Trainer of another version of transformers, without what this overrides.
    """

    training_step: Any  # the Trainer's

    def __init__(self, *args: Any, elastic_loader: ElasticDataLoader, **kwargs: Any) -> None:
        behind: Any = super()
        missing = [name for name in _PRIVATE if not hasattr(behind, name)]
        if missing:
            raise IntegrationUnavailable(
                f"ElasticTrainer needs a Trainer with {missing[0]}(), as transformers 5.23 has it: declare "
                f"class MyTrainer(ElasticTrainer, Trainer), and pip install 'edl-torch[transformers]'"
            )
        behind.__init__(*args, **kwargs)
        self.elastic_loader = elastic_loader
        self._epoch = _EpochSize(1)
        self._before = 0.0  # share of the first epoch that the data position has behind it
        self._is_last = False
        self._stepping: Any = None  # the optimizer, or the engine, that is attached
        self._shares: deque[float] = deque()  # of the micro-batches that were read, in the gradient
        self._check_arguments()
        from transformers import TrainerCallback

        self._notices = type("_EndOnNotice", (_EndOnNotice, TrainerCallback), {})(elastic_loader)
        self.add_callback(self._notices)
        if elastic_loader.synchronous:
            self.training_step = self._weighed(self.training_step)  # outside of what subclasses make of it
        self.training_step = self._of_next_batch(self.training_step)

    def _check_arguments(self) -> None:
        loader, args = self.elastic_loader, self.args
        if not isinstance(loader, ElasticDataLoader):
            raise InvalidArgument(f"elastic_loader must be an ElasticDataLoader, not {type(loader).__name__}")
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and self.accelerator.distributed_type == "NO":
            raise InvalidArgument(
                f"the process group has {ranks} ranks, and the Trainer would train a model on each: without "
                f"accelerators, TrainingArguments need use_cpu=True and ddp_backend='gloo'"
            )
        check_synchronous(loader, args.world_size, f"{args.world_size} ranks average their gradients")
        if loader.synchronous and not args.average_tokens_across_devices:
            raise InvalidArgument(
                "ranks with unequal batches need one mean over all of them: leave out "
                "average_tokens_across_devices=False"
            )
        if self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1:
            raise InvalidArgument(
                "with tensor, context or sequence parallelism ranks share batches, which an ElasticTrainer "
                "does not do: use data parallelism"
            )
        if args.auto_find_batch_size:
            raise InvalidArgument("auto_find_batch_size: the batch size is that of the elastic_loader")
        if getattr(args, "enable_jit_checkpoint", False):
            raise InvalidArgument(
                "an ElasticTrainer saves on SIGTERM by itself, on all ranks after the same step: leave out "
                "enable_jit_checkpoint=True"
            )

    # Where training begins ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the checkpoint's data position, or from the beginning of the data.

        A checkpoint that was being written when its job died is passed over for the one before.

        Raises:
            CheckpointError: for a checkpoint without a data position.
            SystemExit: with status 143, where a notice has ended the training. All is saved.
        """
        lookahead = self.elastic_loader.service.lookahead
        read_ahead(self.elastic_loader)  # the Trainer does, by the micro-batches of a step
        self._check_epochs()  # the service registers here: what others restore from now on is seen
        folder, position = _beginning(resume_from_checkpoint, self.args.output_dir)
        self.elastic_loader.load_state_dict(position)
        try:
            output = super().train(folder, *args, **kwargs)
        finally:
            with suppress(ServiceClosed):
                self._attach(None)  # another Trainer on the same loader decides by its own steps
                read_ahead(self.elastic_loader, lookahead)
        if self._notices.ended:  # not finished: the program must not evaluate and publish what it has
            sys.exit(128 + signal.SIGTERM)
        return output

    def _check_epochs(self) -> None:
        has = self.elastic_loader.progress().num_epochs
        wants = 0 if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs)
        if has and wants and has != wants:
            raise InvalidArgument(
                f"the elastic_loader has num_epochs={has}, the TrainingArguments num_train_epochs={wants}: "
                f"give both the same, or the loader num_epochs=0, which never ends"
            )

    def get_train_dataloader(self) -> ElasticDataLoader:
        """Return the loader as it is: Accelerate does not rebuild it."""
        return self.elastic_loader

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's numbers; with `max_steps` there are as many epochs as it takes."""
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        return (sys.maxsize if self.args.max_steps > 0 else epochs, *others)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Begin in the epoch of the data position, and skip nothing: the loader is there."""
        super()._init_training_state(*args, **kwargs)
        if self.elastic_loader.service.finished:  # there is no step, and no estimate of any
            self.state.max_steps = self.state.global_step
        status = self.elastic_loader.progress()
        done = status.acknowledged + status.quarantined + status.dropped
        self._before = done / status.size - status.epoch
        return status.epoch, 0

    # An epoch -----------------------------------------------------------------------------------------------

    def _run_epoch(self, *, model: Any, epoch: int, **kwargs: Any) -> None:
        """Train until the loader ends the epoch: how many batches it has is not known before."""
        loader = self.elastic_loader
        self._attach(self.deepspeed if self.is_deepspeed_enabled else self.optimizer)
        if loader.synchronous:
            loader.freeze_statistics(model)
        is_endless = loader.service.size == ENDLESS  # a mixture, of which max_steps= are trained
        self._epoch = _EpochSize(sys.maxsize if is_endless else max(1, len(loader)))
        self._epoch.before, self._before = self._before, 0.0
        self._is_last = self._by_epochs and epoch + 1 >= self.args.num_train_epochs
        kwargs.update(steps_in_epoch=self._epoch, num_update_steps_per_epoch=sys.maxsize)
        super()._run_epoch(model=model, epoch=epoch, **kwargs)

    def _attach(self, stepping: Any) -> None:
        """Let the steps of this optimizer decide, in place of the one before; None: of no more."""
        if stepping is not self._stepping:
            before, self._stepping = self._stepping, stepping
            if before is not None:
                self.elastic_loader.detach(before)
            if stepping is not None:
                self.elastic_loader.attach(stepping, scaler=getattr(self.accelerator, "scaler", None))

    @property
    def _by_epochs(self) -> bool:
        """Whether training ends with an epoch, and not after so many steps."""
        return self.args.max_steps <= 0 and float(self.args.num_train_epochs).is_integer()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Read the micro-batches of one step: fewer at the end of the epoch, and then none."""
        batches: list[Any] = []
        weights: list[int] = []
        while len(batches) < num_batches and self._epoch.last is None:
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                self._epoch.last = self._epoch.read
            else:
                self._epoch.read += 1
                weights.append(records_read(self.elastic_loader))
        if not batches:
            self._end_epoch()
            return batches, None
        if self._by_epochs:  # the number of steps was an estimate
            self.state.max_steps = max(self.state.max_steps, self.state.global_step + 2)
        return batches, self._share(batches, weights, device)

    def _of_next_batch(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step that gets the oldest micro-batch of those that were read."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.elastic_loader.passed_on()
            return training_step(*args, **kwargs)

        return step

    def _end_epoch(self) -> None:
        """Make the Trainer leave its loop over steps, and do what follows the last step of all."""
        control, state, args = self.control, self.state, self.args
        self.elastic_loader.passed_on()  # the Trainer asks for more, and there is none
        control.should_epoch_stop = True
        state.epoch = float(math.ceil(state.epoch or 0.0))  # the last step's share was an estimate
        if self._is_last:
            state.max_steps = state.global_step
            if args.save_strategy == "steps" and state.global_step % max(1, state.save_steps):
                control.should_save = True
            if args.eval_strategy == "steps" and state.global_step % max(1, state.eval_steps):
                control.should_evaluate = args.eval_delay <= state.global_step
        elif args.max_steps > 0 and self.elastic_loader.service.finished:
            control.should_training_stop = True
            warn_user(
                f"the data ended after {state.global_step} of max_steps={args.max_steps}: give the "
                f"elastic_loader more epochs, or num_epochs=0, with which it never ends"
            )

    # Ranks that step together -------------------------------------------------------------------------------

    def _share(self, batches: list[Any], weights: list[int], device: Any) -> Any:
        """Note what each micro-batch is in the gradient. Returns the number of items that the Trainer divides
        losses by, where it does."""
        if not self.elastic_loader.synchronous:
            return self._get_num_items_in_batch(batches, device)
        items = self._get_num_items_in_batch(list(map(_without_labels, batches, weights)), device)
        if items is not None or self.compute_loss_func is not None:
            self._shares = deque(float(weight > 0) for weight in weights)
            return items
        # Losses are means over micro-batches, over the number of these, and gradients the mean over ranks.
        records = torch.tensor(float(sum(weights)), device=device)
        total = float(self.accelerator.reduce(records, "sum"))
        scale = len(batches) * self.accelerator.num_processes / total
        self._shares = deque(weight * scale for weight in weights)
        return None

    def _weighed(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step whose backward pass is of the micro-batch's share."""

        def weighed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            share, backward = self._shares.popleft(), self.accelerator.backward
            passes = 0

            def backward_share(loss: Any, **more: Any) -> None:
                nonlocal passes
                passes += 1
                backward(loss * share if share else self.elastic_loader.weigh(loss, count=0), **more)

            self.accelerator.backward = backward_share
            try:
                loss = training_step(model, inputs, *args, **kwargs)
            finally:
                del self.accelerator.backward
            if not passes:
                raise InvalidArgument(
                    f"training_step() of {type(self).__name__} does not call "
                    f"self.accelerator.backward(loss), by which losses of unequal ranks are weighed"
                )
            return loss * share

        return weighed

    # Checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the Trainer's checkpoint, and the data position last: only then it is whole."""
        from transformers.trainer_utils import rotate_checkpoints

        args = self.args
        run = self._get_output_dir(trial=trial)
        folder = Path(run, f"checkpoint-{self.state.global_step}")
        if args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, {})
        self.accelerator.wait_for_everyone()
        limit = args.save_total_limit
        args.save_total_limit = None  # the one before goes when this one is whole
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        position = self.elastic_loader.state_dict()
        if args.should_save:
            _write(folder, position)
            rotate_checkpoints(
                output_dir=run,
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )


class _EndOnNotice:
    """Makes a Trainer save a checkpoint after the step under way, and end without evaluating, on a notice.

    A mixin for `transformers.TrainerCallback`. On synchronous ranks all see the notice after the same step.

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


class _EpochSize(int):
    """Micro-batches in an epoch: an estimate, until `last` is known (docs/decisions/0038).

    The Trainer is given it as a number, before it reads, and asks two things of it: whether a micro-batch is
    the last one (`step + 1 == size`), and the share of the epoch that is done (`(step + 1) / size`).
    """

    before = 0.0  # share of the epoch that was done when this pass began
    read = 0
    last: int | None = None

    def __eq__(self, step: object) -> bool:
        return step == self.last

    def __ne__(self, step: object) -> bool:
        return step != self.last

    __hash__ = int.__hash__

    def __rtruediv__(self, step: float) -> float:
        return 1.0 if step == self.last else min(1.0, self.before + step / int(self))


def _without_labels(batch: Any, weight: int) -> Any:
    """Return a batch as its labels are to be counted: those of a padding batch are ignored."""
    if weight or not isinstance(batch, Mapping):
        return batch
    labels = {key: batch[key].new_full(batch[key].shape, -100) for key in _LABELS if key in batch}
    return {**batch, **labels}


def _beginning(resume: str | bool | None, output: str) -> tuple[str | None, dict[str, str] | None]:
    """Return the checkpoint that a caller of `train()` means, or the newest before it that is whole, and its
    data position. Neither is where there is none."""
    from transformers.trainer_utils import sort_checkpoints

    if not resume:
        return None, None
    found = sort_checkpoints(output if resume is True else str(Path(resume).parent))
    if resume is True and not found:
        raise CheckpointError(f"there is no checkpoint in {output!r}: call train() without one to begin")
    meant = found[-1] if resume is True else str(Path(resume))
    before = found[: found.index(meant)] if meant in found else []
    whole = next((folder for folder in (meant, *reversed(before)) if _position(folder)), None)
    if whole != meant:
        log.warning(
            "the job was killed as it saved %s: training goes on from %s", meant, whole or "the beginning"
        )
    return whole, None if whole is None else _position(whole)


def _write(folder: Path, position: Mapping[str, Any]) -> None:
    with whole_file(folder / POSITION) as file:
        file.write(json.dumps(position).encode())


def _position(folder: str) -> dict[str, str]:
    """Return the data position of a checkpoint; empty where it is not whole. Raises CheckpointError.

    A folder with hidden files alone was made for one, which was not begun.
    """
    path = Path(folder, POSITION)
    try:
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise CheckpointError(f"there is no folder '{folder}' to go on from") from None
        if all(file.name.startswith(".") for file in Path(folder).iterdir()):
            return {}
        raise CheckpointError(
            f"'{folder}' has no data position ({POSITION}): it was not saved by an ElasticTrainer, and "
            f"training that went on from it would lose records or repeat them"
        ) from None
    except (OSError, json.JSONDecodeError) as exc:
        raise CheckpointError(f"the data position '{path}' cannot be read: {exc}") from exc
    return found
