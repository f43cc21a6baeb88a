"""`edl-torch master`: serves shards of datasets to trainers, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

from edl_torch.errors import InvalidArgument

if TYPE_CHECKING:
    from edl_torch.core.calls import Registration
    from edl_torch.core.dispatcher import Dispatcher
    from edl_torch.master.durable import DurableState
    from edl_torch.protocols import MakeServicer
    from edl_torch.rpc.credentials import ServerCredentials

    _Given = tuple[ServerCredentials, tuple[MakeServicer, ...], tuple[Registration, ...]]

log = logging.getLogger("edl_torch.master")

SWITCH_S = 0.0005  # between threads of a master with a journal


def run(options: argparse.Namespace) -> int:
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
    # All that is wrong with the options is found before there is a journal: else one would be left behind.
    given = _checked(options)
    if options.state is None:
        _serve(options, given, Dispatcher(ledger_id=uuid.uuid4().hex, **patience), None)
        return 0
    # The journal's thread needs the interpreter for a moment after each commit: it must not wait 5 ms for it.
    sys.setswitchinterval(SWITCH_S)
    accept_older = options.accept_older_journal
    with closing(
        DurableState(options.state, now=time.monotonic(), accept_older=accept_older, **patience)
    ) as state:
        _serve(options, given, state.dispatcher, state)
    return 0


def _checked(options: argparse.Namespace) -> _Given:
    """Look at what the options name: a master can listen where they say, with data that can be read."""
    from edl_torch.cli.datasets import described
    from edl_torch.core.registration import new_spec
    from edl_torch.master.addresses import check_address
    from edl_torch.protocols import servicers
    from edl_torch.rpc.credentials import ServerCredentials

    files = ("token_file", "tls_cert", "tls_key", "tls_client_ca")
    credentials = ServerCredentials.read(**{name: getattr(options, name) for name in files})
    foreign = servicers(vars(options))
    state, file, insecure = options.state, options.address_file, options.insecure
    if state is not None and os.path.exists(state) and not os.path.isdir(state):
        raise InvalidArgument(f"--state {state}: it is a file, expected a folder")
    if file is not None and (os.path.isdir(file) or not os.path.isdir(file.parent)):
        raise InvalidArgument(f"--address_file {file}: expected a file, in a folder that exists")
    for address, is_open in (
        (options.addr, insecure),
        (options.http, insecure),
        (options.health_addr, True),
    ):
        if address is not None:
            check_address(address, insecure=is_open, credentials=credentials)
    registrations = tuple(described(options))
    for registration in registrations:
        new_spec(registration, 1)
    return credentials, foreign, registrations


def _serve(
    options: argparse.Namespace, given: _Given, dispatcher: Dispatcher, state: DurableState | None
) -> None:
    from edl_torch.master.server import serve, write_address_file
    from edl_torch.system.address import HostPort
    from edl_torch.system.descriptors import raise_limit

    credentials, foreign, registrations = given
    for registration in registrations:
        for difference in dispatcher.define(registration):
            log.warning("dataset=%s goes on as it is: %s", registration.name, difference)

    def announce(address: HostPort) -> None:
        if state is None:
            log.warning("not durable: a restart forgets all; --state DIR keeps the state in a journal")
        if options.address_file is not None:
            write_address_file(options.address_file, address)
        print(f"ready on {address}", flush=True)

    raise_limit()
    gc.collect()
    gc.freeze()  # what is here stays: a full collection that looks at it would hold answers back for 14 ms
    make_commits = None if state is None else state.group_commit
    asyncio.run(
        serve(
            *(dispatcher, options.addr),
            insecure=options.insecure,
            credentials=credentials,
            on_ready=announce,
            make_commits=make_commits,
            health_address=options.health_addr,
            http_address=options.http,
            on_page=lambda url: log.info("page on %s", url),
            with_process=options.with_process,
            foreign=foreign,
        )
    )
