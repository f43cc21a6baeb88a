"""The proof of mixtures, which has no code of the package, against a package that is broken on purpose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mixture_proof import Broken, prove
from test_mixtures import PROOF, loader, mixture, trained

from edl_torch import LocalMaster
from edl_torch.core import ledger
from edl_torch.core import mixture as segments
from edl_torch.core.backlog import Backlog
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.token import Token
from edl_torch.core.turns import Turns, turns_of
from edl_torch.errors import EdlError
from edl_torch.shard import Slice


def job(folder: Path) -> None:
    """Train on a mixture: weights change twice, a trainer leaves with records, and a checkpoint is loaded."""
    master = LocalMaster()
    more: dict[str, Any] = {"audit_dir": folder, "records_per_shard": 40}
    more["mixed"] = mixture(weights={"web": 0.613, "code": 0.288, "math": 0.099})
    with loader(master_client=master, **more) as one:
        trained(one, 12)
        with loader(master_client=master, **more) as two:
            trained(two, 2)  # what it has not trained on comes back
        one.set_weights({"web": 0.2, "code": 0.3, "math": 0.5})
        trained(one, 9)
        one.set_weights({"web": 0.7, "code": 0.1, "math": 0.2})
        for _ in one:
            one.stepped()
            token = one.state_dict()
            if master.dataset_status("training").leased:  # in the middle of a lease
                break
    with loader(**more) as one:
        one.load_state_dict(token)
        trained(one, 20)
        one.set_weights({"web": 1, "code": 1, "math": 1})
        trained(one)


def another_order(patch: pytest.MonkeyPatch) -> None:
    """Who is due last comes first."""
    window = Turns._window

    def late(self: Turns, c: int, drawn: int) -> tuple[int, int]:
        may, until = window(self, c, drawn)
        return may, until + 3 * c

    patch.setattr(Turns, "_window", late)


def forgotten_lags(patch: pytest.MonkeyPatch) -> None:
    """What a component was owed is forgotten when weights change."""
    settled = segments._settled
    patch.setattr(segments, "_settled", lambda lags, *more: settled([0] * len(lags), *more))


def miscounted(patch: pytest.MonkeyPatch) -> None:
    """A segment begins with one record more of one component, and one less of another."""
    begin = segments._next

    def wrong(*given: Any) -> Any:
        segment = begin(*given)
        first, second, *rest = segment.counts
        return replace(segment, counts=(first + 1, second - 1, *rest)) if segment.start else segment

    patch.setattr(segments, "_next", wrong)


def given_back_whole(patch: pytest.MonkeyPatch) -> None:
    """Of a trainer that leaves all comes back, what it has trained on, too."""
    put_back = Backlog.put_back

    def wrong(self: Backlog, item: Slice, attempt: int) -> None:
        put_back(self, replace(item, skip=0, limit=item.stop), attempt)

    patch.setattr(Backlog, "put_back", wrong)
    patch.setattr(Token, "check_within", lambda self, plan: None)


def more_in_the_token(patch: pytest.MonkeyPatch) -> None:
    """A token counts as trained on what is lent."""
    snapshot = ShardLedger.snapshot

    def wrong(self: ShardLedger) -> Any:
        token = snapshot(self)
        lent = sum(each.limit for each in token.open)
        return replace(token, open=(), acknowledged=token.acknowledged + lent)

    patch.setattr(ShardLedger, "snapshot", wrong)


def old_weights_in_the_token(patch: pytest.MonkeyPatch) -> None:
    """A token does not say which weights hold."""
    patch.setattr(ledger, "needed", lambda segments, index: ())


BREAKS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (another_order, "begins with"),
    (forgotten_lags, "begins with lags"),
    (miscounted, "begins with"),
    (given_back_whole, "were acknowledged twice"),
    (more_in_the_token, "and no log of before it has"),
    (old_weights_in_the_token, r"at the checkpoint at \d+ the weights are"),
]


@pytest.mark.parametrize(("break_it", "said"), BREAKS, ids=lambda one: getattr(one, "__name__", None))
def test_a_broken_package_is_found_out_by_its_logs(
    break_it: Callable[[pytest.MonkeyPatch], None], said: str, tmp_path: Path
) -> None:
    turns_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        with suppress(EdlError):  # where it notices that something is wrong
            job(tmp_path)
    turns_of.cache_clear()  # what was computed by another rule
    with pytest.raises(Broken, match=said):
        prove([str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROOF), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.startswith("BROKEN: ")


def test_the_same_job_is_proven_while_nothing_is_broken(tmp_path: Path) -> None:
    job(tmp_path)
    said = prove([str(tmp_path)])
    assert (said["records"], said["missing"], said["lineages"]) == (1000, 0, 2)
