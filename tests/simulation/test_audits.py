"""Simulated jobs whose trainers keep audit logs: the verdict on them is what a witness of everything saw.

EDL_SIMULATION_SEEDS="17 18" runs other seeds.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import sim_cluster
from cases import cases
from mixture_proof import prove
from run import mixture_options, options
from sim_cluster import Cluster
from sim_master import DATASET
from sim_mixture import MixtureModel
from sim_model import Model

from edl_torch.audit.chain import FinalWord, final_words
from edl_torch.audit.findings import Finding
from edl_torch.audit.verdict import Verdict, audit
from edl_torch.core.calls import LeaseAnswer, LeaseCall
from edl_torch.core.plan import Plan
from edl_torch.shard import Slice
from edl_torch.trainer.vocabulary import Ticket

GIVEN = [int(word) for word in os.environ.get("EDL_SIMULATION_SEEDS", "").split()]
SEEDS = GIVEN or [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (5, 8))]
SHORT = {"trainers": 8, "shards": 400, "faults": 100}
CUT_OFF = {"stop": 15, "cut": 10, "stream": 15, "hang": 8, "master": 4}


class Witness(Model):
    """It sees as well how often each record was trained on."""

    def __init__(self, plan: Plan, batch: int) -> None:
        super().__init__(plan, batch)
        self.times: Counter[tuple[int, int]] = Counter()  # of epoch and record
        self._cuts: dict[int, Slice] = {}

    def leased(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        """A lease call was answered."""
        super().leased(call, answer)
        self._cuts.update((grant.task, grant.slice) for grant in answer.grants)

    def trained(self, ticket: Ticket) -> None:
        """A training loop is done with a batch."""
        super().trained(ticket)
        for task, first, after in ticket:
            drawn = replace(self._cuts[task], skip=first, limit=after - first)
            numbers = self.plan.indices(drawn).numbers.tolist()  # in a window they are mixed
            self.times.update((drawn.epoch, number) for number in numbers)


def run(seed: int, restores: int, folder: Path) -> tuple[Cluster, Witness]:
    print(f"EDL_SIMULATION_SEEDS={seed}")
    job = replace(options(seed, **SHORT, restores=restores), audit_dir=folder)
    cluster = Cluster(job, watch=Witness)
    cluster.run()
    assert isinstance(cluster.model, Witness)
    return cluster, cluster.model


def judged(folder: Path, words: dict[str, FinalWord]) -> Verdict:
    (verdict,) = audit([folder], words=words, listed=sys.maxsize)
    print(verdict)
    return verdict


def records(findings: Iterable[Finding], kind: str) -> set[tuple[int, int]]:
    named = [finding.records for finding in findings if finding.kind == kind]
    return {(found.epoch, record) for found in named for record in range(found.start, found.end)}


@pytest.mark.parametrize("restores", [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_logs_of_trainers_under_random_faults_prove_every_record(
    tmp_path: Path, seed: int, restores: int
) -> None:
    cluster, model = run(seed, restores, tmp_path)
    token = FinalWord(token=cluster.master.ledger.snapshot().encode())
    for words in ({}, {DATASET: token}, final_words(cluster.master.dispatcher)):
        verdict = judged(tmp_path, words)
        assert verdict.delivered
        assert verdict.acknowledged + verdict.dropped == model.done + cluster.master.ledger.dropped
        assert verdict.quarantined == model.bad
        if words:  # else a record that nobody answered for is taken for trained on, not for a remainder
            assert verdict.acknowledged == model.done


@cases("restores", [3], [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_logs_of_a_mixture_prove_shares_and_records(tmp_path: Path, seed: int, restores: int) -> None:
    job = replace(mixture_options(seed, shards=200, faults=50, restores=restores), audit_dir=tmp_path)
    cluster = Cluster(job)
    cluster.run()
    model = cluster.model
    assert isinstance(model, MixtureModel)
    verdict = judged(tmp_path, final_words(cluster.master.dispatcher))
    assert verdict.delivered
    assert (verdict.acknowledged, verdict.quarantined) == (model.done, model.bad)
    proof = prove([str(tmp_path)])
    assert (proof["records"], proof["quarantined"], proof["missing"]) == (model.done, model.bad, 0)
    assert {c.name: c.acknowledged for c in verdict.components} == {
        name: one["given"] for name, one in proof["components"].items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_logs_tell_of_every_record_that_a_living_trainer_may_have_trained_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    monkeypatch.setattr(sim_cluster, "ALL_FAULTS", CUT_OFF)
    cluster, model = run(seed, 0, tmp_path)
    verdict = judged(tmp_path, final_words(cluster.master.dispatcher))
    assert verdict.delivered
    twice = {record for record, times in model.times.items() if times > 1}
    assert twice
    assert twice <= records(verdict.findings, "repeated")
