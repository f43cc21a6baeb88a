"""A fingerprint as text: what differs is named, and nothing else is taken for one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.errors import InvalidArgument
from edl_torch.fingerprint import LISTED, UNKNOWN, Fingerprint, check, describe_change, differ, strength_of
from edl_torch.readers.shared.looks import listing

NAMES = [f"{n:04}.jpg" for n in range(48)]


def text(names: list[str], sizes: dict[int, str] | None = None, strength: str = "names") -> str:
    return listing(strength, names, sizes or {}).encode()


@given(st.lists(st.text(st.characters(exclude_categories=())), max_size=30))
def test_a_fingerprint_comes_back_from_its_text_as_it_was(names: list[str]) -> None:
    found = listing("names", names, {})
    check(found.encode())
    assert Fingerprint.decode(found.encode()) == found


@pytest.mark.parametrize("count", [48, 5000])
def test_the_same_entries_have_the_same_fingerprint_and_any_change_another(count: int) -> None:
    names, sizes = [f"{n:05}.jpg" for n in range(count)], {3: "17", count - 1: "4"}
    same = text(names, sizes)
    assert text(list(names), dict(sizes)) == same
    draw = random.Random(1)
    swapped = names.copy()
    swapped[2], swapped[40] = swapped[40], swapped[2]
    at = draw.randrange(count)
    others = [
        text(names[:at] + names[at + 1 :]),
        text([*names[:at], "new", *names[at:]], sizes),
        text([*names[:at], names[at] + "x", *names[at + 1 :]], sizes),
        text(swapped, sizes),
        text(names, sizes | {3: "18"}),
        text(names, sizes, "sampled"),
    ]
    assert all(differ(same, other) for other in others)
    assert len({strength_of(same), *map(strength_of, others)}) == 2


def test_names_that_run_into_each_other_are_told_apart() -> None:
    many = [f"{n:05}" for n in range(5000)]
    moved = [many[0] + many[1][0], many[1][1:], *many[2:]]
    assert "".join(many) == "".join(moved)
    assert differ(text(many), text(moved))


def test_what_was_added_removed_and_changed_is_named_five_at_most() -> None:
    before = text(NAMES, {7: "100", 8: "200"})
    now = text([n for n in NAMES if n != "0003.jpg"] + [f"new{n}" for n in range(7)], {6: "101"})
    assert describe_change(before, now) == (
        "48 then, 54 now: added 'new0', 'new1', 'new2', 'new3', 'new4' and 2 more; removed '0003.jpg'; "
        "changed '0007.jpg'"
    )


def test_of_a_list_too_long_to_travel_it_is_said_where_it_parts() -> None:
    names = [f"{n:06}.jpg" for n in range(100_000)]
    said = describe_change(text(names), text([n for n in names if n != "050000.jpg"]))
    assert said.startswith("100,000 then, 99,999 now: the first difference is among the 2,048 entries from ")
    first = int(said.split("from '")[1][:6])
    assert first <= 50_000 < first + 2048


def test_where_long_lists_part_does_not_depend_on_which_sizes_were_looked_at() -> None:
    names = [f"{n:06}.jpg" for n in range(100_000)]
    sizes = [dict.fromkeys(range(start, 100000, 97), "17") for start in (3, 5)]
    said = describe_change(text(names, sizes[0]), text([n for n in names if n != "050000.jpg"], sizes[1]))
    first = int(said.split("from '")[1][:6])
    assert first <= 50_000 < first + 2048


def test_a_list_of_a_million_names_is_a_short_text() -> None:
    assert len(text([f"images/{n:07}.jpg" for n in range(200_000)])) < 4000
    assert len(text([f"images/{n:07}.jpg" for n in range(LISTED)])) < 16_000


def test_what_a_user_says_is_compared_with_what_a_user_says() -> None:
    one, two = (Fingerprint.given(version).encode() for version in ("v1", "v2"))
    assert describe_change(one, two) == "fingerprint 'v1' then, 'v2' now"
    assert "cannot be compared" in describe_change(one, text(NAMES))
    assert differ(one, text(NAMES))
    assert not differ(one, UNKNOWN)
    assert not differ(UNKNOWN, two)
    assert strength_of(UNKNOWN) == "none"


@pytest.mark.parametrize(
    "found",
    [
        17,
        "v1",
        "names:1:2",
        "strong" + text(NAMES)[5:],
        text(NAMES).replace(":", ":0", 1),
        text(NAMES)[:-9],
        "x" * (1 << 18),
    ],
)
def test_what_is_no_fingerprint_is_refused(found: object) -> None:
    with pytest.raises(InvalidArgument, match="no fingerprint of data"):
        check(found)
