"""What an ElasticTrainer does in one process: epochs, steps, checkpoints, and what it refuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import Counting, CountingOptimizer, Records
from train_program import MyTrainer, Settings, arguments, counts, parts
from transformers import TrainerCallback

from edl_torch import ElasticDataLoader, Mixture
from edl_torch.errors import CheckpointError, IntegrationUnavailable, InvalidArgument
from edl_torch.integrations.transformers import POSITION, ElasticTrainer

SETTINGS = Settings(size=30, epochs=3, save_steps=5)
EPOCH_STEPS = 8
Make = Callable[..., MyTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a trainer of the same job: another process, but for the process."""
    loaders = []

    def trainer(
        settings: Settings = SETTINGS, *, loader_epochs: int | None = None, kind: Any = MyTrainer, **more: Any
    ) -> MyTrainer:
        extra = {name: more.pop(name) for name in ("callbacks", "eval_dataset") if name in more}
        loaders.append(
            ElasticDataLoader(
                Records(settings.size),
                settings.batch,
                num_epochs=settings.epochs if loader_epochs is None else loader_epochs,
                shuffle=True,
                num_workers=settings.workers,
                records_per_shard=3 if settings.workers else 8 * SETTINGS.batch,
                audit_dir=tmp_path / "audit",
            )
        )
        args = arguments(tmp_path, settings, **more)
        return kind(args=args, elastic_loader=loaders[-1], **parts(settings), **extra)

    yield trainer
    for loader in loaders:
        loader.close()


