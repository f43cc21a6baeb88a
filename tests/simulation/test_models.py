"""Short simulations of jobs with one model: model and token are the same instant, whoever wakes whenever.

`run.py --models 500 --jobs 2` is the long version. EDL_SIMULATION_SEEDS="17 18" runs other seeds.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from sim_model import BrokenPromise
from sim_model_job import FAULTS, ModelJob, ModelOptions, ModelResult, model_options
from sim_model_trainer import Fates
from sim_network import Weather
from sim_weights import Judge, Weights

from edl_torch.audit.verdict import Outcome, audit
from edl_torch.core import dispatcher
from edl_torch.core.calls import ProgressCall, RestoreCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.state import Rollback
from edl_torch.core.token import Token
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.batches import Batches
from edl_torch.trainer.elastic import ElasticPasses
from edl_torch.trainer.state import State

SEEDS = [int(word) for word in os.environ.get("EDL_SIMULATION_SEEDS", "4").split()]
SHORT: dict[str, int] = {"shards": 300, "faults": 40}
QUIET = Fates(stop=0.0, kill=0.0)
SUPERSEDED = {"supersede": 1}


def job(seed: int, kinds: dict[str, int] | None = None, fates: Fates | None = None) -> ModelOptions:
    """A short and simple job, as when the seeds below were found."""
    options = model_options(seed, **SHORT, simple=True)
    return replace(options, kinds=kinds or options.kinds, fates=fates or options.fates)


def run(options: ModelOptions) -> ModelResult:
    print(f"seed {options.seed}")
    return ModelJob(options).run()


@pytest.mark.parametrize("window", [None, 4, pytest.param(10**6, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", SEEDS)
def test_model_and_token_never_differ(seed: int, window: int | None) -> None:
    options = job(seed)
    result = run(replace(options, job=replace(options.job, shuffle_window=window)))
    assert result.zombies
    assert result.rolled_back
    assert result.compared > result.saved > 0


@cases("seed", [19], [19, 2])
def test_a_trainer_superseded_inside_a_save_leaves_nothing_wrong(seed: int) -> None:
    """It went on with a model of 640 records and took a token of 648."""
    run(job(seed, SUPERSEDED, Fates(at="save", stop=0.1, kill=0.0, delay=0.0)))


@cases("seed", [3], [3, 5])
def test_a_late_restore_does_not_take_the_job_back(seed: int) -> None:
    """The living trainer's next token was of the checkpoint that a superseded one had loaded."""
    run(job(seed, SUPERSEDED, Fates(at="load", stop=0.4, kill=0.0, delay=0.0)))


@cases("seed", [28], [28, 30])
def test_a_superseded_trainer_is_not_told_that_all_is_finished(seed: int) -> None:
    """It had trained on 832 of 4746 records."""
    run(job(seed, SUPERSEDED, Fates(at="finished?", stop=0.5, kill=0.0, delay=0.0)))


@cases("seed", [1], [1, 22])
def test_a_trainer_that_slept_after_its_step_saves_no_token(seed: int) -> None:
    """Its model has a batch whose acknowledgement was refused: the records come again."""
    run(job(seed, {"stop": 1}, QUIET))


@cases("seed", [1], [1, 60, 306])
def test_a_journal_that_went_back_is_not_taken_for_the_newest(seed: int) -> None:
    """By a transaction or by seconds: tokens did not count what models had learnt since."""
    result = run(job(seed, {"rollback": 3, "stop": 1, "cut": 1, "supersede": 1}))
    assert result.rolled_back


def test_a_trainer_given_up_by_a_master_whose_journal_went_back_saves_no_token() -> None:
    """The master gave it up after its start, and its call as the member that it was proves what was lost."""
    run(job(105))


def test_acknowledgements_that_were_never_sent_are_not_forgotten() -> None:
    """A session that took part anew threw them away unheard: found by this seed."""
    options = job(
        1045, {"stop": 1, "cut": 1}, Fates(at="stepped", stop=1.0, kill=0.0, delay=1.0, delay_s=1.0)
    )
    options = replace(options, job=replace(options.job, size=8 * 150 - 3, bad_every=5))
    run(replace(options, pace=replace(options.pace, workers=2), fault_every_s=options.fault_every_s / 2))


def test_a_seed_fixes_every_event_of_a_job_with_a_model() -> None:
    digests = [run(job(seed)).digest for seed in (4, 4, 5)]
    assert digests[0] == digests[1] != digests[2]


