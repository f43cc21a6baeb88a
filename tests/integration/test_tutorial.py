"""The programs of the tutorial and of the page on DDP run as they stand."""

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

import preloaded
import pytest
import torch
from ddp_counts import CASES, RECORDS

from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.main import main
from edl_torch.cli.verdict_words import inexact, undecided

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


# DDP --------------------------------------------------------------------------------------------------------


DDP_PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
DIES = """
                if steps in (30, 50) and dist.get_rank() == 1 and loader.epoch < 2:
                    __import__("os").kill(__import__("os").getpid(), 9)
"""


@pytest.mark.long
def test_the_job_of_the_page_is_killed_and_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DDP_PAGE.read_text(encoding="utf-8"), re.S)
    (command,) = re.findall(r"^\$ torchrun (.*) train\.py$", DDP_PAGE.read_text(encoding="utf-8"), re.M)
    assert "steps += 1\n" in program
    (tmp_path / "train.py").write_text(program.replace("steps += 1\n", "steps += 1" + DIES), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    env |= {"OMP_NUM_THREADS": "1"}
    ran = {}
    for ranks, restarts in ((2, 1), (3, 3)):
        options = command.replace("--nproc-per-node=2", f"--nproc-per-node={ranks}")
        options = options.replace("--max-restarts=3", f"--max-restarts={restarts}")
        ran[ranks] = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options.split(), "train.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert ran[2].returncode != 0, "it was killed twice, and may be started again once"
    assert ran[3].returncode == 0, ran[3].stderr
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "acknowledged 4000 " in capsys.readouterr().out


# DDP with gradient accumulation on two ranks: what is proven is in the model --------------------------------


RANK = Path(__file__).with_name("ddp_counts.py")
TORCHRUN = Path(__file__).parents[1] / "preloaded_torchrun.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left of all cases."""
    folder = tmp_path_factory.mktemp("ddp")
    run = [sys.executable, str(TORCHRUN), "--standalone", "--nproc-per-node=2", str(RANK), str(folder)]
    done = preloaded.run(run, timeout=110, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return folder


@pytest.mark.parametrize(("gradients", "before"), CASES)
def test_windows_of_ddp_are_proven_where_the_model_has_each_record(
    trained: Path, gradients: str, before: str
) -> None:
    folder = trained / f"{gradients}-{before}"
    learnt = torch.load(folder / "learnt.pt", weights_only=True)
    (verdict,) = audit([folder / "audit"])
    is_exact = learnt.tolist() == [1.0] * RECORDS
    assert is_exact == (before == "keep")
    assert (verdict.outcome is Outcome.PROVEN) == is_exact
    if before == "unweighed":
        assert {1.0, 2.0} <= set(learnt.tolist())
        assert verdict.outcome is Outcome.INEXACT
        assert verdict.padding >= 1
        assert any("loader.weigh(loss)" in said for said in inexact(verdict))
    if before == "ignored":
        assert any("loader.weight" in said for said in undecided(verdict))
    if before == "back":
        assert verdict.outcome is Outcome.INEXACT
        assert any("given back" in said or "went back" in said for said in inexact(verdict))
