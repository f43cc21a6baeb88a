"""Real trainers and a real master under a seeded schedule of deaths, stops and broken connections.

    python tests/chaos/chaos_run.py   # until 200 trainers and 50 masters were killed
    python tests/chaos/chaos_run.py --seeds 17 --keep runs/chaos   # a failed one again, with its files

Each run ends when its job has; then the audit, the master and the trainers' own notes must agree that every
record had one outcome. A seed fixes what happens and when it is due, not how the machine interleaves it.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # a script; pytest does so by itself

from chaos_job import Run
from chaos_judge import ChaosError, Result
from chaos_plan import LONG, Kind, make_plan, sorted_counts
from chaos_processes import Launcher


def report(results: list[Result], errors: list[str]) -> str:
    """Totals."""
    counts = sum((result.plan.counts for result in results), Counter[Kind]())
    release = sorted(itertools.chain.from_iterable(result.release_s for result in results))
    lines = [
        f"{len(results)} runs, {len(errors)} failed",
        f"{sum(result.killed for result in results)} trainers killed; faults: "
        + ", ".join(f"{kind.value} {number}" for kind, number in sorted_counts(counts)),
        f"{sum(result.verdict.acknowledged for result in results)} records acknowledged, none lost; "
        f"trained twice {sum(result.doubled for result in results)} "
        f"(at most {sum(result.allowed for result in results)})",
    ]
    if release:
        lines.append(
            f"from kill -9 of a trainer to its leases' release ({len(release)} seen, the master's deaths "
            f"included): median {statistics.median(release):.2f} s, worst {release[-1]:.2f} s"
        )
    return "\n".join(lines + errors)


def run_seeds(
    seeds: Iterable[int], folder: Path, wanted: Callable[[Counter[Kind]], bool]
) -> tuple[list[Result], list[str]]:
    """Runs until `wanted` has enough, or the seeds end."""
    results: list[Result] = []
    errors: list[str] = []
    done: Counter[Kind] = Counter()
    with Launcher(errors=folder / "launcher.log") as launcher:
        for seed in seeds:
            if not wanted(done):
                break
            plan = make_plan(seed, LONG)
            done += plan.counts
            place = folder / f"seed-{seed}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            try:
                results.append(Run(plan, place, launcher).result())
                print(results[-1], flush=True)
            except ChaosError as error:
                errors.append(f"failed: seed {seed}")
                print(f"FAILED: {error}", flush=True)
    return results, errors


def main() -> int:
    """The exit status is 0 when every promise held."""
    parser = argparse.ArgumentParser(description="chaos with real processes")
    parser.add_argument("--seeds", type=int, nargs="+", help="run these instead")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--trainer-kills", type=int, default=200)
    parser.add_argument("--master-kills", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="keep every run's files there")
    options = parser.parse_args()

    def wanted(done: Counter[Kind]) -> bool:
        few = done[Kind.KILL] < options.trainer_kills or done[Kind.MASTER] < options.master_kills
        return bool(options.seeds) or few

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results, errors = run_seeds(options.seeds or itertools.count(options.first), folder, wanted)
    print(report(results, errors))
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
