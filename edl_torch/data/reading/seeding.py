"""Random augmentation that depends on the record and the epoch alone, not on workers or threads.

A transform draws in one of three ways, and each record has a seed for all of them:

* from the global generators of Python, numpy and torch. `Generators` seeds them for a record, and puts them
  back. They are shared by all threads, so one thread does this.
* by torch, in a thread that `_Draws` serves: from a generator of the thread's own, which draws the same
  numbers as the seeded global one. So any number of threads transform at once.
* from what it is given (`draws_by_itself`): a parameter `rng` or `generator`, or `set_random_seed()`.

This file does not know what a transform does.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import random
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from edl_torch.core.permutation import derive_key
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Indices
from edl_torch.system.user_warnings import warn_user

log = logging.getLogger("edl_torch.client")

_WEYL, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


class Generators:
    """The global generators of Python, numpy and torch (CPU), lent to records and put back as they were.

    To put them back costs more than to seed them. So where it is known when somebody else draws next they
    are put back then, by that one; else after each record.
    """

    def __init__(self, *, after_each: bool) -> None:
        self._after_each = after_each
        self.lent: GeneratorStates | None = None  # how they were, while records have them

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lent": None}

    def seeded(self, transform: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
        """`transform` as a function of a record and its seed, a number in [0, 2⁶⁴)."""

        def call(record: Any, seed: int) -> Any:
            if self.lent is None:
                self.lent = GeneratorStates()
            _seed(seed)
            try:
                return _of_record(seed, transform, record)
            finally:
                if self._after_each:
                    self.put_back()

        return call

    def put_back(self) -> None:
        """Let the generators go on from where they were before the first record."""
        own, self.lent = self.lent, None
        if own is not None:
            own.restore()

    def drawn_since(self, seed: int) -> list[str]:
        """Return the generators drawn from since they were seeded by `seed`; they are so again."""
        now = GeneratorStates()
        _seed(seed)
        return now.unlike(GeneratorStates())


class GeneratorStates:
    """The states of the global generators of Python, numpy and torch (CPU) at a moment."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.get_rng_state()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates):
            return NotImplemented
        return not self.unlike(other)

    def unlike(self, other: GeneratorStates) -> list[str]:
        """Return the names of the generators whose states differ."""
        same = {
            "random": self._python == other._python,
            "numpy.random": self._numpy[0] == other._numpy[0]
            and self._numpy[2:] == other._numpy[2:]
            and np.array_equal(self._numpy[1], other._numpy[1]),
            "torch": torch.equal(self._torch, other._torch),
        }
        return [name for name, is_same in same.items() if not is_same]

    def restore(self) -> None:
        """Let the generators go on from here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    module: Any = torch.random
    module.default_generator.manual_seed(seed)


def record_seeds(seed: int, epoch: int, records: Indices, folder: str = "") -> list[int]:
    """A seed in [0, 2⁶⁴) for each record: a function of `seed`, the epoch, the source and the number.

    Of a source's name that counts which comes after `folder`: the same data may lie elsewhere. Of a
    mixture the epoch is the pass over the component.
    """
    below = (name.removeprefix(folder) for name in records.names)
    names = [zlib.crc32(name.encode("utf-8", "surrogatepass")) << 32 for name in below]
    sources = np.array(names, np.uint64)[0 if records.sources is None else records.sources]
    base: Any = _base(seed, epoch)
    if records.passes is not None:
        passes, inverse = np.unique(records.passes, return_inverse=True)
        base = np.array([_base(seed, number) for number in passes.tolist()], np.uint64)[inverse]
    mixed = base ^ sources ^ (records.numbers.astype(np.uint64) * np.uint64(_WEYL))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    seeds: list[int] = (mixed ^ (mixed >> np.uint64(31))).tolist()
    return seeds


def _base(seed: int, epoch: int) -> np.uint64:
    return np.uint64(derive_key(seed, epoch, "augment") & 0xFFFFFFFFFFFFFFFF)


class _Now(threading.local):
    """The record that this thread transforms."""

    seed: int | None = None
    own: torch.Generator | None = None
    is_drawn_for = False  # whether torch draws from its own

    def generator(self) -> torch.Generator | None:
        """The record's own, from its first draw on. None in a thread that transforms no record."""
        if self.own is None and self.seed is not None:
            self.own = torch.Generator().manual_seed(self.seed)
        return self.own

    @functools.cached_property
    def draws(self) -> _Draws | None:
        with _made:
            return _draws()


