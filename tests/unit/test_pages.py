"""The Python of README and docs runs as it stands, in a folder that has what it names; links lead somewhere.

Pages that need data, a service or a framework have tests of their own (`RUN_ELSEWHERE`). Blocks of Ray show
places in a program: they are read, not run.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import preloaded
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from image_files import encode, render, write_image_folder
from processes import quiet_port

from edl_torch.cli.main import build_parser, main

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": 1,
    "docs/readers.md": 2,
    "docs/testing.md": 1,
    "docs/evaluation-and-prediction.md": 1,
}
RUN_ELSEWHERE = {
    "docs/accelerate.md": "with_accelerate/test_accelerate_page.py",
    "docs/ddp.md": "unit/test_pages.py",
    "docs/deepspeed.md": "with_deepspeed/test_deepspeed_page.py",
    "docs/images.md": "unit/readers/test_image_docs.py",
    "docs/mixtures.md": "integration/test_mixtures.py",
    "docs/objects.md": "objects/test_images.py",
    "docs/recordio.md": "integration/test_file_readers.py",
    "docs/tar.md": "integration/test_file_readers.py",
    "docs/synchronous.md": "unit/test_pages.py",
    "docs/tensorflow.md": "with_tensorflow/test_tf_dataset.py",
    "docs/text-and-csv.md": "integration/test_file_readers.py",
    "docs/tutorial.md": "integration/test_tutorial.py",
}
ONLY_READ = {"docs/ray.md"}
LINKING = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*/README.md"),
    *ROOT.glob("benchmarks/*.md"),
]
FOR_MAINTAINERS = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "releasing.md")  # who install tools too


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def test_pages_install_what_is_there_and_pin_nothing_of_the_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installs = [
        line
        for page in LINKING
        if page not in FOR_MAINTAINERS
        for line in re.findall(r"pip install [^`#\n]+", page.read_text(encoding="utf-8"))
    ]
    assert len(installs) > 7
    (least,) = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert f"torch stays as you have it, {least} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    for line in installs:
        wanted = shlex.split(line)[2:]
        assert [word for word in wanted if word.startswith("-")] == [], line
        name, _, extras = wanted[0].rstrip("]").partition("[")
        assert name == ".", f"{line}: nothing is published under a name"
        assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"]), line


def test_every_page_with_python_is_run_somewhere() -> None:
    pages = {str(page.relative_to(ROOT)) for page in LINKING if blocks(str(page.relative_to(ROOT)))}
    assert pages == {*PAGES, *RUN_ELSEWHERE, *ONLY_READ}
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("page", sorted({*RUN_ELSEWHERE, *ONLY_READ}))
def test_blocks_are_python(page: str) -> None:
    for number, block in enumerate(blocks(page)):
        within = "def page():\n" + textwrap.indent(block, "    ")  # some have a `return`
        compile(within, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_examples(page: str) -> None:
    assert len(blocks(page)) == PAGES[page]


@pytest.mark.parametrize(("page", "number"), [(page, n) for page in PAGES for n in range(PAGES[page])])
def test_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(tmp_path / "photos")
    (tmp_path / "table").mkdir()
    rows = pa.table({"features": [0.5] * 2000, "label": list(range(2000))})
    pq.write_table(rows, tmp_path / "table" / "a.parquet", row_group_size=500)
    monkeypatch.chdir(tmp_path)
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    name = f"{Path(page).stem}_block_{number}"  # a module: loader workers that are not forked import it
    (tmp_path / f"{name}.py").write_text(blocks(page)[number], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    if hasattr(module, "main"):
        module.main()


def test_the_readme_is_short_and_its_program_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert not re.search(r"[A-Z]+-OF-|example\.(com|org)", text), "nothing to be filled in"
    (printed,) = re.findall(r"^\$ edl-torch audit audit\n(.*?)```", text, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    (program,) = blocks("README.md")
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert main(["audit", "audit"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert set(printed.splitlines()) - set(said) == {"  …"}


CONVERTED = """
import os
import torch

MyDataset = lambda: [(torch.ones(3) * number, number % 2) for number in range(100)]
MyModel = lambda: torch.nn.Linear(3, 2)
criterion = torch.nn.functional.cross_entropy
"""


def test_the_converted_script_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.S)
    before, after = ("\n".join(line[1:] for line in diff.splitlines() if line[:1] != other) for other in "+-")
    compile(before, "docs/convert.md, before", "exec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    after = after.replace("num_workers=4", "num_workers=0")
    stepped = []
    step = torch.optim.AdamW.step

    def dying(optimizer: torch.optim.AdamW) -> None:
        step(optimizer)
        stepped.append(optimizer)
        if len(stepped) == 9:  # two epochs are saved, and one batch of the third is trained on
            raise KeyboardInterrupt

    first: dict[str, Any] = {}
    again: dict[str, Any] = {}
    with monkeypatch.context() as dies:
        dies.setattr(torch.optim.AdamW, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            exec(compile(CONVERTED + after, "docs/convert.md", "exec"), first)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: stepped.append(step(optimizer)))
    exec(compile(CONVERTED + after, "docs/convert.md", "exec"), again)
    assert len(stepped) == 9 + 8 * 4
    for names in (first, again):  # as the end of the program does
        names["loader"].close()


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_program_of_images_runs_where_loader_workers_are_not_forked(tmp_path: Path, method: str) -> None:
    write_photos(tmp_path / "photos")
    started = f"""\
