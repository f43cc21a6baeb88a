"""The audit once more, with sets of records and a line at a time: what the fast one is held against."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from edl_torch.audit.lines import read_spec
from edl_torch.audit.log import token_digest
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token

Record = tuple[int, int, int]  # epoch, shard, position


def done(token: Token, plan: Plan) -> set[Record]:
    """The records that have an outcome in a token."""
    found = set()
    for epoch in range(token.epoch + 1):
        for position in range(plan.num_shards):
            shard = plan.shard_at(epoch, position)
            for place in range(plan.length(shard)):
                if (epoch, position, place) < (token.epoch, token.position, token.offset):
                    found.add((epoch, shard, place))
    for cut in (*token.open, *token.crumbs):
        found -= {(cut.epoch, cut.shard, place) for place in range(cut.skip, cut.stop)}
    return found


class Lineage:
    def __init__(self) -> None:
        self.accepted: Counter[Record] = Counter()
        self.unsure: set[Record] = set()
        self.bad: set[Record] = set()
        self.crumbs: set[Record] = set()
        self.refused = 0
        self.token: str | None = None
        self.taken: set[str] = set()


class Naive:
    """All logs of a directory, of one dataset and one batch size. The final lineage has the highest key."""

    def __init__(self, directory: Path) -> None:
        self.lineages: defaultdict[tuple[str, int], Lineage] = defaultdict(Lineage)
        for path in directory.glob("*.audit"):
            self._read(path.read_text())
        self.plan = Plan(self.spec)

    def _read(self, text: str) -> None:
        pending: list[tuple[Lineage, str, int, set[Record]]] = []
        holes: set[tuple[int, Record]] = set()
        lines = text.split("\n")[1:-1]
        ledger, lineage = "", Lineage()
        for line in lines:
            if line.startswith("{") and json.loads(line)["event"] == "quarantined":
                values = json.loads(line)
                holes.add((values["task"], (values["epoch"], values["shard"], values["position"])))
        for line in lines:
            if line == "=":
                self._settle(pending, set())
            elif not line.startswith("{"):
                epoch, shard, start, upto, task, _, _, _ = map(int, line.split(" "))
                records = {(epoch, shard, p) for p in range(start, upto)}
                pending.append((lineage, "ack", task, {r for r in records if (task, r) not in holes}))
            else:
                values = json.loads(line)
                match values["event"]:
                    case "joined":
                        self.spec = read_spec(values["dataset"])
                        self.batch_size = values["batch_size"]
                        ledger = values["ledger"]
                        lineage = self.lineages[ledger, values["lineage"]]
                    case "restored":
                        lineage = self.lineages[ledger, values["lineage"]]
                        lineage.token = values["token"]
                    case "snapshot":
                        lineage.taken.add(values["token"])
                    case "crumb":
                        places = range(values["start"], values["upto"])
                        lineage.crumbs |= {(values["epoch"], values["shard"], p) for p in places}
                    case "quarantined":
                        record = values["epoch"], values["shard"], values["position"]
                        pending.append((lineage, "bad", values["task"], {record}))
                    case "refused":
                        self._settle(pending, set(values["tasks"]))
        for lineage, _, _, records in pending:
            lineage.unsure |= records

    def _settle(self, pending: list, refused: set[int]) -> None:
        for lineage, kind, task, records in pending:
            if task in refused:
                lineage.refused += len(records) if kind == "ack" else 0
            elif kind == "ack":
                lineage.accepted.update(records)
            else:
                lineage.bad |= records
        pending.clear()

    def verdict(self) -> dict[str, int]:
        """Counts, as the fast audit has them."""
        key = max(self.lineages, key=lambda key: (int(key[0].removeprefix("ledger")), key[1]))
        required = {
            (epoch, shard, place)
            for epoch in range(self.spec.num_epochs)
            for shard in range(self.plan.num_shards)
            for place in range(self.plan.length(shard))
        }
        counts: Counter[str] = Counter()
        used, quarantine = set(), set()
        while True:
            used.add(key)
            lineage = self.lineages[key]
            token = None if lineage.token is None else Token.decode(lineage.token)
            begun = set() if token is None else done(token, self.plan)
            crumbs = set(lineage.crumbs)
            if token is not None:
                crumbs |= {(c.epoch, c.shard, p) for c in token.crumbs for p in range(c.skip, c.stop)}
            self._count(counts, lineage, required, begun, quarantine - begun, crumbs)
            if len(used) > 1:
                counts["rolled_back"] += len(
                    (set(lineage.accepted) | lineage.unsure | lineage.bad) - begun - required
                )
            if not begun:
                break
            digest = token_digest(lineage.token or "")
            key = next(k for k, other in self.lineages.items() if digest in other.taken and k not in used)
            required = begun
            quarantine = {(q.epoch, q.shard, q.position) for q in token.quarantine}
        for other, lineage in self.lineages.items():
            counts["refused"] += lineage.refused
            if other not in used:
                counts["rolled_back"] += len(set(lineage.accepted) | lineage.unsure)
        return counts

    def _count(self, counts, lineage, required, begun, quarantine, crumbs) -> None:
        bad = (lineage.bad | quarantine) & required
        many = lineage.accepted + Counter(dict.fromkeys(bad, 1)) + Counter(dict.fromkeys(begun, 1))
        outcomes = set(many) | lineage.unsure
        missing = required - outcomes
        for epoch in range(self.spec.num_epochs):
            left = {record for record in missing & crumbs if record[0] == epoch}
            if len(left) < self.batch_size:
                counts["dropped"] += len(left)
                missing -= left
        counts["lost"] += len(missing)
        counts["doubled"] += sum(1 for record, times in many.items() if times > 1 and record in required)
        counts["quarantined"] += len(bad - begun)
        counts["acknowledged"] += len((outcomes - begun) & required) - len(bad - begun)