@cases("seed, forgets", [(6, 0.0), (5, 0.15)], [(1, 0.0), (6, 0.0), (10, 0.0), (3, 0.15), (5, 0.15)])
def test_the_verdict_is_proven_just_where_one_model_learnt_each_record(
    tmp_path: Path, seed: int, forgets: float
) -> None:
    """Each trainer has a model of its own; it is that of the one before where it loads it with the token."""
    options = model_options(seed, **SHORT)
    pace = replace(options.pace, accumulates=options.pace.accumulates or 1)
    options = replace(options, pace=pace, forgets=forgets, audit_dir=tmp_path)
    if forgets:
        options = replace(options, kinds=FAULTS)
    result = run(options)
    verdicts = audit([tmp_path])
    print(*verdicts, sep="\n")
    learnt = int(result.model.parameters.sum())
    assert all(verdict.delivered for verdict in verdicts)
    assert result.model.forgot == bool(forgets)
    assert (verdicts[-1].outcome is Outcome.PROVEN) == (not forgets)
    assert learnt in [share.records for share in verdicts[-1].models.shares]
    assert (len(verdicts) > 1) == bool(result.faults["data"])


# What breaks when the code does -----------------------------------------------------------------------------


def broken_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks gets a position."""
    patch.setattr(Dispatcher, "snapshot", lambda self, call, now: self.token(call.dataset))


def broken_restore(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks may take the job back, however late the call comes."""

    def restore(self: Dispatcher, call: RestoreCall, now: float) -> int:
        return self.go_back(call.dataset, call.token)

    patch.setattr(Dispatcher, "restore", restore)


def broken_progress(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks is told whether the job is finished."""

    def progress(self: Dispatcher, call: ProgressCall, now: float) -> Any:
        return self.dataset_status(call.dataset)

    patch.setattr(Dispatcher, "progress", progress)


def broken_evidence(patch: pytest.MonkeyPatch) -> None:
    """A journal that went back is taken for the newest."""
    patch.setattr(Rollback, "check", lambda self, call: None)


def broken_losses(patch: pytest.MonkeyPatch) -> None:
    """A trainer whose acknowledgements were refused saves its position."""
    patch.setattr(State, "check", lambda self: None)


def broken_refusals(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears of acknowledgements that came too late."""
    patch.setattr(State, "refused", lambda self, tasks: None)


BREAKS: list[Any] = [
    (broken_snapshot, 5, SUPERSEDED, Fates(at="save", stop=0.1, kill=0.0), "differ at checkpoint"),
    (broken_restore, 4, SUPERSEDED, QUIET, "in place of lineage"),
    (broken_progress, 10, SUPERSEDED, Fates(at="finished?", stop=0.5, kill=0.0), "were never trained"),
    (broken_evidence, 9, {"rollback": 1}, QUIET, "too often in it [1-9]"),
    (broken_losses, 5, {"stop": 1}, QUIET, "too often in it [1-9]"),
    (broken_refusals, 5, {"stop": 1}, QUIET, "too often in it [1-9]"),
]


@cases("break_it, seed, kinds, fates, promise", BREAKS[:4], BREAKS)
def test_code_that_lets_model_and_token_part_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    break_it: Any,
    seed: int,
    kinds: dict[str, int],
    fates: Fates,
    promise: str,
) -> None:
    break_it(monkeypatch)
    options = replace(job(seed, kinds, fates), weather=Weather(0.002, 0.002, repeat=0.05, late=0.002))
    with pytest.raises(BrokenPromise, match=promise):
        run(options)


def lost_count_of_what_is_ahead(patch: pytest.MonkeyPatch) -> None:
    """A trainer that was given up forgets what its wrapper has still: later batches pass for those."""

    def clear(self: Batches) -> None:
        self.take_back([*self.unfinished, *self.ahead])
        self.in_hand = None

    patch.setattr(Batches, "clear", clear)


def broken_wrapper(patch: pytest.MonkeyPatch) -> None:
    """What a wrapper held when its loop was left does not go back."""
    withdraw = ElasticPasses._withdraw

    def some(self: ElasticPasses) -> None:
        batches = self._state.batches
        ahead = list(batches.ahead)
        batches.ahead.clear()
        withdraw(self)
        batches.ahead.extend(ahead)

    patch.setattr(ElasticPasses, "_withdraw", some)


def broken_window(patch: pytest.MonkeyPatch) -> None:
    """A loop that is left gives back all that it gathered, whose gradients stay."""

    def all_of_it(self: ElasticPasses) -> None:
        state, batches = self._state, self._state.batches
        back = [*batches.unfinished, *batches.ahead]
        batches.take_back(back)
        state.outbox.note(give_backs=state.inflight.withdraw(batch.ticket for batch in back))

    patch.setattr(ElasticPasses, "_withdraw", all_of_it)


