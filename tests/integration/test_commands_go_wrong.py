"""What commands and readers say of wrong input."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import preloaded
import pytest
import torch
from image_files import write_image_folder

from edl_torch import ElasticDataLoader, save_checkpoint
from edl_torch.cli.main import main
from edl_torch.errors import EdlError, MasterStartError
from edl_torch.master.server import write_address_file
from edl_torch.readers import CsvReader
from edl_torch.system.address import HostPort

READERS = Path(__file__).parents[1] / "unit" / "checking"
BOX = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]}
IMAGE = {"id": 1, "file_name": "a.jpg"}


def coco(**changes: Any) -> str:
    return json.dumps(
        {"images": [IMAGE], "annotations": [BOX], "categories": [{"id": 1, "name": "x"}], **changes}
    )


COCO_FILES = {
    "a large id": (coco(images=[{**IMAGE, "id": 10**20}], annotations=[]), "too large for 64 bits"),
    "a large category": (coco(annotations=[{**BOX, "category_id": 10**20}]), "too large for 64 bits"),
    "keypoints that are a number": (
        coco(annotations=[{**BOX, "keypoints": 5}]),
        "keypoints=5, expected a list",
    ),
    "an endless area": (
        coco().replace("[0, 0, 1, 1]", '[0, 0, 1, 1], "area": 1e400'),
        "area=inf, expected a number",
    ),
    "a name that is no JSON": (coco().replace("a.jpg", r"\q.jpg"), "is not valid JSON"),
    "no image": (coco(images=[]), "lists no image"),
    "cut off": (coco()[:60], "may be truncated"),
    "no annotations": (json.dumps({"images": [IMAGE]}), "it has no 'annotations'"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pictures in `photos`, which is where commands run."""
    write_image_folder(tmp_path / "photos", per_class=2)
    (tmp_path / "a.jpg").write_bytes(next((tmp_path / "photos").rglob("*.*")).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(READERS))
    return tmp_path


