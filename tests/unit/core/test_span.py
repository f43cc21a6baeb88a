"""Spans against a set of positions that is worked off one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.lease import Span

STOP = 12
positions = st.integers(0, STOP)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), positions),
        st.tuples(st.just("punch"), positions),
        st.tuples(st.just("cut"), positions),
    ),
    max_size=12,
)


@given(begin=st.integers(0, 3), steps=steps)
def test_a_span_is_the_set_of_its_open_positions(begin: int, steps: list[tuple[str, int]]) -> None:
    span = Span(done=begin, stop=STOP)
    left = set(range(begin, STOP))
    for step, position in steps:
        if step == "punch":
            assert span.punch(position) == (position in left)
            left.discard(position)
        elif step == "advance":
            upto = min(position, span.stop)
            assert span.advance(upto) == sum(p < upto for p in left)
            left = {p for p in left if p >= upto}
        elif span.done <= position <= span.stop:
            span.cut(position)
            left = {p for p in left if p < position}
        assert {p for p in range(-1, STOP + 2) if span.is_open(p)} == left
        assert span.open_records == len(left)
        assert span.is_done == (not left)
        assert {p for first, after in span.pieces(0) for p in range(first, after)} == left
        behind = {p for p in left if p >= position}
        assert {p for a, b in span.pieces(position) for p in range(a, b)} == behind
        ordered = sorted(left)
        for count in range(len(left) + 1):
            after = span.position_after(count)
            assert {p for p in left if p < after} == set(ordered[:count])
        assert span.position_after(STOP) == span.stop
        assert all(span.done < hole < span.stop for hole in span.holes)
        assert span.done <= span.stop


def test_pieces_are_as_long_as_can_be() -> None:
    span = Span(done=2, stop=9)
    span.punch(4)
    span.punch(5)
    assert list(span.pieces(0)) == [(2, 4), (6, 9)]
