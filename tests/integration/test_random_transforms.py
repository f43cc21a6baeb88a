"""Random augmentation by many threads at once: for one seed the same numbers as by one.

The oracle is torch itself, seeded by hand for each record, in one thread.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from image_files import encode, render
from loader_kit import PickingReader, trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset
from torchvision_kit import torchvision

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.core.registration import folder_of
from edl_torch.data.reading.seeding import record_seeds, transform_in_thread
from edl_torch.errors import InvalidArgument
from edl_torch.readers import ImageFolderReader, MapDatasetReader
from edl_torch.shard import Indices
from edl_torch.testing import FakeMaster

COUNT, SEED = 24, 5
WAYS: list[dict[str, int]] = [
    *({"num_threads": threads} for threads in (0, 1, 2, 8)),
    *({"num_workers": 1}, {"num_workers": 1, "num_threads": 4}),
]


class Numbers:
    """0 … 23 as a map-style dataset."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 4), float(index))


def pairs(transform: Callable[..., Any], data: Any = None, **arguments: Any) -> dict[int, Any]:
    """What became of each record, by its number; in epoch 0."""
    found: dict[int, Any] = {}
    with ElasticDataLoader(
        MapDatasetReader(Numbers(), thread_safe=True) if data is None else data,
        4,
        seed=SEED,
        shuffle=True,
        seed_transforms=True,
        transform=functools.partial(numbered, transform),
        collate_fn=list,
        master_client=LocalMaster(),
        **arguments,
    ) as loader:
        for batch in loader:
            found.update(batch)
    return found


def numbered(transform: Callable[..., Any], record: torch.Tensor) -> tuple[int, Any]:
    return int(record[0, 0]), transform(record)


def expected(transform: Callable[..., Any]) -> dict[int, Any]:
    """The same by torch's global generator, seeded by hand."""
    reader = MapDatasetReader(Numbers())
    (name,) = reader.create_shards()
    seeds = record_seeds(SEED, 0, Indices((name,), np.arange(COUNT)), folder_of([name]))
    found = {}
    with torch.random.fork_rng(devices=[]):
        for number, seed in enumerate(seeds):
            torch.manual_seed(seed)
            found[number] = transform(Numbers()[number])
    return found


def same(some: dict[int, Any], others: dict[int, Any]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(torch.as_tensor(some[number]), torch.as_tensor(others[number])) for number in some
    )


def in_a_fork(seed: int) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(2)


def checkpointed(record: torch.Tensor) -> torch.Tensor:
    """The gradient through dropout that is computed a second time."""
    leaf = (record + 1.0).requires_grad_()
    dropped = torch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, leaf, use_reentrant=False)
    dropped.square().sum().backward()
    return torch.stack((dropped.detach(), leaf.grad))


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(2, 3),
    "randn": lambda x: torch.randn((2, 3), dtype=torch.float64),
    "randint": lambda x: torch.randint(9, (5,)) + torch.randint(low=3, high=8, size=(1,)),
    "randperm": lambda x: torch.randperm(11),
    "normal": lambda x: torch.normal(0.0, 1.0, (3,)) + torch.normal(x[0, :3], 2.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full((7,), 0.5)) + x.sigmoid().bernoulli().sum(),
    "multinomial": lambda x: torch.multinomial(torch.ones(9), 4) + torch.ones(9).multinomial(4),
    "poisson": lambda x: torch.poisson(x + 1.0),
    "binomial": lambda x: torch.binomial(torch.full((5,), 9.0), torch.full((5,), 0.4)),
    "like": lambda x: torch.rand_like(x) + torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 9) + torch.randint_like(input=x, low=2, high=5),
    "in place": lambda x: x.uniform_(-1, 1) + torch.empty(4).normal_() + torch.empty(4).exponential_(),
    "in place too": lambda x: torch.empty(4).log_normal_() + torch.empty(4).cauchy_() + x.bernoulli_(0.3)[0],
    "whole": lambda x: torch.empty(4, dtype=torch.long).random_(7) + torch.empty(4).geometric_(0.5),
    "init": lambda x: torch.nn.init.trunc_normal_(torch.nn.init.uniform_(torch.empty(3, 3))),
    "distribution": lambda x: (
        torch.distributions.Beta(2.0, 3.0).sample() + torch.distributions.Normal(0, 1).sample()
    ),
    "gamma": lambda x: (
        torch.distributions.Gamma(2.0, 3.0).sample() + torch.distributions.Dirichlet(torch.ones(3)).sample()
    ),
    "dropout": lambda x: (
        torch.nn.functional.dropout(x + 1) + torch.nn.functional.alpha_dropout(x + 1, training=True)
    ),
    "rrelu": lambda x: torch.nn.functional.rrelu(-x - 1, training=True),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 4, 4).unbind(), dropout_p=0.5
    ),
    "vmap": lambda x: torch.func.vmap(lambda row: row + torch.rand(4), randomness="different")(x),
    "into": lambda x: torch.multinomial(torch.ones(5), 2, out=torch.empty(2, dtype=torch.long)),
    "inference": lambda x: torch.inference_mode()(torch.rand)(4),
    "elsewhere": lambda x: torch.rand(2) * torch.rand(3, device="meta").shape[0],
    "own generator": lambda x: torch.rand(3, generator=torch.Generator().manual_seed(7)) + torch.rand(3),
    "forked": lambda x: torch.cat((in_a_fork(int(x[0, 0])), torch.rand(2))),
    "seeded": lambda x: torch.rand(2) + torch.manual_seed(int(x[0, 0])).initial_seed() + torch.rand(2),
    "states": lambda x: torch.cat((torch.get_rng_state(), torch.rand(2), torch.get_rng_state())),
    "seed": lambda x: torch.tensor(torch.initial_seed() % 2**31),
    "checkpointed": lambda x: checkpointed(x),
    "own one by place": lambda x: torch.poisson(x + 1.0, torch.Generator().manual_seed(7)) + torch.rand(4),
}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "edl_torch.client")
    return lambda: "\n".join(
        record.getMessage() for record in caplog.records if "drew from" in record.getMessage()
    )


