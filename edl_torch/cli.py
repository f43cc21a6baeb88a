"""The command line: `edl-torch master`, `status`, `audit`, `check` and `convert`.

Reads arguments and prints; what a command does lives elsewhere and is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edl_torch import __version__
from edl_torch.core.printable import printable
from edl_torch.errors import EdlError, InvalidArgument

if TYPE_CHECKING:
    from edl_torch.core.dispatcher import Dispatcher
    from edl_torch.master.durable import DurableState
    from edl_torch.rpc.credentials import Credentials, ServerCredentials

log = logging.getLogger("edl_torch.master")

DEFAULT_ADDRESS = "127.0.0.1:50001"
STATUS_TIMEOUT_S = 5.0
INTERRUPTED = 130
SWITCH_S = 0.0005  # between threads of a master with a journal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if arguments is None:  # gRPC would say before us, in its own words, what our one line says
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        status = command(options)
        sys.stdout.flush()  # here, where a full disk is an error with a name
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except EdlError as error:
        print(f"edl-torch: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    except BrokenPipeError:  # `edl-torch status | head`
        _flush_or_drop()
        return 1
    except OSError as error:
        _flush_or_drop()
        print(f"edl-torch: error: {printable(str(error))}", file=sys.stderr)
        return 1


def _flush_or_drop() -> None:
    """What cannot be written is not tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stream without a file, as under a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="edl-torch", description="Elastic dataset sharding for PyTorch.")
    parser.add_argument("--version", action="version", version=f"edl-torch {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_master(commands.add_parser("master", help="serve shards of datasets to trainers"))
    _add_status(commands.add_parser("status", help="show progress, trainers and bad records"))
    _add_audit(commands.add_parser("audit", help="prove what was trained on from the trainers' audit logs"))
    _add_check(commands.add_parser("check", help="read data through its reader and report what is wrong"))
    _add_convert(commands.add_parser("convert", help="write the records of any reader to RecordIO files"))
    return parser


def _add_master(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_master)
    where = f"where to listen (default: {DEFAULT_ADDRESS})"
    _option(parser, "--addr", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=where)
    _option(
        parser, "--address_file", type=Path, metavar="PATH", help="write the address there once it serves"
    )
    _option(
        parser, "--state", type=Path, metavar="DIR", help="keep the state there, and resume from it at start"
    )
    _option(
        parser,
        "--accept_older_journal",
        action="store_true",
        help="go on from a journal that is older than what its trainers were told: what it does not know is "
        "lent again (for one start)",
    )
    _option(parser, "--health_addr", metavar="HOST:PORT", help="answer health checks there too, without TLS")
    # For what starts a master beside itself: see integrations/beside_agent.py.
    _option(parser, "--with_process", type=int, metavar="PID", help=argparse.SUPPRESS)
    _add_security(parser)
    _duration(parser, "--lease_timeout_s", 30.0, "a trainer silent for so long is dead (default: 30)")
    _duration(parser, "--grace_s", 1.0, "time to come back after a broken connection (default: 1)")
    _duration(
        parser,
        "--progress_timeout_s",
        0.0,
        "a trainer that lives but does not train for so long loses its leases (default: never)",
    )
    _duration(
        parser,
        "--elasticdl_task_timeout_s",
        300.0,
        "a task of an ElasticDL client that is silent for so long is handed out again (default: 300)",
    )
    data = parser.add_argument_group("datasets", "made at start; without them the trainers bring their own")
    for kind in ("training", "validation", "prediction"):
        _option(data, f"--{kind}_data", metavar="PATH", help=f"data for {kind}")
    _option(
        data,
        "--records_per_task",
        type=int,
        default=256,
        metavar="N",
        help="records in a shard (default: 256)",
    )
    _option(
        data,
        "--num_epochs",
        type=int,
        default=1,
        metavar="N",
        help="epochs (default: 1), 0 is endless; of prediction 1",
    )
    _option(data, "--shuffle", action="store_true", help="shuffle all training records")
    _option(data, "--shuffle_shards", action="store_true", help="shuffle the order of the training shards")
    _option(data, "--seed", type=int, default=0, metavar="N", help="of the shuffles")
    _option(data, "--max_bad_records", type=int, default=0, metavar="N", help="may be bad before a job fails")
    _add_reader(data)


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "security", "which callers are accepted; by default only those of this machine"
    )
    _option(group, "--tls_cert", type=Path, metavar="PEM", help="the master's certificate: for TLS")
    _option(group, "--tls_key", type=Path, metavar="PEM", help="its private key")
    _option(
        group, "--tls_client_ca", type=Path, metavar="PEM", help="callers need a certificate signed by it"
    )
    _option(group, "--token_file", type=Path, metavar="PATH", help="callers need the token in this file")
    _option(
        group,
        "--insecure",
        action="store_true",
        help="allow an address that other machines can reach without TLS and token",
    )


