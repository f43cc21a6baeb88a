"""The stubs that are checked in are those of the proto."""

from __future__ import annotations

import pytest
from make_stubs import GENERATED, ROOT, TOOLS, generate, tools_version

from edl_torch.elasticdl import elasticdl_pb2
from edl_torch.rpc import edl_torch_pb2


@pytest.mark.skipif(tools_version() != TOOLS, reason=f"needs grpcio-tools {TOOLS}")
def test_regenerating_changes_nothing(tmp_path):
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.skipif(tools_version() == TOOLS, reason="the right tools are installed")
def test_other_tools_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=TOOLS):
        generate(tmp_path)


@pytest.mark.parametrize("stubs", [edl_torch_pb2, elasticdl_pb2], ids=lambda stubs: stubs.__name__)
def test_stubs_know_every_message_of_the_proto(stubs):
    # A cheap stand-in where the tools are missing: names and numbers, read from the proto's text.
    text = (ROOT / stubs.DESCRIPTOR.name).read_text()
    declared = [line.split()[1] for line in text.splitlines() if line.startswith("message ")]
    assert sorted(stubs.DESCRIPTOR.message_types_by_name) == sorted(declared)
