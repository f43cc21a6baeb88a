from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.errors import DataFormatError
from edl_torch.readers.images.decode import safe_relative_path


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ("a.jpg", "a.jpg"),
        ("train/a b.jpg", "train/a b.jpg"),
        ("..a/b...jpg", "..a/b...jpg"),
        ("train\\cats\\1.jpg", "train/cats/1.jpg"),
        ("./a.jpg", "a.jpg"),
        ("a//b/../c.jpg", "a/c.jpg"),
    ],
)
def test_paths_inside_the_root_are_normalised(entry, path):
    assert safe_relative_path(entry, "'list.csv' line 1") == path


@pytest.mark.parametrize(
    "entry",
    [
        "",
        ".",
        "/etc/passwd",
        "//host/x",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "..\\a",
        "\\a",
        "C:\\a",
        "c:a",
        "a\x00b",
    ],
)
def test_paths_that_lead_out_name_file_and_entry(entry):
    with pytest.raises(DataFormatError) as caught:
        safe_relative_path(entry, "'list.csv' line 7")
    assert "'list.csv' line 7" in str(caught.value)
    assert repr(entry) in str(caught.value)


@given(
    st.lists(st.sampled_from(["..", ".", "", "a", "b.jpg", "\\", "/", "C:", "..\\"]), max_size=8).map(
        "/".join
    )
)
def test_what_is_accepted_stays_inside(entry):
    try:
        path = safe_relative_path(entry, "x")
    except DataFormatError:
        return
    full = os.path.normpath(os.path.join("/root/images", path))
    assert full.startswith("/root/images/")
