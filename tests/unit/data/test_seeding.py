"""Random numbers of transforms: a function of the record, and no trace left in the global generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loader_kit import trainer

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.data.batches.transport import IterationSetup
from edl_torch.data.reading.seeding import Generators, GeneratorStates, record_seeds
from edl_torch.shard import Indices
from edl_torch.testing import FakeMaster

GOLDEN = [16728935973979473641, 13270957580276315052, 18376105204524043862]


def draw(record: Any) -> tuple[Any, float, float, float, float]:
    return record, random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(1))


def state() -> tuple[Any, ...]:
    kind, key, position, has_gauss, gauss = np.random.get_state()  # type: ignore[misc]
    return (
        random.getstate(),
        (kind, key.tobytes(), position, has_gauss, gauss),
        torch.get_rng_state().numpy().tobytes(),
    )


def test_seeds_of_records_are_stable_for_ever() -> None:
    assert record_seeds(3, 2, Indices(("ab",), np.array([0, 1, 10**12]))) == GOLDEN


def test_seeds_differ_by_seed_epoch_source_and_number() -> None:
    numbers = np.arange(1000)
    lists = [
        record_seeds(0, 0, Indices(("a",), numbers)),
        record_seeds(1, 0, Indices(("a",), numbers)),
        record_seeds(0, 1, Indices(("a",), numbers)),
        record_seeds(0, 0, Indices(("b",), numbers)),
    ]
    assert len({seed for seeds in lists for seed in seeds}) == 4000


def test_seeds_of_mixed_sources_are_those_of_each_source() -> None:
    mixed = record_seeds(5, 1, Indices(("a", "é"), np.array([4, 4, 9]), np.array([0, 1, 1])))
    assert mixed[:1] == record_seeds(5, 1, Indices(("a",), np.array([4])))
    assert mixed[1:] == record_seeds(5, 1, Indices(("é",), np.array([4, 9])))


@pytest.mark.parametrize("after_each", [True, False])
def test_a_transform_draws_by_the_seed_alone(after_each: bool) -> None:
    generators = Generators(after_each=after_each)
    call = generators.seeded(draw)
    first = [call("x", seed) for seed in (1, 2, 2**64 - 1)]
    random.random()
    assert [call("x", seed) for seed in (2**64 - 1, 2, 1)] == first[::-1]
    generators.put_back()


@pytest.mark.parametrize("after_each", [True, False])
def test_generators_go_on_as_if_nothing_had_been_drawn(after_each: bool) -> None:
    np.random.randn()  # numpy keeps the second of a pair
    before = state()
    generators = Generators(after_each=after_each)
    call = generators.seeded(draw)
    for seed in range(5):
        call("x", seed)
        assert (state() == before) is after_each
    generators.put_back()
    assert state() == before
    generators.put_back()
    assert state() == before


def test_generators_are_put_back_when_a_transform_raises() -> None:
    def fail(record: Any) -> None:
        random.random()
        raise ValueError(record)

    before = state()
    with pytest.raises(ValueError, match="x"):
        Generators(after_each=True).seeded(fail)("x", 1)
    assert state() == before


@pytest.mark.parametrize("after_each", [True, False])
def test_a_worker_puts_back_generators_when_its_trainer_would(after_each: bool) -> None:
    before = state()
    generators = pickle.loads(pickle.dumps(Generators(after_each=after_each)))
    generators.seeded(draw)("x", 1)
    assert (state() == before) is after_each
    generators.put_back()
    assert state() == before


@pytest.mark.parametrize("draw_one", [random.random, np.random.rand, np.random.randn, lambda: torch.rand(1)])
def test_states_are_equal_until_somebody_draws(draw_one: Callable[[], object]) -> None:
    states = GeneratorStates()
    assert states == GeneratorStates()
    assert states != state()
    draw_one()
    assert states != GeneratorStates()
    states.restore()
    assert states == GeneratorStates()


def test_a_pass_that_ended_in_the_middle_of_a_batch_leaves_the_next_one_its_generators() -> None:
    with trainer(FakeMaster(), dataset={"seed_transforms": True}) as (_, dataset):
        setup = IterationSetup(columnar=False, list_size=4)
        before = GeneratorStates()
        setup.generators.seeded(draw)("x", 1)
        assert GeneratorStates() != before
        assert dataset._generators_of(setup) is setup.generators
        assert GeneratorStates() == before
        assert dataset._generators_of(None) is not setup.generators


class Drawing:
    """A map-style dataset that draws random numbers itself, as torchvision's with a transform inside."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return draw(index)


@pytest.mark.parametrize("arguments", [{}, {"num_threads": 3}, {"num_workers": 2}], ids=str)
def test_random_numbers_of_a_map_style_dataset_are_the_records_too(arguments: dict[str, Any]) -> None:
    def run(**arguments: Any) -> list[Any]:
        with ElasticDataLoader(
            Drawing(), 4, seed_transforms=True, master_client=LocalMaster(), collate_fn=list, **arguments
        ) as loader:
            return sorted(sample for batch in loader for sample in batch)

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before, alone = state(), run()
    assert state()[:2] == before[:2], "the loop's own numbers go on"
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert run(**arguments) == alone
    assert len({sample[1] for sample in alone}) == 24
