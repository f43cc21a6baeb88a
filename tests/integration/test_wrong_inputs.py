"""What a newcomer gives by mistake: one error of ours, which names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from edl_torch import ElasticDataLoader, save_checkpoint
from edl_torch.errors import EdlError
from edl_torch.readers import CsvReader

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


def loader(data: Any = None, **more: Any) -> ElasticDataLoader:
    return ElasticDataLoader(np.arange(8.0) if data is None else data, batch_size=2, **more)


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