def _add_credentials(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "security", "default: EDL_MASTER_TOKEN_FILE, EDL_MASTER_TLS_CA and the like"
    )
    _option(group, "--token_file", type=Path, metavar="PATH", help="the master's token")
    _option(group, "--tls", action="store_true", help="the master speaks TLS")
    _option(group, "--tls_ca", type=Path, metavar="PEM", help="the authority that signed its certificate")
    _option(
        group, "--tls_cert", type=Path, metavar="PEM", help="a certificate for a master that asks for one"
    )
    _option(group, "--tls_key", type=Path, metavar="PEM", help="its private key")
    _option(
        group, "--tls_name", metavar="NAME", help="the name in its certificate (default: the host of --addr)"
    )
    _option(group, "--insecure", action="store_true", help="send the token though there is no TLS")


def _credentials(options: argparse.Namespace) -> Credentials | None:
    """What the options say, or None: then the environment does."""
    from edl_torch.rpc.credentials import Credentials

    names = ("token_file", "tls_ca", "tls_cert", "tls_key", "tls_name", "tls", "insecure")
    given = {name: getattr(options, name) for name in names}
    return Credentials.read(**given) if any(given.values()) else None


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=show_status)
    _option(parser, "--addr", metavar="HOST:PORT", help="the master (default: EDL_MASTER_ADDR)")
    _add_credentials(parser)
    _option(parser, "--json", action="store_true", help="print JSON")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_audit)
    parser.epilog = (
        "Exit status: 0 proven; 3 proven, but acknowledgements inexact; 1 refuted; 2 unfinished, or the logs "
        "or the journal cannot be used."
    )
    parser.add_argument("directories", nargs="+", metavar="DIR", help="an audit_dir of trainers")
    _option(
        parser,
        "--state",
        type=Path,
        metavar="STATE_DIR",
        help="the master's --state folder: its journal says what was heard of trainers that were killed",
    )
    _option(parser, "--json", action="store_true", help="print JSON")
    _option(
        parser,
        "--unfinished",
        action="store_true",
        help="the job still runs or was stopped: records without an outcome are open, not lost",
    )
    _option(parser, "--list", type=int, default=20, metavar="N", help="ranges of each kind to name (20)")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_convert)
    parser.add_argument("source", metavar="SOURCE", help="data that a reader knows, as for --training_data")
    parser.add_argument("target", metavar="TARGET", help="a file, or with --records_per_file a folder")
    _option(parser, "--records_per_file", type=int, metavar="N", help="many files of so many records")
    _option(
        parser,
        "--encode",
        default="auto",
        metavar="HOW",
        help="records as bytes: auto, bytes, text, json, npy, npz or MODULE:FUNCTION",
    )
    _option(parser, "--mode", default="training", choices=("training", "evaluation", "prediction"))
    _option(parser, "--dialect", default="python", choices=("python", "go"), help="which library reads it")
    _option(parser, "--compressor", default="snappy", choices=("none", "snappy", "gzip"))
    _option(parser, "--max_chunk_bytes", type=int, default=1 << 18, metavar="N", help="records in a chunk")
    _add_reader(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=run_check)
    parser.add_argument("data", metavar="DATA", help="data that a reader knows, as for --training_data")
    _option(parser, "--mode", default="training", choices=("training", "evaluation", "prediction"))
    _option(parser, "--workers", type=int, metavar="N", help="processes that read (default: one a core)")
    _option(parser, "--limit", type=int, metavar="N", help="read a sample of N records instead of all")
    _option(parser, "--sample", metavar="PATH.png", help="draw some records as one picture")
    _option(parser, "--sample_count", type=int, default=12, metavar="N", help="so many (default: 12)")
    _option(parser, "--list", type=int, default=20, metavar="N", help="findings of each kind to name (20)")
    _option(parser, "--json", action="store_true", help="print JSON")
    _add_reader(parser)


def _add_reader(parser: argparse._ActionsContainer) -> None:
    what = "what reads the data: a kind (csv, text, voc, …) or a class of yours as module:Class"
    _option(parser, "--custom_data_reader", metavar="READER", help=what)
    _option(parser, "--custom_data_reader_params", metavar="'k=v; …'", default="", help="its arguments")


