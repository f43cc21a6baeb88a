"""What the code of a map-style dataset tells of its records, for the dataset's fingerprint.

Two datasets may have the same attributes and give other records: code names a table of its module or a number
of its class, `__init__` keeps an argument, a function holds a value. Python's bytecode tells what each
instruction names, so nothing is called to find these. Code that makes records is a dataset's `__getitem__`,
and methods and functions of its modules that this calls.

A number that code writes to, as it counts calls, tells no data apart. What may be data is for `dataset_looks`
to say, which asks here.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, timedelta
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from edl_torch.readers.shared.looks import OF_A_PROCESS

_WRITERS = {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "sort"}


def named_in_code(found: Any, may_be_data: Callable[[Any], bool]) -> tuple[dict[str, Any], set[str]]:
    """Return what code names that makes an object's records: data, numbers and texts of modules and classes,
    by name, numbered where several have one; and the names of data that it may write to."""
    held: defaultdict[str, list[Any]] = defaultdict(list)
    written = set[int]()
    for function in _makers_of(type(found)):
        code, scope = function.__code__, function.__globals__
        names = sorted(name for name in _names_in(code) if not name.startswith("__"))
        known = sorted(_named_by(code, "LOAD_GLOBAL") & scope.keys() & {*names})
        each = {f"{code.co_name}.{name}": value for name, value in held_by(function)}
        each |= {f"global {name}": scope[name] for name in known}
        modules = {name: vars(scope[name]) for name in known if isinstance(scope[name], ModuleType)}
        for (opcode, module), (then, name) in pairwise(_instructions(code)):
            is_read = opcode == "LOAD_GLOBAL" and then in ("LOAD_ATTR", "LOAD_METHOD")
            if is_read and name in names and name in modules.get(module, ()):
                each[f"global {module}.{name}"] = modules[module][name]
        for kind in reversed(type(found).__mro__):
            each |= {name: vars(kind)[name] for name in names if name in vars(kind)}
        stored = _named_by(code, "STORE_ATTR", "STORE_GLOBAL")
        into = _named_by(code, "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL") | _WRITERS.intersection(names)
        for path, value in each.items():
            name = path.rpartition(".")[2].removeprefix("global ")
            is_plain = is_number(value) or isinstance(value, str)
            is_told = is_plain and not (name in stored or name.lower() in OF_A_PROCESS)
            is_data = may_be_data(value)
            if (is_told or is_data) and all(value is not one for one in held[path]):
                held[path].append(value)
            if is_data and into:
                written.add(id(value))
    named = {
        f"{path} ({number})" if number else path: value
        for path, values in held.items()
        for number, value in enumerate(values)
    }
    return named, {name for name, value in named.items() if id(value) in written}


def _makers_of(kind: type) -> Iterator[FunctionType]:
    """Yield what makes an object's records."""
    ahead: list[Any] = [getattr(kind, name, None) for name in ("__getitem__", "__getitems__")]
    met = set[int]()
    while ahead:
        function = ahead.pop()
        if id(function) in met:
            continue
        met.add(id(function))
        if (inside := _wrapped_by(function)) is not None:
            ahead.append(inside)
        if not isinstance(function, FunctionType):
            continue
        yield function
        names = sorted(_names_in(function.__code__))
        ahead += [vars(base)[name] for base in kind.__mro__ for name in names if name in vars(base)]
        called = (function.__globals__.get(name) for name in names)
        ahead += [
            one for one in called if isinstance(one, FunctionType) and one.__module__ == function.__module__
        ]


def _unwrapped(member: Any) -> Any:
    """The innermost of what a member of a class wraps; None where wrappers wrap each other."""
    met = set[int]()
    while (inside := _wrapped_by(member)) is not None:
        if id(inside) in met:
            return None
        met.add(id(inside))
        member = inside
    return member


def _wrapped_by(member: Any) -> Any:
    """What a member of a class wraps. It is not asked: one that holds settings may answer to any name."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return inspect.getattr_static(member, "__wrapped__", None)


@functools.lru_cache(maxsize=256)
def arguments_of(kind: type) -> frozenset[str]:
    """Return names of attributes that are named as an argument of a class, or are numbers of its own that
    code which makes records names, and that are written to as it is made alone: none that tells of the
    process."""
    names, written = set[str](), set[str]()
    named = {name for function in _makers_of(kind) for name in _names_in(function.__code__)}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if is_number(member) and name in named:
                names |= {name} - OF_A_PROCESS
            for one in (member.fget, member.fset) if isinstance(member, property) else (member,):
                # A class method that makes an object is none: it may write to any attribute.
                function = _unwrapped(one) if isinstance(one, FunctionType) else None
                if not isinstance(function, FunctionType):
                    continue
                code = function.__code__
                if name == "__init__":
                    arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
                    names.update(*((each, f"_{each}") for each in arguments if each not in OF_A_PROCESS))
                elif name not in ("__post_init__", "__setstate__"):
                    written |= _named_by(code, "STORE_ATTR")
    return frozenset(names - written)


def held_by(function: Any) -> list[tuple[str, Any]]:
    """Return what a function has beside its arguments, by name, but numbers that it writes to, as it counts
    calls; cells that are still empty have nothing."""
    if isinstance(function, functools.partial):
        given = [(str(number), value) for number, value in enumerate(function.args)]
        return [*held_by(function.func), *given, *function.keywords.items()]
    if not isinstance(function, FunctionType):
        return []
    held = [*(function.__kwdefaults__ or {}).items()]
    code, defaults = function.__code__, function.__defaults__ or ()
    held += zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            held.append((name, cell.cell_contents))
    functions = [function, *(value for _, value in held if isinstance(value, FunctionType))]
    written = {name for one in functions for name in _named_by(one.__code__, "STORE_DEREF")}
    return [pair for pair in held if not (pair[0] in written and is_number(pair[1]))]


def is_number(value: Any) -> bool:
    """Whether it is a number, a date or a time."""
    return isinstance(value, int | float | date | timedelta) or (
        isinstance(value, np.generic) and isinstance(value.item(), int | float)
    )


# Bytecode ----------------------------------------------------------------------------------------------


def _names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in code."""
    return {name for one in _codes(code) for name in one.co_names}


def _named_by(code: CodeType, *opcodes: str) -> set[str]:
    """What some instructions of code name."""
    return {name for opcode, name in _instructions(code) if opcode in opcodes}


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> list[tuple[str, str]]:
    """The instructions of code, each with what it names."""
    each = (instruction for one in _codes(code) for instruction in dis.get_instructions(one))
    named = ((one.opname, one.argval if isinstance(one.argval, str) else "") for one in each)
    return [one for one in named if one[0] != "EXTENDED_ARG"]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions inside of it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
