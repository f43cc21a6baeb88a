"""The tutorial, as a reader follows it: each file saved, each command run, in order, in an empty folder."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def script(folder: Path) -> tuple[str, list[str]]:
    """Save the page's programs as it says. Returns its commands as one script, and what they are to print."""
    commands, printed = ["set -e"], []
    parts = re.split(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    for before, kind, block in zip(parts[0::3], parts[1::3], parts[2::3], strict=False):
        if kind == "python":
            (name,) = re.findall(r"Save this as `(\w+\.py)`", before)
            (folder / name).write_text(block, encoding="utf-8")
        else:
            commands += re.findall(r"^\$ (.*)$", block, re.M)
            printed += [line for line in block.splitlines() if not line.startswith("$ ")]
    return "\n".join(commands), printed


@pytest.mark.slow
def test_the_tutorial_ends_with_a_proven_job(tmp_path: Path) -> None:
    commands, printed = script(tmp_path)
    assert "kill -9" in commands
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    ran = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    for line in printed:
        pattern = fnmatch.translate(line.replace("[", "[[]").replace("…", "*"))
        assert any(re.match(pattern, one) for one in said), f"{line!r} is not in {said}"
    (begins,) = (int(number) for number in re.findall(r"begins after ([1-9]\d*) records", ran.stdout))
    assert begins % 40 == 0, "what a checkpoint holds"
    assert begins < 240, "it was killed before its end"
