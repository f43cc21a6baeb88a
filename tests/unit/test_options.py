"""An option of a dataset is declared in one place, and the rest of the package goes by it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import edl_torch
from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.shard import OPTIONS, DatasetOptions, DatasetSpec, Registration

PACKAGE = Path(edl_torch.__file__).parent
MIXTURE = ["components", "weights", "stops", "turn"]  # what a dataset is made of: no option
ORDER_BY_OTHER_WORDS = {"shuffle", "shuffle_shards", "shuffle_in_shard"}  # which loaders and services put so


@pytest.mark.parametrize("option", ["shuffle_window", "max_bad_records", "epoch_barrier"])
def test_an_option_is_named_in_few_files(option: str) -> None:
    files = [path for kind in ("*.py", "*.proto") for path in PACKAGE.rglob(kind)]
    naming = sorted(
        str(path.relative_to(PACKAGE))
        for path in files
        if not path.name.endswith("_pb2.py") and option in path.read_text("utf-8")
    )
    assert len(naming) <= 9, naming


def test_what_is_asked_for_has_the_options_of_what_is_registered() -> None:
    hints, asked = get_type_hints(DatasetSpec), get_type_hints(Registration)
    state = {"segments"}  # of a mixture, which nobody asks for
    registered = [field.name for field in fields(DatasetSpec) if field.name not in state]
    assert [field.name for field in fields(Registration)] == registered
    assert [name for name in hints if name not in OPTIONS] == ["name", "sources", *MIXTURE, *state]
    for name in OPTIONS:
        assert {*get_args(asked[name])} == {*(get_args(hints[name]) or [hints[name]]), type(None)}


def test_what_travels_has_them_all() -> None:
    for message, more in ((pb.Registration, set()), (pb.DatasetSpec, {"segments"})):
        assert {*message.DESCRIPTOR.fields_by_name} == {"name", "sources", *OPTIONS, *MIXTURE} | more


@pytest.mark.parametrize("kind", [DataShardService, ElasticDataLoader])
def test_who_gives_them_sees_each_with_its_default_and_what_it_does(kind: type) -> None:
    keywords, hints = get_type_hints(DatasetOptions), get_type_hints(DatasetSpec)
    assert {*keywords} == {*OPTIONS} - ORDER_BY_OTHER_WORDS
    shown = inspect.signature(kind).parameters
    for name, hint in keywords.items():
        assert {*(get_args(hint) or [hint])} - {type(None)} == {hints[name]}
        assert shown[name].default in (None, OPTIONS[name].default)
        words = (inspect.getdoc(kind) or "").replace("\n    ", "\n        ")
        assert words.count(f"\n        {name}: ") == 1, f"{name} is said once"
