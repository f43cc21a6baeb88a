"""Whether one model has all that was learnt: what the audit says is what the models remember."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_kit import by_command, learn, sgd
from loader_kit import NumberReader
from lockstep_kit import Rank, run_ranks

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.main import main
from edl_torch.shard import TaskType
from edl_torch.testing import FakeMaster

SIZE, BATCH = 48, 4
PROVEN, REFUTED, INEXACT, DELIVERED = 0, 1, 3, 4
BY_TWO = "each record was trained on once, by 2 trainers with models of their own:"


class Memory(torch.nn.Module):
    """Remembers each record that it learnt: its weight is how often that was in a step."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(size))
        self.head = torch.nn.Parameter(torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.counts[batch.long()].sum() - self.head.sum() * batch.sum()

    @property
    def learnt(self) -> set[int]:
        return {n for n, count in enumerate(self.counts.tolist()) if count}


def loader(
    fake: FakeMaster | None, folder: Path, name: str = "a", records: int = SIZE, **options: Any
) -> ElasticDataLoader:
    options = {"batch_size": BATCH, "records_per_shard": BATCH, "shuffle": True, **options}
    return ElasticDataLoader(
        torch.arange(float(records)), master_client=fake and fake.connect(name), audit_dir=folder, **options
    )


@contextmanager
def trainer(
    fake: FakeMaster | None,
    folder: Path,
    name: str = "a",
    model: Memory | None = None,
    word: str = "",
    **options: Any,
) -> Iterator[tuple[ElasticDataLoader, Memory, torch.optim.Optimizer]]:
    model = model or Memory()
    optimizer = sgd(model)
    with loader(fake, folder, name, **options) as batches:
        batches.attach(optimizer, one_model=word)
        yield batches, model, optimizer


def train(batches: ElasticDataLoader, model: Memory, optimizer: Any, steps: int = 1000) -> None:
    for _ in batches.epochs():
        for batch in batches:
            learn(model, optimizer, batch)
            steps -= 1
            if not steps:
                return


# One trainer --------------------------------------------------------------------------------------------


def test_one_trainer_that_attached_its_optimizer_has_one_model(tmp_path, capsys):
    with trainer(FakeMaster(), tmp_path, num_epochs=3) as (batches, model, optimizer):
        train(batches, model, optimizer)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["headline"]) == (PROVEN, "PROVEN")
    assert said["models"]["shares"] == [{"trainers": ["a"], "records": 3 * SIZE}]


def test_a_loader_of_other_data_under_the_same_name_hides_no_loop_that_was_left(tmp_path, capsys):
    with trainer(None, tmp_path) as (batches, model, optimizer):
        train(batches, model, optimizer, steps=6)
    with loader(None, tmp_path, records=12) as validation:
        assert sum(map(len, validation)) == 12
    assert main(["audit", "--expect", "delivered", str(tmp_path)]) == REFUTED
    told = capsys.readouterr().out
    assert "lost 24" in told
    assert told.count("dataset_name=") == 2
    with trainer(None, tmp_path) as (batches, model, optimizer):
        train(batches, model, optimizer)
    assert main(["audit", "--expect", "delivered", str(tmp_path)]) == 0


@pytest.mark.parametrize("when", ["before the loader", "after the loader", "in the first batch"])
def test_a_model_that_was_restored_with_its_token_goes_on(tmp_path, capsys, when):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        train(batches, model, optimizer, steps=5)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), batches.state_dict()))
        train(batches, model, optimizer, steps=2)  # which are rolled back
    with trainer(fake, tmp_path, "b") as (batches, model, optimizer):
        if when == "before the loader":
            model.load_state_dict(saved[0])
        batches.load_state_dict(saved[2])
        if when == "after the loader":
            model.load_state_dict(saved[0])
        for number, batch in enumerate(batches):
            if when == "in the first batch" and not number:
                model.load_state_dict(saved[0])
            learn(model, optimizer, batch)
        assert model.learnt == set(range(SIZE))
    status, said = by_command(tmp_path, capsys)
    assert (status, said["undecided"]) == (PROVEN, [])
    assert "those saved with the token" in said["models"]["shown"][0]


