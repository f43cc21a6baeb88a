"""Hypothesis strategies that make programs; each keeps to what a program can mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from loop_program import (
    Data,
    Flush,
    Incident,
    Kind,
    Loader,
    Optimizer,
    Order,
    Place,
    Program,
    Report,
    Seed,
    Way,
)

LEAVING = (Kind.BREAK, Kind.RAISE)
NO_WORKERS = st.just(0)


def datas() -> st.SearchStrategy[Data]:
    few = st.lists(st.integers(0, 13), max_size=2, unique=True).map(tuple)
    return st.builds(
        Data,
        records=st.integers(1, 14),
        batch_size=st.integers(1, 5),
        epochs=st.integers(1, 3),
        records_per_shard=st.integers(1, 9),
        order=st.sampled_from(Order),
        picked=st.booleans(),
        unreadable=st.one_of(st.just(()), st.just(()), few),
    ).map(_with_some_readable)


def _with_some_readable(data: Data) -> Data:
    unreadable = tuple(sorted(n for n in data.unreadable if n < data.records - 1))
    return replace(data, unreadable=unreadable, picked=data.picked or data.order is Order.RECORDS)


def _processes(workers: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    def of(count: int) -> st.SearchStrategy[dict[str, Any]]:
        if not count:
            return st.just({"workers": 0})
        return st.fixed_dictionaries(
            {
                "workers": st.just(count),
                "persistent": st.booleans(),
                "prefetch": st.sampled_from([None, 1, 3]),
                "in_order": st.booleans(),
            }
        )

    return workers.flatmap(of)


def optimizers(*, attached: bool) -> st.SearchStrategy[tuple[Optimizer, ...]]:
    one = st.builds(
        Optimizer,
        every=st.sampled_from([1, 1, 1, 2, 3, 0]),
        attached=st.just(attached),
        closure=st.sampled_from(["", "", "none", "given"]),
        rate=st.sampled_from([0.125, 0.125, 0.0]),
        fused=st.booleans(),
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def _some_attached(plans: tuple[Optimizer, ...], unattached: int) -> tuple[Optimizer, ...]:
    return tuple(replace(p, attached=p.attached and n != unattached) for n, p in enumerate(plans))


@st.composite
def elastic_programs(
    draw: Any,
    workers: st.SearchStrategy[int] = NO_WORKERS,
    threads: st.SearchStrategy[bool] = st.sampled_from([True, False, False]),  # noqa: B008  it is a value
    attached: st.SearchStrategy[bool] = st.booleans(),  # noqa: B008  it is a value
) -> Program:
    processes = draw(_processes(workers))
    loader = Loader(
        drop_last=draw(st.booleans()),
        seed=draw(st.sampled_from([Seed.NONE, Seed.GLOBAL])),
        in_process=draw(st.sampled_from([True, True, True, False])),
        **processes,
    )
    lookahead = draw(st.sampled_from([0, 0, 0, 0, 1, 2]))
    told = lookahead > 0 and draw(st.booleans())
    if draw(st.integers(0, 4)) == 0:
        loader = replace(loader, columnar=True, drop_last=False)
    elif draw(threads):
        loader = replace(
            loader, threads=draw(st.integers(1, 3)), prefetch=draw(st.sampled_from([None, 1, 3]))
        )
    is_attached = draw(attached)
    scaler = draw(st.integers(0, 3)) == 0
    program = Program(
        data=draw(datas()),
        loader=loader,
        optimizers=_some_attached(
            draw(optimizers(attached=is_attached)), draw(st.sampled_from([-1, -1, 0, 1]))
        ),
        lookahead=lookahead,
        told=told,
        weighed=not lookahead and draw(st.booleans()),
        scaler=scaler,
        counted_epochs=draw(st.booleans()),
        take=0 if lookahead else draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        flush=draw(st.sampled_from([Flush.PASS, Flush.PASS, Flush.END, Flush.NEVER])),
        zeroes=draw(st.booleans()),
        way=draw(st.sampled_from([Way.PLAIN, Way.PLAIN, *Way])),
        clips=draw(st.integers(0, 3)) == 0,
        looks=draw(st.integers(0, 3)) == 0,
        freezes=draw(st.integers(0, 3)) == 0,
        in_place=draw(st.integers(0, 3)) == 0,
        swaps=draw(st.integers(0, 3)) == 0,
    )
    program = _with_a_way_of_its_own(draw, program)
    if lookahead and not program.attached:
        program = replace(program, counted_epochs=False)  # the last batches count when another pass begins
    kinds = [Kind.ZERO_GRAD, Kind.REPORT, Kind.SAVE, Kind.RESTORE]
    if not lookahead or told:  # else who left the loop, or failed, near the end of a pass is not known then
        kinds += [*LEAVING, Kind.QUARANTINE]
    kinds += [Kind.OVERFLOW] * scaler
    kinds += [Kind.CONTINUE]
    if not lookahead and program.attached:
        kinds += [Kind.GIVE_BACK]
    # Else both passes may be in one step, as of two losses; or nobody knows which batch a step is on.
    if all(plan.every == 1 for plan in program.optimizers) and not program.reads_far:
        kinds += [Kind.AGAIN]
    all_attached = len(program.attached) == len(program.optimizers)
    if all_attached and all(plan.rate for plan in program.optimizers):
        kinds += [Kind.ROLLBACK]
    if program.delayed:
        kinds = [kind for kind in kinds if kind not in (Kind.AGAIN, Kind.RESTORE)]
    elif not (program.freezes or scaler or program.way is Way.BY_HAND) and _all_train(program):
        if all_attached:
            kinds += [Kind.FAILS]  # else it may be in the first batch, before the optimizer attaches itself
        kinds += [Kind.RETRIES] * (not program.in_place)  # whether a part was made 0 there is not known
    return _with_incidents(draw, program, kinds)


def _all_train(program: Program) -> bool:
    return all(plan.trains == 1 for plan in program.optimizers)


def _with_a_way_of_its_own(draw: Any, program: Program) -> Program:
    """Some of the loops step at their head, and some of several optimizers train on every other batch."""
    all_attached = len(program.attached) == len(program.optimizers)
    match draw(st.integers(0, 5)):
        case 0 if all_attached and not program.scaler and (program.told or not program.lookahead):
            return replace(program, delayed=True, weighed=False, freezes=False)
        case 1 if all_attached and len(program.optimizers) > 1 and not program.scaler:
            first = replace(program.optimizers[0], trains=2)
            plans = (first, *program.optimizers[1:])
            return replace(program, optimizers=plans, weighed=False, freezes=False, way=Way.PLAIN)
    return program


@st.composite
def left_programs(draw: Any) -> Program:
    """Loops that gather gradients over several batches and are left; what they have gathered stays."""
    lookahead = draw(st.sampled_from([0, 1, 2]))
    every = st.builds(Optimizer, every=st.integers(1, 3), attached=st.just(True))
    leave = st.builds(
        Incident, at=st.integers(0, 7), kind=st.sampled_from(LEAVING), place=st.sampled_from(Place)
    )
    left = draw(st.lists(leave, min_size=1, max_size=3, unique_by=lambda incident: incident.at))
    return Program(
        data=draw(datas()),
        loader=Loader(threads=draw(st.sampled_from([0, 0, 2]))),
        optimizers=tuple(draw(st.lists(every, min_size=1, max_size=2))),
        lookahead=lookahead,
        told=lookahead > 0,
        weighed=not lookahead and draw(st.booleans()),
        flush=draw(st.sampled_from([Flush.PASS, Flush.END])),
        zeroes=False,
        incidents=tuple(sorted(left, key=lambda incident: incident.at)),
    )


@st.composite
def plain_programs(draw: Any, workers: st.SearchStrategy[int] = NO_WORKERS) -> Program:
    data = draw(datas())
    loader = Loader(
        plain=True,
        batch_size=draw(st.sampled_from([None, None, 0, 1, data.batch_size + 1, 2 * data.batch_size])),
        drop_last=draw(st.integers(0, 4)) == 0,
        seed=draw(st.sampled_from(Seed)),
        in_process=draw(st.sampled_from([True, True, True, False])),
        **draw(_processes(workers)),
    )
    if loader.batch_size == 0:
        loader = replace(loader, drop_last=False)
    program = Program(
        data=data,
        loader=loader,
        report=draw(st.sampled_from([Report.DEFAULT, Report.DEFAULT, Report.OWN, Report.OWN, *Report])),
        counted_epochs=draw(st.booleans()),
        take=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        weighed=False,
    )
    # Records are told by their number, so a loop that tells too few says of others that they are bad.
    names_bad = loader.workers < 2 and program.report is not Report.SMALL
    kinds = [*LEAVING, Kind.SAVE, Kind.RESTORE] + [Kind.QUARANTINE] * names_bad
    return _with_incidents(draw, program, kinds)


def _with_incidents(draw: Any, program: Program, kinds: list[Kind]) -> Program:
    count = draw(st.sampled_from([0, 0, 1, 1, 2, 3]))
    incidents = []
    for _ in range(count):
        kind = draw(st.sampled_from(kinds))
        incidents.append(
            Incident(
                at=draw(st.integers(0, 7)),
                kind=kind,
                place=draw(_places(kind, program)),
                keep_iterator=kind in LEAVING and draw(st.integers(0, 3)) == 0,
            )
        )
    once = {(incident.at, incident.kind): incident for incident in incidents}
    incidents = sorted(once.values(), key=lambda incident: incident.at)
    program = replace(program, incidents=tuple(incidents))
    if program.saves_exactly:
        kept = any(incident.keep_iterator for incident in incidents)
        program = replace(program, saves_passes=not kept and draw(st.integers(0, 3)) == 0)
    if program.saves_exactly and (program.saves_passes or program.has(Kind.SAVE)):
        moves = all(optimizer.rate for optimizer in program.optimizers)  # else a model is as good as none
        forgets_model = moves and draw(st.integers(0, 3)) == 0
        return replace(program, resume=draw(st.booleans()), forgets_model=forgets_model)
    kept = (i for i in incidents if program.saves_exactly or i.kind not in (Kind.SAVE, Kind.RESTORE))
    return replace(program, incidents=tuple(kept))


def _places(kind: Kind, program: Program) -> st.SearchStrategy[Place]:
    match kind:
        case Kind.BREAK | Kind.RAISE:
            return st.sampled_from(Place)
        case Kind.QUARANTINE | Kind.CONTINUE | Kind.GIVE_BACK:
            return st.just(Place.FETCHED)
        case Kind.ZERO_GRAD | Kind.OVERFLOW:
            return st.just(Place.BACKWARD)
        case Kind.SAVE if program.attached:
            return st.sampled_from(Place)
    return st.just(Place.STEPPED)
