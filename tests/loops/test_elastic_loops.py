"""Loops over an `ElasticDataLoader` that once broke a promise, each by its smallest program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loop_data import reading_ahead
from loop_interpreter import Interpreter
from loop_program import Data, Flush, Incident, Kind, Loader, Optimizer, Place, Program, Way
from loop_promises import BrokenPromise, is_bare_proof
from loop_runs import run

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome
from edl_torch.errors import AccountingError
from edl_torch.testing import FakeMaster

ATTACHED = (Optimizer(attached=True),)


# Gradients ----------------------------------------------------------------------------------------------


def test_each_of_several_optimizers_scales_by_its_own_window() -> None:
    run(Program(optimizers=(Optimizer(), Optimizer())))


def test_optimizers_that_step_in_turn_scale_by_their_own_windows() -> None:
    run(Program(optimizers=(Optimizer(), Optimizer(every=2), Optimizer(every=3))))


@pytest.mark.parametrize("kind", [Kind.BREAK, Kind.RAISE])
@pytest.mark.parametrize("place", [Place.FETCHED, Place.BACKWARD])
@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_of_a_loop_that_was_left_is_not_in_the_gradient(
    kind: Kind, place: Place, attached: bool
) -> None:
    incident = Incident(at=1, kind=kind, place=place)
    run(Program(optimizers=(Optimizer(attached=attached),), incidents=(incident,)))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_that_failed_is_not_in_the_gradient(every: int, attached: bool) -> None:
    failed = Incident(at=1, kind=Kind.QUARANTINE, place=Place.FETCHED)
    run(Program(optimizers=(Optimizer(every=every, attached=attached),), incidents=(failed,)))


def test_gradients_gathered_across_the_end_of_an_epoch() -> None:
    run(Program(data=Data(epochs=3), optimizers=(Optimizer(every=3, attached=True),), flush=Flush.END))


# Steps that count, and steps that do not ----------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_steps_at_rate_0_count(every: int) -> None:
    optimizer = Optimizer(attached=True, every=every, closure="none", rate=0.0)
    assert run(Program(optimizers=(optimizer,))).finished


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused: bool) -> None:
    overflow = Incident(at=1, kind=Kind.OVERFLOW, place=Place.BACKWARD)
    run(Program(optimizers=(Optimizer(attached=True, fused=fused),), scaler=True, incidents=(overflow,)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_last_step_that_a_scaler_skips_counts_in_the_end(fused: bool) -> None:
    overflow = Incident(at=3, kind=Kind.OVERFLOW, place=Place.BACKWARD)
    job = run(
        Program(optimizers=(Optimizer(attached=True, fused=fused),), scaler=True, incidents=(overflow,))
    )
    assert job.finished
    assert job.error is None


def test_a_scaler_skips_the_steps_of_those_optimizers_alone_whose_gradients_overflowed() -> None:
    """The other still has the infinite gradient among what it gathers, when the first steps again."""
    overflow = Incident(at=0, kind=Kind.OVERFLOW, place=Place.BACKWARD)
    plans = (Optimizer(), Optimizer(every=2))
    job = run(Program(optimizers=plans, weighed=False, scaler=True, incidents=(overflow,)))
    first, second = job.model.heads
    assert first.detach().any()
    assert second.detach().any()
    assert set(job.reference.learnt[0]) == {(0, n) for n in range(2, 8)}
    assert set(job.reference.learnt[1]) == {(0, n) for n in range(4, 8)}


def test_a_fused_optimizer_that_skips_its_step_does_not_take_anothers_place() -> None:
    """The other attached itself, and its step is not called at all: nobody has learnt from the batch."""
    overflow = Incident(at=2, kind=Kind.OVERFLOW, place=Place.BACKWARD)
    plans = (Optimizer(every=2), Optimizer(every=2, fused=True))
    data = Data(records=5, batch_size=1, records_per_shard=1)
    job = run(Program(data=data, optimizers=plans, weighed=False, scaler=True, incidents=(overflow,)))
    assert job.finished


@pytest.mark.parametrize("counted_epochs", [False, True])
def test_new_optimizers_each_epoch_in_place_of_the_old_ones(counted_epochs: bool) -> None:
    program = Program(data=Data(epochs=3), optimizers=ATTACHED, renew="detach", counted_epochs=counted_epochs)
    assert run(program).finished


def test_optimizers_attached_beside_old_ones_that_never_step_again_end_or_fail() -> None:
    run(Program(data=Data(epochs=3), optimizers=ATTACHED, renew="attach"))


def test_an_optimizer_that_never_steps_ends_in_an_error() -> None:
    job = run(Program(optimizers=(Optimizer(attached=True), Optimizer(attached=True, every=0))))
    assert job.error is not None


# Loops that are left ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.BREAK, Kind.RAISE])
def test_a_batch_trained_on_and_given_back_is_no_bare_proof(kind: Kind) -> None:
    run(Program(incidents=(Incident(at=1, kind=kind),)))


def test_a_step_at_the_head_after_a_report_does_not_count_the_batch_in_hand() -> None:
    two = Optimizer(attached=True), Optimizer(attached=True)
    few = Data(records=2, batch_size=1, records_per_shard=1, picked=False)
    reported = (Incident(at=0, kind=Kind.REPORT),)
    told = Program(data=few, optimizers=two, delayed=True, lookahead=1, told=True, incidents=reported)
    run(replace(told, weighed=False, in_place=True, zeroes=False, clips=True, looks=True, swaps=True))


def test_islice_gives_its_last_batch_back_and_that_is_no_bare_proof() -> None:
    run(Program(take=2))


@pytest.mark.parametrize("optimizer", [Optimizer(every=0), Optimizer(attached=True, every=2)])
def test_passes_that_give_their_only_batch_back_end_in_an_error(optimizer: Optimizer) -> None:
    """`islice(loader, 1)` without an optimizer that steps, or before it does."""
    job = run(Program(take=1, optimizers=(optimizer,)))
    assert isinstance(job.error, AccountingError)
    assert "10 passes in a row" in str(job.error)


@pytest.mark.parametrize("attached", [False, True])
def test_with_an_optimizer_that_steps_islice_loses_nothing(attached: bool) -> None:
    assert run(Program(take=1, optimizers=(Optimizer(attached=attached),))).finished


@pytest.mark.parametrize("attached", [False, True])
def test_an_iterator_that_is_kept_alive_can_be_closed(attached: bool) -> None:
    left = Incident(at=1, kind=Kind.RAISE, keep_iterator=True)
    assert run(Program(optimizers=(Optimizer(attached=attached),), incidents=(left,))).finished


def learns(program: Program) -> tuple[int, list[str]]:
    """How often the first optimizer learnt the record that it learnt most often; and what was warned of."""
    job = run(program)
    assert job.finished
    return max(job.reference.learnt[0].values()), job.warnings


WINDOW = Program(
    data=Data(records=4, batch_size=1, epochs=2),
    optimizers=(Optimizer(attached=True, every=2),),
    weighed=False,
    zeroes=False,
)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("kind", [Kind.BREAK, Kind.RAISE])
@pytest.mark.parametrize("at", range(4))
def test_a_window_that_is_left_before_a_backward_pass_keeps_what_it_gathered(
    at: int, kind: Kind, lookahead: int
) -> None:
    left = (Incident(at=at, kind=kind, place=Place.FETCHED),)
    assert learns(replace(WINDOW, lookahead=lookahead, told=lookahead > 0, incidents=left)) == (1, [])


@pytest.mark.parametrize("flush", [Flush.PASS, Flush.END])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_window_that_is_left_after_a_backward_pass_is_no_bare_proof_and_warns(
    at: int, lookahead: int, flush: Flush
) -> None:
    left = (Incident(at=at, kind=Kind.BREAK, place=Place.BACKWARD),)
    program = replace(WINDOW, lookahead=lookahead, told=lookahead > 0, flush=flush, incidents=left)
    times, warned = learns(program)
    assert times == 2
    assert any("stepped on gradients of 1 record(s) of 'training' that went back" in text for text in warned)


def test_gradients_that_were_thrown_away_after_a_loop_was_left_are_learnt_by_nobody() -> None:
    left = (Incident(at=0, kind=Kind.BREAK, place=Place.BACKWARD),)
    assert learns(replace(WINDOW, zeroes=True, incidents=left)) == (1, [])


# Tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_token_in_mid_loop_is_the_instant_of_its_model(at: int, every: int) -> None:
    save = Incident(at=at, kind=Kind.SAVE, place=Place.BACKWARD)
    optimizers = (Optimizer(every=every, attached=True),)
    run(Program(data=Data(epochs=2), optimizers=optimizers, incidents=(save,), resume=True))


@pytest.mark.parametrize("attached", [False, True])
def test_a_token_before_records_that_are_dropped_leaves_a_pass_of_none(attached: bool) -> None:
    save = Incident(at=2, kind=Kind.SAVE, place=Place.STEPPED)
    data, optimizer = Data(records=7, epochs=2), Optimizer(attached=attached)
    loop = Program(data=data, loader=Loader(drop_last=True), optimizers=(optimizer,), incidents=(save,))
    job = run(replace(loop, resume=True))
    assert job.heir is not None
    assert job.heir.finished


@pytest.mark.parametrize("attached", [False, True])
def test_a_job_goes_back_to_its_token_in_mid_loop(attached: bool) -> None:
    incidents = (Incident(at=1, kind=Kind.SAVE), Incident(at=3, kind=Kind.RESTORE))
    job = run(Program(optimizers=(Optimizer(attached=attached),), incidents=incidents))
    assert job.finished


@pytest.mark.parametrize("told", [True, False])
def test_what_a_wrapper_held_is_not_trained_on_after_the_data_went_back(told: bool) -> None:
    """The loop goes on with batches of before, though model and data are at the token."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    numbers = [float(number) for number in range(8)]
    lookahead = "manual" if told else 1
    with ElasticDataLoader(numbers, 1, lookahead=lookahead, master_client=LocalMaster()) as loader:
        loader.attach(optimizer)
        beginning = loader.state_dict()
        batches = reading_ahead(iter(loader), 1, *([loader.passed_on] if told else []))
        for number in range(3):
            assert next(batches).tolist() == [number]
            weight.grad = torch.zeros(1)
            optimizer.step()
        loader.load_state_dict(beginning)
        with pytest.raises(AccountingError, match=r"read ahead.*Leave the loop after load_state_dict"):
            next(batches)
        assert [number for batch in loader for number in batch.tolist()] == [*range(8)]
        if not told:
            loader.give_back(window=True)