def test_a_token_restored_without_its_model_has_two_models(tmp_path, capsys):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        train(batches, model, optimizer, steps=5)
        token = batches.state_dict()
    with trainer(fake, tmp_path, "b") as (batches, model, optimizer):
        batches.load_state_dict(token)
        train(batches, model, optimizer)
        assert model.learnt != set(range(SIZE))
    status, said = by_command(tmp_path, capsys)
    assert status == DELIVERED
    assert said["headline"] == f"DELIVERED: {BY_TWO} a 20, b 28, data the same by samples"
    assert "model.load_state_dict(…) before the first step" in said["undecided"][0]


@pytest.mark.parametrize("left", ["the model of the token", "an older model", "a new model"])
@pytest.mark.parametrize("begins", [True, False], ids=["with a loop", "without a loop"])
def test_a_token_of_the_end_is_restored_with_its_model_too(tmp_path, capsys, left, begins):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        saved = {"a new model": Memory().state_dict()}
        train(batches, model, optimizer, steps=5)
        saved["an older model"] = copy.deepcopy(model.state_dict())
        train(batches, model, optimizer)
        saved["the model of the token"] = copy.deepcopy(model.state_dict())
        token = batches.state_dict()
    with trainer(fake, tmp_path, "b") as (batches, model, optimizer):
        model.load_state_dict(saved[left])
        batches.load_state_dict(token)
        if begins:
            assert not list(batches)
    status, said = by_command(tmp_path, capsys)
    is_whole = model.learnt == set(range(SIZE))
    assert status == (PROVEN if is_whole else DELIVERED)
    assert is_whole or "model.load_state_dict(…) before the first step" in said["undecided"][0]


def test_a_model_loaded_in_part_is_one_by_its_users_word(tmp_path, capsys):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        train(batches, model, optimizer, steps=5)
        saved = copy.deepcopy((model.state_dict(), batches.state_dict()))
    new_head = Memory()
    with trainer(fake, tmp_path, "b", new_head, word="its head is new") as (batches, model, optimizer):
        model.load_state_dict(saved[0] | {"head": torch.ones(4)})
        batches.load_state_dict(saved[1])
        train(batches, model, optimizer)
        assert model.learnt == set(range(SIZE))
    status, said = by_command(tmp_path, capsys)
    assert status == PROVEN
    assert said["models"]["shown"] == ["that trainers had one model is their user's word: 'its head is new'"]


def another_model(batches: ElasticDataLoader) -> None:
    """A notebook's cell that makes model and optimizer is run again, but not that of the loader."""
    for _ in range(2):
        model = Memory()
        optimizer = sgd(model)
        batches.attach(optimizer)
        train(batches, model, optimizer, steps=6)


def models_of_folds(batches: ElasticDataLoader) -> None:
    kept = []
    for _ in range(2):
        kept.append((model := Memory(), optimizer := sgd(model)))
        batches.attach(optimizer)
        train(batches, model, optimizer, steps=6)
        batches.detach(optimizer)


def reset_model(batches: ElasticDataLoader) -> None:
    model = Memory()
    beginning = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    batches.attach(optimizer)
    for _ in range(2):
        model.load_state_dict(beginning)
        train(batches, model, optimizer, steps=6)


@pytest.mark.parametrize("loop", [another_model, models_of_folds, reset_model])
def test_a_session_whose_model_begins_anew_has_several(tmp_path, capsys, loop):
    with loader(FakeMaster(), tmp_path) as batches:
        loop(batches)
    status, said = by_command(tmp_path, capsys)
    # What is written between two passes differs at both, and from what the last step left.
    reasons = 2 if loop is reset_model else 1
    assert (status, said["verdict"], len(said["undecided"])) == (DELIVERED, "DELIVERED", reasons)
    if loop is not reset_model:
        assert [share["records"] for share in said["models"]["shares"]] == [24, 24]
        assert "by 2 models, as 1 trainer(s) made others on the way: a 24, a 24" in said["headline"]


def test_a_model_of_which_a_part_is_thawed_on_the_way_is_one(tmp_path, capsys):
    with loader(FakeMaster(), tmp_path) as batches:
        model = Memory()
        batches.attach(optimizer := torch.optim.SGD([model.head], lr=0.1))
        model.counts.requires_grad_(False)
        train(batches, model, optimizer, steps=6)
        model.counts.requires_grad_(True)
        optimizer.add_param_group({"params": [model.counts]})
        train(batches, model, optimizer)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["undecided"]) == (PROVEN, [])


