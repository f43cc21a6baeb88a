"""Recompute from audit logs alone what a mixture was trained on. Nothing here is the package's: stdlib only.

    python tests/mixture_proof.py AUDIT_DIR… [--dataset NAME] [--records]

It follows the tokens from the final lineage back to the first, plays the rule of the order in fractions
through the weights that the logs name, and raises Broken for the first of these that does not hold:

* counts and lags that each segment begins with are those that the one before it comes to;
* at every prefix of the plan no component is a whole record ahead of its share; none is a whole record behind
  while weights have not changed, nor 1 + 1/2 + … + 1/k records, k half the components rounded up, after;
  where batches are of one component, and these take turns of several records, all that is of turns;
* what a token says has an outcome, the logs of before say too; its weights are those of before;
* each index is trained on once at most;
* at every acknowledgement each component has its share of all that is acknowledged, to within that bound and
  the records in flight: those below the highest acknowledged index that are without outcome.

`opened` and `ms` of the logs order acknowledgements of several trainers: their clocks must agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

EXACTLY = Fraction(1, 1 << 40)  # lags are written down with 52 bits


class Broken(Exception):
    """What does not hold."""


class Ack(NamedTuple):
    """Indices `first` to `after` were acknowledged at a time."""

    at: float
    first: int
    after: int


class Lineage:
    """What the logs say of one lineage."""

    def __init__(self) -> None:
        self.began = math.inf
        self.token: str | None = None
        self.dataset: dict[str, Any] = {}
        self.names: list[str] = []  # of all components that it has had
        self.sizes: dict[str, int] = {}  # of those that have data
        self.segments: dict[int, Segment] = {}  # by number
        self.acks: list[Ack] = []
        self.unsure: list[Ack] = []  # reported, and no answer came
        self.bad: set[int] = set()
        self.sessions: set[str] = set()

    def has_joined(self, spec: dict[str, Any]) -> None:
        """Note a dataset as a trainer knew it, to which components may have been added since."""
        self.dataset = spec
        self.names = sorted({*self.names, *names_of(spec)})
        for name, sources, *_ in spec["components"]:
            if size := sum(count for _, _, count in sources):
                self.sizes[name] = size


class Segment(NamedTuple):
    """A segment, with parts, counts and lags by name."""

    number: int
    start: int
    parts: dict[str, int]
    counts: dict[str, int]
    lags: dict[str, Fraction]
    turn: int

    def says(self, other: Segment) -> bool:
        """Whether it is the other one, under a number of its own and with maybe other names."""
        of_each = zip(self[2:5], other[2:5], strict=True)
        same = all(
            mine.get(name, 0) == yours.get(name, 0) for mine, yours in of_each for name in {*mine, *yours}
        )
        return same and (self.start, self.turn) == (other.start, other.turn)


def names_of(spec: dict[str, Any]) -> list[str]:
    return [one[0] for one in spec["components"]]


def segment_of(names: list[str], row: list[Any]) -> Segment:
    """A segment as a trainer heard of it that had components of these names."""
    number, start, parts, counts, lags, scale, turn, _ = row
    of_each = [dict(zip(names, of, strict=True)) for of in (parts, counts)]
    return Segment(
        number,
        start,
        *of_each,
        {name: Fraction(lag, scale) for name, lag in zip(names, lags, strict=True)},
        turn,
    )


def segments_of(spec: dict[str, Any], told: list[list[Any]]) -> dict[int, Segment]:
    """Segments by number, as the trainer heard of them that had the dataset `spec`."""
    return {row[0]: segment_of(names_of(spec), row) for row in told}


Key = tuple[str, int]


class Logs:
    """All lineages of a dataset, and the lineage in which each token was taken."""

    def __init__(self, folders: list[str], dataset: str) -> None:
        self.lineages: dict[Key, Lineage] = {}
        self.taken: dict[str, Key] = {}
        for folder in folders:
            for path in sorted(Path(folder).glob("*.audit")):
                self._read(path, dataset)
        if not self.lineages:
            raise Broken(f"no log in {', '.join(folders)} is of a mixture called {dataset!r}")

    def _read(self, path: Path, wanted: str) -> None:
        key: Key | None = None
        spec: dict[str, Any] = {}
        opened, session = 0.0, ""
        pending: list[tuple[int, Ack]] = []  # by task
        lines = path.read_bytes().split(b"\n")
        for line in lines[:-1]:  # what has no newline was not written to its end
            if line == b"=":
                self._settle(key, pending, set(), set())
            elif not line.startswith(b"{"):
                epoch, shard, start, upto, task, _, _, ms = map(int, line.split())
                if key is not None:
                    if epoch:
                        raise Broken(f"{path}: a mixture has one epoch, and this is {epoch}")
                    first = shard * spec["records_per_shard"]
                    pending.append((task, Ack(opened + ms / 1000, first + start, first + upto)))
            else:
                event = json.loads(line)
                match event.get("event"):
                    case None:
                        opened, session = event["opened"], event["session"]
                    case "joined" | "restored" as kind:
                        self._lost(key, pending)
                        if kind == "joined":
                            spec = event["dataset"]
                            is_it = spec["name"] == wanted and spec["components"]
                            key = (event["ledger"], event["lineage"]) if is_it else None
                        elif key is not None:
                            key = key[0], event["lineage"]
                        if key is None:
                            continue
                        lineage = self.lineages.setdefault(key, Lineage())
                        lineage.began = min(lineage.began, opened + event["ms"] / 1000)
                        lineage.has_joined(spec)
                        lineage.sessions.add(session)
                        if kind == "restored":
                            lineage.token = event["token"]
                        else:
                            lineage.segments |= segments_of(spec, spec["segments"])
                    case "segments" if key is not None:
                        self.lineages[key].segments |= segments_of(spec, event["segments"])
                    case "quarantined" if key is not None:
                        first = event["shard"] * spec["records_per_shard"]
                        self.lineages[key].bad.add(first + event["position"])
                    case "refused":
                        self._settle(key, pending, set(event["tasks"]), set(event["unsure"]))
                    case "lost":
                        self._lost(key, pending)
                    case "snapshot":
                        self.taken[event["token"]] = event["ledger"], event["lineage"]
        self._lost(key, pending)

    def _settle(
        self, key: Key | None, pending: list[tuple[int, Ack]], refused: set[int], unsure: set[int]
    ) -> None:
        if key is not None:
            self.lineages[key].acks += [ack for task, ack in pending if task not in refused | unsure]
            self.lineages[key].unsure += [ack for task, ack in pending if task in unsure]
        pending.clear()

    def _lost(self, key: Key | None, pending: list[tuple[int, Ack]]) -> None:
        if key is not None:
            self.lineages[key].unsure += [ack for _, ack in pending]
        pending.clear()

    def chain(self) -> list[Lineage]:
        """The lineages that the final one came from, the first one first, and itself."""
        last, _ = max(self.lineages, key=lambda key: self.lineages[key].began)
        key = last, max(number for ledger, number in self.lineages if ledger == last)
        found = [self.lineages[key]]
        while (token := found[0].token) is not None:
            digest = hashlib.blake2b(token.encode(), digest_size=16).hexdigest()
            if digest not in self.taken:
                raise Broken(f"no log says where the token {digest} was taken")
            found.insert(0, self.lineages[self.taken[digest]])
        return found


# The order, as docs/mixtures.md tells it ---------------------------------------------------------------


class Plan:
    """The component of each index, and how many records of it came before; and what each is owed there."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.owners: list[int] = []
        self.ranks: list[int] = []
        self.owed: list[list[Fraction]] = []  # after each index, shares of all records until then
        self.worst_ahead = self.worst_behind = Fraction(0)
        self.calm = True  # weights have not changed yet
        self.counts = [0] * len(names)
        self.lags = [Fraction(0)] * len(names)  # of turns
        self.shares = [Fraction(0)] * len(names)
        self.told: Segment | None = None
        self.turn = 1
        self.began, self.before = 0, list(self.lags)  # where it began, and the lags until then

    def __copy__(self) -> Plan:
        """Return one that goes on by itself."""
        other = Plan.__new__(Plan)
        for name, value in vars(self).items():
            setattr(other, name, list(value) if isinstance(value, list) else value)
        return other

    def begin(self, segment: Segment) -> None:
        """Go on with a segment, which must take over what the plan has come to."""
        start = segment.start
        parts, counts = ([of.get(name, 0) for name in self.names] for of in (segment.parts, segment.counts))
        told = [segment.lags.get(name, Fraction(0)) for name in self.names]
        if start != len(self.owners) or counts != self.counts:
            raise Broken(f"the segment from {start} on begins with {counts}, not {self.counts}")
        if self.told is None or self.began < start:  # else it takes the place of one that nobody was in
            self.began, self.before = start, list(self.lags)
        owed = self._let_go(parts)
        if any(abs(one - other) > EXACTLY for one, other in zip(told, owed, strict=True)):
            raise Broken(f"the segment from {start} on begins with lags {told}, not {owed}")
        if start % segment.turn or (start and segment.turn != self.turn):
            raise Broken(f"the segment from {start} on has turns of {segment.turn} records")
        self.lags, self.told, self.turn = told, segment, segment.turn
        self.shares = [Fraction(part, sum(parts)) for part in parts]
        self.calm = self.calm and not any(told)

    def _let_go(self, parts: list[int]) -> list[Fraction]:
        """The lags of components that stay, who share out those of components that do not."""
        none = Fraction(0)
        kept = [lag if part else none for lag, part in zip(self.before, parts, strict=True)]
        over = sum(kept, none)
        giving = sum((lag for lag in kept if lag * over > 0), none)
        return [lag * (1 - over / giving) if lag * over > 0 else lag for lag in kept]

    def grow(self, size: int) -> None:
        """Play the rule, and look at each prefix."""
        most = (
            Fraction(1)
            if self.calm
            else sum(Fraction(1, k) for k in range(1, (len(self.names) + 1) // 2 + 1))
        )
        while len(self.owners) < size:
            due = {
                c: math.ceil((1 - self.lags[c]) / share)
                for c, share in enumerate(self.shares)
                if share and self.lags[c] + share > 0
            }
            owed = [lag * self.turn + count for lag, count in zip(self.lags, self.counts, strict=True)]
            self.lags = [lag + share for lag, share in zip(self.lags, self.shares, strict=True)]
            now = [c for c, turns in due.items() if turns <= 1]
            c = min(now, key=lambda c: (-self.lags[c], c)) if now else min(due, key=lambda c: (due[c], c))
            self.lags[c] -= 1
            self.worst_ahead = min(self.worst_ahead, *self.lags)
            self.worst_behind = max(self.worst_behind, *self.lags)
            if not (min(self.lags) > -1 and max(self.lags) < most):
                raise Broken(f"after {len(self.owners)} records the lags are {list(map(float, self.lags))}")
            for _ in range(self.turn):
                self.owners.append(c)
                self.ranks.append(self.counts[c])
                self.counts[c] += 1
                owed = [of + share for of, share in zip(owed, self.shares, strict=True)]
                self.owed.append(owed)


def plan_of(chain: list[Lineage], size: int) -> Plan:
    """The plan of the final lineage: its own segments, before them those of the lineages it came from."""
    segments: list[Segment] = []
    for lineage in chain:
        told = [segment for _, segment in sorted(lineage.segments.items())]
        per_shard = lineage.dataset["records_per_shard"]
        stands = 0 if lineage.token is None else cursor_of(lineage.token, per_shard)
        *_, had = [None, *(one for one in segments if one.start < stands)]
        *_, has = [None, *(one for one in told if one.start < stands)]
        if had is not None and has is not None and not had.says(has):
            raise Broken(f"at the checkpoint at {stands} the weights are {has.parts}, and were {had.parts}")
        for segment in told:  # one takes the place of those from its start on
            segments = [one for one in segments if one.start < segment.start] + [segment]
    plan = Plan(sorted({name for lineage in chain for name in lineage.names}))
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if segment.start >= size:
            break
        plan.begin(segment)
        plan.grow(size if following is None else min(size, following.start))
    return plan


# What was trained on -----------------------------------------------------------------------------------


def cursor_of(token: str, records_per_shard: int) -> int:
    """The first index that was not lent at a token. Where all was: 0, nothing can be said."""
    epoch, window, offset = json.loads(token)["cursor"]
    return 0 if epoch else int(window * records_per_shard + offset)


def outcomes_of(token: str, records_per_shard: int) -> set[int]:
    """Indices that have an outcome in a token."""
    said = json.loads(token)
    behind = said["acknowledged"] + said["dropped"]
    for _, _, _, _, _, _, *runs in said["quarantine"]:  # of passes that met it: first, end, first, end, …
        behind += sum(runs[1::2]) - sum(runs[::2])
    waiting = [*said["open"], *said["crumbs"]]
    behind += sum(limit for _, _, _, limit in waiting)
    if (cursor := cursor_of(token, records_per_shard)) and behind != cursor:
        raise Broken(f"a token's cursor is at {cursor}, and it counts {behind}")
    found = set(range(behind))
    for _, shard, skip, limit in waiting:
        first = shard * records_per_shard + skip
        found -= set(range(first, first + limit))
    return found


def trained(chain: list[Lineage]) -> tuple[list[Ack], set[int]]:
    """The acknowledgements that the final model has, in time, and indices in quarantine."""
    acks: list[Ack] = []
    has: set[int] = set()
    bad: set[int] = set()
    for lineage, following in zip(chain, [*chain[1:], None], strict=True):
        certain = sorted(lineage.acks)
        seen = set(has)
        for ack in certain:
            own = set(range(ack.first, ack.after))
            if own & seen:
                raise Broken(f"indices {sorted(own & seen)[:5]} were acknowledged twice")
            seen |= own
        # One that got no answer counts where nobody else has the records.
        extra = [ack for ack in lineage.unsure if not seen & set(range(ack.first, ack.after))]
        for ack in extra:
            seen |= set(range(ack.first, ack.after))
        new = sorted([*certain, *extra])
        if following is not None:
            assert following.token is not None
            kept = outcomes_of(following.token, lineage.dataset["records_per_shard"])
            if beyond := kept - seen - bad - lineage.bad:
                raise Broken(f"a token has indices {sorted(beyond)[:5]}, and no log of before it has")
            new = [
                Ack(ack.at, index, index + 1)
                for ack in new
                for index in range(ack.first, ack.after)
                if index in kept
            ]
            bad |= lineage.bad & kept
            seen &= kept
        else:
            bad |= lineage.bad
        acks, has = acks + new, seen
    return acks, bad


def prove(folders: list[str], dataset: str = "training") -> dict[str, Any]:
    """Return what was found, or raise Broken."""
    chain = Logs(folders, dataset).chain()
    acks, bad = trained(chain)
    plan = plan_of(chain, max((ack.after for ack in acks), default=0))
    number = len(plan.names)
    before = [[Fraction(0)] * number, *plan.owed]
    given, share = [0] * number, [Fraction(0)] * number
    most = sum(Fraction(1, k) for k in range(1, (number + 1) // 2 + 1)) if not plan.calm else 1
    done = highest = most_in_flight = 0
    worst = Fraction(0)
    for ack in acks:
        for index in range(ack.first, ack.after):
            given[plan.owners[index]] += 1
            share = [s + b - a for s, a, b in zip(share, before[index], before[index + 1], strict=True)]
        done += ack.after - ack.first
        highest = max(highest, ack.after)
        in_flight = highest - done
        distance = max(abs(count - s) for count, s in zip(given, share, strict=True))
        worst, most_in_flight = max(worst, distance), max(most_in_flight, in_flight)
        if not distance < in_flight + most * plan.turn:
            raise Broken(f"after {done} records a component is {float(distance)} from its share")
    by_name = {name: size for lineage in chain for name, size in lineage.sizes.items()}
    sizes = [by_name[name] for name in plan.names]
    return {
        "records": done,
        "quarantined": len(bad),
        "missing": highest - done - len(bad),
        "lineages": len(chain),
        "sessions": len(set().union(*(lineage.sessions for lineage in chain))),
        "calm": plan.calm,
        "ahead": float(-plan.worst_ahead),
        "behind": float(plan.worst_behind),
        "from_its_share": float(worst),
        "in_flight": most_in_flight,
        "components": {
            name: {"given": given[c], "share": float(share[c]), "passes": given[c] / sizes[c]}
            for c, name in enumerate(plan.names)
        },
        "found": [
            (plan.names[c], plan.ranks[index] // sizes[c], plan.ranks[index] % sizes[c])
            for ack in acks
            for index in range(ack.first, ack.after)
            for c in [plan.owners[index]]
        ],
    }


def main() -> int:
    """0: all of it holds."""
    parser = argparse.ArgumentParser(description="shares of a mixture, from its audit logs alone")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--dataset", default="training")
    parser.add_argument(
        "--records", action="store_true", help="print component, pass and number in it of each record"
    )
    arguments = parser.parse_args()
    try:
        said = prove(arguments.folders, arguments.dataset)
    except Broken as broken:
        print(f"BROKEN: {broken}")
        return 1
    found = said.pop("found")
    print(json.dumps(said))
    if arguments.records:
        print("\n".join(" ".join(map(str, record)) for record in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
