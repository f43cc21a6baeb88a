"""The rooms of the package and the arrows between them, read off the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "edl_torch"

# room: what it may import of the package, beside itself
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "shard": set(),
    "fingerprint": {"errors"},
    "protocols": set(),  # whose doors are imported by their rows
    "core": {"errors", "shard", "fingerprint"},
    "system": {"errors", "shard"},
    "rpc": {"errors", "shard", "core", "protocols"},
    "master": {"errors", "shard", "core", "rpc", "system", "protocols", "__version__"},
    "readers": {"errors", "shard", "fingerprint", "system"},
    "trainer": {"errors", "shard", "core"},
    "audit": {"errors", "shard", "fingerprint", "core", "trainer"},
    "checking": {"errors", "shard", "fingerprint", "core", "readers", "system"},
    "client": {"errors", "shard", "fingerprint", "core", "trainer", "rpc", "audit", "system", "readers"}
    | {"master.embedded", "master.web", "protocols", "integrations.engines"},
    "data": {"errors", "shard", "core", "trainer", "client", "readers", "system", "integrations.frameworks"}
    | {"integrations.engines"},
    "integrations": {"errors", "shard", "core", "trainer", "rpc", "master", "client", "readers", "data"}
    | {"system"},
    "elasticdl": {"errors", "shard", "core", "rpc", "master", "client", "system"},
    "testing": {"errors", "shard", "core", "trainer", "master", "readers", "client"},
    "cli": {"errors", "shard", "core", "trainer", "rpc", "master", "readers", "client", "audit", "checking"}
    | {"system", "protocols", "__version__"},
    "__main__": {"cli"},
    "__init__": set(),  # lazily, all of it
}

# package: the modules that may import it, as prefixes
FOREIGN: dict[str, tuple[str, ...]] = {
    "torch": (
        "data",
        "client.leftovers",
        "client.watched",
        "client.model",
        "client.optimizers",
        "client.torchrun",
        "integrations.transformers",
        "integrations.torchtitan",
    ),
    "grpc": (
        *(
            "rpc",
            "master.server",
            "master.servicer",
            "master.health",
            "elasticdl.servicer",
        ),
        *("client.grpc.client", "client.grpc.channel", "client.grpc.client", "client.grpc.client"),
    ),
    "grpc_health": ("master.health",),
    "aiohttp": ("master.web.app",),
    "prometheus_client": ("master.web.metrics",),
    "rich": ("cli.top",),
    "google": ("rpc", "elasticdl.wire", "elasticdl.elasticdl_pb2", "master.servicer", "client.grpc.client"),
    "cv2": ("readers", "checking.sheet"),
    "pycocotools": ("readers",),
    "PIL": (),
    "obstore": ("readers.storage",),
    "fsspec": ("readers.storage",),
    "ray": ("integrations.ray",),
    "tensorflow": ("integrations.tensorflow",),
    "lightning": ("integrations.lightning",),
    "accelerate": ("integrations.accelerate",),
    "transformers": ("integrations.transformers",),
    "torchtitan": ("integrations.torchtitan",),
    "torchft": (),
    "tyro": ("integrations.torchtitan",),
    "cramjam": ("readers",),
    "google_crc32c": ("readers",),
    "odps": ("readers.odps.client",),
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target`; `lazy` when only inside a function."""

    module: str
    target: str
    line: int
    lazy: bool

    @property
    def room(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]
    return tuple(
        (name.removesuffix(".__init__"), ast.parse(path.read_text("utf-8")))
        for name, path in zip(names, paths, strict=True)
    )