@pytest.mark.parametrize(
    ("saved", "trains", "is_one"), [("all", "all", True), ("head", "head", False), ("head", "all", False)]
)
def test_a_layer_that_is_frozen_on_the_way_is_still_of_the_model(tmp_path, capsys, saved, trains, is_one):
    """Of what goes on from a checkpoint the optimizer has all layers, or nothing shows those it has not."""
    fake, model = FakeMaster(), Memory()
    with loader(fake, tmp_path, num_epochs=2) as batches:
        batches.attach(first := sgd(model))
        train(batches, model, first, steps=SIZE // BATCH)
        batches.detach(first)
        model.counts.requires_grad_(False)
        batches.attach(second := sgd(model.head))
        train(batches, model, second, steps=5)
        state = {name: one for name, one in model.state_dict().items() if saved in ("all", name)}
        kept = copy.deepcopy((state, batches.state_dict()))
    model = Memory()
    model.load_state_dict(kept[0], strict=False)
    model.counts.requires_grad_(False)
    with loader(fake, tmp_path, "b", num_epochs=2) as batches:
        batches.attach(optimizer := sgd(model if trains == "all" else model.head))
        batches.load_state_dict(kept[1])
        train(batches, model, optimizer)
    assert (model.learnt == set(range(SIZE))) == is_one
    status, said = by_command(tmp_path, capsys)
    assert status == (PROVEN if is_one else DELIVERED)
    assert is_one or "was not the one that was saved with it" in said["undecided"][0]


def test_a_model_with_an_infinite_weight_is_compared_without_a_word(tmp_path, capsys):
    model = Memory()
    torch.nn.init.constant_(model.head, float("inf"))
    with trainer(FakeMaster(), tmp_path, model=model) as (batches, _, optimizer):
        train(batches, model, optimizer)
    assert by_command(tmp_path, capsys)[0] == PROVEN


def test_data_of_evaluation_have_no_model(tmp_path, capsys):
    with trainer(FakeMaster(), tmp_path, task_type=TaskType.EVALUATION) as (batches, model, optimizer):
        train(batches, model, optimizer)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["headline"]) == (DELIVERED, "DELIVERED: each record went to a loop once")


# Several trainers ---------------------------------------------------------------------------------------


def test_a_trainer_that_was_killed_and_begun_anew_without_a_checkpoint_has_half_of_it(tmp_path, capsys):
    fake = FakeMaster()
    killed = trainer(fake, tmp_path)
    batches, model, optimizer = killed.__enter__()
    train(batches, model, optimizer, steps=6)
    session = batches.service.session
    session.flush()
    fake.break_stream(session.id)
    fake.clock.advance(600)
    fake.expire()
    with trainer(fake, tmp_path, "b") as (others, other, steps):
        train(others, other, steps)
    assert model.learnt | other.learnt == set(range(SIZE))
    status, said = by_command(tmp_path, capsys)
    assert status == DELIVERED
    assert said["headline"] == f"DELIVERED: {BY_TWO} a 24, b 24, data the same by samples"
    assert "model = DistributedDataParallel(model)" in said["undecided"][0]


def ranks_that(
    reduce: Callable[[list[torch.Tensor]], torch.Tensor],
    folder: Path,
    ranks: int = 2,
    word: str = "",
    *,
    fake: FakeMaster | None = None,
    models: list[Memory] | None = None,
    tokens: list[Any] | None = None,
    steps: int = 1000,
) -> list[Memory]:
    """Train synchronous ranks, with gradients that are `reduce`d over them before each step.

    They begin at the last of `tokens`, and add one after so many steps.
    """
    models = models or [Memory() for _ in range(ranks)]
    tokens = [None] if tokens is None else tokens
    barrier, begun = threading.Barrier(ranks), tokens[-1]

    def work(rank: Rank) -> None:
        model = models[rank.peers.rank]
        optimizer = sgd(model)
        rank.loader.attach(optimizer, one_model=word)
        rank.service.load_state_dict(begun)
        for _epoch in rank.loader.epochs() if steps else ():
            for _, batch in zip(range(steps), rank.loader, strict=False):
                rank.loader.weigh(model(torch.tensor(batch_of(batch)))).backward()
                barrier.wait()
                gradients = [other.counts.grad for other in models], [other.head.grad for other in models]
                mine = [reduce([g.clone() for g in found if g is not None]) for found in gradients]
                barrier.wait()
                model.counts.grad, model.head.grad = mine[0].clone(), mine[1].clone()
                optimizer.step()
                optimizer.zero_grad()
            if steps < SIZE:
                break
        token = rank.service.state_dict()
        if not rank.peers.rank:
            tokens.append(token)

    run_ranks(fake or FakeMaster(), ranks, work, NumberReader({"a": SIZE}), audit_dir=folder)
    return models


