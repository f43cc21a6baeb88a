"""For all tests: nothing is kept outside their own folders, Ctrl-C works, a busy machine is no failure."""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from huge_pages import use_huge_pages

# Before torch is imported: its threads wait for each other in loops that keep a core busy, and where several
# processes of pytest share the cores a small backward pass takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and test items stay: the garbage collector need not look through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        use_huge_pages()


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples each time; where all tests run, twenty times as many, and others.

    No change is refused for what an earlier one did, and what was never drawn is found by night.
    """
    if any(Path(argument).absolute() == Path(__file__).parent for argument in config.args):
        with suppress(ImportError), warnings.catch_warnings(action="ignore"):  # from Python 3.12 on it warns
            import odps  # noqa: F401  it looks through all modules: beside torch that takes three times as long
    with suppress(ImportError):  # TensorFlow's environment is without it
        from hypothesis import HealthCheck, settings

        common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("each change", max_examples=50, derandomize=True, **common)
        settings.register_profile("each night", max_examples=1000, **common)
        settings.load_profile("each change" if config.option.markexpr else "each night")


@pytest.fixture(autouse=True, scope="session")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Readers keep their indexes in a folder of this run, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDL_INDEX_DIR", str(tmp_path_factory.mktemp("index")))
        yield


@pytest.fixture(autouse=True, scope="session")
def preloaded_forkserver() -> None:
    """Processes of a forkserver find torch imported."""
    multiprocessing.set_forkserver_preload(["torch", "edl_torch.data.loader"])


@pytest.fixture
def own_threads() -> Callable[[], list[threading.Thread]]:
    """Threads of the package that this test began; an earlier one's may still wait for a master."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name.startswith("edl-") and t not in before]


@pytest.fixture
def own_children() -> Callable[[], list[BaseProcess]]:
    """Processes that this test began, as loader workers; an earlier one's may still be ending."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """A run in the background of a script ignores SIGINT, and its children would too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
