"""`edl-torch status`: what a master says of itself, for people and for programs.

Figures as people read them stand at the end: durations, rates, shares, epochs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from edl_torch.cli.main import DEFAULT_ADDRESS
from edl_torch.core.limits import printable
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import (
    ComponentStatus,
    DatasetStatus,
    MasterStatus,
    TrainerState,
    TrainerStatus,
    plain,
)
from edl_torch.errors import MasterUnavailable

if TYPE_CHECKING:
    from edl_torch.client.grpc.client import MasterClient

STATUS_TIMEOUT_S = 5.0
MOST_BAD_RECORDS = 20  # in the table; JSON has them all
MOST_GONE = 20
MOST_EPOCHS = 8  # of one bad record


def run(options: argparse.Namespace) -> int:
    """Print what the master says: once, or again and again until Ctrl-C."""
    show = as_json if options.json else as_table
    with client_of(options) as client:
        print(show(client.status()))
        while options.watch is not None:
            sys.stdout.flush()
            time.sleep(options.watch)
            try:
                print(f"\n{show(client.status())}")
            except MasterUnavailable as error:  # it may be started again, as for `top`
                print(printable(f"{error} - trying again"), file=sys.stderr)
    return 0


def client_of(options: argparse.Namespace) -> MasterClient:
    """Return a client of the master that the options, or the environment, name."""
    from edl_torch.client.environment import master_address_from_env
    from edl_torch.client.grpc.client import MasterClient
    from edl_torch.rpc.credentials import Credentials

    address = options.addr or master_address_from_env() or DEFAULT_ADDRESS
    names = ("token_file", "tls_ca", "tls_cert", "tls_key", "tls_name", "tls", "insecure")
    given = {name: getattr(options, name) for name in names}
    credentials = Credentials.read(**given) if any(given.values()) else None  # then the environment says
    return MasterClient(address, "status", master_timeout_s=STATUS_TIMEOUT_S, credentials=credentials)


def as_json(status: MasterStatus) -> str:
    """Everything, indented; task types by name."""
    return json.dumps(plain(status), indent=2, ensure_ascii=False)


def as_table(status: MasterStatus) -> str:
    """Datasets, trainers and bad records, one line each."""
    return "\n".join(_lines(status))


def _lines(status: MasterStatus) -> Iterator[str]:
    kept = "in a journal" if status.durable else "in memory only"
    yield f"ledger {status.ledger}, kept {kept}"
    yield ""
    if not status.datasets:
        yield "no dataset yet: trainers register theirs when they start"
    else:
        yield from _table(_DATASET, [(item, item.dataset in status.suspended) for item in status.datasets])
    reasons: dict[str, list[str]] = {}
    for name, why in status.suspended.items():
        reasons.setdefault(why, []).append(name)
    for dataset in status.datasets:
        if dataset.components:
            yield ""
            yield from _table(_COMPONENT, [(dataset.dataset, item) for item in dataset.components])
        if tokens := sum(item.tokens for item in dataset.components):
            # As many tokens as the shares of records are to make now, of one record.
            # None of those that have a length may have a share, as at the end of what has left since.
            now = sum(item.share * item.mean_length for item in dataset.components) or 1.0
            yield ""
            yield from _table(_TOKENS, [(dataset.dataset, item, now, tokens) for item in dataset.components])
    for why, names in reasons.items():
        yield f"SUSPENDED: {', '.join(map(printable, names))}: {printable(why)}"
    for dataset in status.datasets:
        if dataset.failure:
            yield f"FAILED: {printable(dataset.failure)}"
    if status.trainers:
        yield ""
        yield from _table(TRAINER, [(item,) for item in status.trainers])
        if (line := of_data(status)) is not None:
            yield line
    if status.departed:
        yield ""
        yield from _table(
            _GONE, [(item, status.time) for item in islice(reversed(status.departed), MOST_GONE)]
        )
    for dataset in status.datasets:
        yield from _quarantine(dataset)


def _state(item: DatasetStatus, suspended: bool) -> str:
    return "suspended" if suspended else "finished" if item.finished else "failed" if item.failure else "open"


# Columns of each table: heading, and what stands below it.
_Columns = Mapping[str, Callable[..., str]]
_DATASET: _Columns = {
    "DATASET": lambda item, _: item.dataset,
    "TYPE": lambda item, _: item.task_type.name.lower(),
    "EPOCH": lambda item, _: epoch_of(item.epoch, item.num_epochs),
    "SIZE": lambda item, _: count(item, item.size),
    "SHARDS LEFT": lambda item, _: count(item, f"{item.shards_left}/{item.shards}"),
    "TODO": lambda item, _: count(item, item.todo),
    "LEASED": lambda item, _: str(item.leased),
    "DONE": lambda item, _: str(item.acknowledged),
    "BAD": lambda item, _: str(item.quarantined),
    "DROPPED": lambda item, _: str(item.dropped),
    "OF ALL": lambda item, _: percent(item.percent),
    "RATE": lambda item, _: rate(item.rate),
    "TO THE END": lambda item, _: duration(item.eta_s),
    "CAME BACK": lambda item, _: str(item.returned_records),
    "STATE": _state,
}
_COMPONENT: _Columns = {  # of a mixture
    "MIXTURE": lambda name, _: name,
    "COMPONENT": lambda _, item: item.name,
    "SIZE": lambda _, item: str(item.size),
    "SHARE": lambda _, item: f"{item.share:.4g}",
    "WANTED": lambda _, item: f"{item.wanted:.1f}",
    "GIVEN": lambda _, item: str(item.given),
    "OPEN": lambda _, item: str(item.open),
    "PASSES": lambda _, item: f"{item.passes:.2f}",
}
_TOKENS: _Columns = {  # of a mixture whose weights are of them
    "MIXTURE": lambda name, *_: name,
    "COMPONENT": lambda _, item, *__: item.name,
    "MEAN LENGTH": lambda _, item, *__: _if_known(item, f"{item.mean_length:.1f}"),
    "SHARE": lambda _, item, now, __: _if_known(item, f"{item.share * item.mean_length / now:.4g}"),
    "WANTED": lambda _, item, *__: _if_known(item, f"{item.wanted * item.mean_length:.0f}"),
    "TOKENS": lambda _, item, *__: _if_known(item, f"{item.tokens:.0f}"),
    "OF ALL": lambda _, item, __, tokens: _if_known(item, f"{item.tokens / tokens:.4g}"),
}
TRAINER: _Columns = {
    "TRAINER": lambda item: item.worker_id,
    "SESSION": lambda item: item.session[:12],
    "DATASETS": lambda item: ",".join(item.datasets),
    "LEASED": lambda item: str(item.leased),
    "OLDEST": lambda item: duration(item.oldest_lease_s) if item.leases else "-",
    "PACE": lambda item: rate(item.pace),
    "WAITS": lambda item: share(item.waiting_share),
    "READ": lambda item: short(item.mean_read_s),
    "TRANSFORM": lambda item: short(item.mean_transform_s),
    "IDLE": lambda item: f"{item.idle_s:.1f} s",
    "PROGRESS": lambda item: f"{item.since_progress_s:.1f} s ago",
    "STATE": lambda item: trainer_state(item),
}
_GONE: _Columns = {
    "GONE": lambda item, _: item.worker_id,
    "SESSION": lambda item, _: item.session[:12],
    "WHEN": lambda item, now: f"{duration(now - item.at)} ago",
    "WHY": lambda item, _: item.why or "left",
    "TRAINED ON": lambda item, _: str(item.trained),
    "WENT BACK": lambda item, _: str(item.records),
}
_BAD: _Columns = {  # of one record, in all the epochs, or of a mixture passes, that met it
    "BAD RECORD": lambda *met: met[0].name,
    "INDEX": lambda *met: str(met[0].index),
    "MET IN": lambda *met: (
        _met_in(met[0])
        if met[0].passes
        else (",".join(str(item.epoch) for item in met[:MOST_EPOCHS]) + "…" * (len(met) > MOST_EPOCHS))
    ),
    "REASON": lambda *met: " ".join(met[-1].cause.split()),
}


def _if_known(item: ComponentStatus, shown: str) -> str:
    """Return a figure in tokens; a dash of a component that left before its length was known."""
    return shown if item.mean_length else "-"


def trainer_state(item: TrainerStatus) -> str:
    if item.state is TrainerState.STREAM_GONE:
        return "connection lost"
    return "slow" if item.state is TrainerState.LIVE and item.slow else item.state.value


def _quarantine(dataset: DatasetStatus) -> Iterator[str]:
    if not dataset.quarantine:
        return
    records: dict[tuple[str, int], list[QuarantinedRecord]] = {}
    for item in dataset.quarantine:
        records.setdefault((item.name, item.index), []).append(item)
    yield ""
    yield from _table(_BAD, islice(records.values(), MOST_BAD_RECORDS))
    told = sum([bad.times for bad in dataset.quarantine])
    hidden = len(records) - MOST_BAD_RECORDS + dataset.quarantined - told
    if hidden > 0:
        yield f"… and {hidden} more: see --json"


def _met_in(bad: QuarantinedRecord) -> str:
    """Return the passes that met a record of a mixture."""
    runs = [f"{first}" if after == first + 1 else f"{first}–{after - 1}" for first, after in bad.runs()]
    return ",".join(runs[:MOST_EPOCHS]) + "…" * (len(runs) > MOST_EPOCHS)


def _table(columns: _Columns, rows: Iterable[Sequence[object]]) -> Iterator[str]:
    cells = [tuple(columns), *(tuple(text(*row) for text in columns.values()) for row in rows)]
    shown = [tuple(map(printable, row)) for row in cells]  # names are the trainers' own
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def count(item: DatasetStatus, number: object) -> str:
    """Return a number of records that are left; a dash of a mixture that nothing ends."""
    return "-" if item.components and not item.num_epochs else str(number)


# Figures ------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits; a dash where they are not known."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{seconds / 86400:.0f} days"


def short(seconds: float | None) -> str:
    """Return seconds of which there are few in the unit that fits; a dash where they are not known."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def of_data(status: MasterStatus) -> str | None:
    """Return how long the loops waited for data, and what a batch takes; None where nothing was timed."""
    if status.waiting_share is None:
        return None
    line = f"waited for data {share(status.waiting_share)} of the time"
    if status.mean_read_s is None:
        return line
    read, transformed = short(status.mean_read_s), short(status.mean_transform_s)
    return f"{line}; a batch is read in {read}, transformed in {transformed}"


def rate(records: float) -> str:
    digits = 0 if records >= 100 else 1 if records >= 10 else 2
    return f"{records:,.{digits}f}/s"


def percent(value: float | None) -> str:
    """Return a share of 0 to 100, rounded down, so that only the end is 100 %; a dash for None."""
    if value is None:
        return "-"
    return f"{int(value)} %" if value >= 10 else f"{int(value * 10) / 10} %"


def share(value: float | None) -> str:
    """Return a share of 0 to 1 in percent; a dash for None."""
    return percent(None if value is None else 100 * value)


def epoch_of(epoch: int, num_epochs: int) -> str:
    """Return "0 of 3" in the first of 3 epochs, "3 of 3" after the last, "2, endless" where none is last."""
    return f"{epoch} of {num_epochs}" if num_epochs else f"{epoch}, endless"
