"""Spans against a set of positions that is worked off one by one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.leases import Span

STOP = 12
ranges = st.lists(st.tuples(st.integers(-1, STOP + 2), st.integers(-1, STOP + 2)), max_size=12)


@given(begin=st.integers(0, 3), ranges=ranges)
def test_a_span_is_the_set_of_its_open_positions(begin: int, ranges: list[tuple[int, int]]) -> None:
    span = Span(done=begin, stop=STOP)
    left = set(range(begin, STOP))
    for start, upto in ranges:
        closed = set(range(start, upto))
        assert span.is_open(start, upto) == (closed <= left) or not closed
        assert span.close(start, upto) == len(closed & left)
        left -= closed
        assert {p for p in range(-1, STOP + 2) if span.is_open(p, p + 1)} == left
        assert span.open_records == len(left)
        assert span.is_done == (not left)
        assert {p for a, b in span.pieces() for p in range(a, b)} == left
        assert {p for a, b in span.pieces(start) for p in range(a, b)} == {p for p in left if p >= start}
        assert {p for a, b in span.pieces(start - 2, upto) for p in range(a, b)} == {
            p for p in left if start - 2 <= p < upto
        }
        ordered = sorted(left)
        for count in range(1, len(left) + 1):
            after = span.position_after(count)
            assert {p for p in left if p < after} == set(ordered[:count])
        assert span.position_after(STOP) == span.stop
        edges = [span.done, *(edge for hole in span.holes for edge in hole)]
        assert all(edge < after for edge, after in pairwise(edges))
        assert edges[-1] <= span.stop == STOP


def test_pieces_are_as_long_as_can_be() -> None:
    span = Span(done=2, stop=9)
    span.close(4, 5)
    span.close(5, 6)
    assert list(span.pieces()) == [(2, 4), (6, 9)]
