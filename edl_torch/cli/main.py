"""Run one command of `edl-torch`, and say in one line why it failed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from edl_torch.cli.parser import build_parser
from edl_torch.core.printable import printable
from edl_torch.errors import EdlError, InvalidArgument

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if arguments is None:  # gRPC would say before us, in its own words, what our one line says
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        command = importlib.import_module(f"edl_torch.cli.{options.command}")
        status: int = command.run(options)
        sys.stdout.flush()  # here, where a full disk is an error with a name
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except EdlError as error:
        print(f"edl-torch: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2 if _blames_argument(error) else 1
    except BrokenPipeError:  # `edl-torch status | head`
        _flush_or_drop()
        return 1
    except OSError as error:
        _flush_or_drop()
        print(f"edl-torch: error: {printable(str(error))}", file=sys.stderr)
        return 1


def _blames_argument(error: EdlError) -> bool:
    return isinstance(error, InvalidArgument) or isinstance(error.__cause__, InvalidArgument)


def _flush_or_drop() -> None:
    """What cannot be written is not tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file, as under a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