def imports_of(module: str, tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(module, alias.name, node.lineno, lazy)
            case ast.ImportFrom(module=target, names=names, level=0):
                for alias in names:
                    yield Import(module, f"{target}.{alias.name}", node.lineno, lazy)
            case ast.ImportFrom():
                raise AssertionError(f"{module}:{node.lineno}: a relative import hides the arrow")
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=rest):
                for child in rest:
                    yield from imports_of(module, child, lazy=lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imports_of(module, node, lazy=True)
            case _:
                yield from imports_of(module, node, lazy=lazy)


@cache
def every_import() -> tuple[Import, ...]:
    return tuple(found for module, tree in modules() for found in imports_of(module, tree))


def within(name: str, prefixes: tuple[str, ...] | set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_every_room_has_its_arrows() -> None:
    assert {module.split(".")[0] for module, _ in modules()} <= set(ARROWS)


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for found in every_import():
        root, _, target = found.target.partition(".")
        if root != "edl_torch" or found.room == "__init__":
            continue
        if not within(target, ARROWS.get(found.room, set()) | {found.room}):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", FOREIGN)
def test_foreign_packages_stay_in_their_rooms(package: str) -> None:
    wrong = [
        str(found)
        for found in every_import()
        if found.target.split(".")[0] == package and not within(found.module, FOREIGN[package])
    ]
    assert not wrong, "\n".join(wrong)


PURE = {"core", "trainer"}


@pytest.mark.parametrize("room", sorted(PURE))
def test_what_is_pure_touches_no_outside_world(room: str) -> None:
    outside = {
        "socket",
        "asyncio",
        "urllib",
        "http",
        "multiprocessing",
        "threading",
        "os",
        "pathlib",
        "random",
    }
    wrong = [str(found) for found in every_import() if found.room == room and within(found.target, outside)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(PURE))
def test_what_is_pure_reads_no_clock(room: str) -> None:
    wrong = [
        str(found)
        for found in every_import()
        if found.room == room and within(found.target, {"time", "datetime"})
    ]
    assert not wrong, "\n".join(wrong)


def test_the_trainer_knows_values_and_rules_alone() -> None:
    """No thread, clock, log, chance, file, network or array: whoever runs it, it decides the same."""
    pure = {"collections", "contextlib", "dataclasses", "enum", "itertools", "math", "typing"}
    known = {"__future__", "edl_torch", *pure}
    wrong = [
        str(found)
        for found in every_import()
        if found.room == "trainer" and found.target.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


# Statements that a program may run one after the other, and what none has brought in by then.
WITHOUT = {
    "neither grpc nor torch": [
        ("import edl_torch", "torch cv2 grpc numpy pycocotools"),
        ("from edl_torch.system import address, fresh_names, processes, termination", "torch cv2 grpc numpy"),
        ("import edl_torch.master.embedded, edl_torch.testing", "torch cv2 grpc google.protobuf"),
        (
            "edl_torch.readers.CsvReader, edl_torch.errors.BadRecord, edl_torch.testing.FakeMaster",
            "torch cv2 grpc",
        ),
        ("from edl_torch import DataShardService, AbstractDataReader, Shard", "torch cv2 grpc"),
        ("import edl_torch.integrations.records", "torch cv2 grpc tensorflow"),
        ("import edl_torch.client.torchrun", "torch cv2 grpc"),
    ],
    "no torch": [
        ("from edl_torch import MasterClient", "torch cv2"),
        ("import edl_torch.master, edl_torch.cli.main, edl_torch.master.server", "torch cv2 pycocotools"),
        (
            "import edl_torch.cli.master, edl_torch.cli.datasets, edl_torch.cli.status",
            "torch cv2 pycocotools",
        ),
    ],
    "no grpc": [
        ("import edl_torch.data.loader", "cv2 grpc pycocotools"),
        ("from edl_torch import ElasticDataLoader", "cv2 grpc pycocotools"),
        ("with ElasticDataLoader(range(8), batch_size=4) as one: list(one)", "torch._dynamo cv2 grpc"),
    ],
}


@pytest.mark.parametrize("statements", WITHOUT.values(), ids=list(WITHOUT))
def test_importing_brings_in_no_more_than_is_needed(statements: list[tuple[str, str]]) -> None:
    looks = (
        f"{statement}\nprint(*(({statement!r}, name) for name in {absent.split()} if name in sys.modules))"
        for statement, absent in statements
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import sys", *looks])],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=60,
        check=True,
    )
    assert not done.stdout.strip(), done.stdout


def words_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What code says: its names and strings, and neither comments nor docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if id(node) in docs:
            continue
        for _, value in ast.iter_fields(node):
            if isinstance(value, str):
                yield value, getattr(node, "lineno", 0)


def test_a_foreign_protocol_is_named_by_its_row_and_its_room_alone() -> None:
    from edl_torch.protocols import DOORS

    may_say = {"__init__", "protocols"}  # a public name that is imported when it is used, and the row
    named = {
        f"{module}:{line}"
        for module, tree in modules()
        for word, line in words_of(tree)
        for name in DOORS
        if name in word.lower() and module.split(".")[0] not in {*may_say, name}
    }
    assert DOORS
    assert not named, "\n".join(sorted(named))


def test_public_names_are_complete() -> None:
    import edl_torch

    for name in edl_torch.__all__:
        assert getattr(edl_torch, name) is not None
    assert set(edl_torch.__all__) <= set(dir(edl_torch))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = edl_torch.Nothing
