"""The permutation is a bijection, the same one for ever, and as even-handed as numpy's."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import permutations

import numpy as np
import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_torch.core.permutation import MAX_SIZE, Permutation, derive_key
from edl_torch.errors import InvalidArgument

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 16, 17, 33, 100, 1000)

keys = st.integers(min_value=-(2**130), max_value=2**130) | st.binary(max_size=40)
all_sizes = st.integers(min_value=1, max_value=MAX_SIZE)


def chi_squared_score(counts: Iterable[int], cells: int) -> float:
    """How many standard deviations the counts are from uniform (Wilson and Hilferty, 1931)."""
    observed = np.zeros(cells)
    given = np.fromiter(counts, dtype=np.float64)
    observed[: len(given)] = given
    expected = observed.sum() / cells
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = cells - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def whole(n: int, key: int) -> np.ndarray:
    return Permutation(n, key).many(np.arange(n))


# --- stable for ever -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((0, 0, "shards", 0), 0xAE08A93C3D459A1A46F662A26138FB82),
        ((7, 3, "records", 12), 0xEEB510C9CAA6554E1A56D922C7B197CF),
        ((-1, 0, "global", 0), 0x5856C7AFD48FC4B8D395BF672C1DA6DA),
        ((1267650600228229401496703205376, 1000000, "shards", 0), 0xC2F1E6ECF094A7FF2E5F3DA460800262),
    ],
)
def test_derived_keys_never_change(arguments: tuple[int, int, str, int], key: int) -> None:
    assert derive_key(*arguments) == key


@pytest.mark.parametrize(
    ("n", "key", "elements"),
    [
        (1, 0, [0]),
        (2, 0, [0, 1]),
        (2, 3, [1, 0]),
        (3, 0, [0, 2, 1]),
        (4, 1, [2, 0, 1, 3]),
        (5, 2, [4, 3, 1, 2, 0]),
        (7, b"key", [0, 4, 3, 2, 6, 1, 5]),
        (8, -1, [2, 1, 3, 5, 7, 4, 6, 0]),
        (10, 0, [3, 4, 6, 2, 1, 8, 5, 0, 9, 7]),
        (16, 0, [14, 13, 8, 15, 2, 11, 3, 1, 10, 0, 6, 5, 4, 9, 7, 12]),
        (17, -(2**100), [8, 3, 6, 7, 0, 14, 1, 9, 16, 12, 4, 15, 10, 2, 11, 13, 5]),
    ],
)
def test_small_permutations_never_change(n: int, key: int | bytes, elements: list[int]) -> None:
    assert Permutation(n, key).many(np.arange(n)).tolist() == elements
    assert [Permutation(n, key)(position) for position in range(n)] == elements


@pytest.mark.parametrize(
    ("n", "key", "at"),
    [
        (33, 1, {0: 11, 1: 16, 32: 1}),
        (100, 0, {0: 97, 1: 74, 99: 62}),
        (1000, 0, {0: 399, 1: 368, 999: 118}),
        (5000, 0, {0: 3276, 1: 2296, 4999: 3416}),
        (1000000, 1, {0: 186582, 1: 314621, 999999: 725618}),
        (2**31 + 1, -5, {0: 569255974, 1: 1613892987, 2147483648: 2073415593}),
        (1000000000000, b"key", {0: 670718865821, 1: 398047020171, 999999999999: 439865795850}),
        (
            2**62,
            2**127,
            {0: 253782224287174485, 1: 300540565342469559, 4611686018427387903: 2862058753905584816},
        ),
        (
            2**61 + 1,
            0,
            {0: 241844932354761139, 1: 1477393357963223332, 2305843009213693952: 317597344422069399},
        ),
    ],
)
def test_large_permutations_never_change(n: int, key: int | bytes, at: dict[int, int]) -> None:
    permutation = Permutation(n, key)
    assert {position: permutation(position) for position in at} == at
    assert permutation.many(list(at)).tolist() == list(at.values())


# --- a bijection, scalar and vectorised alike ----------------------------------------------------------


@pytest.mark.parametrize("n", range(130))
def test_every_element_has_exactly_one_position(n: int) -> None:
    for key in range(4):
        permutation = Permutation(n, key)
        elements = permutation.many(np.arange(n))
        assert sorted(elements.tolist()) == list(range(n))
        assert permutation.many_inverse(elements).tolist() == list(range(n))
        assert [permutation(position) for position in range(n)] == elements.tolist()
        assert [permutation.inverse(element) for element in elements.tolist()] == list(range(n))


@given(n=all_sizes, key=keys, data=st.data())
@settings(derandomize=True)
def test_one_and_many_agree_and_are_inverted_at_any_size(
    n: int, key: int | bytes, data: st.DataObject
) -> None:
    permutation = Permutation(n, key)
    drawn = data.draw(st.lists(st.integers(min_value=0, max_value=n - 1), max_size=30))
    positions = [*drawn, 0, n - 1, n // 2]
    elements = [permutation(position) for position in positions]
    assert all(0 <= element < n for element in elements)
    assert permutation.many(np.array(positions)).tolist() == elements
    assert permutation.many_inverse(np.array(elements)).tolist() == positions
    assert [permutation.inverse(element) for element in elements] == positions


@pytest.mark.parametrize("n", [2**20, 2**20 + 1, 999_983])
def test_arrays_longer_than_a_block_are_permuted_whole(n: int) -> None:
    permutation = Permutation(n, 5)
    elements = permutation.many(np.arange(n))
    assert np.array_equal(np.bincount(elements, minlength=n), np.ones(n))
    assert np.array_equal(permutation.many_inverse(elements), np.arange(n))
    assert [permutation(position) for position in range(0, n, 99_991)] == elements[::99_991].tolist()


def test_many_leaves_its_argument_alone_and_takes_any_integers() -> None:
    permutation = Permutation(10, 1)
    positions = np.arange(10)
    expected = permutation.many(positions)
    assert np.array_equal(positions, np.arange(10))
    assert expected.dtype == np.int64
    for same in (list(range(10)), positions.astype(np.uint8), positions.astype(np.int32)):
        assert np.array_equal(permutation.many(same), expected)
    assert np.array_equal(permutation.many(positions[::-2]), expected[::-2])
    assert permutation.many([]).shape == (0,)
    assert permutation(np.int64(3)) == expected[3]


def test_sizes_keys_and_kinds_of_key_give_unrelated_permutations() -> None:
    seen = [whole(100, 0), whole(100, 1), whole(101, 0)[:100], Permutation(100, b"0").many(np.arange(100))]
    agreements = [int((a == b).sum()) for i, a in enumerate(seen) for b in seen[:i]]
    assert max(agreements) < 10


def test_a_permutation_survives_pickling_and_shows_its_size() -> None:
    permutation = Permutation(1000, 7)
    again = pickle.loads(pickle.dumps(permutation))
    assert [again(i) for i in range(20)] == [permutation(i) for i in range(20)]
    assert repr(permutation) == "<Permutation n=1000>"


# --- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [-1, MAX_SIZE + 1])
def test_a_size_outside_the_limits_is_refused(n: int) -> None:
    with pytest.raises(InvalidArgument, match=str(n)):
        Permutation(n, 0)


@pytest.mark.parametrize(("n", "position"), [(0, 0), (1, 1), (10, -1), (10, 10), (10, 2**70)])
def test_a_position_out_of_range_is_refused(n: int, position: int) -> None:
    permutation = Permutation(n, 0)
    for method in (permutation, permutation.inverse):
        with pytest.raises(InvalidArgument, match=f"{position} is outside"):
            method(position)


@pytest.mark.parametrize(("n", "positions"), [(0, [0]), (10, [0, -1]), (10, [10, 3]), (MAX_SIZE, [-(2**63)])])
def test_an_array_with_a_position_out_of_range_is_refused(n: int, positions: list[int]) -> None:
    permutation = Permutation(n, 0)
    for method in (permutation.many, permutation.many_inverse):
        with pytest.raises(InvalidArgument, match="outside"):
            method(positions)


@pytest.mark.parametrize("positions", [[0.5], [[1, 2]], 3, ["a"]])
def test_an_array_of_another_kind_is_refused(positions: object) -> None:
    with pytest.raises(InvalidArgument, match="integers of shape"):
        Permutation(10, 0).many(positions)  # type: ignore[arg-type]


def test_a_permutation_of_a_trillion_needs_no_memory() -> None:
    tracemalloc.start()
    permutation = Permutation(10**12, 3)
    for position in range(0, 10**12, 10**10):
        assert permutation.inverse(permutation(position)) == position
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


# --- keys ----------------------------------------------------------------------------------------------


def test_every_part_of_a_key_counts() -> None:
    parts = [(0, 0, "a", 0), (1, 0, "a", 0), (-1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0), (0, 0, "a", 1)]
    parts += [
        (16, 0, "a", 0),
        (1, 6, "a", 0),
        (0, 0, "0/a", 0),
        (0, 0, "a/0", 0),
        (2**64, 0, "a", 0),
        (10**5000, 0, "a", 0),
    ]
    assert len({derive_key(*part) for part in parts}) == len(parts)


def test_a_numpy_integer_is_the_same_seed() -> None:
    assert derive_key(np.int64(-3), np.int32(2), "a") == derive_key(-3, 2, "a")  # type: ignore[arg-type]


# --- uniform: fixed keys, so these never flake; 4 standard deviations are 1 in 30,000 --------------------


@pytest.mark.parametrize("n", SIZES)
def test_each_position_holds_each_element_equally_often(n: int) -> None:
    draws = 6000
    watched = sorted({0, 1, n // 2, n - 1})
    drawn = np.array([Permutation(n, key).many(watched) for key in range(draws)])
    for column in range(len(watched)):
        assert abs(chi_squared_score(np.bincount(drawn[:, column], minlength=n), n)) < 4


@cases("n", [3, 5], [2, 3, 4, 5])
def test_all_permutations_of_a_tiny_set_occur_equally_often(n: int) -> None:
    assert len(list(permutations(range(n)))) == math.factorial(n)
    draws = 40_000 if n > 3 else 10_000
    seen = Counter(tuple(map(Permutation(n, key), range(n))) for key in range(draws))
    assert abs(chi_squared_score(seen.values(), math.factorial(n))) < 4


@cases("n", [6, 33], [6, 10, 32, 33, 57, 64, 65])
def test_each_pair_of_positions_holds_each_pair_of_elements_equally_often(n: int) -> None:
    draws = 12_000
    drawn = np.array(
        [Permutation(n, derive_key(0, key, "pairs")).many([0, 1, n - 1]) for key in range(draws)]
    )
    for a, b in ((0, 1), (0, 2), (1, 2)):
        # The second of the pair, counted among the n - 1 elements that are left: n * (n - 1) cells.
        code = drawn[:, a] * (n - 1) + drawn[:, b] - (drawn[:, b] > drawn[:, a])
        assert abs(chi_squared_score(np.bincount(code, minlength=n * (n - 1)), n * (n - 1))) < 4


@pytest.mark.long
def test_narrow_halves_have_enough_rounds_to_part_neighbours() -> None:
    """Six rounds fail this by 6 standard deviations at n = 40: neighbours keep their distance too often."""
    n, draws = 40, 400_000
    drawn = [(p(0), p(1)) for p in (Permutation(n, derive_key(9, key, "neighbours")) for key in range(draws))]
    first, second = np.array(drawn).T
    counts = np.bincount(first * n + second, minlength=n * n)
    assert not counts[:: n + 1].any()
    assert abs(chi_squared_score(counts[counts > 0], n * (n - 1))) < 4


@cases("n", [4, 17, 33], [4, 5, 17, 33, 34, 64, 65])
def test_both_parities_occur_equally_often(n: int) -> None:
    draws = 4000
    odd = sum(_is_odd(whole(n, derive_key(1, key, "parity")).tolist()) for key in range(draws))
    assert abs(odd - draws / 2) < 4 * math.sqrt(draws / 4)


@cases("n", [33, 1000], [33, 100, 1000, 4097])
def test_statistics_of_whole_permutations_match_numpys(n: int) -> None:
    """Fixed points, cycles, ascents and neighbour distances have the same means as `numpy`'s permutation."""
    draws = 800
    generator = np.random.default_rng(20)
    ours = np.array([_statistics(whole(n, derive_key(2, key, "numpy"))) for key in range(draws)])
    theirs = np.array([_statistics(generator.permutation(n)) for _ in range(draws)])
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / draws)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4 * error).all()
    # And they vary as much: a ratio of variances of `draws` samples stays well inside this.
    assert (np.abs(np.log(ours.var(axis=0) / theirs.var(axis=0))) < 0.5).all()


