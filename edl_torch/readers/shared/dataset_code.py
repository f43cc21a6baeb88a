"""What the code of a map-style dataset tells of its records, for the dataset's fingerprint.

Two datasets may have the same attributes and give other records: code names a table of its module or a number
of its class, `__init__` keeps an argument, a function holds a value. Python's bytecode tells what each
instruction names, so nothing is called to find these. Code that makes records is a dataset's `__getitem__`
and functions that it has, and methods and functions that these call, but those of installed packages.

A value that code writes to, as it counts calls, tells no data apart. What may be data is for `dataset_looks`
to say, which asks here.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from edl_torch.readers.shared.looks import OF_A_PROCESS, is_value

_WRITERS = {
    *("append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "sort"),
    *("add", "discard"),
}
_OPENERS = {
    *("open", "fdopen", "urlopen", "connect", "imread", "read_image", "read_bytes", "read_text", "read_file"),
    *("load", "loadmat", "loadtxt", "fromfile", "memmap", "File", "read_csv", "read_table", "read_parquet"),
    *("read_pickle", "read_json", "read_feather", "genfromtxt", "ZipFile", "TarFile", "load_file"),
    *("load_dataset", "open_dataset", "dcmread", "VideoCapture", "VideoReader"),
}
_OF_A_RUN = {
    *("getpid", "getppid", "get_ident", "get_native_id", "gethostname", "id", "hash", "urandom", "uuid4"),
    *("time_ns", "perf_counter_ns", "monotonic_ns", "now", "utcnow", "today"),
}
_MAKING = {"__init__", "__post_init__", "__setstate__"}
# Of a text in code: `/data/`, `x.bin`
_PATH = re.compile(r"^\S*(?:\w[/\\]|[/\\]\w|\w\.[A-Za-z]\w{1,7}$)\S*$")
_FAST = re.compile("(?:LOAD|STORE)_FAST")
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<frozen ")


class Code(NamedTuple):
    """What an object's code tells of the names of its attributes. None of these tells of the process."""

    made_with: set[str]  # named as an argument, or values of its class that code which makes records names
    named: set[str]  # by code that makes records
    written: set[str]  # by methods that do not make it
    literals: set[str]  # values that `__init__` has
    is_of_a_run: bool  # whether `__init__` asks for clocks, processes or identities
    opens: bool  # whether code that makes records opens files, or has a text that may be the path of one
    filled: set[str]  # that code which makes records writes to
    stored_in: set[str]  # what such code may store entries in
    computed_once: set[str]  # cached properties that code which makes records names


def makers_of(found: Any, called: set[str]) -> list[FunctionType]:
    """Return what makes an object's records: with names that are `called` elsewhere, where they are its
    methods'. What the code names is added to them."""
    kind, makers = type(found), list[FunctionType]()
    roots = ("__getitem__", "__getitems__", *sorted(called))
    ahead = [vars(base)[name] for name in roots for base in kind.__mro__[::-1] if name in vars(base)]
    is_ours = functools.partial(_is_ours, {base.__module__ for base in kind.__mro__})
    ahead += filter(is_ours, getattr(found, "__dict__", {}).values())
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
        makers.append(function)
        names = _names_in(function.__code__) - _MAKING
        called |= {name for name in names if not name.startswith("__")}
        ahead += [vars(base)[name] for base in kind.__mro__ for name in sorted(names) if name in vars(base)]
        ahead += filter(is_ours, _reached(function).values())
        ahead += filter(is_ours, (value for _, value in held_by(function)))
    return makers


def named_in_code(
    found: Any, makers: Sequence[FunctionType], may_be_data: Callable[[Any], bool]
) -> tuple[dict[str, Any], set[str]]:
    """Return what code names that makes an object's records: data, values and texts of modules and classes,
    by name, numbered where several have one; and the names of data that it may write to."""
    held: defaultdict[str, list[Any]] = defaultdict(list)
    own = {id(value) for value in getattr(found, "__dict__", {}).values()}  # what these hold has their name
    written = set[int]()
    for function in makers:
        code = function.__code__
        names = {name for name in _names_in(code) if not name.startswith("__")}
        of_function = held_by(function) if id(function) not in own else ()
        each = {f"{code.co_name}.{name}": value for name, value in of_function} | _reached(function)
        for kind in reversed(type(found).__mro__):
            each |= {name: vars(kind)[name] for name in sorted(names) if name in vars(kind)}
        for path, value in list(each.items()):
            if isinstance(value, functools.partial | functools.partialmethod):
                each |= {f"{path}.{name}": one for name, one in held_by(value)}
        stored = _named_by(code, "STORE_ATTR", "STORE_GLOBAL")
        into = _named_by(code, "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL") | _WRITERS.intersection(names)
        for path, value in each.items():
            name = path.rpartition(".")[2].removeprefix("global ")
            is_one = is_value(value) or isinstance(value, str | os.PathLike)
            is_told = is_one and not (name in stored or name.lower() in OF_A_PROCESS)
            is_data = not is_one and may_be_data(value)
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


def _is_ours(modules: set[str], member: Any) -> bool:
    """Whether it is a function of these modules, or of none that is installed."""
    function = _unwrapped(member)
    return isinstance(function, FunctionType) and (
        function.__module__ in modules
        or all(part not in function.__code__.co_filename for part in _LIBRARIES)
    )