def one_line(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int) -> str:
    assert main(list(arguments)) == status
    said = capsys.readouterr()
    assert said.err.startswith("edl-torch: error: "), said.err
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("name", COCO_FILES)
def test_a_coco_file_that_cannot_be_used_says_where(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, message = COCO_FILES[name]
    (here / "c.json").write_text(content)
    for command in (["check", "c.json"], ["convert", "c.json", "c.recordio"]):
        error = one_line(capsys, command, 2)
        assert "'c.json'" in error
        assert message in error
    assert not (here / "c.recordio").exists()


@pytest.mark.parametrize("reader", ["Unmade", "Shardless"])
@pytest.mark.parametrize("command", ["master", "check", "convert"])
def test_what_a_reader_of_ones_own_raises_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, reader: str
) -> None:
    arguments = {
        "master": ["--addr=127.0.0.1:0", "--training_data=x"],
        "check": ["x"],
        "convert": ["x", "y.recordio"],
    }[command]
    options = ["--custom_data_reader", f"checked_readers:{reader}"]
    error = one_line(capsys, [command, *arguments, *options], 2)
    assert "'x' cannot be opened: " in error


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["check", "photos", "--sample", "x.jpg"], 2, "expected the name of a .png file"),
        (["check", "notes"], 2, "no reader knows 'notes'"),
        (["check", "photos/nothing"], 2, "'photos/nothing' does not exist"),
        (["convert", "photos/nothing", "x.recordio"], 2, "'photos/nothing' does not exist"),
        (["check", "notes/a.rst"], 2, "no reader knows"),
        (["convert", "photos", "no/such/x.recordio"], 1, "'no/such/x.recordio' cannot be written"),
        (["convert", "photos", "notes"], 1, "'notes'"),
        (["status", "--addr", "nobody"], 2, "'nobody' is not host:port"),
        (["convert", "photos", "no/such/x.recordio"], 1, "make the folder 'no/such' first"),
        (["check", "@notes/a.rst"], 2, "the manifest 'notes/a.rst' names 'notes/text', which does not exist"),
        (["check", "notes/t-{0..2}.tar"], 2, "'notes/t-0.tar'"),
        (["check", "notes/loop"], 2, "'notes/loop' is a link to 'loop', which leads back to itself"),
        (["audit", "s3://bucket/logs"], 2, "'s3://bucket/logs' is not a directory here"),
        (["audit", "photos"], 2, "no audit log (*.audit) in 'photos'"),
        (["master", "--addr=127.0.0.1:0", "--state", "notes/a.rst"], 2, "--state notes/a.rst: it is a file"),
        (["master", "--addr=127.0.0.1:0", "--state", "notes/a.rst/x"], 1, "a journal in notes/a.rst/x"),
        (["master", "--addr=127.0.0.1:0", "--token_file", "notes/none"], 2, "notes/none"),
    ],
)
def test_wrong_input_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int, message: str
) -> None:
    (here / "notes").mkdir()
    (here / "notes" / "a.rst").write_text("text")
    if "notes/loop" in arguments:
        (here / "notes" / "loop").symlink_to("loop")
    assert message in one_line(capsys, arguments, status)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--addr", "{taken}"], 1, "another process has this port"),
        (["--http", "{taken}"], 1, "another process has this port"),
        (["--health_addr", "{taken}"], 1, "another process has this port"),
        (["--health_addr", "here"], 2, "address 'here' is not host:port"),
        (["--addr", "nowhere"], 2, "address 'nowhere' is not host:port"),
        (["--addr", "no-such-host.invalid:1"], 1, "is unknown"),
        (["--addr", "0.0.0.0:0"], 1, "--insecure"),
        (["--address_file", "none/address"], 2, "--address_file none/address: expected a file, in a folder"),
        (["--address_file", "photos"], 2, "--address_file photos: expected a file, in a folder"),
        (["--max_bad_records", "-1"], 2, "max_bad_records is -1"),
        (["--token_file", "none"], 2, "'none' cannot be read"),
        (["--training_data", "none"], 2, "'none' does not exist"),
        (["--training_data", "photos", "--records_per_task", "0"], 2, "records_per_shard is 0"),
        (["--custom_data_reader", "csv"], 2, "--custom_data_reader needs --training_data"),
        (["--training_data", "photos", "--custom_data_reader", "nocolon"], 2, "module:Class"),
        (["--shuffle"], 2, "--shuffle needs --training_data"),
        (["--shuffle_window", "4"], 2, "--shuffle_window needs --training_data"),
    ],
)
def test_a_master_that_cannot_start_leaves_no_state_behind(
    here: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str], status: int, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        arguments = [option.format(taken=taken) for option in options]
        error = one_line(capsys, ["master", "--addr=127.0.0.1:0", "--state", "state", *arguments], status)
    assert message in error
    assert not (here / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (["master", "--lease-timeout-s", seconds], f"'{seconds}' is not a number of seconds above 0")
            for seconds in ("0", "-1", "nan", "soon")
        ),
        (["master", "--addr=127.0.0.1:0", "--state", ""], "the path is empty"),
        (["convert", "photos", ""], "the path is empty"),
        (["convert", "photos", "s3://bucket/x"], "'s3://bucket/x' is a URL: give a path of this machine"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_with_it(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], said: str
) -> None:
    there = sorted(here.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f": {said}" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(here.iterdir()) == there


def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edl_torch", *arguments]
    return preloaded.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **settings)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_below_the_output_is_one_line(here: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("check", "photos", "--workers", "0", stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), "1 would be a verdict"
    assert "No space left on device" in done.stderr


def test_who_stops_listening_is_no_error(here: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = run("check", "photos", "--workers", "0", stdout=nobody)
    assert (done.returncode, done.stderr) == (2, ""), "1 would be a verdict"


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from edl_torch.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("most", "arguments", "message"),
    [
        (100, ["convert", "photos", "x.recordio"], "'x.recordio' cannot be written"),
        (100, ["convert", "photos", "many", "--records_per_file", "1"], "'many/part-00000-of-"),
        (100, ["check", "photos", "--workers", "0", "--sample", "s.png"], "'s.png' cannot be written"),
        (0, ["master", "--addr=127.0.0.1:0", "--address-file", "address"], "the address file address"),
        (0, ["master", "--addr=127.0.0.1:0", "--state", "state"], "state"),
        (5000, ["master", "--addr=127.0.0.1:0", "--state", "state"], "state"),
    ],
)
def test_a_full_disk_leaves_nothing_half_written(
    here: Path, most: int, arguments: Sequence[str], message: str
) -> None:
    done = preloaded.run(
        [sys.executable, "-c", LIMITED.format(most), *arguments], capture_output=True, text=True, timeout=60
    )
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert done.returncode in (1, 2), done
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
    assert {path.name for path in here.iterdir()} <= {"photos", "a.jpg", "state"}


def test_an_address_file_that_cannot_be_written_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    with pytest.raises(MasterStartError, match="cannot write the address file"):
        write_address_file(tmp_path / "address", HostPort("h", 5))
    assert [path.name for path in tmp_path.iterdir()] == ["address"]


def test_a_sheet_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from edl_torch.checking import sheet

    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sheet.save(np.zeros((4, 4, 3), np.uint8), tmp_path / "s.png")
    assert not list(tmp_path.iterdir())


def test_no_command_shows_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "serve shards of datasets to trainers" in said


# What a newcomer gives by mistake: one error of ours, which names the thing and the remedy ------------------


MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class Length(NoLength):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]