def test_unreadable_records_are_in_nobodys_way() -> None:
    job: Interpreter = run(
        Program(data=Data(records=9, epochs=2, unreadable=(0, 3, 4)), optimizers=ATTACHED, loader=Loader())
    )
    assert job.finished


# Wrappers that read ahead -------------------------------------------------------------------------------

LEFT_AT_ITS_LAST = Program(
    data=Data(records=2, epochs=2),
    weighed=False,
    lookahead=1,
    incidents=(Incident(at=0, kind=Kind.BREAK, place=Place.FETCHED),),
)
LAST_FAILED = Program(
    data=Data(records=4),
    weighed=False,
    lookahead=1,
    incidents=(Incident(at=1, kind=Kind.QUARANTINE, place=Place.FETCHED),),
)


@pytest.mark.parametrize("attached", [False, True])
def test_a_wrapped_loop_that_is_left_at_its_last_batch_gives_that_back(attached: bool) -> None:
    run(replace(LEFT_AT_ITS_LAST, optimizers=(Optimizer(attached=attached),), told=True))


def test_the_last_batch_of_a_wrapped_loop_that_failed_is_the_one_in_quarantine() -> None:
    run(replace(LAST_FAILED, told=True))


@pytest.mark.parametrize(
    ("program", "promise"),
    [
        (LEFT_AT_ITS_LAST, "acknowledged early"),
        (LAST_FAILED, "acknowledged early"),
    ],
    ids=["left", "failed"],
)
def test_a_number_does_not_say_which_of_the_last_batches_the_loop_was_passed(
    program: Program, promise: str
) -> None:
    """Once a wrapper has read a pass to its end it asks for nothing more, whatever its loop does: one that
    was left there looks like one that has trained on all. So the promises hold for "manual" alone:
    docs/decisions/0029-reading-ahead-is-told-or-checked.md."""
    with pytest.raises(BrokenPromise, match=promise):
        run(program)


