"""`edl-torch top`: a master's status in the terminal, live. Needs `edl-torch[top]`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from edl_torch.cli.status import TRAINER, client_of, duration, epoch_of, of_data, percent, rate, trainer_state
from edl_torch.core.limits import printable
from edl_torch.core.status import (
    DatasetStatus,
    Event,
    EventKind,
    MasterStatus,
    Picture,
    TrainerState,
    TrainerStatus,
)
from edl_torch.errors import InvalidArgument, MasterUnavailable

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as exc:
    raise InvalidArgument("edl-torch top needs rich: pip install 'edl-torch[top]'") from exc

EVENTS = 10
_BAD = {EventKind.DIED, EventKind.STALLED, EventKind.QUARANTINED, EventKind.SUSPENDED}
_SIGNS = {  # of a cell, by the state that most of its records are in; the letters work without colour
    "done": ("█", "green"),
    "lent": ("▓", "blue"),
    "returned": ("R", "magenta"),
    "quarantined": ("x", "red"),
    "waiting": ("·", "bright_black"),
}


_FITS = {  # columns of a trainer, and how wide a screen must be for each
    **dict.fromkeys(("PACE", "WAITS", "IDLE"), 0),
    **dict.fromkeys(("READ", "TRANSFORM"), 70),
    "LEASED": 90,
    "PROGRESS": 100,
    "OLDEST": 110,
}


def run(options: argparse.Namespace) -> int:
    """Show the status until Ctrl-C. Raises InvalidArgument where there is no screen to draw it on."""
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:  # rich would print one picture, at the very end
        raise InvalidArgument(
            "top draws on a terminal, and the output is none that it can draw on: "
            "'edl-torch status --watch' prints the same into a pipe or a file"
        )
    with client_of(options) as client:
        status = client.status()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(status, console.width, console.height), refresh=True)
                time.sleep(options.every)
                try:
                    status = client.status()
                except MasterUnavailable as error:
                    live.update(Text(printable(f"{error} - trying again"), "red"), refresh=True)


def view(status: MasterStatus, width: int, height: int) -> Group:
    parts = [*_head(status), *(part for item in status.datasets for part in _dataset(item, status, width))]
    rows = max(4, height - EVENTS - 4 * max(1, len(status.datasets)) - 6)
    return Group(*parts, _trainers(status, rows, width), *_events(status))


def _head(status: MasterStatus) -> Iterator[RenderableType]:
    kept = "in a journal" if status.durable else "in memory only"
    line = f"edl-torch  kept {kept}, up {duration(max(0.0, status.time - status.started_at))}"
    yield Text(", ".join(filter(None, (line, of_data(status)))), "bold")


def _dataset(item: DatasetStatus, status: MasterStatus, width: int) -> Iterator[RenderableType]:
    epoch = f"epoch {epoch_of(item.epoch, item.num_epochs)}"
    why = status.suspended.get(item.dataset) or item.failure
    ended = "finished" if item.finished else f"{duration(item.eta_s)} to the end"
    line = Text(printable(item.dataset), "bold")
    line.append(f"  {percent(item.percent)}, {epoch}, {rate(item.rate)}, {ended}", "not bold")
    line.append(f", {item.acknowledged:,} trained on, {item.quarantined:,} bad", "not bold")
    if item.returned_records:
        line.append(f", {item.returned_records:,} came back", "not bold magenta")
    yield Text()
    yield line
    if item.picture is not None:
        yield bar(item.picture, max(10, width - 1))
    if why:
        yield Text(printable(why), "red")


def bar(picture: Picture, width: int) -> Text:
    """Return the epoch as a line of signs."""
    cells = len(picture.waiting)
    made = Text()
    for place in range(width):
        first, after = cells * place // width, max(cells * place // width + 1, cells * (place + 1) // width)
        sums = {state: sum(getattr(picture, state)[first:after]) for state in _SIGNS}
        odd = next((state for state in ("quarantined", "returned") if sums[state]), None)
        made.append(*_SIGNS[odd or max(sums, key=lambda state: sums[state])])
    return made


def _trainers(status: MasterStatus, rows: int, width: int) -> Table:
    columns = {name: cell for name, cell in TRAINER.items() if width >= _FITS.get(name, width + 1)}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("TRAINER")  # may wrap: so this is the column that gives way. Its cells do not wrap
    table.add_column("STATE", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(status.trainers, key=lambda one: (_rank(one), one.worker_id))
    for one in order[:rows]:
        table.add_row(
            Text(printable(one.worker_id), no_wrap=True, overflow="ellipsis"),
            Text(trainer_state(one), ("red", "yellow", "green")[_rank(one)]),
            *[cell(one) for cell in columns.values()],
        )
    if len(order) > rows:
        table.add_row(Text(f"and {len(order) - rows} more", "bright_black", no_wrap=True))
    return table


def _rank(one: TrainerStatus) -> int:
    """Return 0 for one in trouble, 1 for a slow one, 2 for any other."""
    return 0 if one.state is not TrainerState.LIVE else 1 if one.slow else 2


def _events(status: MasterStatus) -> Iterator[RenderableType]:
    yield Text()
    for event in reversed(status.events[-EVENTS:]):
        yield _event(event)


def _event(event: Event) -> Text:
    line = Text(time.strftime("%H:%M:%S  ", time.localtime(event.at)), "bright_black", no_wrap=True)
    return line.append(printable(event.line), "red" if event.kind in _BAD else "default")