def _duration(parser: argparse.ArgumentParser, name: str, default: float, what: str) -> None:
    _option(parser, name, type=_seconds, default=default, metavar="S", help=what)


def _option(parser: argparse._ActionsContainer, name: str, **settings: object) -> None:
    """Both spellings: `--records_per_task` as ElasticDL has it, and `--records-per-task`."""
    names = dict.fromkeys((name, "--" + name[2:].replace("_", "-")))
    parser.add_argument(*names, **settings)  # type: ignore[arg-type]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


# Master -----------------------------------------------------------------------------------------------


def run_master(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    from edl_torch.core.dispatcher import Dispatcher
    from edl_torch.master.durable import DurableState

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    patience = {
        "lease_timeout_s": options.lease_timeout_s,
        "grace_s": options.grace_s,
        "progress_timeout_s": options.progress_timeout_s,
    }
    if options.state is None and options.accept_older_journal:
        raise InvalidArgument("--accept-older-journal needs --state: without it there is no journal")
    if options.state is None:
        _serve(options, Dispatcher(ledger_id=uuid.uuid4().hex, **patience), None)
        return 0
    # The journal's thread needs the interpreter for a moment after each commit: it must not wait 5 ms for it.
    sys.setswitchinterval(SWITCH_S)
    accept_older = options.accept_older_journal
    with closing(
        DurableState(options.state, now=time.monotonic(), accept_older=accept_older, **patience)
    ) as state:
        _serve(options, state.dispatcher, state)
    return 0


def _serve(options: argparse.Namespace, dispatcher: Dispatcher, state: DurableState | None) -> None:
    from edl_torch.cli_data import described
    from edl_torch.master.elasticdl_adapter import ElasticDLOptions
    from edl_torch.master.server import allow_connections, serve, write_address_file
    from edl_torch.rpc.address import HostPort

    for registration in described(options):
        for difference in dispatcher.define(registration):
            log.warning("dataset=%s goes on as it is: %s", registration.name, difference)

    def announce(address: HostPort) -> None:
        if state is None:
            log.warning("not durable: a restart forgets all; --state DIR keeps the state in a journal")
        if options.address_file is not None:
            write_address_file(options.address_file, address)
        print(f"ready on {address}", flush=True)

    allow_connections()
    gc.collect()
    gc.freeze()  # what is here stays: a full collection that looks at it would hold answers back for 14 ms
    make_commits = None if state is None else state.group_commit
    asyncio.run(
        serve(
            *(dispatcher, options.addr),
            insecure=options.insecure,
            credentials=_server_credentials(options),
            on_ready=announce,
            make_commits=make_commits,
            health_address=options.health_addr,
            with_process=options.with_process,
            elasticdl=ElasticDLOptions(
                task_timeout_s=options.elasticdl_task_timeout_s, max_bad_records=options.max_bad_records
            ),
        )
    )


def _server_credentials(options: argparse.Namespace) -> ServerCredentials:
    from edl_torch.rpc.credentials import ServerCredentials

    return ServerCredentials.read(
        token_file=options.token_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
    )


# Status -----------------------------------------------------------------------------------------------


def show_status(options: argparse.Namespace) -> int:
    """Print what the master says, once."""
    from edl_torch.cli_status import as_json, as_table
    from edl_torch.client.environment import master_address_from_env
    from edl_torch.client.transport import MasterClient

    address = options.addr or master_address_from_env() or DEFAULT_ADDRESS
    credentials = _credentials(options)
    with MasterClient(
        address, "status", master_timeout_s=STATUS_TIMEOUT_S, credentials=credentials
    ) as client:
        status = client.status()
    print(as_json(status) if options.json else as_table(status))
    return 0


# Audit ------------------------------------------------------------------------------------------------


def run_audit(options: argparse.Namespace) -> int:
    """Judge audit logs. Status 0: proven, 1: refuted, 2: unfinished, or unusable logs, 3: proven, inexact."""
    from edl_torch.cli_audit import run

    return run(
        options.directories,
        state=options.state,
        unfinished=options.unfinished,
        listed=options.list,
        as_json=options.json,
    )


# Convert ----------------------------------------------------------------------------------------------


def run_convert(options: argparse.Namespace) -> int:
    """Write RecordIO files, all or none."""
    from edl_torch.cli_convert import run

    return run(options)


# Check ------------------------------------------------------------------------------------------------


def run_check(options: argparse.Namespace) -> int:
    """Read a dataset. Status 0: nothing is wrong, 1: findings, 2: the data cannot be used."""
    from edl_torch.cli_check import run

    return run(options)
