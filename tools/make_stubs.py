"""Regenerate the protobuf modules from the `.proto` files: `make stubs`.

They are made by the oldest tools that the package supports, because generated code runs on runtimes
that are newer than it and never on older ones.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

TOOLS = "1.71.0"  # of grpcio-tools; the floor of protobuf in pyproject.toml follows from it
ROOT = Path(__file__).resolve().parents[1]
PROTOS = (Path("edl_torch/rpc/edl_torch.proto"), Path("edl_torch/elasticdl/elasticdl.proto"))
# Lines that nobody asks for: of stubs two thirds, of modules where each message stands in the descriptor.
_UNUSED = re.compile(r"    (__slots__ = |\w+_FIELD_NUMBER: )|  _globals\['\w+'\]\._serialized_(start|end)=")
GENERATED = tuple(proto.with_name(f"{proto.stem}_pb2.{kind}") for proto in PROTOS for kind in ("py", "pyi"))


def tools_version() -> str | None:
    """Return the installed version of grpcio-tools, or None."""
    try:
        return importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        return None


def generate(into: Path) -> None:
    """Write the files GENERATED under `into`.

    Raises RuntimeError for other tools than TOOLS, and when protoc refuses a proto.
    """
    if tools_version() != TOOLS:
        raise RuntimeError(
            f"stubs are made with grpcio-tools {TOOLS}, not {tools_version()}: install it in a venv"
        )
    from grpc_tools import protoc

    for proto in PROTOS:
        outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi")]
        if protoc.main(["protoc", f"--proto_path={ROOT}", *outputs, str(ROOT / proto)]):
            raise RuntimeError(f"protoc refused {proto}; its own message stands above")
    for file in (into / name for name in GENERATED):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not _UNUSED.match(line)))


def main() -> int:
    """Regenerate in place."""
    try:
        generate(ROOT)
    except RuntimeError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
