"""`edl-torch top` draws what the status has, and the figures are fit for people."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")
from rich.console import Console
from statuses import dataset_status, master_status, trainer_status

from edl_torch.cli import top
from edl_torch.cli.main import main
from edl_torch.cli.status import duration, percent, rate, share, short
from edl_torch.core.status import Event, EventKind, Histogram, MasterStatus, Measures, Picture, TrainerState


def drawn(status: MasterStatus, width: int = 100, height: int = 40) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(top.view(status, width, height))
    return out.getvalue()


def status(**fields: object) -> MasterStatus:
    picture = Picture(epoch=0, waiting=(0, 5), lent=(0, 0), done=(5, 0), returned=(0, 0), quarantined=(0, 0))
    counts = {"todo": 5, "acknowledged": 5, "dropped": 1, "trainers": 1, "returned_records": 3}
    dataset = dataset_status(rate=2.5, picture=picture, **counts)
    one = trainer_status("w\x1b[31m", pace=2.5)
    gone = trainer_status("v", state=TrainerState.STREAM_GONE)
    event = Event(number=1, at=0.0, kind=EventKind.DIED, worker_id="u", text="why")
    given = {"datasets": (dataset,), "trainers": (one, gone), "events": (event,), **fields}
    return master_status(**given)


def test_it_shows_datasets_trainers_and_events() -> None:
    text = drawn(status())
    assert "30 %" in text  # with what was dropped
    assert "epoch 0 of 2" in text
    assert "3 came back" in text
    assert "trainer u died: why; it held no records" in text
    lines = text.splitlines()
    place = {name: next(i for i, line in enumerate(lines) if name in line) for name in ("w\\x1b", "v ")}
    assert place["v "] < place["w\\x1b"]  # trouble first
    assert "\x1b" not in text


@pytest.mark.parametrize("terminal", ["", "dumb"])
def test_without_a_screen_it_names_the_command_that_prints(
    terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # rich draws then
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", terminal)
    assert main(["top", "--addr", "127.0.0.1:1"]) == 2  # before any master is asked
    out, err = capsys.readouterr()
    assert out == ""
    assert "edl-torch status --watch" in err
    assert len(err.splitlines()) == 1


def test_it_shows_what_a_batch_takes_to_read_and_to_transform() -> None:
    measures = Measures(stepped=Histogram(sum_s=4.0), timed=2, read_s=2.4, transform_s=0.001)
    both = status(trainers=(trainer_status("w", measures=measures), trainer_status("v")))
    for width in (80, 100):
        text = drawn(both, width)
        (row,) = [line for line in text.splitlines() if line.startswith("w ")]
        assert "a batch is read in 1.2 s, transformed in 500 µs" in " ".join(text.split())
        assert "1.2 s" in row
        assert "500 µs" in row
        assert "1.0 s" in row  # since it was heard of


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.0, "0 µs"), (0.00025, "250 µs"), (0.001, "1 ms"), (0.25, "250 ms"), (2.5, "2.5 s")],
)
def test_a_batchs_time_is_in_the_unit_that_fits(seconds: float | None, shown: str) -> None:
    assert short(seconds) == shown


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
    many = tuple(trainer_status(str(i)) for i in range(99))
    text = drawn(status(trainers=many), height=30)
    assert len(text.splitlines()) <= 30
    assert "and 9" in text or "and 8" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_states_and_figures_are_whole_on_a_narrow_screen(width: int) -> None:
    measures = Measures(timed=1, read_s=0.312, transform_s=0.045)
    fields = {"pace": 12345.0, "leases": 3, "oldest_lease_s": 5000.0, "measures": measures}
    ill = trainer_status("resnet-worker-17.default", state=TrainerState.STREAM_GONE, **fields)
    lines = drawn(status(trainers=(ill,), events=()), width=width).splitlines()
    row = next(line for line in lines if line.startswith("resnet"))
    assert "…" not in next(line for line in lines if line.startswith("TRAINER"))
    assert "…" not in row.partition("  ")[2]  # the name alone may be cut
    assert "connection lost" in row
    assert "12,345/s" in row
    assert ("312 ms" in row, "83 min" in row) == (width >= 70, width >= 110)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0 s"), (89, "89 s"), (600, "10 min"), (7300, "2 h 1 min"), (864000, "10 days")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_only_the_end_is_a_hundred_percent() -> None:
    assert (percent(99.99), percent(100.0), percent(0.55), share(None)) == ("99 %", "100 %", "0.5 %", "-")
    assert (rate(0.123), rate(12.34), rate(1234.5)) == ("0.12/s", "12.3/s", "1,234/s")
