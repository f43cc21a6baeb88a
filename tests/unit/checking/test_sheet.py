"""What is drawn of records, and that it is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked_readers import (
    Forgetful,
    Homeless,
    Lethal,
    Lost,
    Numbers,
    Rewritten,
    Rooted,
    Stillborn,
    Unreachable,
)
from image_files import render, write_coco, write_image_folder, write_manifest, write_voc

from edl_torch.checking import check as check_module
from edl_torch.checking.check import (
    CheckReport,
    Flaw,
    Flaws,
    a_sample,
    all_records,
    check,
    found,
    joined,
    named,
    spread,
    validate_sources,
)
from edl_torch.checking.sheet import SheetCell, View, cells, draw, save, view
from edl_torch.errors import (
    EdlError,
    InvalidArgument,
    OutputError,
    ReaderError,
    ReaderUnavailable,
    SourceUnavailable,
)
from edl_torch.readers import (
    CocoCaptionsReader,
    CocoDetectionReader,
    ImageFolderReader,
    ImageManifestReader,
    VocReader,
    read_image,
)
from edl_torch.readers.base import reader_sources
from edl_torch.shard import Source, TaskType

IMAGE = render(3)


class Classes:
    classes = ("ant", "bee")


BOXES = {"boxes": np.array([[1, 2, 9, 9.5], [0, 0, 4, 4]], np.float32), "labels": np.array([1, 7])}


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        (IMAGE, []),
        ((IMAGE, 1), ["1 bee"]),
        ((IMAGE, 5), ["5"]),
        ((IMAGE, "a caption"), ["a caption"]),
        ((IMAGE, ["one", "two"]), ["one", "two"]),
        ((IMAGE, BOXES), ["2 box(es): 1 x 1 bee, 1 x 7"]),
        ((IMAGE, {"image_id": 3}), ["image_id: 3"]),
        ({"a": 1, "b": None}, ["a: 1", "b: None"]),
        ("line", ["line"]),
        ("", [""]),
        (b"text", ["text"]),
        (b"\x00\x01", ["2 bytes: 00 01"]),
        ((1, "x"), ["1", "x"]),
        (7, ["7"]),
        (np.arange(3), ["int64 [3] [0 1 2]"]),
    ],
)
def test_what_is_shown_of_a_record(record: Any, lines: list[str]) -> None:
    shown = view(record, Classes)
    assert list(shown.lines) == lines
    assert (shown.image is not None) == (
        record is IMAGE or (isinstance(record, tuple) and record[0] is IMAGE)
    )


def test_boxes_have_their_class() -> None:
    assert view((IMAGE, BOXES), Classes).boxes == [(1, 2, 9, 9.5, "1 bee"), (0, 0, 4, 4, "7")]


def test_a_sheet_shows_the_image_itself_and_text_below() -> None:
    plain, labelled = (
        draw([SheetCell(heading="0", view=View(image=IMAGE, lines=text))]) for text in ([], ["label"])
    )
    top, left = 20, 6
    height, width = 244 * 24 // 32, 244
    shown = plain[top : top + height, left : left + width]
    assert (shown[0, 0] == IMAGE[0, 0]).all()
    assert (shown[-1, -1] == IMAGE[-1, -1]).all()
    assert np.allclose(shown.mean(axis=(0, 1)), IMAGE.mean(axis=(0, 1)), atol=2)
    assert (plain[: top + height] == labelled[: top + height]).all()
    assert (plain != labelled).any()


@pytest.mark.parametrize(
    "change",
    [
        lambda: SheetCell(heading="0", error="broken"),
        lambda: SheetCell(heading="0", view=View(lines=["text"])),
        lambda: SheetCell(heading="0", view=View(lines=["ça – “été” …", "x" * 5000, ""])),
        lambda: SheetCell(heading="0", view=View(image=IMAGE[:1, :1], lines=[])),
        lambda: SheetCell(heading="0", view=View(image=IMAGE, lines=[], boxes=[(-9e9, 0, 9e9, 5, "é")])),
    ],
)
def test_each_kind_of_cell_leaves_ink(change: Callable[[], SheetCell]) -> None:
    empty = draw([SheetCell(heading="0", view=View(lines=[]))])
    assert (draw([change()]) != empty).any()


def test_a_bad_record_is_drawn_as_its_reason_and_not_read_again() -> None:
    class Once(Numbers):
        def fail(self, number: int) -> None:
            raise AssertionError("it was read")

    reader = Once(10, bad=tuple(range(10)))
    bad = [found("unreadable", "n", number, "it kills") for number in range(10)]
    made = cells(reader, [Source(name="n", count=10)], TaskType.TRAINING, 3, bad)
    assert [(cell.heading, cell.error) for cell in made] == [(f"{n}  n", "it kills") for n in (1, 5, 8)]


def test_a_sheet_of_a_folder_is_a_png_on_disk(tmp_path: Path) -> None:
    reader = ImageFolderReader(write_image_folder(tmp_path / "f"))
    (tmp_path / "f" / "ant" / "0001.png").write_bytes(b"no image")
    sources = [Source(name=reader.name, count=6)]
    made = cells(reader, sources, TaskType.TRAINING, 12, [])
    assert [bool(cell.error) for cell in made] == [False, True, False, False, False, False]
    save(draw(made), tmp_path / "sheet.png")
    assert (read_image(str(tmp_path / "sheet.png")) == draw(made)).all()
    assert sorted(os.listdir(tmp_path)) == ["f", "sheet.png"]


def test_a_sheet_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        save(draw([SheetCell(heading="0")]), tmp_path / "no" / "sheet.png")


# What `check` finds, in this process and in others ----------------------------------------------------------


HERE_AND_ELSEWHERE = pytest.mark.parametrize("workers", [0, 2])


def checked(reader: Any, **options: Any) -> CheckReport:
    sources = reader_sources(reader)
    validate_sources(sources, TaskType.TRAINING)
    return check(reader, sources, **options)


def bad(report: CheckReport, kind: Any = "unreadable") -> list[tuple[int, int]]:
    return [(item.start, item.end) for item in report.findings.kept(kind)]


# Reading --------------------------------------------------------------------------------------------------


@HERE_AND_ELSEWHERE
def test_clean_data_is_read_whole_and_once(workers: int) -> None:
    progress: list[int] = []
    report = checked(Numbers(1000), workers=workers, progress=progress.append)
    assert (report.read, report.records, bool(report.findings)) == (1000, 1000, False)
    assert progress == sorted(progress)
    assert progress[-1] == 1000


@HERE_AND_ELSEWHERE
def test_each_bad_record_is_named_and_the_rest_is_read(workers: int) -> None:
    report = checked(Numbers(1000, bad=(0, 3, 4, 500, 999)), workers=workers)
    assert report.read == 1000
    assert bad(report) == [(0, 1), (3, 4), (4, 5), (500, 501), (999, 1000)]
    assert report.findings.counts["unreadable"] == 5
    assert "record 500 of 'n': 500 is bad" in map(str, report.findings.kept("unreadable"))


def test_a_reader_that_ends_early_is_told_as_one_range() -> None:
    report = checked(Forgetful(100, bad=(90,)))
    assert bad(report) == [(90, 100)]
    assert "ended before it" in str(report.findings.kept("unreadable")[0])


def test_data_that_was_written_to_is_not_asked_for_record_by_record() -> None:
    report = checked(Rewritten(100, bad=tuple(range(10, 100))))
    assert bad(report) == [(10, 100)]
    assert (report.read, Rewritten.asked) == (100, 1)


def test_a_missing_file_is_no_damaged_one() -> None:
    report = checked(Lost(10, bad=(4,)))
    assert (bad(report), bad(report, "missing")) == ([], [(4, 5)])


@HERE_AND_ELSEWHERE
def test_a_package_that_is_missing_ends_the_check(workers: int) -> None:
    with pytest.raises(ReaderUnavailable, match="pip install nothing"):
        checked(Homeless(10, bad=(4,)), workers=workers)


@HERE_AND_ELSEWHERE
def test_a_source_out_of_reach_ends_the_check_and_no_record_is_blamed(workers: int) -> None:
    with pytest.raises(SourceUnavailable, match=r"record 4 of 'n': ConnectionResetError: .*not to blame"):
        checked(Unreachable(10, bad=tuple(range(4, 10))), workers=workers)


def test_data_without_records_cannot_be_checked() -> None:
    with pytest.raises(InvalidArgument, match="nothing to read"):
        checked(Numbers(0))


# Processes ------------------------------------------------------------------------------------------------


def test_a_record_that_kills_its_process_is_named_and_the_rest_is_read() -> None:
    report = checked(Lethal(600, bad=(7, 8, 599)), workers=2)
    assert report.read == 600
    assert bad(report) == [(7, 9), (599, 600)]
    assert "was killed by SIGKILL" in str(report.findings.kept("unreadable")[0])


def test_a_span_that_kills_one_process_after_the_other_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "MOST_DEATHS", 4)  # each costs a new process
    report = checked(Lethal(300, bad=tuple(range(10, 256))), workers=1)
    assert report.read == 300
    ((first, last),) = bad(report)
    assert (first, last) == (10, 256)


def test_a_reader_that_cannot_travel_is_told_so() -> None:
    with pytest.raises(ReaderError, match=r"cannot be sent .*a lock is in it.*workers=0"):
        checked(Rooted(10), workers=1)


def test_a_reader_that_kills_each_process_ends_the_check() -> None:
    with pytest.raises(ReaderError, match="ended with status 7 before it began"):
        checked(Stillborn(10), workers=2)


# Samples --------------------------------------------------------------------------------------------------


def test_a_sample_has_one_record_of_each_equal_part() -> None:
    sources = [Source(name="a", start=5, count=300), Source(name="b", count=700)]
    spans = list(a_sample(sources, 100))
    assert {len(range(span.start, span.end)) for span in spans} == {1}
    positions = [span.start - 5 if span.name == "a" else span.start + 300 for span in spans]
    assert [position // 10 for position in positions] == list(range(100))
    assert spans == list(a_sample(sources, 100))


def test_what_is_to_be_drawn_is_read_with_the_sample_for_it_may_kill() -> None:
    sources = reader_sources(Numbers(1000))
    drawn = spread(sources, 1)
    assert drawn == [("n", 500)]
    report = checked(Lethal(1000, bad=(500,)), workers=1, limit=2, drawn=drawn)
    assert (report.read, bad(report)) == (3, [(500, 501)])
    (cell,) = cells(
        Lethal(1000, bad=(500,)), sources, TaskType.TRAINING, 1, report.findings.kept("unreadable")
    )
    assert "was killed by SIGKILL" in cell.error
    spans = list(a_sample(sources, 500, spread(sources, 500)))
    assert len({span.start for span in spans}) == len(spans)


def test_a_sample_larger_than_the_data_is_the_data() -> None:
    assert checked(Numbers(10, bad=(3,)), limit=50).read == 10


def test_a_sample_of_a_trillion_takes_no_list_of_them() -> None:
    assert len(list(a_sample([Source(name="a", count=10**12)], 50))) == 50


@pytest.mark.parametrize("workers", [0, 1, 3, 64])
def test_spans_hold_every_record_once(workers: int) -> None:
    sources = [Source(name="a", start=5, count=1000), Source(name="b", count=0), Source(name="c", count=1)]
    spans = list(all_records(sources, workers))
    records = [(span.name, n) for span in spans for n in range(span.start, span.end)]
    assert records == [("a", n) for n in range(5, 1005)] + [("c", 0)]


def test_positions_are_named_by_source() -> None:
    sources = [Source(name="a", start=5, count=2), Source(name="e", count=0), Source(name="b", count=2)]
    assert list(named(sources, np.arange(4))) == [("a", 5), ("a", 6), ("b", 0), ("b", 1)]
    assert spread(sources, 2) == [("a", 6), ("b", 1)]


# Lists of files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2])
def test_a_manifest_with_a_missing_and_a_double_file(tmp_path: Path, limit: int | None) -> None:
    manifest = write_manifest(tmp_path, labels=[0, 1] * 5)
    os.unlink(tmp_path / "images" / "0007.png")
    with open(manifest, "a", encoding="ascii") as file:
        file.write("images/./0003.png,1\nimages/0003.png,0\n")
    report = checked(ImageManifestReader(manifest), limit=limit)
    assert bad(report, "missing") == [(7, 8)]
    assert bad(report, "duplicate") == [(10, 12)]
    assert report.findings.counts["duplicate"] == 2
    assert "listed again, first as entry 3" in str(report.findings.kept("duplicate")[0])


def test_coco_images_of_one_file_are_duplicates_and_captions_of_one_image_are_not(tmp_path: Path) -> None:
    folder, captions, instances = write_coco(tmp_path, 4)
    for reader in (CocoCaptionsReader(folder, captions), CocoDetectionReader(folder, instances)):
        assert not checked(reader).findings
    for path in (captions, instances):
        text = Path(path).read_text()
        Path(path).write_text(text.replace("0002.jpg", "0001.jpg"))
    for reader in (CocoCaptionsReader(folder, captions), CocoDetectionReader(folder, instances)):
        assert bad(checked(reader), "duplicate") == [(2, 3)]


def test_a_voc_list_with_a_double_name(tmp_path: Path) -> None:
    root = write_voc(tmp_path, 4)
    path = tmp_path / "VOCdevkit" / "VOC2012" / "ImageSets" / "Main" / "train.txt"
    path.write_text(path.read_text() + "0001\n")
    assert bad(checked(VocReader(root)), "duplicate") == [(3, 4)]


def test_a_reader_of_ones_own_may_list_files(tmp_path: Path) -> None:
    class Listing(Numbers):
        def listed_files(self) -> list[str]:
            return [f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/./a", f"{tmp_path}/c"]

    for name in ("a", "b"):
        (tmp_path / name).touch()
    report = checked(Listing(100), limit=5)
    assert (bad(report, "duplicate"), bad(report, "missing")) == ([(2, 3)], [(3, 4)])


# Flaws -------------------------------------------------------------------------------------------------


def test_findings_are_bounded_and_counted_in_full() -> None:
    findings = Flaws()
    findings.add(found("unreadable", "n", 2 * number, "why") for number in range(20_000))
    assert findings.counts["unreadable"] == 20_000
    assert len(findings.kept("unreadable")) == 10_000


def test_neighbours_of_one_reason_are_joined() -> None:
    reasons = ((1, "a"), (2, "a"), (3, "b"), (5, "b"))
    items = [found("unreadable", "n", number, why) for number, why in reasons]
    assert [(item.start, item.end) for item in joined(items)] == [(1, 3), (3, 4), (5, 6)]
    assert str(next(joined(items))) == "records 1 to 2 of 'n': a"


def test_a_reason_is_one_line_of_bounded_length() -> None:
    item = found("unreadable", "n", 0, "two\nlines " + "x" * 5000)
    assert item.reason.startswith("two lines x")
    assert len(item.reason) < 1100
    assert isinstance(item, Flaw)


def test_no_number_of_workers_below_0() -> None:
    with pytest.raises(EdlError, match="workers=-1"):
        checked(Numbers(1), workers=-1)
