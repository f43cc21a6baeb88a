"""For all tests: nothing is kept outside the test's own folders."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Readers keep their indexes in a folder of this run, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDL_INDEX_DIR", str(tmp_path_factory.mktemp("index")))
        yield