def test_a_last_batch_that_left_no_gradient_is_not_proven_behind_a_wrapper_that_does_not_tell() -> None:
    run(replace(LEFT_AT_ITS_LAST, optimizers=ATTACHED))


def warnings_of(program: Program) -> list[str]:
    job = Interpreter(program)
    job.run(FakeMaster(), None)
    assert job.finished
    return job.warnings


def test_where_the_last_batches_have_no_gradient_a_warning_says_that_they_count() -> None:
    (warning,) = warnings_of(replace(LEFT_AT_ITS_LAST, optimizers=ATTACHED))
    assert "2 record(s) of 'training' were handed out after the last optimizer.step()" in warning


@pytest.mark.parametrize("lookahead", [0, 1])
def test_gradients_that_were_thrown_away_at_the_end_of_an_epoch_are_told_once(lookahead: int) -> None:
    optimizers = (Optimizer(attached=True, every=4),)  # three batches an epoch
    thrown = tuple(Incident(at=at, kind=Kind.ZERO_GRAD) for at in (2, 5))
    data = Data(records=6, epochs=4)
    program = Program(
        data=data,
        optimizers=optimizers,
        weighed=False,
        lookahead=lookahead,
        flush=Flush.NEVER,
        incidents=thrown,
    )
    told = [warning for warning in warnings_of(program) if "no attached optimizer has a gradient" in warning]
    assert len(told) == 1


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_loops_that_step_on_all_do_not_hear_of_lost_gradients(every: int, lookahead: int) -> None:
    """Also where gradients are gathered over the end of an epoch."""
    optimizers = (Optimizer(attached=True, every=every),)
    data = Data(records=10, epochs=3)
    program = Program(data=data, optimizers=optimizers, weighed=False, lookahead=lookahead, flush=Flush.END)
    assert warnings_of(program) == []