import multiprocessing
multiprocessing.set_start_method({method!r}, force=True)
multiprocessing.set_forkserver_preload(["torch"])  # imported once, not by each worker
"""
    (tmp_path / "train.py").write_text(started + blocks("docs/tutorial.md")[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    ran = preloaded.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert (ran.returncode, ran.stdout) == (0, "begins after 0 records\nends after 42 records\n"), ran.stderr


def write_photos(folder: Path) -> None:
    """Two classes; as of photographs, not all of one size."""
    write_image_folder(folder, ("cat", "dog"), per_class=7)
    (folder / "dog" / "0001.png").write_bytes(encode(render(5, height=50, width=40), ".png"))


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher tells the only rank of a job; its process group ends with the test."""
    said = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port())}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_whole_program_of_ddp_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the only rank; `integration/test_tutorial.py` has two, of which one is killed."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/ddp.md")
    module = ModuleType("page_ddp")
    exec(compile(program, "docs/ddp.md", "exec"), module.__dict__)
    module.main()
    assert main(["audit", "audit"]) == 0
    assert "acknowledged 4000 " in capsys.readouterr().out


def test_the_program_of_ddp_that_gets_a_notice_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_rank: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/ddp.md")
    module = ModuleType("page_ddp")
    exec(compile(program, "docs/ddp.md", "exec"), module.__dict__)
    batches = 0
    forward = torch.nn.Linear.forward

    def counted(model: torch.nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        nonlocal batches
        batches += 1
        if batches == 3:
            signal.raise_signal(signal.SIGTERM)
        return forward(model, batch)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    with pytest.raises(SystemExit, match="143"):
        module.main()
    assert 3 <= batches <= 5
    module.main()
    assert batches == 400


MESH = """
import torch
import torch.distributed as dist
from edl_torch import ElasticDataLoader
from edl_torch.readers import ImageFolderReader

dist.init_process_group("gloo")
device, models, parts = "cpu", 1, 1
parallelize = lambda model, mesh: None
reader = ImageFolderReader("photos")
model = torch.nn.Linear(3 * 24 * 32, 2)
{block}
assert sum(len(images) for images, _ in loader) == 14
loader.close()
dist.destroy_process_group()
"""


def test_the_loader_of_a_mesh_runs(tmp_path: Path, only_rank: None) -> None:
    """In a process of its own: one that had groups of ranks in parts is no good place to fork others from."""
    write_image_folder(tmp_path / "photos", ("cat", "dog"), per_class=7)
    (mesh,) = blocks("docs/synchronous.md")
    preloaded.run([sys.executable, "-c", MESH.format(block=mesh)], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            assert heading in headings(file), target


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_they_are_given(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    given = re.findall(r"^\$ .*?\b(edl-torch [a-z].*)$", text, re.M) + re.findall(
        r"`(edl-torch [a-z][^`]*)`", text
    )
    for command in given:
        _, *arguments = shlex.split(re.sub(r"\s*(&|#.*|>.*)$", "", command))
        try:
            build_parser().parse_args(arguments)
        except SystemExit:
            said = capsys.readouterr().err
            assert "unrecognized" not in said, command
            assert "invalid" not in said, command


def test_variables_of_the_pages_are_read_somewhere() -> None:
    def variables(*files: Path) -> set[str]:
        return {
            name for file in files for name in re.findall(r"\bEDL_[A-Z_]+[A-Z]\b", file.read_text("utf-8"))
        }

    of_tests = {"EDL_CHAOS_SEEDS", "EDL_SIMULATION_SEEDS"}
    code = variables(*ROOT.glob("edl_torch/**/*.py"))
    deploy = [file for file in ROOT.glob("deploy/**/*") if file.is_file()]
    made_by_kubernetes = {"EDL_MASTER_PORT"}
    assert variables(*LINKING, *deploy) - code == made_by_kubernetes | of_tests


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_architecture_names_every_package_each_pure_module_and_nothing_that_is_gone() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "edl_torch"
    there = {file.name for file in package.rglob("*.py")} | {"test_imports.py", "test_lock_order.py"}
    named = set(re.findall(r"\b(\w+\.py)\b", page))
    assert named - there == set()
    pure = {file.name for room in ("core", "trainer") for file in (package / room).glob("[!_]*.py")}
    assert pure - named == set()
    packages = {file.parent.name for file in package.glob("*/**/*.py")}
    listed = set(re.findall(r"^ .*$", page, re.M))
    assert {name for name in packages if not any(f" {name}/ " in line for line in listed)} == set()
