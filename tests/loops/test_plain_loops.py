"""Loops over a plain `DataLoader` that once broke a promise, each by its smallest program."""

from __future__ import annotations

from typing import Any

import pytest
from loop_program import Data, Incident, Kind, Loader, Place, Program, Report, Seed
from loop_runs import run

SIZES = [(1, 0), (3, 0), (7, 0), (0, 0), (3, 1), (3, 2), (7, 2), (0, 2)]  # batch size and workers


def plain(report: Report = Report.DEFAULT, *, data: Data | None = None, **arguments: Any) -> Program:
    """A program of a plain loader with these arguments."""
    loop = {name: arguments.pop(name) for name in ("incidents", "counted_epochs") if name in arguments}
    loader = Loader(plain=True, **arguments)
    return Program(data=data or Data(), loader=loader, report=report, weighed=False, **loop)


# The same random seed before each pass ------------------------------------------------------------------


@pytest.mark.parametrize("counted_epochs", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", [Seed.GLOBAL, Seed.GENERATOR])
def test_each_pass_of_a_seeded_loop_reads_its_epoch(
    seed: Seed, persistent: bool, counted_epochs: bool
) -> None:
    loader = {"workers": 1 + persistent, "seed": seed, "persistent": persistent}
    assert run(plain(data=Data(epochs=3), counted_epochs=counted_epochs, **loader)).finished


def test_a_seeded_loop_that_was_left_goes_on() -> None:
    left = Incident(at=1, kind=Kind.BREAK)
    assert run(plain(workers=1, seed=Seed.GLOBAL, incidents=(left,))).finished


# Reports and deliveries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "workers"), SIZES)
def test_default_reports_of_a_loader_with_another_batch_size_never_acknowledge_early(
    size: int, workers: int
) -> None:
    """0 is `batch_size=None`."""
    data = Data(records=14, batch_size=4, records_per_shard=5)
    run(plain(Report.DEFAULT, data=data, batch_size=size, workers=workers))


@pytest.mark.parametrize(("size", "workers"), SIZES)
def test_reports_with_their_own_size_serve_any_batch_size(size: int, workers: int) -> None:
    data = Data(records=14, batch_size=4, epochs=2, records_per_shard=5)
    assert run(plain(Report.OWN, data=data, batch_size=size, workers=workers)).finished


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("report", [Report.TWICE, Report.LARGE])
def test_more_than_was_delivered_is_never_acknowledged(report: Report, workers: int) -> None:
    run(plain(report, data=Data(records=14, batch_size=4, records_per_shard=5), workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("report", [Report.NONE, Report.SMALL])
def test_a_loop_whose_reports_get_nowhere_hears_of_it(report: Report, workers: int) -> None:
    """An error, or a warning in each pass."""
    assert not run(plain(report, data=Data(records=1, batch_size=1), workers=workers)).finished


def test_a_loop_whose_loader_hides_a_remainder_hears_of_it_with_workers_too() -> None:
    data = Data(records=14, batch_size=4, records_per_shard=1)
    assert not run(plain(data=data, workers=2, drop_last=True)).finished


def test_an_error_at_the_start_of_a_pass_is_clear_with_persistent_workers_too() -> None:
    assert run(plain(Report.NONE, workers=2, persistent=True)).error is not None


def test_a_batch_that_failed_is_the_one_in_hand() -> None:
    failed = Incident(at=2, kind=Kind.QUARANTINE, place=Place.FETCHED)
    assert run(plain(Report.OWN, incidents=(failed,))).finished


# Loops that are left ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Kind.BREAK, Kind.RAISE])
def test_a_loop_that_is_left_goes_on_in_the_next_pass(kind: Kind, workers: int) -> None:
    left = Incident(at=1, kind=kind, place=Place.BACKWARD)
    assert run(plain(Report.OWN, data=Data(epochs=2), workers=workers, incidents=(left,))).finished


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_of_a_plain_loop_is_the_instant_of_its_model(workers: int) -> None:
    incidents = (Incident(at=1, kind=Kind.SAVE), Incident(at=2, kind=Kind.RESTORE))
    assert run(plain(workers=workers, incidents=incidents)).finished
