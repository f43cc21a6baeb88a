"""What lies below a folder, as a compact index: names, sizes and tags, 16 bytes an object beside its name.

All readers that list do it by `Listing.below`. A store shows no moment of a folder: what is added, removed
or replaced between two pages of a listing may be in it or not. So a listing that may have met a change (an
object as new as the listing itself, a folder that was there and has nothing, a name twice) is made again
until two in a row are equal.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from math import floor
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers.shared.files import FileStamp
from edl_torch.readers.shared.mapped import BESIDE, Array, StringTable, kept_at, kept_index, shared
from edl_torch.readers.storage.drivers import Object, Page
from edl_torch.readers.storage.requests import MOST_REQUESTS
from edl_torch.readers.storage.storage import Storage

log = logging.getLogger("edl_torch.readers")

_KIND = "listing2"
_ATTEMPTS = 5
MISSING = -1  # the size of what is not there


class NothingListed(DataFormatError):
    """Error: nothing lies below a folder."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects by number: `base` and a name below it; `sizes` and `tags`, int64 [n] each."""

    base: str
    names: StringTable
    arrays: Mapping[str, Array]

    @classmethod
    def below(cls, storage: Storage, folder: str) -> Listing:
        """The objects below a folder, sorted by the folder right below it, then folder, then name; the kept
        listing where the storage keeps them.

        One that is kept is taken, however old it is: what was written over or removed since is found when it
        is read, and what was added is not in it. Where the storage shall refresh it, only one is taken that
        was not ready yet when it was asked for: of ranks that start together one lists. Raises ReaderError
        where the folder cannot be listed to its end, NothingListed, and SourceChanged for one that changes
        all the time.
        """
        base = folder.rstrip("/") + "/"
        with storage.apart() as apart:
            if storage.index_dir in (None, BESIDE):
                arrays: Mapping[str, Array] = _listed(apart, folder)
            else:
                stamp = FileStamp(path=base, size=0, mtime_ns=0, ctime_ns=0)  # a folder has none
                keep = kept_at(stamp, _KIND, storage.endpoint, apart)
                header = {"path": base, "kind": _KIND, "options": storage.endpoint}
                arrays = kept_index(keep, header, lambda: _listed(apart, folder), refresh=storage.refresh)
        names = StringTable.of({part: arrays[f"names {part}"] for part in ("blob", "bounds")})
        return cls(base, names, shared({name: arrays[name] for name in ("sizes", "tags")}, "listing"))

    def where(self, chosen: npt.NDArray[np.bool_]) -> Listing:
        """The objects for which it is true; bool [n]."""
        if chosen.all():
            return self
        arrays = shared({name: values[chosen] for name, values in self.arrays.items()}, "listing")
        return Listing(self.base, self.names.take(np.flatnonzero(chosen)), arrays)

    def find(self, url: str) -> Object | None:
        """The object of that URL, if it is listed."""
        name = url.removeprefix(self.base)
        place = bisect_left(self.names, folder_order(name), key=folder_order)
        return self.object(place) if place < len(self) and self.names[place] == name != url else None

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

    def with_others(self, storage: Storage, others: StringTable) -> Listing:
        """The same with the object of another name in the place of each that is missing, if that is there."""
        missing = np.flatnonzero(self.arrays["sizes"] == MISSING).tolist()
        if not missing:
            return self
        found = Listing.looked_up(storage, self.base, StringTable(others[place] for place in missing))
        names = list(self.names)
        arrays = {key: np.array(values) for key, values in self.arrays.items()}
        for number, place in enumerate(missing):
            if found.arrays["sizes"][number] != MISSING:
                names[place] = found.names[number]
                arrays["sizes"][place] = found.arrays["sizes"][number]
                arrays["tags"][place] = found.arrays["tags"][number]
        return Listing(self.base, StringTable(names), shared(arrays, "listing"))

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
        return Object(
            self.base + self.names[number],
            int(self.arrays["sizes"][number]),
            int(self.arrays["tags"][number]),
        )


def _listed(storage: Storage, folder: str) -> dict[str, Array]:
    """The arrays of a listing of now. Raises as `Listing.below`."""
    before: dict[str, Array] | None = None
    for _ in range(_ATTEMPTS):
        began_s = floor(time.time())  # stores have whole seconds
        pages = list(storage.pages(folder))
        parts = list(_in_order(pages))
        if not parts:
            raise NothingListed(f"'{folder}' has no file; check the bucket and the path")
        names = StringTable(chain.from_iterable(part.names for part in parts))
        found = {
            **{f"names {part}": value for part, value in names.arrays.items()},
            "sizes": np.concatenate([np.frombuffer(part.sizes, np.int64) for part in parts]),
            "tags": np.concatenate([np.frombuffer(part.tags, np.int64) for part in parts]),
        }
        is_twice = any(len(set(part.names)) < len(part.names) for part in parts)
        if not is_twice and (
            max(page.newest_s for page in pages) < began_s
            or (before is not None and all(np.array_equal(before[key], found[key]) for key in found))
        ):
            return found
        log.info("url=%s may have changed while it was listed: it is listed again", folder)
        before = found
    raise SourceChanged(
        f"'{folder}' changes while it is listed, {_ATTEMPTS} times in a row: let what writes to it end, and "
        "start the job again"
    )


def _in_order(pages: Iterable[Page]) -> Iterator[Page]:
    """The same objects by `folder_order`, those of one folder together."""
    of_folder: dict[str, list[Page]] = {}
    for page in pages:
        for folder, part in _by_folder(page):
            of_folder.setdefault(folder, []).append(part)
    for folder in sorted(of_folder, key=lambda name: (name.partition("/")[0], name)):
        parts = sorted(of_folder[folder], key=lambda part: part.names[0])
        if any(one.names[-1] >= other.names[0] for one, other in pairwise(parts)):
            names = list(chain.from_iterable(part.names for part in parts))
            joined = Page(names, parts[0].sizes[:0], parts[0].tags[:0])
            for part in parts:
                joined.sizes.extend(part.sizes)
                joined.tags.extend(part.tags)
            parts = [_taken(joined, range(len(names)))]
        yield from parts


def _by_folder(page: Page) -> Iterator[tuple[str, Page]]:
    """What a page has of each folder, sorted; most have one folder alone, in its order."""
    names = page.names
    if not names:
        return
    folder = names[0].rpartition("/")[0]
    inside = f"{folder}/" if folder else ""
    if (
        names[-1].startswith(inside)
        and "".join(names).count("/") == len(names) * inside.count("/")
        and names == sorted(names)
    ):
        yield folder, page
        return
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name.rpartition("/")[0], []).append(place)
    yield from ((folder, _taken(page, each)) for folder, each in places.items())


def _taken(page: Page, places: Iterable[int]) -> Page:
    ordered = sorted(places, key=page.names.__getitem__)
    sizes, tags = page.sizes[:0], page.tags[:0]
    sizes.extend(map(page.sizes.__getitem__, ordered))
    tags.extend(map(page.tags.__getitem__, ordered))
    return Page([page.names[place] for place in ordered], sizes, tags)


def folder_order(name: str) -> str:
    """What names are sorted by: the first folder, then the whole of it, then the file."""
    folder, _, file = name.rpartition("/")
    return f"{folder.partition('/')[0]}\0{folder}\0{file}"
