"""`edl-torch status`: what a master says of itself, for people and for programs.

Figures as people read them stand at the end: durations, rates, shares, epochs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from edl_torch.cli.main import DEFAULT_ADDRESS
from edl_torch.core.limits import printable
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import DatasetStatus, Departed, MasterStatus, TrainerState, TrainerStatus, plain
from edl_torch.errors import MasterUnavailable

if TYPE_CHECKING:
    from edl_torch.client.grpc.client import MasterClient
    from edl_torch.rpc.credentials import Credentials

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

    address = options.addr or master_address_from_env() or DEFAULT_ADDRESS
    credentials = _credentials(options)
    return MasterClient(address, "status", master_timeout_s=STATUS_TIMEOUT_S, credentials=credentials)


def _credentials(options: argparse.Namespace) -> Credentials | None:
    """What the options say, or None: then the environment does."""
    from edl_torch.rpc.credentials import Credentials

    names = ("token_file", "tls_ca", "tls_cert", "tls_key", "tls_name", "tls", "insecure")
    given = {name: getattr(options, name) for name in names}
    return Credentials.read(**given) if any(given.values()) else None


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
        rows = (_dataset_row(item, item.dataset in status.suspended) for item in status.datasets)
        yield from _columns([_DATASET_HEADING, *rows])
    for why, names in _suspended(status).items():
        yield f"SUSPENDED: {', '.join(map(printable, names))}: {printable(why)}"
    for dataset in status.datasets:
        if dataset.failure:
            yield f"FAILED: {printable(dataset.failure)}"
    if status.trainers:
        yield ""
        yield from _columns([_TRAINER_HEADING, *map(_trainer_row, status.trainers)])
        if (line := of_data(status)) is not None:
            yield line
    if status.departed:
        yield ""
        gone = islice(reversed(status.departed), MOST_GONE)
        yield from _columns([_GONE_HEADING, *(_gone_row(item, status.time) for item in gone)])
    for dataset in status.datasets:
        yield from _quarantine(dataset)


def _suspended(status: MasterStatus) -> dict[str, list[str]]:
    """Datasets by the reason why nothing of them is lent."""
    reasons: dict[str, list[str]] = {}
    for name, why in status.suspended.items():
        reasons.setdefault(why, []).append(name)
    return reasons


_DATASET_HEADING = (
    *("DATASET", "TYPE", "EPOCH", "SIZE", "SHARDS LEFT", "TODO", "LEASED", "DONE", "BAD", "DROPPED"),
    *("OF ALL", "RATE", "TO THE END", "CAME BACK", "STATE"),
)
_TRAINER_HEADING = (
    *("TRAINER", "SESSION", "DATASETS", "LEASED", "OLDEST", "PACE", "WAITS", "READ", "TRANSFORM"),
    *("IDLE", "PROGRESS", "STATE"),
)
_GONE_HEADING = ("GONE", "SESSION", "WHEN", "WHY", "TRAINED ON", "WENT BACK")
_BAD_HEADING = ("BAD RECORD", "INDEX", "EPOCHS", "REASON")


def _dataset_row(item: DatasetStatus, suspended: bool) -> tuple[str, ...]:
    ended = "finished" if item.finished else "failed" if item.failure else "open"
    state = "suspended" if suspended else ended
    counts = (item.todo, item.leased, item.acknowledged, item.quarantined, item.dropped)
    shards = f"{item.shards_left}/{item.shards}"
    return (
        item.dataset,
        item.task_type.name.lower(),
        epoch_of(item.epoch, item.num_epochs),
        str(item.size),
        shards,
        *map(str, counts),
        percent(item.percent),
        rate(item.rate),
        duration(item.eta_s),
        str(item.returned_records),
        state,
    )


def _trainer_row(item: TrainerStatus) -> tuple[str, ...]:
    return (
        item.worker_id,
        item.session[:12],
        ",".join(item.datasets),
        str(item.leased),
        duration(item.oldest_lease_s) if item.leases else "-",
        rate(item.pace),
        share(item.waiting_share),
        short(item.mean_read_s),
        short(item.mean_transform_s),
        f"{item.idle_s:.1f} s",
        f"{item.since_progress_s:.1f} s ago",
        trainer_state(item),
    )


def trainer_state(item: TrainerStatus) -> str:
    """Return the state of a trainer in words."""
    if item.state is TrainerState.STREAM_GONE:
        return "connection lost"
    return "slow" if item.state is TrainerState.LIVE and item.slow else item.state.value


def _gone_row(item: Departed, now: float) -> tuple[str, ...]:
    return (
        item.worker_id,
        item.session[:12],
        f"{duration(now - item.at)} ago",
        item.why or "left",
        str(item.trained),
        str(item.records),
    )


def _quarantine(dataset: DatasetStatus) -> Iterator[str]:
    if not dataset.quarantine:
        return
    records: dict[tuple[str, int], list[QuarantinedRecord]] = {}
    for item in dataset.quarantine:
        records.setdefault((item.name, item.index), []).append(item)
    yield ""
    yield from _columns([_BAD_HEADING, *map(_bad_row, islice(records.values(), MOST_BAD_RECORDS))])
    hidden = len(records) - MOST_BAD_RECORDS + dataset.quarantined - len(dataset.quarantine)
    if hidden > 0:
        yield f"… and {hidden} more: see --json"


def _bad_row(met: list[QuarantinedRecord]) -> tuple[str, ...]:
    """One record, in all the epochs that met it."""
    epochs = ",".join(str(item.epoch) for item in met[:MOST_EPOCHS]) + "…" * (len(met) > MOST_EPOCHS)
    return (met[0].name, str(met[0].index), epochs, " ".join(met[-1].cause.split()))


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    shown = [tuple(map(printable, row)) for row in rows]  # names are the trainers' own
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
    """Return records a second."""
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