_now = _Now()


def _of_record(seed: int, transform: Callable[[Any], Any], record: Any) -> Any:
    """Return `transform(record)`; what it asks for in this thread comes of the seed."""
    before, _now.seed, _now.own = (_now.seed, _now.own), seed, None
    try:
        return transform(record)
    finally:
        _now.seed, _now.own = before  # a transform may read by a loader of its own


# torch's random numbers in a thread -------------------------------------------------------------------------


class _Draws:
    """torch's operators draw from the record's generator, in threads that ask for it.

    Each call of torch's goes through its dispatcher, by keys that a thread may include. One of them stands
    before all others and has no kernels: it gets some for the operators that take a generator, and lets all
    others pass, at no cost. So whatever draws is found, in torchvision, dropout or TorchScript. The numbers
    are those that the seeded global generator would give: both are torch's Mersenne Twister.
    """

    _KEY = "TESTING_ONLY_GenericMode"

    def __init__(self) -> None:
        self._key: Any = torch._C._dispatch_key_parse(self._KEY)
        library: Any = torch.library  # which has no types
        self._all = library.Library("_", "IMPL", self._KEY)  # in force for as long as these live
        self._aten = library.Library("aten", "IMPL", self._KEY)
        self._all.fallback(library.fallthrough_kernel, self._KEY)
        for schema in torch._C._jit_get_all_schemas():
            name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
            names = [argument.name for argument in schema.arguments]
            # Others are made of these.
            if schema.name.startswith("aten::") and "generator" in names and _has_cpu_kernel(name):
                draw = self._drawing(schema, names.index("generator"))
                self._aten.impl(name.removeprefix("aten::"), draw, self._KEY, with_keyset=True)
        module: Any = torch.random
        module.default_generator = _OfThread()

    def here(self) -> AbstractContextManager[Any]:
        """Draw so in this thread, within the context."""
        guard: AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(self._key)
        return guard

    def _drawing(self, schema: Any, generator: int) -> Callable[..., Any]:
        """The kernel of an operator whose generator is the argument of that number."""
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        redispatch = getattr(packet, schema.overload_name or "default").redispatch
        tensor = [str(argument.type) for argument in schema.arguments].index("Tensor")
        below = torch._C._dispatch_keyset_full_after(self._key)

        def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:  # defaults are left out
            if len(args) <= generator and kwargs.get("generator") is None:
                drawn = args[tensor] if tensor < len(args) else kwargs["out"]
                if drawn.is_cpu:
                    kwargs["generator"] = _now.generator()
            return redispatch(keys & below, *args, **kwargs)

        return draw


class _OfThread:
    """The default generator as `torch.random` asks for it: in a thread that draws for a record, its own."""

    def __getattr__(self, name: str) -> Any:
        own = _now.generator() if _now.is_drawn_for else None
        return getattr(torch._C.default_generator if own is None else own, name)


def _has_cpu_kernel(name: str) -> bool:
    try:
        found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    except RuntimeError:  # TorchScript has it alone
        return False
    return found


_made = threading.Lock()


@functools.cache
def _draws() -> _Draws | None:
    """Return the process's own; None where this torch has no such key: whoever compares the global generators
    notices what is drawn from them."""
    try:
        return _Draws()
    except (AttributeError, RuntimeError, TypeError) as error:
        log.info(
            "torch %s cannot draw for each thread, so one thread transforms where a transform draws (%s)",
            torch.__version__,
            error,
        )
        return None