OPEN: list[ElasticDataLoader] = []


@pytest.fixture(autouse=True)
def no_loader_is_left() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def loader(data: Any = None, **more: Any) -> ElasticDataLoader:
    OPEN.append(ElasticDataLoader(np.arange(8.0) if data is None else data, batch_size=2, **more))
    return OPEN[-1]


def first(data: Any, **more: Any) -> Any:
    with loader(data, **more) as batches:
        return next(iter(batches))


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda: ElasticDataLoader(None, batch_size=2), "not None: give it the data"),
        (lambda: loader(5), "not 5: give it the data"),
        (lambda: loader(b"/data"), "b'/data' is no data: a path is a str, as '/data'"),
        (lambda: loader(list), r"the class list is no data: give an instance, as list\(…\)"),
        (lambda: loader(CsvReader), r"the class CsvReader is no data: give an instance"),
        (lambda: loader((torch.zeros(4, 2), torch.zeros(4))), "TensorDataset\\(\\*data\\)"),
        (
            lambda: loader("s3://bucket/x.csv", storage_options="anon"),
            "a dict of options by name, not 'anon'",
        ),
        (lambda: loader(audit_dir="s3://bucket/audit"), "audit_dir is 's3://bucket/audit': give a folder"),
        (lambda: loader(audit_dir=""), "audit_dir is '': give a folder of this machine, or None"),
        (lambda: loader({1, 2}), "not set, which can only be iterated: give its records numbers"),
        (lambda: loader(np.array(3.0)), "ndarray is no map-style dataset: it has no number of records"),
        (lambda: loader(NoLength()), "NoLength has no __len__, the number of its records: write one"),
        (lambda: loader(Length(-1)), "Length is no map-style dataset: it has no number of records"),
        (lambda: loader(Length(2.5)), "'float' object cannot be interpreted as an integer"),
        (lambda: loader(pandas.DataFrame({"x": [1, 2]})), 'give the loader data.to_dict\\("records"\\)'),
        (lambda: loader("~/nowhere"), "'~/nowhere' does not exist .a shell makes '/"),
        (lambda: loader(transform=3), "transform must be a function of one record, not 3"),
        (lambda: loader(collate_fn=3), "collate_fn must be a function of a list of records, not 3"),
        (lambda: loader(task_type="train"), "task_type must be TaskType.TRAINING, TaskType.EV.* not 'train'"),
        (lambda: loader().attach(MODEL), "not Linear: give the one that trains this model"),
        (
            lambda: loader().attach(torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)),
            "not StepLR: give its own, the SGD, as loader.attach.scheduler.optimizer",
        ),
        (lambda: loader().attach([OPTIMIZER]), "not list: call it once for each"),
        (lambda: loader().attach(None), "not NoneType: leave the call out where nothing steps"),
        (lambda: loader().attach(OPTIMIZER, one_model=True), "become one, as .*: True is no text"),
        (
            lambda: save_checkpoint("x", MODEL, OPTIMIZER, loader()),
            "not ElasticDataLoader: give loader.service",
        ),
        (
            lambda: save_checkpoint("x", OPTIMIZER, MODEL, loader().service),
            "model must be a torch.nn.Module, not SGD: give the model itself, then its optimizer",
        ),
        (lambda: save_checkpoint("x", MODEL, OPTIMIZER, None), "not NoneType: give that of the loader"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(give: Callable[[], Any], said: str) -> None:
    with pytest.raises(EdlError, match=said):
        give()


@pytest.mark.parametrize("records", [[None] * 4, [{"a": 1}, {"b": 1}], [1, "a"]])
def test_samples_that_make_no_batch_are_refused_in_torchs_words_with_the_remedy(records: list[Any]) -> None:
    with pytest.raises((TypeError, KeyError)) as caught:
        first(records)
    assert "none is None, as of a `transform` that returns nothing" in caught.value.__notes__[0]


@pytest.mark.parametrize("transform", [None, dict], ids=["columns", "row by row"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_a_csv_have_the_types_that_were_asked_for(
    tmp_path: Path, transform: Callable[[Any], Any] | None, shuffle: bool
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("x,y,z\n" + "1.5,2,3\n" * 8)
    reader = CsvReader(file, dtypes={"x": np.float32, "y": "uint8"}, index_dir=tmp_path)
    batch = first(reader, transform=transform, shuffle=shuffle)
    assert {name: column.dtype for name, column in batch.items()} == {
        "x": torch.float32,
        "y": torch.uint8,
        "z": torch.int64,
    }