@pytest.mark.parametrize("told", [False, True])
def test_gradients_gathered_in_a_wrapped_loop_that_steps_on_them_at_its_end_count(told: bool) -> None:
    """Guessed, with a warning: the step came before the wrapper was known to have passed on the last ones."""
    optimizers = (Optimizer(every=3, attached=True),)
    data = Data(records=6)
    assert run(Program(data=data, optimizers=optimizers, weighed=False, lookahead=2, told=told)).finished


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("lookahead", [2, 3])
def test_several_optimizers_in_a_wrapped_loop_acknowledge_nothing_early(lookahead: int, told: bool) -> None:
    optimizers = (Optimizer(attached=True), Optimizer(attached=True))
    data = Data(records=11, epochs=2)
    assert run(
        Program(data=data, optimizers=optimizers, weighed=False, lookahead=lookahead, told=told)
    ).finished


@pytest.mark.parametrize("attached", [True, False])
def test_behind_a_wrapper_that_reads_several_ahead_and_does_not_tell_nothing_is_proven(
    attached: bool,
) -> None:
    """Two steps are on one batch at the end of a pass, or on two: both make the same calls."""
    program = Program(
        data=Data(records=5, records_per_shard=1, picked=False),
        optimizers=(Optimizer(attached=attached),),
        weighed=False,
        lookahead=2,
    )
    for told, expected in ((False, Outcome.DELIVERED), (True, Outcome.PROVEN)):
        job = run(replace(program, told=told))
        assert job.judged is not None
        assert job.judged.exact
        assert job.judged.verdict.outcome is expected