def batch_of(batch: Any) -> list[float]:
    return [float(n) for n in batch]


def test_ranks_whose_gradients_are_reduced_have_one_model(tmp_path, capsys):
    models = ranks_that(lambda gradients: torch.stack(gradients).sum(0), tmp_path)
    assert all(model.learnt == set(range(SIZE)) for model in models)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["undecided"]) == (PROVEN, [])
    assert said["models"]["shown"] == [
        "trainers' parameters were sampled, and the same after the last of their records"
    ]


def test_a_token_from_before_the_first_step_is_of_the_model_that_was_loaded(tmp_path, capsys):
    """As of a job that saves when it begins, and is killed there."""
    fake, tokens, models = FakeMaster(), [None], None
    for steps in (4, 0, 1000):
        models = ranks_that(
            lambda gradients: torch.stack(gradients).sum(0),
            tmp_path,
            fake=fake,
            models=copy.deepcopy(models),
            tokens=tokens,
            steps=steps,
        )
    assert all(model.learnt == set(range(SIZE)) for model in models or ())
    status, said = by_command(tmp_path, capsys)
    assert (status, said["undecided"]) == (PROVEN, [])


def test_synchronous_ranks_without_ddp_have_models_of_their_own(tmp_path, capsys):
    models: dict[int, Memory] = {}

    def work(rank: Rank) -> None:
        model = models[rank.peers.rank] = Memory()
        optimizer = sgd(model)
        rank.loader.attach(optimizer)
        rank.service.load_state_dict(None)
        for _ in rank.loader.epochs():
            for batch in rank.loader:
                optimizer.zero_grad()
                rank.loader.weigh(model(torch.tensor(batch_of(batch)))).backward()
                optimizer.step()

    run_ranks(FakeMaster(), 2, work, NumberReader({"a": SIZE}), audit_dir=tmp_path)
    assert not models[0].learnt & models[1].learnt
    status, said = by_command(tmp_path, capsys)
    assert status == DELIVERED
    for rank, model in models.items():
        assert {"trainers": [f"rank{rank}"], "records": len(model.learnt)} in said["models"]["shares"]
    assert "model = DistributedDataParallel(model)" in said["undecided"][0]


# What is near is not the same -----------------------------------------------------------------------------


def saved_at(batches: ElasticDataLoader, model: Memory, optimizer: Any, *when: int) -> list[Any]:
    """Train up to the last of these steps; the model and the token at each of them."""
    found = []
    for number, batch in enumerate(batches, 1):
        learn(model, optimizer, batch)
        if number in when:
            found.append((copy.deepcopy(model.state_dict()), batches.state_dict()))
        if number == when[-1]:
            return found
    raise AssertionError("the epoch has fewer batches")


def test_a_token_with_the_model_of_a_neighbouring_checkpoint_is_not_one_model(tmp_path, capsys):
    fake = FakeMaster()
    with trainer(fake, tmp_path, model=Memory().bfloat16()) as (batches, model, optimizer):
        model.head.data += 1000.0  # one part is large, and hides what the other has learnt
        (older, _), (_, token) = saved_at(batches, model, optimizer, 4, 5)
    with trainer(fake, tmp_path, "b", model=Memory().bfloat16()) as (batches, model, optimizer):
        model.load_state_dict(older)
        batches.load_state_dict(token)
        train(batches, model, optimizer)
        assert len(model.learnt) == SIZE - BATCH
    assert by_command(tmp_path, capsys)[0] == DELIVERED


