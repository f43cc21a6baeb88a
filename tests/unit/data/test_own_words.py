"""Errors that a loader worker raised, without the traceback that torch puts around them."""

from __future__ import annotations

import pytest

from edl_torch.data.loop.loader_pass import in_own_words
from edl_torch.errors import BadRecord, EdlError

HEAD = "Caught BadRecord in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  …"
TAIL = "\nedl_torch.errors.BadRecord: "


@pytest.mark.parametrize("said", ["record 3 of 'a': no JPEG", "  in two\nlines\n"])
def test_an_error_of_ours_is_what_the_worker_said(said: str) -> None:
    found = in_own_words(BadRecord(HEAD + TAIL + said))
    assert type(found) is BadRecord
    assert str(found) == said.strip()


@pytest.mark.parametrize(
    "error",
    [
        BadRecord("record 3"),
        BadRecord(f"told in a loop of the user's own:{TAIL}record 3"),
        BadRecord("Caught in the act"),
        BadRecord(HEAD + "\nedl_torch.errors.ReaderError: record 3"),
        ValueError(HEAD + "\nbuiltins.ValueError: record 3"),
    ],
    ids=["no worker", "no beginning", "no end", "another kind", "not ours"],
)
def test_other_errors_stay_what_they_are(error: EdlError) -> None:
    assert in_own_words(error) is None