def broken_padding(patch: pytest.MonkeyPatch) -> None:
    """The newest batch is taken for the one in hand, where that is a padding batch."""
    withdraw = ElasticPasses._withdraw

    def newest(self: ElasticPasses) -> None:
        batches = self._state.batches
        if batches.in_hand is not None and not batches.in_hand.ticket and batches.unfinished:
            batches.in_hand = batches.unfinished[-1]
        withdraw(self)

    patch.setattr(ElasticPasses, "_withdraw", newest)


def broken_step(patch: pytest.MonkeyPatch) -> None:
    """A step counts the batch in hand, whose gradient is not in it."""
    stepped = Batches.stepped
    patch.setattr(Batches, "stepped", lambda self, number, before_hand: stepped(self, number))


BREAKS_OF_HABITS: list[Any] = [
    (lost_count_of_what_is_ahead, 2, "stop", {"tells": 2}, "and its trainer says Batch"),
    (broken_padding, 2, "supersede", {"accumulates": 3, "pads": 0.3}, "too often in it [1-9]"),
    (broken_wrapper, 1, "supersede", {"tells": 2}, "not in the model [1-9]"),
    (broken_window, 3, "supersede", {"accumulates": 3}, "too often in it [1-9]"),
    (broken_step, 1, "supersede", {"accumulates": 3, "tells": 2}, "not in the model [1-9]"),
]


@cases("break_it, seed, kind, habits, promise", BREAKS_OF_HABITS[:2], BREAKS_OF_HABITS)
def test_code_that_does_not_know_which_batch_a_loop_has_is_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Any, seed: int, kind: str, habits: dict[str, Any], promise: str
) -> None:
    """A wrapper reads ahead, a window is left, a padding batch is in hand: the code as it is passes these."""
    options = job(seed, {kind: 1}, QUIET)
    options = replace(
        options, job=replace(options.job, breaks=0.1), pace=replace(options.pace, **habits, keeps=0.5)
    )
    run(options)
    break_it(monkeypatch)
    with pytest.raises(BrokenPromise, match=promise):
        run(options)


def broken_token(patch: pytest.MonkeyPatch) -> None:
    """A token of other data is as good as any."""
    patch.setattr(Token, "check", lambda self, spec: None)


def broken_way_on(patch: pytest.MonkeyPatch) -> None:
    """The new data begin in the epoch that the old ones were in."""
    onto = Token.onto

    def in_its_epoch(self: Token, spec: DatasetSpec) -> Token:
        found = onto(self, spec)
        return found if found is self else replace(found, epoch=self.epoch, first_epoch=self.epoch)

    patch.setattr(Token, "onto", in_its_epoch)


def broken_registration(patch: pytest.MonkeyPatch) -> None:
    """A master that keeps the old data takes a trainer of the new ones for one of its own."""
    patch.setattr(dispatcher, "reconcile", lambda registered, asked, *, alone: registered)


BREAKS_OF_DATA = [
    (broken_token, "which is of other data"),
    (broken_way_on, "too often in it [1-9]"),
    (broken_registration, "too often in it [1-9]"),
]


@cases("break_it, promise", BREAKS_OF_DATA[:1], BREAKS_OF_DATA)
def test_code_that_takes_other_data_for_the_same_is_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Any, promise: str
) -> None:
    """The data change between two lives, and the user may not know of it: the code as it is passes this."""
    options = replace(job(9, {"data": 1, "kill": 3}, QUIET), faults=20)
    assert run(options).died_of.keys() >= {"DatasetConflict", "TokenError", "finished"}
    break_it(monkeypatch)
    with pytest.raises(BrokenPromise, match=promise):
        run(options)


# The judge --------------------------------------------------------------------------------------------------


def test_the_judge_sees_a_record_too_many_and_one_too_few() -> None:
    judge = Judge(model_options(2, **SHORT).job)
    token = '{"cursor":[0,0,4],"open":[],"crumbs":[],"quarantine":[],"dropped":0}'
    records = judge.first_records(5)
    exact = judge.nothing()
    exact.learn([(0, records[:4])])
    judge.same(exact, token, "a test")
    for runs, words in (
        ([(0, records[:3])], r"not in the model 1 \("),
        ([(0, records[:4]), (0, records[:1])], r"too often in it 1 \("),
    ):
        weights: Weights = judge.nothing()
        weights.learn(runs)
        with pytest.raises(BrokenPromise, match=words):
            judge.same(weights, token, "a test")
