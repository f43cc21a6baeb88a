"""Arguments of `ElasticDataLoader` that nothing takes."""

from __future__ import annotations

from typing import Any

import pytest

from edl_torch import ElasticDataLoader


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batchsize": 2}, r"no argument 'batchsize': did you mean batch_size\?"),
        ({"batch_size": 2, "nthreads": 2}, r"no argument 'nthreads': did you mean num_threads\?"),
        ({"batch_size": 2, "num_worker": 2}, r"no argument 'num_worker': did you mean num_workers\?"),
        ({"batch_size": 2, "qqq": 2}, r"no argument 'qqq'$"),
    ],
)
def test_a_misspelt_argument_is_named_with_the_one_that_was_meant(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        ElasticDataLoader([1, 2, 3], **arguments)
