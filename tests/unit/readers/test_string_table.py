from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.readers.shared.mapped import StringTable

anything = st.text(st.characters(exclude_categories=()))


@given(st.lists(anything))
def test_strings_come_back_as_they_were(strings):
    table = pickle.loads(pickle.dumps(StringTable(strings)))
    assert list(table) == strings
    assert [table[index] for index in range(len(table))] == strings


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_is_refused(index):
    with pytest.raises(IndexError):
        StringTable(["a", "b"])[index]


def test_pickle_costs_eight_bytes_an_entry_and_the_text():
    table = StringTable(f"{number:012d}.jpg" for number in range(100_000))
    assert len(pickle.dumps(table)) < 100_000 * (16 + 8) + 1000
