"""Which two descriptions are of the same data."""

from __future__ import annotations

import pytest

from edl_torch.core.registration import differences, identity
from edl_torch.fingerprint import UNKNOWN, Fingerprint
from edl_torch.shard import DatasetSpec, Source

V1 = Fingerprint.given("v1").encode()


def of(*names: str, fingerprint: str = V1) -> dict[str, object]:
    sources = tuple(Source(name=name, count=10) for name in names)
    return identity(DatasetSpec(name="d", sources=sources, records_per_shard=5, fingerprint=fingerprint))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["/data/images"], ["../elsewhere/images2"]),
        (["/data/a.csv", "/data/b.csv"], ["old/a.csv", "old/b.csv"]),
        (["/data/x/1", "/data/y/1"], ["x/1", "y/1"]),
        (["t/p=1", "t/p=2"], ["t/p=1", "t/p=2"]),
    ],
)
def test_data_whose_fingerprint_is_known_may_lie_elsewhere(here, there):
    assert differences(of(*here), of(*there)) == []
    if here != there:
        assert len(differences(of(*here, fingerprint=UNKNOWN), of(*there))) == 1


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["/data/a.csv", "/data/b.csv"], ["/data/b.csv", "/data/a.csv"]),
        (["/data/a.csv", "/data/b.csv"], ["/data/a.csv", "/data/c.csv"]),
    ],
)
def test_files_in_another_order_or_of_other_names_are_other_data_whatever_their_user_says(here, there):
    assert [line.split(" (")[0] for line in differences(of(*here), of(*there))] == [
        "names of sources below their folder, in order"
    ]
