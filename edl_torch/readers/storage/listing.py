"""What lies below a folder, as a compact index: names, sizes and tags, 16 bytes an object beside its name."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.mapped import Array, StringTable, shared
from edl_torch.readers.storage.drivers import Object
from edl_torch.readers.storage.requests import MOST_REQUESTS
from edl_torch.readers.storage.storage import Storage

MISSING = -1  # the size of what is not there


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects by number: `base` and a name below it; `sizes` and `tags`, int64 [n] each."""

    base: str
    names: StringTable
    arrays: Mapping[str, Array]

    @classmethod
    def below(
        cls, storage: Storage, folder: str, keep: Callable[[str], bool], order: Callable[[str], str]
    ) -> Listing:
        """The objects below a folder whose name below it is to be kept, sorted by what `order` makes of that.

        Raises ReaderError where the folder cannot be listed to its end, DataFormatError where it has nothing.
        """
        base, any_found = folder.rstrip("/") + "/", False
        names: list[str] = []
        sizes, tags = array("q"), array("q")
        with storage.apart() as apart:
            for one in apart.listing(folder):
                any_found = True
                name = one.name[len(base) :]
                if keep(name):
                    names.append(name)
                    sizes.append(one.size)
                    tags.append(one.tag)
        if not any_found:
            raise DataFormatError(f"'{folder}' has no file; check the bucket and the path")
        keys = list(map(order, names))
        places = np.array(sorted(range(len(names)), key=keys.__getitem__), dtype=np.int64)
        return cls._of(base, (names[place] for place in places.tolist()), sizes, tags, places)

    @classmethod
    def _of(
        cls, base: str, names: Iterable[str], sizes: Sequence[int], tags: Sequence[int], places: Array
    ) -> Listing:
        arrays = {"sizes": np.array(sizes, np.int64)[places], "tags": np.array(tags, np.int64)[places]}
        return cls(base, StringTable(names), shared(arrays, "listing"))

    @classmethod
    def looked_up(cls, storage: Storage, folder: str, names: StringTable) -> Listing:
        """Objects of a server that lists none, each looked up by its name. Raises ReaderError."""
        base, quoted = folder.rstrip("/") + "/", StringTable(map(quote, names))
        with storage.apart() as apart, ThreadPoolExecutor(MOST_REQUESTS) as pool:
            found = list(pool.map(lambda name: apart.look(base + name), quoted))
        sizes = [MISSING if one is None else one.size for one in found]
        tags = [0 if one is None else one.tag for one in found]
        arrays = {"sizes": np.array(sizes, np.int64), "tags": np.array(tags, np.int64)}
        return cls(base, quoted, shared(arrays, "listing"))

    def of_names(self, names: StringTable) -> Listing:
        """The objects of these names below the same folder; the size of one that is none is `MISSING`."""
        place_of = {name: place for place, name in enumerate(self.names)}
        places = np.fromiter((place_of.get(name, -1) for name in names), np.int64, len(names))
        there = places >= 0
        arrays = {}
        for key, absent in (("sizes", MISSING), ("tags", 0)):
            arrays[key] = np.full(len(names), absent, np.int64)
            arrays[key][there] = self.arrays[key][places[there]]
        return Listing(self.base, names, shared(arrays, "listing"))

    def __len__(self) -> int:
        return len(self.names)

    def object(self, number: int) -> Object:
        """An object, as it was listed."""
        return Object(
            self.base + self.names[number],
            int(self.arrays["sizes"][number]),
            int(self.arrays["tags"][number]),
        )