@pytest.mark.parametrize("name", DRAWS)
def test_threads_draw_what_a_seeded_generator_would(name: str, logged: Callable[[], str]) -> None:
    wanted = expected(DRAWS[name])
    assert same(pairs(DRAWS[name], num_threads=3), wanted)
    assert not logged(), "threads went on, and no global generator was drawn from"


class Generators(TorchDispatchMode):
    """The devices that operators are called for, with the generator that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.uniform_.default:
            self.seen.append((args[0].device.type, kwargs.get("generator")))
        return func(*args, **kwargs)


def test_other_devices_draw_from_their_own_generators() -> None:
    def draw(record: None) -> None:
        torch.empty(3).uniform_(), torch.empty(3, device="meta").uniform_()

    with Generators() as generators:
        transform_in_thread(draw, None, seed=1)
    (cpu, given), (meta, none) = generators.seen
    assert (cpu, meta) == ("cpu", "meta")
    assert given.initial_seed() == 1
    assert none is None


def test_a_transform_may_read_by_a_loader_of_its_own() -> None:
    def draw(record: torch.Tensor) -> torch.Tensor:
        with ElasticDataLoader(Numbers(), 4, seed_transforms=True, transform=DRAWS["rand"],
                               master_client=LocalMaster()) as loader:  # fmt: skip
            inner = next(iter(loader))
        return inner.sum() + torch.rand(3)

    few = MapDatasetReader(Subset(Numbers(), range(4)), thread_safe=True)
    assert same(pairs(draw, few, num_threads=2), pairs(draw, few))


def test_a_scripted_transform_draws_so_too(logged: Callable[[], str]) -> None:
    scripted = _scripted()
    assert same(pairs(scripted, num_threads=3), expected(scripted))
    assert not logged()


# Made of others that draw; the attention that torch has for CPUs refuses dropout.
MADE_OF_OTHERS = {"native_dropout", "_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}


def test_every_operator_that_torch_says_draws_on_the_cpu_is_caught() -> None:
    """torch marks those that draw, for its compiler."""
    transform_in_thread(lambda record: record, None, seed=1)
    caught = set()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        known = getattr(getattr(torch.ops.aten, operator, None), overload or "default", None)
        if space != "aten" or known is None or torch.Tag.nondeterministic_seeded not in known.tags:
            continue
        if has_kernel(name, "CPU") and operator not in MADE_OF_OTHERS:
            assert has_kernel(name, "TESTING_ONLY_GenericMode"), name
            caught.add(operator)
    assert {"uniform_", "randperm", "bernoulli_", "multinomial"} <= caught


def test_all_threads_are_between_two_draws_at_once() -> None:
    together, first = threading.Barrier(4, timeout=60), threading.Semaphore(4)

    def draw(record: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(2)
        if threading.current_thread() is not threading.main_thread() and first.acquire(blocking=False):
            together.wait()
        return drawn + torch.rand(2)

    wanted = expected(lambda record: torch.rand(2) + torch.rand(2))
    assert same(pairs(draw, num_threads=4), wanted)
    assert not first.acquire(blocking=False)


def draw_globally(record: torch.Tensor, *, by: str) -> torch.Tensor:
    drawn = torch.rand(2).double()
    if by == "random":
        return drawn + random.random()
    if by == "numpy.random":
        return drawn + np.random.rand()
    return drawn + torch.rand(2, generator=torch.default_generator)


@pytest.mark.parametrize("by", ["random", "numpy.random", "torch"])
def test_what_draws_from_a_global_generator_is_noticed_and_named(by: str, logged: Callable[[], str]) -> None:
    transform = functools.partial(draw_globally, by=by)
    states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    alone = pairs(transform)
    assert not logged()
    assert same(pairs(transform, num_threads=3), alone)
    assert f"global generator of {by}:" in logged()
    assert "numbered(), or the loop, drew" in logged()
    assert "rng" in logged()
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tobytes()  # type: ignore[index]


def _scripted() -> Any:
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(2, 3) + x.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; people have it
        return torch.jit.script(double)


# Generators that are given ----------------------------------------------------------------------------------


def with_rng(record: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return record + rng.random()


def with_generator(record: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(2, generator=generator)


class Tagging:
    """Keeps the record's number beside what a transform makes of it."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, record: torch.Tensor, rng: np.random.Generator) -> tuple[int, Any]:
        return int(record[0, 0]), self.transform(record, rng)


