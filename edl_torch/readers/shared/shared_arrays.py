"""Index arrays of a reader, small ones as they are and large ones in a mapped file that all processes share.

It must not know what the arrays mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edl_torch.readers.shared.mapped import Array, MappedArrays

log = logging.getLogger("edl_torch.readers")

# Below, an array travels in a reader's pickle faster than a file is made and mapped.
SPILL_BYTES = 1 << 20


def shared(arrays: Mapping[str, Array], label: str) -> Mapping[str, Array]:
    """The arrays, in a temporary file where they take more than `SPILL_BYTES` together.

    Without room for a file they stay in memory, with a warning: loader workers then have copies of their own.
    """
    total = sum(array.nbytes for array in arrays.values())
    if total <= SPILL_BYTES:
        return dict(arrays)
    try:
        return MappedArrays.spill(arrays, label=label)
    except OSError as exc:
        log.warning(
            "label=%s bytes=%d the index stays in memory, once for each loader worker (%s); TMPDIR names "
            "another folder for temporary files",
            *(label, total, exc),
        )
        return dict(arrays)
