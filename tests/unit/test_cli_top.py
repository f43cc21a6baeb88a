"""`edl-torch top` draws what the status has, and the figures are fit for people."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")
from rich.console import Console

from edl_torch.cli import top
from edl_torch.cli.figures import duration, percent, rate, share
from edl_torch.core.calls import DatasetStatus, MasterStatus, TrainerState, TrainerStatus
from edl_torch.core.events import Event, EventKind
from edl_torch.core.picture import Picture
from edl_torch.shard import TaskType


def drawn(status: MasterStatus, width: int = 100, height: int = 40) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(top.view(status, width, height))
    return out.getvalue()


def status(**fields: object) -> MasterStatus:
    counts = dict.fromkeys(("shards", "shards_left", "leases", "dropped"), 1)
    picture = Picture(epoch=0, waiting=(0, 5), lent=(0, 0), done=(5, 0), returned=(0, 0), quarantined=(0, 0))
    dataset = DatasetStatus(
        dataset="training",
        ledger="l",
        lineage=1,
        task_type=TaskType.TRAINING,
        epoch=0,
        num_epochs=2,
        size=10,
        todo=5,
        leased=0,
        acknowledged=5,
        quarantined=0,
        finished=False,
        trainers=1,
        rate=2.5,
        returned_records=3,
        picture=picture,
        **counts,
    )
    one = TrainerStatus(session="s", worker_id="w\x1b[31m", datasets=(), leased=0, idle_s=1.0, pace=2.5)
    gone = TrainerStatus(
        session="t", worker_id="v", datasets=(), leased=0, idle_s=1.0, state=TrainerState.STREAM_GONE
    )
    event = Event(number=1, at=0.0, kind=EventKind.DIED, worker_id="u", text="why")
    given = {"datasets": (dataset,), "trainers": (one, gone), "events": (event,), **fields}
    return MasterStatus(ledger="l", durable=True, **given)


def test_it_shows_datasets_trainers_and_events() -> None:
    text = drawn(status())
    assert "30 %" in text  # with what was dropped
    assert "epoch 1 of 2" in text
    assert "3 came back" in text
    assert "trainer u died: why; it held no records" in text
    lines = text.splitlines()
    place = {name: next(i for i, line in enumerate(lines) if name in line) for name in ("w\\x1b", "v ")}
    assert place["v "] < place["w\\x1b"]  # trouble first
    assert "\x1b" not in text


def test_the_bar_is_readable_without_colour() -> None:
    cells = (0, 0, 0, 0)
    picture = Picture(
        epoch=0,
        done=(9, 0, 9, 0),
        lent=(0, 9, 0, 0),
        returned=(0, 0, 1, 0),
        quarantined=(0, 0, 0, 1),
        waiting=cells,
    )
    assert top.bar(picture, 4).plain == "█▓Rx"
    assert top.bar(picture, 8).plain == "██▓▓RRxx"


def test_many_trainers_are_cut_to_the_screen() -> None:
    many = tuple(
        TrainerStatus(session=str(i), worker_id=str(i), datasets=(), leased=0, idle_s=0.0) for i in range(99)
    )
    text = drawn(status(trainers=many), height=30)
    assert len(text.splitlines()) <= 30
    assert "and 9" in text or "and 8" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0 s"), (89, "89 s"), (600, "10 min"), (7300, "2 h 1 min"), (864000, "10 days")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_only_the_end_is_a_hundred_percent() -> None:
    assert (percent(99.99), percent(100.0), percent(0.55), share(None)) == ("99 %", "100 %", "0.5 %", "-")
    assert (rate(0.123), rate(12.34), rate(1234.5)) == ("0.12/s", "12.3/s", "1,234/s")
