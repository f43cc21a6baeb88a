"""What is said where the framework of an integration is not installed."""

from __future__ import annotations

import sys

import pytest

from edl_torch.errors import IntegrationUnavailable
from edl_torch.integrations.ray import master_client


def test_tensorflow_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not
    monkeypatch.delitem(sys.modules, "edl_torch.integrations.tensorflow", raising=False)
    with pytest.raises(IntegrationUnavailable, match=r"pip install 'edl-torch\[tensorflow\]'") as caught:
        import edl_torch.integrations.tensorflow  # noqa: F401
    assert isinstance(caught.value, ImportError)


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(IntegrationUnavailable, match=r"pip install 'edl-torch\[ray\]'"):
        master_client()