@pytest.mark.parametrize("master", ["the same", "another"])
def test_a_model_that_has_learnt_does_not_begin_anew(tmp_path, capsys, master):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        ((state, _),) = saved_at(batches, model, optimizer, 5)
        if master == "the same":
            batches.load_state_dict(None)
            train(batches, model, optimizer)
    if master == "another":
        with trainer(None, tmp_path, "b") as (batches, model, optimizer):
            model.load_state_dict(state)
            train(batches, model, optimizer)
    assert max(model.counts.tolist()) == 2
    status, said = by_command(tmp_path, capsys)
    assert status == DELIVERED
    assert "had learnt from them before" in said["undecided"][-1]


@pytest.mark.parametrize(
    "other", [{"records": SIZE + 1}, {"fingerprint": "v2"}, {"records_per_shard": 2 * BATCH}]
)
def test_a_model_that_has_learnt_does_not_begin_anew_on_data_that_look_like_others(tmp_path, capsys, other):
    with trainer(None, tmp_path, model=Memory(SIZE + 1), fingerprint="v1") as (batches, model, optimizer):
        ((state, _),) = saved_at(batches, model, optimizer, 5)
    other = {"fingerprint": "v1", **other}
    for learnt, verdict in ((False, Outcome.PROVEN), (True, Outcome.DELIVERED)):
        with trainer(None, tmp_path, "b", Memory(SIZE + 1), **other) as (batches, model, optimizer):
            model.load_state_dict(state if learnt else model.state_dict())
            train(batches, model, optimizer)
        left, whole = sorted(audit([tmp_path]), key=lambda verdict: verdict.outcome is not Outcome.REFUTED)
        assert (left.acknowledged, whole.outcome) == (5 * BATCH, verdict)
    assert max(model.counts.tolist()) == 2
    assert "had learnt from them before" in whole.models.reasons[-1]


def learnt_up_to_a_step_that_was_not_looked_at(folder: Path) -> tuple[Memory, Any]:
    with trainer(None, folder) as (batches, model, optimizer):
        for number, batch in enumerate(batches, 1):
            learn(model, optimizer, batch)
            if number == 5:
                found = copy.deepcopy(model)
            if number == 6:
                break
    return found, None


def learnt_and_stepped_on_something_else(folder: Path) -> tuple[Memory, Any]:
    with trainer(None, folder) as (batches, model, optimizer):
        train(batches, model, optimizer)
    learn(model, optimizer, torch.zeros(1))
    return model, None


def learnt_and_got_more_parameters(folder: Path) -> tuple[Memory, Any]:
    with trainer(None, folder) as (batches, model, optimizer):
        train(batches, model, optimizer)
    larger = Memory(SIZE + 4)
    larger.counts.data[:SIZE] = model.counts.data
    return larger, None


def learnt_after_the_token(folder: Path) -> tuple[Memory, Any]:
    with trainer(None, folder) as (batches, _, _):
        token = batches.state_dict()
    return learnt_up_to_a_step_that_was_not_looked_at(folder)[0], token


@pytest.mark.parametrize(
    "learnt",
    [
        learnt_up_to_a_step_that_was_not_looked_at,
        learnt_and_stepped_on_something_else,
        learnt_and_got_more_parameters,
        learnt_after_the_token,
    ],
)
def test_the_first_line_says_that_nothing_shows_a_new_model(tmp_path, capsys, learnt):
    """One that has learnt was never looked at as it was then, or looks otherwise now."""
    model, token = learnt(tmp_path)
    with trainer(None, tmp_path, "b", model) as (batches, model, optimizer):
        if token is not None:
            batches.load_state_dict(token)
        train(batches, model, optimizer)
    assert max(model.counts.tolist()) >= 2
    status, said = by_command(tmp_path, capsys)
    assert status == PROVEN
    assert said["headline"].startswith("PROVEN, if its model was new")
    assert main(["audit", str(tmp_path)]) == PROVEN
    assert "torch.manual_seed(…) before the model is made" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)], ids=["one seed", "unlike seeds"])
def test_a_run_from_scratch_after_another_is_proven_where_both_began_alike(tmp_path, capsys, seeds):
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)
        model = Memory()
        torch.nn.init.normal_(model.counts)
        with trainer(None, tmp_path, f"run{number}", model) as (batches, model, optimizer):
            train(batches, model, optimizer, steps=3 if number == 0 else 1000)
    status, said = by_command(tmp_path, capsys)
    new = "" if seeds[0] == seeds[1] else ", if its model was new"
    assert (status, said["headline"]) == (PROVEN, f"PROVEN{new}, data the same by samples")
    assert len(said["models"]["perhaps_trained"]) == (seeds[0] != seeds[1])


