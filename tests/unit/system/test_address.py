"""Addresses are read strictly."""

from __future__ import annotations

import ipaddress

import pytest

from edl_torch.errors import InvalidArgument
from edl_torch.system.address import HostPort, parse_address, plain_ip


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
