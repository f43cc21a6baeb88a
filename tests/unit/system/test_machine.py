"""Addresses, forks, fresh names and warnings: small things that the package asks of its machine."""

from __future__ import annotations

import importlib
import ipaddress
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from edl_torch.errors import InvalidArgument, PeerFailed
from edl_torch.system.address import HostPort, parse_address, plain_ip
from edl_torch.system.backoff import backoff
from edl_torch.system.descriptors import Seldom
from edl_torch.system.fresh_names import fresh_name
from edl_torch.system.user_warnings import warn_user
from edl_torch.testing import wait_until

# Strangers -------------------------------------------------------------------------------------------------


def test_what_may_come_thousands_of_times_a_second_is_said_once_a_minute() -> None:
    """As refused connections are; the first at once, however young the machine's clock is."""
    now = 0.0
    is_due = Seldom(lambda: now)
    said = []
    for now in np.arange(0.0, 180.0, 0.25).tolist():
        said += [now] if is_due() else []
    assert said == [0.0, 60.0, 120.0]


# Addresses are read strictly --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50001", "127.0.0.1", 50001),
        ("master.job-1:1", "master.job-1", 1),
        ("[::1]:0", "::1", 0),
        (" localhost:65535\n", "localhost", 65535),
    ],
)
def test_good_address(text, host, port):
    address = parse_address(text)
    assert address == HostPort(host, port)
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "::1",
        "::1:80",
        "[]:1",
        "a b:1",
        "http://h:1",
    ],
)
def test_bad_address_is_named_in_the_error(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_port_0_is_for_listening_only():
    with pytest.raises(InvalidArgument, match="from 1 to 65535"):
        parse_address("h:0", least_port=1)


def test_mapped_and_scoped_addresses_become_plain():
    assert plain_ip("::ffff:127.0.0.1") == ipaddress.ip_address("127.0.0.1")
    assert plain_ip("fe80::1%eth0") == ipaddress.ip_address("fe80::1")


def test_loopback_resolves():
    assert HostPort("127.0.0.1", 1).resolve() == {ipaddress.ip_address("127.0.0.1")}


ROOT = Path(__file__).parents[3]
CODE = """
import asyncio, gc, os, signal
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.server import MasterServer

async def serve():
    server = MasterServer(Dispatcher(ledger_id="l"), "127.0.0.1:0")
    await server.start()
    await server.stop()
    return server

gc.disable()
ring = [asyncio.run(serve())]
ring.append(ring)
del ring
child = os.fork()
if child == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "0", done.stderr  # -14: the alarm


# Ranks agree on a name in a store that is full of what earlier ones left ------------------------------------


TIMEOUT_S = 20.0


@pytest.fixture
def store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


class Ranks:
    """Ranks in threads; `names` of those that have one."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.names: dict[int, str] = {}
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, size: int, after: Callable[[], object] = lambda: None) -> None:
        def run() -> None:
            after()
            self.names[rank] = fresh_name(self.store, "place", rank, size, TIMEOUT_S)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def agreed(self) -> str:
        for thread in self.threads:
            thread.join(TIMEOUT_S + 5)
        assert len(self.names) == len(self.threads), "a rank hangs"
        (name,) = set(self.names.values())
        return name


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_one_name_and_another_one_each_time(store: dist.HashStore, size: int) -> None:
    names = []
    for _ in range(3):
        ranks = Ranks(store)
        for rank in reversed(range(size)):
            ranks.start(rank, size)
        names.append(ranks.agreed())
    assert len(set(names)) == 3


def test_ranks_that_died_at_any_point_do_not_mislead_the_next(store: dist.HashStore) -> None:
    # Of an incarnation of three, rank 2 died before it came: the others were killed while they waited.
    for rank in (0, 1):
        with pytest.raises(PeerFailed):
            fresh_name(store, "place", rank, 3, 0.05)
    assert Ranks(store).threads == []
    for size in (2, 3, 2):
        ranks = Ranks(store)
        for rank in range(size):
            ranks.start(rank, size)
        ranks.agreed()


def test_a_new_rank_that_an_old_first_rank_answered_follows_the_new_one(store: dist.HashStore) -> None:
    old = threading.Thread(target=lambda: _lead_in_vain(store), daemon=True)
    old.start()
    ranks = Ranks(store)
    ranks.start(1, 2)
    ranks_of_old_answered = lambda: store.num_keys() >= 3  # noqa: E731
    wait_until(ranks_of_old_answered)
    old.join(60)
    ranks.start(0, 2)
    ranks.agreed()


def _lead_in_vain(store: dist.Store) -> None:
    with pytest.raises(PeerFailed):
        fresh_name(store, "place", 0, 3, 1.0)  # it waits for a third rank, which is gone


def test_a_rank_alone_is_told_what_may_be_wrong(store: dist.HashStore) -> None:
    with pytest.raises(PeerFailed, match=r"2 of 3 ranks.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        fresh_name(store, "place", 0, 3, 0.05)
    with pytest.raises(PeerFailed, match=r"rank 2 .* heard nothing of rank 0"):
        fresh_name(store, "elsewhere", 2, 3, 0.05)


# A warning points at the user's line, not at the framework that called us -----------------------------------


def test_the_line_is_the_one_that_called_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("def train(callback): callback('look there')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    framework = importlib.import_module("transformers")
    with pytest.warns(UserWarning, match="look there") as said:
        framework.train(warn_user)
    assert [warning.filename for warning in said] == [__file__]
    monkeypatch.delitem(sys.modules, "transformers")


# Pauses between attempts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.05, 1.0), (0.1, 5.0), (0.2, 15.0), (3.0, 0.5)])
def test_pauses_double_up_to_the_longest_and_are_never_alike(first_s: float, longest_s: float) -> None:
    drawn = list(islice(backoff(first_s, longest_s), 50))
    for number, pause_s in enumerate(drawn):
        most_s = min(longest_s, first_s * 2**number)
        assert 0.5 * most_s <= pause_s <= most_s
    assert len(set(drawn)) == 50


def test_the_users_random_numbers_stay_as_they_were() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    list(islice(backoff(), 9))
    assert random.random() == expected
