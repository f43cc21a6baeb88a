"""The options of `edl-torch`, and one command run; where it fails, one line says why."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from edl_torch import __version__
from edl_torch.core.limits import printable
from edl_torch.errors import EdlError, InvalidArgument, ReaderError
from edl_torch.protocols import DOORS, door

INTERRUPTED = 130
_JUDGES = ("audit", "check")  # whose 1 is a verdict
DEFAULT_ADDRESS = "127.0.0.1:50001"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    if arguments is None:  # gRPC would say before us, in its own words, what our one line says
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    failed = 2 if options.command in _JUDGES else 1
    try:
        command = importlib.import_module(f"edl_torch.cli.{options.command}")
        status: int = command.run(options)
        sys.stdout.flush()  # here, where a full disk is an error with a name
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except EdlError as error:
        print(f"edl-torch: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        blames_input = isinstance(error, InvalidArgument | ReaderError)
        return 2 if blames_input or isinstance(error.__cause__, InvalidArgument) else failed
    except BrokenPipeError:  # `edl-torch status | head`
        _flush_or_drop()
        return failed
    except OSError as error:
        _flush_or_drop()
        print(f"edl-torch: error: {printable(str(error))}", file=sys.stderr)
        return failed


def _flush_or_drop() -> None:
    """What cannot be written is not tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file, as under a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. `command` is the module of `edl_torch.cli` that runs one."""
    parser = _Parser(prog="edl-torch", description="Elastic dataset sharding for PyTorch.")
    parser.add_argument("--version", action="version", version=f"edl-torch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    examples = []
    for name, add, what, example in _COMMANDS:
        add(commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}."))
        examples.append(f"  edl-torch {name} {example}")
    parser.epilog = "\n".join(("examples:", *examples))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, as all other errors of the command line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {printable(message)}\n")


def _add_master(parser: argparse.ArgumentParser) -> None:
    where = f"where to listen (default: {DEFAULT_ADDRESS})"
    _option(parser, "--addr", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=where)
    _path(parser, "--address_file", "PATH", "write the address there once it serves")
    _path(parser, "--state", "DIR", "keep the state there, and resume from it at start")
    older = "start once from a journal that lacks what trainers were told: records that it does not know as "
    _flag(parser, "--accept_older_journal", older + "done are lent again")
    _option(parser, "--health_addr", metavar="HOST:PORT", help="answer health checks there too, without TLS")
    page = "serve the page, /metrics and /api/status there (needs edl-torch[web])"
    _option(parser, "--http", metavar="HOST:PORT", help=page)
    # For a worker that starts a master: see client/torchrun/sidecar.py.
    _option(parser, "--with_process", type=int, metavar="PID", help=argparse.SUPPRESS)
    _add_security(parser)
    _duration(parser, "--lease_timeout_s", 30.0, "a trainer silent for so long is dead (default: 30)")
    _duration(parser, "--grace_s", 1.0, "time to come back after a broken connection (default: 1)")
    idle = "a trainer that lives but does not train for so long loses its leases (default: never)"
    _duration(parser, "--progress_timeout_s", 0.0, idle)
    for protocol in DOORS:
        for name, (default_s, what) in door(protocol).DURATIONS.items():
            _duration(parser, f"--{name}", default_s, what)
    data = parser.add_argument_group("datasets", "made at start; without them the trainers bring their own")
    for kind in ("training", "validation", "prediction"):
        _option(data, f"--{kind}_data", metavar="PATH", help=f"data for {kind}")
    _number(data, "--records_per_task", 256, "records in a shard (default: 256)")
    _number(data, "--num_epochs", 1, "epochs (default: 1), 0 is endless; of prediction 1")
    mixed = data.add_mutually_exclusive_group()
    _flag(mixed, "--shuffle", "shuffle all training records")
    _flag(data, "--shuffle_shards", "shuffle the order of the training shards")
    window = "mix the training records of so many shards, one such window after the other"
    _option(mixed, "--shuffle_window", type=int, metavar="SHARDS", help=window)
    _number(data, "--seed", 0, "of the shuffles")
    _number(data, "--max_bad_records", 0, "may be bad before a job fails")
    _add_reader(data)


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "security", "which callers are accepted; by default only those of this machine"
    )
    _path(group, "--tls_cert", "PEM", "the master's certificate: for TLS")
    _path(group, "--tls_key", "PEM", "its private key")
    _path(group, "--tls_client_ca", "PEM", "callers need a certificate signed by it")
    _path(group, "--token_file", "PATH", "callers need the token in this file")
    _flag(group, "--insecure", "allow an address that other machines can reach without TLS and token")


def _add_client(parser: argparse.ArgumentParser) -> None:
    _option(parser, "--addr", metavar="HOST:PORT", help="the master (default: EDL_MASTER_ADDR)")
    group = parser.add_argument_group(
        "security", "default: EDL_MASTER_TOKEN_FILE, EDL_MASTER_TLS_CA and the like"
    )
    _path(group, "--token_file", "PATH", "the master's token")
    _flag(group, "--tls", "the master speaks TLS")
    _path(group, "--tls_ca", "PEM", "the authority that signed its certificate")
    _path(group, "--tls_cert", "PEM", "a certificate for a master that asks for one")
    _path(group, "--tls_key", "PEM", "its private key")
    name = "the name in its certificate (default: the host of --addr)"
    _option(group, "--tls_name", metavar="NAME", help=name)
    _flag(group, "--insecure", "send the token though there is no TLS")


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_client(parser)
    _flag(parser, "--json", "print JSON")
    again = "print it again every S seconds, until Ctrl-C (default: 2)"
    _option(parser, "--watch", type=_seconds, nargs="?", const=2.0, metavar="S", help=again)


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "weights", nargs="+", metavar="NAME=WEIGHT", help="the weight of each component; 0 leaves it out"
    )
    _option(parser, "--dataset", default="training", metavar="NAME", help="the mixture (default: training)")
    _add_client(parser)


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_client(parser)
    _duration(parser, "--every", 1.0, "seconds between two looks (default: 1)")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 proven; 4 delivered: each record was trained on once, and it is not shown that one "
        "model has all; 3 inexact; 1 refuted; 2 unfinished, or the logs or the journal cannot be used."
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="an audit_dir of trainers")
    state = "the master's --state folder: compare the logs with the journal in it"
    _path(parser, "--state", "STATE_DIR", state)
    _flag(parser, "--json", "print JSON")
    unfinished = "the job still runs or was stopped: records without an outcome are open, not lost"
    _flag(parser, "--unfinished", unfinished)
    _path(parser, "--html", "FILE", "draw it too, as one HTML file: lineages, epochs and wrong records")
    _number(parser, "--list", 20, "ranges of each kind to name (default: 20)")
    expect = "the exit status is 0 for this verdict or a better one (default: proven)"
    _option(parser, "--expect", default="proven", choices=("proven", "delivered"), help=expect)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="data that a reader knows, as for --training_data")
    target = "a file, or with --records_per_file a folder"
    parser.add_argument("target", type=_written_path, metavar="TARGET", help=target)
    _number(parser, "--records_per_file", None, "write a folder of files with N records each")
    how = "records as bytes: auto (default), bytes, text, json, npy, npz or MODULE:FUNCTION"
    _option(parser, "--encode", default="auto", metavar="HOW", help=how)
    _mode(parser)
    dialect = "for the library that will read it: pyrecordio (default) or Go's; edl_torch reads both"
    _option(parser, "--dialect", default="python", choices=("python", "go"), help=dialect)
    compressors = ("none", "snappy", "gzip")
    _option(
        parser,
        "--compressor",
        default="snappy",
        choices=compressors,
        help="compression of chunks (default: snappy)",
    )
    _number(parser, "--max_chunk_bytes", 1 << 18, "bytes of records in a chunk (default: 262144)")
    _add_reader(parser)


def _add_index(parser: argparse.ArgumentParser) -> None:
    what = "tars, folders of them, or globs"
    parser.add_argument("data", nargs="+", metavar="PATH", help=what)
    what = "storage_options={…}: endpoint, region, credentials of a store"
    _option(parser, "--custom_data_reader_params", metavar="'k=v; …'", default="", help=what)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="data that a reader knows, as for --training_data")
    _mode(parser)
    _number(parser, "--workers", None, "processes that read (default: one a core)")
    _number(parser, "--limit", None, "read a sample of N records instead of all")
    _flag(parser, "--dry_run", "read no record: say what an epoch asks a store for")
    _option(parser, "--sample", metavar="PATH.png", help="draw some records as one picture")
    _number(parser, "--sample_count", 12, "draw N records (default: 12)")
    _number(parser, "--list", 20, "findings of each kind to name (default: 20)")
    _flag(parser, "--whole", "make the fingerprint of all bytes, not of samples")
    _flag(parser, "--json", "print JSON")
    _add_reader(parser)


def _add_reader(parser: argparse._ActionsContainer) -> None:
    what = "what reads the data: a kind (csv, text, voc, …) or a class of yours as module:Class"
    _option(parser, "--custom_data_reader", metavar="READER", help=what)
    _option(parser, "--custom_data_reader_params", metavar="'k=v; …'", default="", help="its arguments")


def _mode(parser: argparse.ArgumentParser) -> None:
    part = "the part of the data, as VOC's splits and readers of your own have it (default: training)"
    _option(parser, "--mode", default="training", choices=("training", "evaluation", "prediction"), help=part)


def _flag(parser: argparse._ActionsContainer, name: str, what: str) -> None:
    _option(parser, name, action="store_true", help=what)


def _path(parser: argparse._ActionsContainer, name: str, metavar: str, what: str) -> None:
    _option(parser, name, type=_written_path, metavar=metavar, help=what)


def _number(parser: argparse._ActionsContainer, name: str, default: int | None, what: str) -> None:
    _option(parser, name, type=int, default=default, metavar="N", help=what)


def _duration(parser: argparse.ArgumentParser, name: str, default: float, what: str) -> None:
    _option(parser, name, type=_seconds, default=default, metavar="S", help=what)


def _option(parser: argparse._ActionsContainer, name: str, **settings: object) -> None:
    """Both spellings: `--records_per_task` as ElasticDL has it, and `--records-per-task`."""
    names = dict.fromkeys((name, "--" + name[2:].replace("_", "-")))
    parser.add_argument(*names, **settings)  # type: ignore[arg-type]


def _written_path(text: str) -> Path:
    """An empty text, as of a variable that is not set, would be the folder that one is in."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    if re.match(r"\w+://", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL: give a path of this machine, and copy it from there"
        )
    return Path(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


_COMMANDS: tuple[tuple[str, Callable[[argparse.ArgumentParser], None], str, str], ...] = (
    ("master", _add_master, "serve shards of datasets to trainers", "--addr 127.0.0.1:50001 --state state/"),
    ("status", _add_status, "show progress, trainers and bad records", "--addr 127.0.0.1:50001 --watch"),
    ("top", _add_top, "show progress and trainers live, in the terminal", "--addr 127.0.0.1:50001"),
    ("weights", _add_weights, "give a mixture other weights", "--addr 127.0.0.1:50001 web=0.5 code=0.5"),
    (
        "audit",
        _add_audit,
        "prove what was trained on from the trainers' audit logs",
        "audit/ --state state/",
    ),
    ("check", _add_check, "read data through its reader and report what is wrong", "images/ --limit 1000"),
    ("convert", _add_convert, "write the records of any reader to RecordIO files", "data.csv data.rio"),
    ("index", _add_index, "write an index beside each tar", "shards/"),
)
