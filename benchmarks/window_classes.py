"""Which window a folder sorted by class needs: label entropy of batches over that of the global shuffle.

`python benchmarks/window_classes.py --svg docs/window_classes.svg`. A batch is neighbours of an epoch's
order, as one trainer reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from pathlib import Path

from harness import parser, write_json
from shuffle import BATCH, CLASSES, GOAL_ENTROPY, label_entropy, ours

DEFAULT_SHARD = 8 * BATCH
FOLDERS = (100, 500, 1300)  # records of a class
SHARDS = (32, DEFAULT_SHARD, 1024, 4096)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
USUAL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder of `CLASSES` classes, sorted by class, in shards."""

    of_a_class: int
    shard: int

    @property
    def size(self) -> int:
        """Its records."""
        return CLASSES * self.of_a_class

    @property
    def shards(self) -> int:
        """How many shards it has."""
        return -(-self.size // self.shard)

    @property
    def classes_in_shard(self) -> float:
        """How many classes a shard has, on average."""
        return min(CLASSES, 1 + (self.shard - 1) / self.of_a_class)

    def expected(self, window: int) -> float:
        """How many classes a window has: what docs/shuffling.md gives as a formula."""
        return CLASSES * (1 - (1 - self.classes_in_shard / CLASSES) ** min(window, self.shards))

    def share(self, window: int) -> float:
        """Entropy of the labels in a batch over that of the global shuffle."""
        return _entropy(self, window) / _entropy(self, None)

    def needed(self) -> int:
        """A window that reaches the goal, by bisection: one a little smaller does not."""
        low, high = 0, self.shards
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if self.share(middle) >= GOAL_ENTROPY else (middle, high)
        return high


@cache
def _entropy(folder: Folder, window: int | None) -> float:
    """Of the labels in a batch, over two epochs; without a window that of the global shuffle."""
    in_windows = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": window}
    shuffle = {"shuffle": True} if window is None else in_windows
    found = 0.0
    for epoch in range(2):
        order = ours(folder.size, shuffle, 5, epoch, shard=folder.shard)
        batches = order[: folder.size - folder.size % BATCH].reshape(-1, BATCH)
        found += label_entropy(batches // folder.of_a_class) / 2
    return found


# The picture ----------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 70, 30, 730, 330
STYLE = """<style>
.sheet { fill: #ffffff; stroke: #9aa4ad; }
.grid { stroke: #d5dade; }
.goal { stroke: #4b5761; stroke-dasharray: 6 5; }
text { fill: #1d2329; }
.curve { fill: none; stroke-width: 2.5; }
.curve0 { stroke: #2f6fad; } .name0 { fill: #2f6fad; }
.curve1 { stroke: #2e7d43; } .name1 { fill: #2e7d43; }
.curve2 { stroke: #b3392f; } .name2 { fill: #b3392f; }
@media (prefers-color-scheme: dark) {
  .sheet { fill: #15191d; stroke: #4b5761; }
  .grid { stroke: #333c44; }
  .goal { stroke: #aab4bd; }
  text { fill: #e8ecef; }
  .curve0 { stroke: #6aa7e0; } .name0 { fill: #6aa7e0; }
  .curve1 { stroke: #67b97d; } .name1 { fill: #67b97d; }
  .curve2 { stroke: #e0847b; } .name2 { fill: #e0847b; }
}
</style>"""


def picture(curves: dict[str, dict[int, float]]) -> str:
    """The curves as SVG: shares by window."""
    most = log2(WINDOWS[-1])

    def place(window: float, share: float) -> str:
        x = LEFT + (RIGHT - LEFT) * log2(window) / most
        return f"{x:.0f},{BOTTOM - (BOTTOM - TOP) * share:.0f}"

    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            "<title>Label entropy of a batch over that of the global shuffle, by window</title>",
            "<desc>Each curve rises from one shard in a window to all of them. The more records a class "
            f"has, the more shards a window needs to reach {GOAL_ENTROPY}.</desc>",
            STYLE,
            f'<rect class="sheet" width="{WIDTH}" height="{HEIGHT}"/>',
            *_axes(place),
            *(
                line
                for number, (name, shares) in enumerate(curves.items())
                for line in _curve(number, name, [place(*point) for point in shares.items()])
            ),
            "</svg>\n",
        )
    )


def _axes(place: Callable[[float, float], str]) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(1, share).split(",")
        yield f'<path d="M{x},{y} H{RIGHT}" class="grid"/>'
        yield f'<text x="{LEFT - 8}" y="{int(y) + 5}" text-anchor="end">{share:g}</text>'
    for window in WINDOWS[::2]:
        x, y = place(window, 0).split(",")
        yield f'<text x="{x}" y="{int(y) + 20}" text-anchor="middle">{window}</text>'
    x, y = place(1, GOAL_ENTROPY).split(",")
    yield f'<path d="M{x},{y} H{RIGHT}" class="goal"/>'
    yield f'<text x="{LEFT + 6}" y="{int(y) + 16}">{GOAL_ENTROPY}</text>'
    middle = (LEFT + RIGHT) // 2
    yield f'<text x="{middle}" y="{BOTTOM + 40}" text-anchor="middle">shards in a window</text>'
    yield f'<text x="{LEFT}" y="{TOP - 10}">label entropy of a batch over that of the global shuffle</text>'


def _curve(number: int, name: str, points: list[str]) -> Iterator[str]:
    yield f'<path d="M{" L".join(points)}" class="curve curve{number}"/>'
    y = BOTTOM - 20 * (len(FOLDERS) - number)
    yield f'<text x="{RIGHT - 10}" y="{y}" text-anchor="end" class="name{number}">{name}</text>'


# The program ----------------------------------------------------------------------------------------------


def show(folder: Folder) -> dict[str, object]:
    """A line of the table."""
    share, needed = folder.share(min(USUAL, folder.shards)), folder.needed()
    row = {
        "shards": folder.shards,
        "classes_in_shard": folder.classes_in_shard,
        "expected": folder.expected(USUAL),
        "share": share,
        "needed": needed,
        "expected_needed": folder.expected(needed),
    }
    print(
        f"| {CLASSES} × {folder.of_a_class:,} | {folder.shard:,} | {folder.shards:,} "
        f"| {folder.classes_in_shard:.1f} | {row['expected']:.0f} | {share:.2f} | {needed:,} "
        f"| {row['expected_needed']:.0f} |",
        flush=True,
    )
    return asdict(folder) | row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; write JSON and the picture."""
    options = _options(arguments)
    folders, shards = ((20,), (32,)) if options.quick else (FOLDERS, SHARDS)
    print(
        "| folder | records of a shard | shards | classes in a shard | in 16 | entropy over global | needed |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = [show(Folder(of_a_class=count, shard=shard)) for count in folders for shard in shards]
    if options.svg is not None:
        curves = {}
        for count in folders:
            folder = Folder(of_a_class=count, shard=DEFAULT_SHARD)
            windows = [window for window in WINDOWS if window < 2 * folder.shards]
            name = f"{CLASSES} classes of {count:,}, shards of {DEFAULT_SHARD}"
            curves[name] = {window: folder.share(min(window, folder.shards)) for window in windows}
        options.svg.write_text(picture(curves))
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("Label entropy of batches by window, on folders sorted by class.")
    made.add_argument("--svg", type=Path, metavar="PATH", help="draw the curves there")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
