"""A warning points at the user's line, not at the framework that called us."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from edl_torch.system.user_warnings import warn_user


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