class Tagging2(Tagging):
    def __call__(self, record: torch.Tensor, generator: torch.Generator) -> tuple[int, Any]:  # type: ignore[override]
        return int(record[0, 0]), self.transform(record, generator=generator)


def samples(transform: Any, **arguments: Any) -> dict[int, Any]:
    with ElasticDataLoader(
        MapDatasetReader(Numbers(), thread_safe=True), 4, seed=SEED, shuffle=True, transform=transform,
        collate_fn=list, master_client=LocalMaster(), **arguments,
    ) as loader:  # fmt: skip
        return {number: value for batch in loader for number, value in batch}


@pytest.mark.parametrize("transform", [Tagging(with_rng), Tagging2(with_generator)], ids=["rng", "generator"])
def test_a_transform_that_asks_for_a_generator_gets_one_of_the_records_own(transform: Any) -> None:
    alone = samples(transform)
    assert len({float(value.sum() - 12 * number) for number, value in alone.items()}) == COUNT
    for arguments in WAYS:
        assert same(samples(transform, **arguments), alone), arguments


def test_a_generator_is_what_numpy_and_torch_make_of_the_records_seed() -> None:
    reader = MapDatasetReader(Numbers())
    (name,) = reader.create_shards()
    seeds = record_seeds(SEED, 0, Indices((name,), np.arange(COUNT)), folder_of([name]))
    by_rng, by_torch = samples(Tagging(with_rng)), samples(Tagging2(with_generator))
    for number, seed in enumerate(seeds):
        rng = np.random.Generator(np.random.PCG64(seed))
        assert torch.equal(by_rng[number], with_rng(Numbers()[number], rng))
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(by_torch[number], torch.rand(2, generator=generator))


class Columns(PickingReader):
    """Makes batches by itself."""

    def read_batch(self, name: str, indices: Any) -> Any:
        return indices


def test_columns_have_no_seed_of_a_record_and_say_so() -> None:
    dataset = {"transform": lambda batch, rng: batch}
    with (
        trainer(FakeMaster(), Columns({"a": 8}), dataset=dataset) as (_, made),
        pytest.raises(InvalidArgument, match=r"batches of columns .* are the transform's own"),
    ):
        next(iter(ElasticDataLoader(made, batch_size=None)))