def test_steps_after_the_end_on_what_the_loop_has_let_go() -> None:
    """A wrapper that does not tell passes on its last batches when there are none."""
    run(
        Program(
            data=Data(records=14, epochs=3),
            optimizers=(Optimizer(every=0, attached=True), Optimizer(attached=True)),
            weighed=False,
            counted_epochs=True,
            lookahead=2,
        )
    )


# Backward passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("way", Way)
def test_however_a_gradient_is_made_its_batch_is_proven(way: Way, every: int) -> None:
    """But for those that the loop adds up by hand: nobody can say which batches are in them."""
    optimizers = (Optimizer(every=every, attached=True),)
    program = Program(optimizers=optimizers, way=way, looks=True, freezes=True, clips=True, weighed=False)
    job = run(program)
    assert job.judged is not None
    assert job.judged.exact
    # What a loop gathers by hand nobody can tell: decision 0056.
    assert is_bare_proof(job.judged.verdict) is not (way is Way.BY_HAND and program.gathers)
    told = Outcome.DELIVERED if way is Way.BY_HAND and program.gathers else Outcome.PROVEN
    assert job.judged.verdict.outcome is told


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_on_what_a_failed_backward_pass_has_left_is_not_proven(way: Way, every: int) -> None:
    optimizers = (Optimizer(every=every, attached=True),)
    fails = Incident(at=1, kind=Kind.FAILS)
    job = run(Program(optimizers=optimizers, way=way, incidents=(fails,), weighed=False))
    assert job.reference.is_broken
    assert job.judged is not None
    assert not is_bare_proof(job.judged.verdict)


def test_a_failed_backward_pass_of_a_batch_that_was_read_ahead_is_not_proven() -> None:
    """The pass is over before the wrapper hands its only batch on: no batch is in hand when it fails."""
    plans = (Optimizer(attached=True, rate=0.0), Optimizer(attached=True, every=2))
    failed = Incident(at=0, kind=Kind.FAILS)
    data = Data(records=1, batch_size=1)
    run(Program(data=data, optimizers=plans, weighed=False, lookahead=1, incidents=(failed,)))


@pytest.mark.parametrize("attached", [True, False])
def test_a_batch_may_be_reported_as_bad_while_a_layer_is_frozen(attached: bool) -> None:
    failed = Incident(at=2, kind=Kind.QUARANTINE, place=Place.FETCHED)
    data = Data(records=1, batch_size=1, epochs=3)
    optimizers = (Optimizer(attached=attached),)
    run(Program(data=data, optimizers=optimizers, weighed=False, freezes=True, incidents=(failed,)))


def test_a_step_on_a_part_beside_older_gradients_counts_the_batch_in_hand() -> None:
    plans = (Optimizer(attached=True), Optimizer(attached=True, every=2))
    failed = Incident(at=1, kind=Kind.FAILS)
    data = Data(records=2, batch_size=1)
    run(Program(data=data, optimizers=plans, weighed=False, take=2, zeroes=False, incidents=(failed,)))


@pytest.mark.parametrize("way", Way)
def test_a_backward_pass_that_is_tried_again_is_proven(way: Way) -> None:
    retries = Incident(at=1, kind=Kind.RETRIES)
    job = run(Program(optimizers=ATTACHED, way=way, incidents=(retries,)))
    assert job.judged is not None
    assert job.judged.exact
    assert is_bare_proof(job.judged.verdict)