def _reached(function: FunctionType) -> dict[str, Any]:
    """What code reaches from names of its module and what it imports: `SCALE`, `settings.SCALE`."""
    reached: dict[str, Any] = {}
    known, local = function.__globals__, dict[str, tuple[str, Any]]()
    path, value, imported = "", None, None
    for opcode, name in _instructions(function.__code__):
        before = path
        if opcode == "IMPORT_NAME":
            there = f"{known.get('__package__')}.{name}".rstrip(".")
            imported = sys.modules.get(name) or sys.modules.get(there)
            # A text where it is not there yet: what it may say of records is not known.
            path, value = name, sys.modules.get(name.partition(".")[0], imported) or name
        elif opcode == "IMPORT_FROM":
            path, value = name, inspect.getattr_static(imported, name, imported)
        elif opcode == "STORE_FAST" and path:
            local[name], path = (path, value), ""
        elif opcode == "LOAD_GLOBAL" and name in known:
            path, value = name, known[name]
        elif opcode == "LOAD_FAST" and name in local:
            path, value = local[name]
        elif path and opcode in ("LOAD_ATTR", "LOAD_METHOD"):
            path, value = f"{path}.{name}", inspect.getattr_static(value, name, None)
            if is_value(value):
                reached.pop(f"global {before}", None)  # what else it has is not asked for
        else:
            path = ""
        if path and "__" not in path:
            reached[f"global {path}"] = value
    return reached


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
    if isinstance(member, staticmethod | classmethod | MethodType):
        return member.__func__
    if isinstance(member, functools.partial | functools.partialmethod | functools.cached_property):
        return member.func
    return inspect.getattr_static(member, "__wrapped__", None)


def code_of(kind: type, makers: Sequence[FunctionType]) -> Code:
    """Return what an object's code tells of its attributes."""
    named = {name for function in makers for name in _names_in(function.__code__)}
    made_with, literals, of_init = set[str](), set[str](), set[str]()
    filled = {name for function in makers for name in _named_by(function.__code__, "STORE_ATTR")}
    codes = [function.__code__ for function in makers if _named_by(function.__code__, "STORE_SUBSCR")]
    stored_in = {name for code in codes for name in _named_by(code, "LOAD_ATTR")}
    members = [pair for base in kind.__mro__ for pair in vars(base).items() if pair[0] in named]
    computed_once = {name for name, member in members if isinstance(member, functools.cached_property)}
    written = {*filled}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if name in named and is_value(member):
                made_with.add(name)
            for one in (member.fget, member.fset) if isinstance(member, property) else (member,):
                # A class method that makes an object is none: it may write to any attribute.
                function = _unwrapped(one) if isinstance(one, FunctionType) else None
                if not isinstance(function, FunctionType):
                    continue
                code = function.__code__
                if name == "__init__":
                    given = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
                    hidden = f"_{base.__name__.lstrip('_')}__"
                    made_with.update(*((each, f"_{each}", hidden + each) for each in given))
                    literals |= {repr(one) for one in code.co_consts}
                    of_init |= _names_in(code)
                elif name not in _MAKING:
                    written |= _named_by(code, "STORE_ATTR")
    ours = {name for name in made_with | named if name.rpartition("__")[2].lstrip("_") in OF_A_PROCESS}
    opens = bool(_OPENERS & named.difference(*(vars(base) for base in kind.__mro__)))
    opens = opens or any(map(_PATH.search, set().union(*(_texts_in(function) for function in makers))))
    is_of_a_run = bool(_OF_A_RUN & of_init)
    made_with, named = made_with - ours, named - ours
    return Code(made_with, named, written, literals, is_of_a_run, opens, filled, stored_in, computed_once)


def held_by(function: Any) -> list[tuple[str, Any]]:
    """Return what a function has beside its arguments, by name, but values that it writes to, as it counts
    calls; cells that are still empty have nothing."""
    if isinstance(function, functools.partial | functools.partialmethod):
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
    return [pair for pair in held if not (pair[0] in written and is_value(pair[1]))]


# Bytecode ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in code, and its texts: `getattr(self, "scale")`."""
    texts = (text for one in _codes(code) for text in one.co_consts if isinstance(text, str))
    return frozenset(texts).union(*(one.co_names for one in _codes(code)))


def _texts_in(function: FunctionType) -> set[str]:
    """The texts in code that it has not for its reader."""
    texts = {text for one in _codes(function.__code__) for text in one.co_consts if isinstance(text, str)}
    return texts - {function.__doc__}


@functools.lru_cache(maxsize=4096)
def _named_by(code: CodeType, *opcodes: str) -> frozenset[str]:
    """What some instructions of code name."""
    return frozenset(name for opcode, name in _instructions(code) if opcode in opcodes)


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> list[tuple[str, str]]:
    """The instructions of code, each with what it names."""
    found = list[tuple[str, str]]()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            opcode, named = instruction.opname, instruction.argval
            if isinstance(named, tuple):  # two in one: STORE_FAST_LOAD_FAST
                found += zip(_FAST.findall(opcode), named, strict=False)
            elif opcode != "EXTENDED_ARG":
                found.append((opcode.removesuffix("_BORROW"), named if isinstance(named, str) else ""))
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions inside of it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
