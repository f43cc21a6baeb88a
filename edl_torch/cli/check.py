"""`edl-torch check`: a dataset as a job would read it, judged, for people and for programs.

Reads options and prints; the reading is in `checking`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from edl_torch.checking.check import KINDS, CheckReport, Flaw, check, cost_of_epoch, spread, validate_sources
from edl_torch.checking.sheet import cells, draw, save
from edl_torch.cli.datasets import ProgressLine, open_data
from edl_torch.errors import InvalidArgument
from edl_torch.readers.storage.names import is_url
from edl_torch.shard import TaskType

_MOST_SOURCES = 10  # in the table; JSON has them all
_MEANING = {
    "unreadable": "the job would stop there, or put it in quarantine",
    "missing": "a file that the data names is not there",
    "duplicate": "the same file is listed twice",
}


def run(options: argparse.Namespace) -> int:
    """Check, print, draw. Returns 0: nothing is wrong, 1: findings, 2: the data cannot be used."""
    if options.dry_run:
        print(_dry_run(options))
        return 0
    report, drawn = _check(options)
    listed = max(0, options.list)
    print(write_json(report, options.data) if options.json else write_table(report, listed))
    if drawn is not None and not options.json:
        print(f"sample: {drawn} record(s) drawn to {options.sample}")
    return 1 if report.findings else 0


def _dry_run(options: argparse.Namespace) -> str:
    """What an epoch costs, as JSON or as lines."""
    reader, sources = open_data(options, options.data, TaskType[options.mode.upper()])
    records = sum(source.count for source in sources)
    orders = {"shuffled": True, "in order": False}
    costs = {name: cost_of_epoch(reader, shuffled=shuffled) for name, shuffled in orders.items()}
    if options.json:
        found = {
            name.replace(" ", "_"): None if cost is None else asdict(cost) for name, cost in costs.items()
        }
        return json.dumps({"data": options.data, "records": records, "epoch": found}, indent=2)
    said = [f"{type(reader).__name__}: {records:,} record(s); nothing was read"]
    unknown = (
        "the reader cannot say what it asks a store for"
        if is_url(options.data)
        else "nothing of a store: the data are files of this machine"
    )
    for name, cost in costs.items():
        known = "" if cost is None else f"{cost.requests:,} request(s), {cost.nbytes:,} bytes"
        said.append(f"an epoch, {name}: {known or unknown}")
    return "\n".join(said)


def _check(options: argparse.Namespace) -> tuple[CheckReport, int | None]:
    _refuse_nonsense(options)
    mode = TaskType[options.mode.upper()]
    reader, sources = open_data(options, options.data, mode)
    validate_sources(sources, mode)
    total = sum(source.count for source in sources)
    limit = None if options.limit is None else min(options.limit, total)
    cost = cost_of_epoch(reader, shuffled=False)
    with ProgressLine(limit or total, "records") as progress:
        report = check(
            reader,
            sources,
            mode,
            workers=_workers(options, limit or total),
            limit=options.limit,
            drawn=() if options.sample is None else spread(sources, options.sample_count),
            progress=lambda count: progress(count, None if cost is None else cost.nbytes * count // total),
            whole=options.whole,
        )
    if options.sample is None:
        return report, None
    sheet = cells(reader, sources, mode, options.sample_count, report.findings.kept("unreadable"))
    save(draw(sheet), options.sample)
    return report, len(sheet)


def _refuse_nonsense(options: argparse.Namespace) -> None:
    for name, least in (("limit", 1), ("sample_count", 1), ("workers", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InvalidArgument(f"--{name} {value}: expected {least} or more")
    if options.sample is None:
        return
    if not options.sample.lower().endswith(".png"):
        raise InvalidArgument(f"--sample {options.sample}: expected the name of a .png file")
    if not os.path.isdir(os.path.dirname(options.sample) or "."):
        raise InvalidArgument(f"--sample {options.sample}: the folder does not exist")


def _workers(options: argparse.Namespace, records: int) -> int:
    """By default one for each core, but few for few records; never none, as a record may kill its process."""
    if options.workers is not None:
        return int(options.workers)
    allowed = getattr(os, "sched_getaffinity", None)  # the cores that this process may use
    cores = (os.cpu_count() or 1) if allowed is None else len(allowed(0))
    return min(cores, max(1, records // 64))


def write_json(report: CheckReport, data: str) -> str:
    """Everything that was kept, indented. Names may hold undecodable bytes, so it is ASCII."""
    findings: dict[str, Any] = {
        kind: {
            "records": report.findings.counts[kind],
            "findings": [asdict(item) for item in report.findings.kept(kind)],
        }
        for kind in KINDS
    }
    value = {
        "clean": not report.findings,
        "data": data,
        "reader": report.reader,
        "records": report.records,
        "read": report.read,
        "seconds": round(report.seconds, 3),
        "workers": report.workers,
        "fingerprint": report.fingerprint,
        "sources": [asdict(source) for source in report.sources],
        **findings,
    }
    return json.dumps(value, indent=2)


def write_table(report: CheckReport, listed: int) -> str:
    """A few lines, and the first findings of each kind."""
    return "\n".join(_lines(report, listed))


def _lines(report: CheckReport, listed: int) -> Iterator[str]:
    yield f"{report.reader}: {report.records:,} record(s) in {len(report.sources):,} source(s)"
    for source in report.sources[:_MOST_SOURCES]:
        begins = f", from {source.start:,}" if source.start else ""
        yield f"  {source.name!r}: {source.count:,}{begins}"
    if len(report.sources) > _MOST_SOURCES:
        yield f"  … and {len(report.sources) - _MOST_SOURCES:,} more"
    rate = report.read / max(report.seconds, 1e-9)
    by = f"{report.workers} process(es)" if report.workers else "this process"
    yield f"read {report.read:,} of them in {report.seconds:.1f} s by {by} ({rate:,.0f} a second)"
    strength, _, rest = report.fingerprint.partition(":")
    if strength:
        yield f"fingerprint: {strength} {rest.partition(':')[0]}"
    else:
        yield "fingerprint: none; a job does not notice other data, unless its loader has fingerprint=…"
    for kind in KINDS:
        yield from _of_kind(report, kind, listed)
    yield "FINDINGS" if report.findings else "CLEAN"


def _of_kind(report: CheckReport, kind: Any, listed: int) -> Iterator[str]:
    count = report.findings.counts[kind]
    if not count:
        return
    yield f"{kind}: {count:,} ({_MEANING[kind]})"
    named: list[Flaw] = report.findings.kept(kind)[:listed]
    yield from (f"  {item}" for item in named)
    if (more := count - sum(map(len, named))) > 0:
        yield f"  … and {more:,} more: see --list, --json"
