"""The tutorial, as a reader follows it: each file saved, each command run, in order, in an empty folder."""

from __future__ import annotations

import fnmatch
import importlib
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl_torch.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def script(folder: Path) -> tuple[list[str], list[str]]:
    """Save the page's programs as it says. Returns its commands, and what they are to print."""
    commands, printed = [], []
    parts = re.split(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    for before, kind, block in zip(parts[0::3], parts[1::3], parts[2::3], strict=False):
        if kind == "python":
            (name,) = re.findall(r"Save this as `(\w+\.py)`", before)
            (folder / name).write_text(block, encoding="utf-8")
        else:
            commands += re.findall(r"^\$ (.*)$", block, re.M)
            printed += [line for line in block.splitlines() if not line.startswith("$ ")]
    return commands, printed


def assert_said(printed: list[str], said: str) -> None:
    """All that the page shows was printed, and the job went on from a checkpoint before its end."""
    for line in printed:
        pattern = fnmatch.translate(line.replace("[", "[[]").replace("…", "*"))
        assert any(re.match(pattern, one) for one in said.splitlines()), f"{line!r} is not in {said}"
    (begins,) = (int(number) for number in re.findall(r"begins after ([1-9]\d*) records", said))
    assert begins % 40 == 0, "what a checkpoint holds"
    assert begins < 240, "it was killed before its end"


def test_the_tutorial_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interruption stands for the kill."""
    commands, printed = script(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # loader workers that are not forked import the programs from there
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)

    def until_saved(seconds: float) -> None:
        if Path("checkpoints/00000001").exists():
            raise KeyboardInterrupt

    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "edl-torch":
            assert main(arguments) == 0
        elif program == "python":
            name, *background = arguments
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
            module = importlib.import_module(name.removesuffix(".py"))
            if name == "train.py":
                wait = until_saved if background else abs
                monkeypatch.setattr(module, "time", SimpleNamespace(sleep=wait))
                with pytest.raises(KeyboardInterrupt) if background else nullcontext():
                    module.main()
        else:
            assert "kill -9" in command
    assert_said(printed, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.long
def test_the_tutorial_in_a_shell(tmp_path: Path) -> None:
    commands, printed = script(tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    ran = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert_said(printed, ran.stdout)