@pytest.mark.parametrize("n", [10**6, 10**12, MAX_SIZE])
def test_neighbours_in_a_large_permutation_are_unrelated(n: int) -> None:
    count, cells = 200_000, 32
    elements = Permutation(n, 11).many(np.arange(count))
    cell = (elements.astype(np.float64) / n * cells).astype(np.int64)
    for lag in (1, 2, 3, 64, 1000, 1024):
        pairs = np.bincount(cell[:-lag] * cells + cell[lag:], minlength=cells**2)
        # Above is a sign of structure; below is what drawing without replacement from few brings.
        assert chi_squared_score(pairs, cells**2) < 4
    low_bits = np.bincount(elements % 64, minlength=64)
    assert chi_squared_score(low_bits, 64) < 4


def test_related_keys_give_unrelated_orders() -> None:
    """Element 0's place over consecutive epochs and seeds: pairs of successive places are uniform."""
    n, count = 40, 20_000
    for key_of in (lambda i: derive_key(0, i, "a"), lambda i: derive_key(i, 0, "a"), lambda i: i):
        places = np.array([Permutation(n, key_of(i))(0) for i in range(count)])
        assert abs(chi_squared_score(np.bincount(places[:-1] * n + places[1:], minlength=n * n), n * n)) < 4


def _is_odd(elements: list[int]) -> bool:
    return (len(elements) - _cycles(elements)) % 2 == 1


def _cycles(elements: list[int]) -> int:
    seen = [False] * len(elements)
    cycles = 0
    for start in range(len(elements)):
        cycles += not seen[start]
        while not seen[start]:
            seen[start] = True
            start = elements[start]
    return cycles


def _statistics(elements: np.ndarray) -> list[float]:
    steps = np.diff(elements)
    return [
        float((elements == np.arange(len(elements))).sum()),
        float(_cycles(elements.tolist())),
        float((steps > 0).sum()),
        float(np.abs(steps).mean()),
        float((np.sign(steps[1:]) != np.sign(steps[:-1])).sum()),
        float((np.abs(steps) == 1).sum()),
    ]


@pytest.mark.parametrize("n", [5, 1000, 2**40])
def test_a_number_of_numpy_is_the_number_that_it_is(n: int) -> None:
    order = Permutation(n, 7)
    for kind in (np.int8, np.uint8, np.int32, np.uint64):
        assert order(kind(3)) == order(3)
        assert type(order(kind(3))) is int
        assert order.inverse(kind(3)) == order.inverse(3)
    for other in (3.0, "3", None):
        with pytest.raises(TypeError):
            order(other)  # type: ignore[arg-type]
