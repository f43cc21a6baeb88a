"""The audit once more, with sets of records and a line at a time: what the fast one is held against."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from edl_torch.audit.log import token_digest
from edl_torch.core.codec import from_object
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.vocabulary import Evidence

Record = tuple[int, int, int]  # epoch, shard, position


def done(token: Token, plan: Plan) -> set[Record]:
    """The records that have an outcome in a token."""
    found = set()
    for epoch in range(token.epoch + 1):
        for position in range(plan.num_windows):
            shard = plan.window_at(epoch, position)
            for place in range(plan.records_in(epoch, shard)):
                if (epoch, position, place) < (token.epoch, token.position, token.offset):
                    found.add((epoch, shard, place))
    for cut in (*token.open, *token.remainders):
        found -= {(cut.epoch, cut.shard, place) for place in range(cut.skip, cut.stop)}
    return found


@dataclass
class Taken:
    """A token that a session took: what its own log says it had trained on by then, in this lineage."""

    session: str
    line: int
    exact: bool
    uncounted: int


class Lineage:
    def __init__(self) -> None:
        self.accepted: Counter[Record] = Counter()
        self.unsure: set[Record] = set()
        self.bad: set[Record] = set()
        self.remainders: set[Record] = set()
        self.refused = 0
        self.token: str | None = None
        self.taken: defaultdict[str, list[Taken]] = defaultdict(list)
        # What happened at a line of a session's log: (session, line, what, records or their number)
        self.events: list[tuple[str, int, str, object]] = []


class Naive:
    """All logs of a directory, of one dataset and one batch size. The final lineage has the highest key."""

    def __init__(self, directory: Path) -> None:
        self.lineages: defaultdict[tuple[str, int], Lineage] = defaultdict(Lineage)
        for path in directory.glob("*.audit"):
            self._read(path.name, path.read_text())
        self.plan = Plan(self.spec)

    def _read(self, session: str, text: str) -> None:
        pending: list[tuple[Lineage, str, int, set[Record], str]] = []
        holes: set[tuple[int, Record]] = set()
        lines = text.split("\n")[1:-1]
        ledger, lineage, way = "", Lineage(), ""
        for line in lines:
            if line.startswith("{") and json.loads(line)["event"] == "quarantined":
                values = json.loads(line)
                holes.add((values["task"], (values["epoch"], values["shard"], values["position"])))
        for number, line in enumerate(lines):
            if line == "=":
                self._settle(session, number, pending)
            elif not line.startswith("{"):
                epoch, shard, start, upto, task, _, _, _ = map(int, line.split(" "))
                records = {(epoch, shard, p) for p in range(start, upto)}
                records = {r for r in records if (task, r) not in holes}
                pending.append((lineage, "ack", task, records, way))
            else:
                values = json.loads(line)
                match values["event"]:
                    case "joined":
                        self.spec = from_object(DatasetSpec, values["dataset"])
                        self.batch_size = values["batch_size"]
                        ledger = values["ledger"]
                        lineage = self.lineages[ledger, values["lineage"]]
                    case "restored":
                        lineage = self.lineages[ledger, values["lineage"]]
                        lineage.token = values["token"]
                    case "snapshot":
                        taken = Taken(session, number, values["exact"], values["uncounted"])
                        lineage.taken[values["token"]].append(taken)
                    case "remainder":
                        lineage.remainders |= run(values)
                    case "way":
                        way = values["way"]
                    case "returned" | "void":
                        lineage.events.append((session, number, values["event"], run(values)))
                    case "uncounted":
                        lineage.events.append((session, number, "uncounted", values["records"]))
                    case "quarantined":
                        record = values["epoch"], values["shard"], values["position"]
                        pending.append((lineage, "bad", values["task"], {record}, ""))
                    case "refused":
                        told = set(values["tasks"]), set(values["unsure"])
                        self._settle(session, number, pending, *told)
                    case "lost":
                        self._settle(session, number, pending, unsure={task for _, _, task, _, _ in pending})
        for lineage, _, _, records, way in pending:
            self._doubt(lineage, records, way, session, len(lines))

    def _settle(self, session, line, pending, refused=frozenset(), unsure=frozenset()) -> None:
        for lineage, kind, task, records, way in pending:
            if task in refused:
                lineage.refused += len(records) if kind == "ack" else 0
                if kind == "ack":
                    lineage.events.append((session, line, "late", records))
            elif task in unsure:
                self._doubt(lineage, records, way, session, line)
                if kind == "ack":
                    lineage.events.append((session, line, "maybe late", records))
            else:
                if kind == "ack":
                    lineage.accepted.update(records)
                    lineage.events.append((session, line, f"by {way}", records))
                    lineage.events.append((session, line, "accepted", records))
                else:
                    lineage.bad |= records
        pending.clear()

    def _doubt(self, lineage, records, way, session, line) -> None:
        lineage.unsure |= records
        if way:
            lineage.events.append((session, line, f"by {way}", records))

    def verdict(self) -> Counter[str]:
        """Counts, as the fast audit has them; `faults` of tokens, and the ways of acknowledgements."""
        key = max(self.lineages, key=place)
        required = {
            (epoch, shard, place)
            for epoch in range(self.spec.num_epochs)
            for shard in self.plan.windows_at(epoch, 0, self.plan.num_windows)
            for place in range(self.plan.records_in(epoch, shard))
        }
        counts: Counter[str] = Counter()
        repeated: defaultdict[str, set[Record]] = defaultdict(set)
        used, quarantine, left = set(), set(), {}
        while True:
            used.add(key)
            lineage = self.lineages[key]
            token = None if lineage.token is None else Token.decode(lineage.token)
            begun = self.begun(lineage)
            self._count(counts, lineage, required, quarantine - begun)
            self._count_inexact(counts, repeated, lineage, left, required)
            if len(used) > 1:
                counts["rolled_back"] += len(
                    (set(lineage.accepted) | lineage.unsure | lineage.bad) - begun - required
                )
            digest = token_digest(lineage.token or "")
            earlier = [
                k
                for k, other in self.lineages.items()
                if digest in other.taken and k not in used and (k[0] != key[0] or k[1] < key[1])
            ]
            earlier.sort(key=place, reverse=True)
            if not begun and not earlier:
                break
            quarantine = {(q.epoch, q.shard, q.position) for q in token.quarantine}
            key, left = self._origin(counts, earlier, digest, begun, quarantine)
            required = begun
        for other, lineage in self.lineages.items():
            counts["refused"] += lineage.refused
            if other not in used:
                counts["rolled_back"] += len(set(lineage.accepted) | lineage.unsure)
        for kind, records in repeated.items():
            counts[kind] = len(records)
        counts["repeated"] = len(set().union(*repeated.values()))
        counts["counted"] = counts["count"]
        return counts

    def begun(self, lineage: Lineage) -> set[Record]:
        return set() if lineage.token is None else done(Token.decode(lineage.token), self.plan)

    def _origin(self, counts, keys, digest, required, quarantine):
        """The lineage that explains a token, and the last line at which each session took it there."""
        taken = [(key, one) for key in keys for one in self.lineages[key].taken[digest]]
        if any(not one.exact for _, one in taken):
            counts["inexact_tokens"] += 1
            counts["uncounted"] += max(one.uncounted for _, one in taken if not one.exact)
        for key, one in taken:
            lineage = self.lineages[key]
            had = self.begun(lineage)
            for session, line, what, records in lineage.events:
                if session == one.session and line < one.line and what == "accepted":
                    had |= records
            counts["faults"] += bool(had - required)
        sound = {}
        for key in keys:
            lineage, trial = self.lineages[key], Counter()
            self._count(trial, lineage, required, quarantine - self.begun(lineage))
            sound[key] = not (trial["lost"] or trial["doubled"])
        counts["faults"] += any(sound.values()) and not all(sound.values())
        key = next((key for key in keys if sound[key]), keys[0])
        return key, {one.session: one.line for one in self.lineages[key].taken[digest]}

    def _count_inexact(self, counts, repeated, lineage: Lineage, left: dict[str, int], required) -> None:
        for session, line, what, records in lineage.events:
            if line >= left.get(session, line + 1):
                continue
            if what in ("returned", "void", "late"):
                repeated[what] |= records
            elif what == "uncounted":
                counts["uncounted"] += records
            elif what == "maybe late":
                others = [
                    e[3] for e in lineage.events if e[2] == "accepted" and e[1] < left.get(e[0], e[1] + 1)
                ]
                repeated["late"] |= {r for r in records if r in set().union(*others) or r not in required}
                unheard = Counter(
                    r
                    for e in lineage.events
                    if e[2] == "maybe late" and e[1] < left.get(e[0], e[1] + 1)
                    for r in e[3]
                )
                repeated["late"] |= {r for r in records if unheard[r] > 1}

    def _count(self, counts, lineage, required, quarantine) -> None:
        token = None if lineage.token is None else Token.decode(lineage.token)
        begun, remainders = self.begun(lineage), set(lineage.remainders)
        if token is not None:
            remainders |= {(c.epoch, c.shard, p) for c in token.remainders for p in range(c.skip, c.stop)}
        bad = (lineage.bad | quarantine) & required
        many = lineage.accepted + Counter(dict.fromkeys(bad, 1)) + Counter(dict.fromkeys(begun, 1))
        outcomes = set(many) | lineage.unsure
        missing = required - outcomes
        for epoch in range(self.spec.num_epochs):
            left = {record for record in missing & remainders if record[0] == epoch}
            if len(left) < self.batch_size:
                counts["dropped"] += len(left)
                missing -= left
        counts["lost"] += len(missing)
        counts["doubled"] += sum(1 for record, times in many.items() if times > 1 and record in required)
        counts["quarantined"] += len(bad - begun)
        trained = ((outcomes - begun) & required) - (bad - begun)
        counts["acknowledged"] += len(trained)
        for way in sorted(Evidence, reverse=True):
            by = set().union(*(e[3] for e in lineage.events if e[2] == f"by {way.label}")) & trained
            counts[way.label] += len(by)
            trained -= by


def run(values: dict) -> set[Record]:
    return {(values["epoch"], values["shard"], p) for p in range(values["start"], values["upto"])}


def place(key: tuple[str, int]) -> tuple[int, int]:
    return int(key[0].removeprefix("ledger")), key[1]