def test_a_second_run_from_what_was_loaded_after_attach_is_of_a_new_model(tmp_path, capsys):
    """The model was looked at before the weights of both runs were loaded: for a token of the beginning."""
    pretrained = Memory()
    torch.nn.init.normal_(pretrained.counts)
    for number, steps in enumerate((3, 1000)):
        with trainer(None, tmp_path, f"run{number}") as (batches, model, optimizer):
            for step, batch in enumerate(itertools.islice(batches, steps)):
                if not step:
                    batches.state_dict()
                    model.load_state_dict(pretrained.state_dict())
                learn(model, optimizer, batch)
    assert by_command(tmp_path, capsys)[1]["headline"] == "PROVEN, data the same by samples"


@pytest.mark.parametrize("kept", [True, False])
def test_of_few_values_a_model_that_begins_anew_is_known_too(tmp_path, capsys, kept):
    def live(model: torch.nn.Linear, most: int) -> None:
        optimizer = sgd(model)
        with loader(None, tmp_path) as batches:
            batches.attach(optimizer)
            for batch in itertools.islice(batches, most):
                optimizer.zero_grad()
                (model(batch[:, None]) / SIZE**2).mean().backward()
                optimizer.step()

    first = torch.nn.Linear(1, 1, bias=False)
    live(first, 5)
    live(first if kept else torch.nn.Linear(1, 1, bias=False), SIZE)
    status, said = by_command(tmp_path, capsys)
    assert status == (DELIVERED if kept else PROVEN)
    assert ["all 1 of its values" in reason for reason in said["undecided"]] == [True] * kept


def test_a_token_between_the_steps_of_two_optimizers_is_inexact(tmp_path, capsys):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        critic = Memory()
        batches.attach(often := sgd(critic))
        for number, batch in enumerate(batches, 1):
            learn(critic, often, batch)
            if number % 3 == 0:
                learn(model, optimizer, batch)
            if number == 5:
                token, saved = batches.state_dict(), copy.deepcopy([model.state_dict(), critic.state_dict()])
                break
    with trainer(fake, tmp_path, "b") as (batches, model, optimizer):
        batches.attach(often := sgd(critic))
        model.load_state_dict(saved[0])
        critic.load_state_dict(saved[1])
        batches.load_state_dict(token)
        for batch in batches:
            learn(critic, often, batch)
            learn(model, optimizer, batch)
    assert max(critic.counts.tolist()) == 2
    status, said = by_command(tmp_path, capsys)
    assert (status, "another had not" in said["inexact"][0]) == (INEXACT, True)


# What a model may be --------------------------------------------------------------------------------------


def test_parameters_may_be_added_between_a_restore_and_its_first_step(tmp_path, capsys):
    fake = FakeMaster()
    with trainer(fake, tmp_path) as (batches, model, optimizer):
        ((saved, token),) = saved_at(batches, model, optimizer, 5)
    with trainer(fake, tmp_path, "b") as (batches, model, optimizer):
        model.load_state_dict(saved)
        batches.load_state_dict(token)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        train(batches, model, optimizer)
    assert set(model.counts.tolist()) == {1.0}
    assert by_command(tmp_path, capsys)[1]["undecided"] == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.empty(0, 3),
        torch.ones(5, dtype=torch.complex64),
        torch.ones(2, 3000).t(),
        torch.ones(3).to_sparse(),
    ],
    ids=["of no dimension", "empty", "complex", "transposed", "sparse"],
)
def test_a_parameter_of_any_kind_ends_no_job(tmp_path, capsys, tensor):
    with trainer(FakeMaster(), tmp_path) as (batches, model, optimizer):
        odd = torch.nn.Parameter(tensor, requires_grad=tensor.layout is torch.strided)
        optimizer.add_param_group({"params": [odd]})
        batches.state_dict()
        train(batches, model, optimizer)
    assert set(model.counts.tolist()) == {1.0}
    assert by_command(tmp_path, capsys)[1]["undecided"] == []