def transform_in_thread(transform: Callable[[Any], Any], record: Any, seed: int) -> Any:
    """Return `transform(record)`; torch draws from a generator of the record's own."""
    draws = _now.draws
    before, _now.is_drawn_for = _now.is_drawn_for, draws is not None
    try:
        with nullcontext() if draws is None else draws.here():
            return _of_record(seed, transform, record)
    finally:
        _now.is_drawn_for = before


# What draws from a generator that it is given ---------------------------------------------------------------


def draws_by_itself(transform: Callable[..., Any] | None) -> bool:
    """Whether a transform takes `rng` or `generator`, or has `set_random_seed()`."""
    return transform is not None and bool(_seeded_methods(transform) or _asks_for(transform))


def with_own_numbers(transform: Callable[..., Any] | None) -> Callable[[Any], Any] | None:
    """Return `transform` as a function of the record alone; its numbers are those of the record's seed.

    * A parameter `rng` gets a `numpy.random.Generator` (PCG64), `generator` a `torch.Generator` (CPU).
    * One with `set_random_seed(seed)`, as Albumentations' since 1.4.19, is copied for each thread. What says
      its `available_keys`, as Albumentations' do, is called with `image=`, or with the items of a dict.

    A function that only holds such an object is called as it is, with a warning: what it holds cannot be
    copied for each thread.
    """
    if transform is None:
        return None
    if _seeded_methods(transform):
        return _Copied(transform)
    asked = _asks_for(transform)
    if asked is not None:
        return _Given(transform, asked)
    held = _held(transform)
    if held is not None:
        kind = type(held).__name__
        warn_user(
            f"{name_of(transform)} calls a {kind}, which has random numbers of its own: they depend on the "
            f"order in which records come, not on the record. Give the {kind} itself as transform, or an "
            f"object with set_random_seed(seed)"
        )
    return transform


def name_of(transform: Any) -> str:
    while isinstance(transform, functools.partial):
        transform = transform.func
    name = getattr(transform, "__qualname__", None)
    return f"{name}()" if name else f"transform {type(transform).__name__}"


class _Given:
    """A transform that takes a generator as a second argument."""

    def __init__(self, transform: Callable[..., Any], name: str) -> None:
        self._transform = transform
        self._name = name

    def __call__(self, record: Any) -> Any:
        seed = _seed_now()
        if self._name == "rng":
            return self._transform(record, rng=np.random.Generator(np.random.PCG64(seed)))
        return self._transform(record, generator=torch.Generator().manual_seed(seed))


class _Copied:
    """A transform with generators of its own; each thread has a copy, seeded for each record."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform
        self._by_key = hasattr(transform, "available_keys")
        self._copies = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Copied, (self._transform,)

    def __call__(self, record: Any) -> Any:
        mine = getattr(self._copies, "transform", None)
        if mine is None:
            mine = self._copies.transform = copy.deepcopy(self._transform)
        mine.set_random_seed(_seed_now() & 0xFFFFFFFF)
        if not self._by_key:
            return mine(record)
        return mine(**record) if isinstance(record, dict) else mine(image=record)["image"]


def _seed_now() -> int:
    if _now.seed is None:
        raise InvalidArgument(
            "transform draws by the record's seed, and is called for no record of a pass: random numbers of "
            "batches of columns (batch_size=None) are the transform's own"
        )
    return _now.seed


def _seeded_methods(transform: object) -> bool:
    return callable(getattr(transform, "set_random_seed", None)) and not isinstance(transform, type)


def _asks_for(transform: Callable[..., Any]) -> str | None:
    try:
        parameters = list(inspect.signature(transform).parameters.values())[1:]
    except (TypeError, ValueError):  # built-in, or no signature
        return None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return next((name for name in ("rng", "generator") if name in named), None)


def _held(transform: Any) -> object | None:
    """Return an object with `set_random_seed()` that a function holds, or None."""
    while isinstance(transform, functools.partial):
        transform = transform.func
    if not inspect.isfunction(transform):
        return None
    variables = inspect.getclosurevars(transform)
    values = (*variables.nonlocals.values(), *variables.globals.values())
    return next((value for value in values if _seeded_methods(value)), None)