class Shaker:
    """A generator of its own, as Albumentations has; not for two threads at once."""

    def __init__(self) -> None:
        self.rng = random.Random()
        self.busy = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shaker:
        return Shaker()

    def __reduce__(self) -> Any:
        return Shaker, ()

    def set_random_seed(self, seed: int) -> None:
        self.rng.seed(seed)

    def __call__(self, record: torch.Tensor) -> tuple[int, float]:
        assert self.busy.acquire(blocking=False), "two threads have one copy"
        try:
            return int(record[0, 0]), self.rng.random()
        finally:
            self.busy.release()


def test_an_object_with_generators_of_its_own_is_copied_for_each_thread_and_seeded() -> None:
    alone = samples(Shaker())
    assert len(set(alone.values())) == COUNT
    for arguments in WAYS:
        assert samples(Shaker(), **arguments) == alone, arguments


def test_a_function_that_hides_such_an_object_is_warned_of() -> None:
    shaker = Shaker()

    def hides(record: torch.Tensor) -> Any:
        return shaker(record)

    with pytest.warns(UserWarning, match=r"hides\(\) calls a Shaker.*Give the Shaker itself"):
        samples(hides)


# Images, by the libraries that people use -------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for label in ("a", "b"):
        (root / label).mkdir()
        for number in range(12):
            (root / label / f"{number:02}.jpg").write_bytes(encode(render(number, 40, 48)))
    return root


def image_batches(folder: Path, transform: Any, **arguments: Any) -> Iterator[Any]:
    with ElasticDataLoader(
        ImageFolderReader(folder), 4, seed=SEED, shuffle=True, transform=transform,
        master_client=LocalMaster(), num_epochs=2, **arguments,
    ) as loader:  # fmt: skip
        for _ in loader.epochs():
            yield from loader


def pipeline(version: str) -> Any:
    package = torchvision()
    t = package.transforms if version == "v1" else package.transforms.v2
    to_image = (
        t.ToTensor() if version == "v1" else t.Compose([t.ToImage(), t.ToDtype(torch.float32, scale=True)])
    )
    return t.Compose(
        [
            to_image,
            t.RandomResizedCrop(24, antialias=True),
            t.RandomHorizontalFlip(),
            t.ColorJitter(0.4, 0.4, 0.4, 0.1),
            t.RandomErasing(p=0.5),
        ]
    )


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_torchvision_makes_the_same_images_in_any_number_of_threads(
    version: str, folder: Path, logged: Callable[[], str]
) -> None:
    transform = pipeline(version)
    alone = list(image_batches(folder, transform))
    assert len(alone) == 12
    assert not torch.equal(alone[0][0][0], alone[0][0][1])
    for arguments in WAYS[1:] if version == "v2" else WAYS[2:3]:
        found = list(image_batches(folder, transform, **arguments))
        for (images, labels), (others, other_labels) in zip(found, alone, strict=True):
            assert torch.equal(images, others), arguments
            assert torch.equal(labels, other_labels)
    assert not logged()


def test_a_resume_with_another_number_of_threads_makes_the_same_images(folder: Path) -> None:
    transform = pipeline("v2")
    alone = list(image_batches(folder, transform))
    seen, token = [], None
    for arguments in WAYS:
        with ElasticDataLoader(
            ImageFolderReader(folder), 4, seed=SEED, shuffle=True, transform=transform,
            master_client=LocalMaster(), num_epochs=2, **arguments,
        ) as loader:  # fmt: skip
            if token is not None:
                loader.load_state_dict(token)
            batches = iter(loader)
            seen.append(next(batches))
            token = loader.state_dict()
    for (images, labels), (others, other_labels) in zip(seen, alone, strict=False):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    assert len(seen) == len(WAYS)


def test_albumentations_makes_the_same_images_in_any_number_of_threads(folder: Path) -> None:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    albumentations = pytest.importorskip("albumentations")
    transform = albumentations.Compose(
        [
            albumentations.RandomResizedCrop(size=(24, 24)),
            albumentations.HorizontalFlip(),
            albumentations.RandomBrightnessContrast(),
        ]
    )
    alone = list(image_batches(folder, transform))
    assert not torch.equal(alone[0][0][0], alone[0][0][1])
    for arguments in WAYS[1:]:
        found = list(image_batches(folder, transform, **arguments))
        for (images, labels), (others, other_labels) in zip(found, alone, strict=True):
            assert torch.equal(images, others), arguments
            assert torch.equal(labels, other_labels)