class StopAt(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            control.should_training_stop = True


def test_epochs_and_steps_are_those_of_the_arguments(make: Make) -> None:
    trainer = make()
    trainer.train()
    assert counts(trainer.model) == [3] * 30
    assert trainer.state.global_step == trainer.state.max_steps == 3 * EPOCH_STEPS
    assert trainer.elastic_loader.service.finished


def test_epochs_with_more_batches_than_records_make_are_trained_to_their_ends(make: Make) -> None:
    settings = Settings(
        size=24, epochs=3, workers=3, save_steps=100
    )  # workers end on batches that are not full
    trainer = make(settings)
    trainer.train()
    assert counts(trainer.model) == [3] * 24
    assert trainer.state.global_step == trainer.state.max_steps >= 18


class Weighing(MyTrainer):
    """Notes the records of each micro-batch, and what the loader says of them while it is in training."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        records = len(next(iter(inputs.values())))
        noted.append((records, self.elastic_loader.weight))
        return super().training_step(model, inputs, *args, **kwargs)


noted: list[tuple[int, int]] = []


def test_the_weight_is_that_of_the_micro_batch_in_training(make: Make) -> None:
    noted.clear()
    make(kind=Weighing, gradient_accumulation_steps=3).train()
    assert {records for records, _ in noted} == {4, 2}
    assert all(records == weight for records, weight in noted)


def test_max_steps_end_training_within_an_epoch(make: Make) -> None:
    trainer = make(max_steps=EPOCH_STEPS + 3, loader_epochs=0)
    trainer.train()
    assert trainer.state.global_step == EPOCH_STEPS + 3
    assert sum(counts(trainer.model)) == 30 + 3 * 4 == trainer.elastic_loader.progress().acknowledged


def test_max_steps_end_training_on_a_mixture_without_an_end(tmp_path: Path) -> None:
    mixture = Mixture({"one": Records(SETTINGS.size)})
    with ElasticDataLoader(mixture, SETTINGS.batch, shuffle=True) as loader:
        args = arguments(tmp_path, SETTINGS, max_steps=11)
        trainer = MyTrainer(args=args, elastic_loader=loader, **parts(SETTINGS))
        trainer.train()
        assert trainer.state.global_step == 11
        assert sum(counts(trainer.model)) == 11 * SETTINGS.batch == loader.progress().acknowledged


def test_data_that_end_before_max_steps_say_so(make: Make) -> None:
    trainer = make(max_steps=100)
    with pytest.warns(UserWarning, match="the data ended after 24 of max_steps=100.*num_epochs=0"):
        trainer.train()
    assert counts(trainer.model) == [3] * 30


def test_half_an_epoch_ends_with_its_estimated_steps(make: Make) -> None:
    trainer = make(num_train_epochs=1.5, loader_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 12


def test_a_resumed_trainer_goes_on_in_mid_epoch_and_skips_nothing(make: Make) -> None:
    make(callbacks=[StopAt(13)]).train()
    again = make()
    again.train(resume_from_checkpoint=True)
    assert counts(again.model) == [3] * 30
    assert again.state.global_step == 3 * EPOCH_STEPS
    epochs = [entry["epoch"] for entry in again.state.log_history if "loss" in entry]
    assert epochs == sorted(epochs)


def test_an_epoch_with_fewer_batches_than_estimated_is_a_whole_one(make: Make) -> None:
    """One batch is left of two that six records would make, with four of them."""
    make(Settings(size=6, epochs=1, batch=2, save_steps=1), callbacks=[StopAt(1)]).train()
    again = make(Settings(size=6, epochs=1, batch=4, save_steps=1))
    again.train(resume_from_checkpoint=True)
    assert counts(again.model) == [1] * 6
    assert again.state.global_step == 2
    assert again.state.epoch == 1


def test_a_second_trainer_decides_by_its_own_steps(make: Make, tmp_path: Path) -> None:
    """The first one, which is still there, takes no more: without it nothing would count."""
    first = make()
    first.train()
    args = arguments(tmp_path / "out", SETTINGS, max_steps=EPOCH_STEPS + 3)
    second = MyTrainer(args=args, elastic_loader=first.elastic_loader, **parts(SETTINGS))
    second.train()
    assert sum(counts(second.model)) == 30 + 3 * 4 == second.elastic_loader.progress().acknowledged
    assert counts(first.model) == [3] * 30


def test_the_last_checkpoint_is_saved_though_its_step_was_not_known(make: Make, tmp_path: Path) -> None:
    make().train()
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-24"))
    assert counts(again.model) == [3] * 30
    assert again.state.global_step == again.state.max_steps == 24


def test_training_again_without_a_checkpoint_begins_with_the_data(make: Make) -> None:
    trainer = make()
    trainer.train()
    trainer.train()
    assert counts(trainer.model) == [6] * 30


def test_a_trainer_that_makes_its_model_anew_attaches_its_new_optimizer(tmp_path: Path) -> None:
    kept = []  # as a scheduler or a callback may keep the old one

    class Keeping(MyTrainer):
        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            kept.append(self.optimizer)
            return super().create_scheduler(*args, **kwargs)

    with ElasticDataLoader(Records(30), SETTINGS.batch, num_epochs=3) as loader:
        trainer = Keeping(
            model_init=lambda: Counting(30),
            args=arguments(tmp_path, SETTINGS, lr_scheduler_type="constant"),
            optimizer_cls_and_kwargs=(CountingOptimizer, {"even": False}),
            elastic_loader=loader,
        )
        for _ in range(2):
            trainer.train()
            assert counts(trainer.model) == [3] * 30
            assert loader.service.finished


def test_evaluation_acknowledges_nothing(make: Make) -> None:
    seen = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append((state.global_step, trainer.elastic_loader.progress().acknowledged))

    more = {"eval_strategy": "steps", "eval_steps": 3}
    trainer = make(eval_dataset=Records(25), callbacks=[Evaluated()], **more)
    trainer.train()
    whole = [step for step in range(3, 24, 3) if step % EPOCH_STEPS]
    assert [found for found in seen if found[0] in whole] == [
        (step, step // EPOCH_STEPS * 30 + step % EPOCH_STEPS * 4) for step in whole
    ]
    assert counts(trainer.model) == [3] * 30


def test_micro_batches_that_were_read_and_not_stepped_on_come_again(make: Make) -> None:
    class StopInWindow(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                control.should_training_stop = True

    settings = Settings(size=30, epochs=1, accumulation=3, save_steps=1)
    stopped = make(settings, callbacks=[StopInWindow()])
    stopped.train()
    assert stopped.elastic_loader.progress().acknowledged == 3 * 4
    again = make(settings)
    again.train(resume_from_checkpoint=True)
    assert counts(again.model) == [1] * 30


class Told(TrainerCallback):
    """Gets SIGTERM in the midst of a step, and notes what the Trainer does from then on."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.events: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert not self.events, "a step after the notice"
        if state.global_step == self._step:
            signal.raise_signal(signal.SIGTERM)
            self.events.append(f"told in step {self._step + 1}")

    def on_save(self, *_: Any, **__: Any) -> None:
        if self.events:
            self.events.append("saved")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self.events:
            self.events.append("evaluated")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.events:
            self.events.append("over")


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
@pytest.mark.parametrize(("accumulation", "step"), [(1, 4), (1, 7), (3, 1)])
def test_a_notice_saves_when_the_step_is_made_and_ends_the_program(
    make: Make, accumulation: int, step: int, strategy: str
) -> None:
    settings = Settings(size=30, epochs=2, accumulation=accumulation, save_steps=100)
    told = Told(step)
    before = signal.getsignal(signal.SIGTERM)
    trainer = make(
        settings, callbacks=[told], save_strategy=strategy, eval_strategy="epoch", eval_dataset=Records(5)
    )
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 143
    assert told.events == [f"told in step {step + 1}", "saved", "over"]
    trainer.elastic_loader.close()
    assert signal.getsignal(signal.SIGTERM) == before
    again = make(settings)
    again.train(resume_from_checkpoint=True)
    assert counts(again.model) == [2] * 30
    assert again.state.global_step == 2 * -(-EPOCH_STEPS // accumulation)  # nothing was done twice


def test_a_notice_that_came_before_training_ends_it_after_a_step(make: Make) -> None:
    trainer = make()
    trainer.elastic_loader.preempt()
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_checkpoint_that_was_half_written_is_passed_over(make: Make, tmp_path: Path) -> None:
    make(callbacks=[StopAt(7)], save_total_limit=None).train()
    half = tmp_path / "out" / "checkpoint-7"
    half.mkdir()
    (half / POSITION).write_text("{}")
    (half / "model.safetensors").write_text("garbage")
    again = make()
    again.train(resume_from_checkpoint=str(half))
    assert counts(again.model) == [3] * 30


def test_a_first_checkpoint_that_was_half_written_is_the_beginning(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    trainer = make()
    trainer.train(resume_from_checkpoint=True)
    assert counts(trainer.model) == [3] * 30


def test_the_checkpoint_before_stays_until_the_next_is_whole(make: Make, tmp_path: Path) -> None:
    class Broken(MyTrainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            if self.state.global_step == 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(kind=Broken, save_total_limit=1).train()
    positions = {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob(f"out/*/{POSITION}")
    }
    assert positions.keys() == {"checkpoint-5", "checkpoint-10"}
    assert positions["checkpoint-5"]
    assert not positions["checkpoint-10"]


def test_a_checkpoint_of_a_plain_trainer_is_refused(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("a model")
    with pytest.raises(CheckpointError, match=r"no data position .*not saved by an ElasticTrainer"):
        make().train(resume_from_checkpoint=True)


def test_a_folder_that_is_not_there_is_an_error(make: Make) -> None:
    with pytest.raises(CheckpointError, match="there is no folder 'nowhere'"):
        make().train(resume_from_checkpoint="nowhere")


def test_resuming_without_a_checkpoint_is_an_error(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in '.*out'"):
        make().train(resume_from_checkpoint=True)


def test_records_weigh_the_same_where_losses_are_divided_by_items(make: Make) -> None:
    settings = Settings(size=30, epochs=1, accumulation=3, items=True)
    trainer = make(settings)
    trainer.train()
    assert counts(trainer.model) == [1] * 30


def test_epochs_that_differ_are_refused(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="num_epochs=2, the TrainingArguments num_train_epochs=3"):
        make(loader_epochs=2).train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: the batch size"),
        ({"enable_jit_checkpoint": True}, "leave out enable_jit_checkpoint"),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused(
    make: Make, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make(**arguments)


def test_something_else_than_a_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="elastic_loader must be an ElasticDataLoader, not list"):
        MyTrainer(args=arguments(tmp_path, SETTINGS), elastic_loader=[], **parts(SETTINGS))


def test_a_mixin_without_a_trainer_behind_it_is_refused(make: Make) -> None:
    class WrongWayRound(ElasticTrainer):
        pass

    with pytest.raises(IntegrationUnavailable, match=r"class MyTrainer\(ElasticTrainer, Trainer\)"):
        WrongWayRound(elastic_loader=None)
