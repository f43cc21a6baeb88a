"""The batches of a pass whose records are read and transformed by several threads.

The thread that iterates draws the leases, keeps the order, counts, and deals with records that cannot be
read; the others get one record at a time. It must not know how leases come, or when a batch is trained on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.batches.convert import Rows
from edl_torch.data.batches.transport import BatchMemory, Collated, IterationSetup
from edl_torch.data.reading.record_jobs import (
    Block,
    ReaderThreads,
    RecordJob,
    Work,
    can_pick,
    jobs_of,
    no_samples,
)
from edl_torch.data.reading.sample_reading import SampleReader, Transform, too_few, turn_end
from edl_torch.data.reading.seeding import GeneratorStates, name_of, transform_in_thread
from edl_torch.errors import ReaderError
from edl_torch.readers.base import AbstractDataReader

log = logging.getLogger("edl_torch.client")

OnBad = Callable[[Grant, int, ReaderError], None]  # called with the position of a bad record; may raise


class ThreadedReading(Iterator[Any]):
    """The batches of a pass, each with its positions in the tally: `Collated`, or a list of samples.

    They are those that one thread makes. Where it `seeds`, random numbers of `transform` are each record's
    own: threads then transform as long as nobody draws from the global generators (`seeding`).
    """

    _closed = True

    def __init__(
        self,
        reader: AbstractDataReader,
        plan: Plan,
        grants: Iterator[Grant],
        setup: IterationSetup,
        on_bad: OnBad,
        *,
        transform: Transform | None,
        seeds: bool,
        keeps_samples: bool,
    ) -> None:
        self._named = SampleReader(reader, no_samples)
        self._reader = reader
        self._plan = plan
        self._setup = setup
        self._on_bad = on_bad
        self._keeps_samples = keeps_samples  # a batch that a thread has made may have to be taken apart
        self._work = Work(transform, setup.collate, seeds and transform is not None)
        self._seeded = setup.generators.seeded(transform) if seeds and transform else None
        self._quiet: GeneratorStates | None = None  # while threads transform: the global generators
        self._memory = BatchMemory()
        picks = can_pick(reader, plan)
        self._ahead = jobs_of(reader, plan, grants, self._work, picks=picks)
        self._ended = False
        self._error: Exception | None = None  # what ended the leases
        self._planned = 0  # records, less those that were bad
        self._blocks: deque[Block] = deque()
        self._waited: list[Block] = []  # which the thread that iterates waits for
        self._jobs: deque[RecordJob] = deque()  # of the block that batches are being made of
        self._whole: Block | None = None  # that block, while nothing of it is taken
        self._began = False
        self._pool = ReaderThreads(setup.threads, one_reads=not picks)
        self._closed = False  # last: without threads there is nothing to close

    def __repr__(self) -> str:
        where = "one thread" if self._work.only_read else "all"
        return f"<ThreadedReading {self._pool} blocks={len(self._blocks)} transforms_in={where!r}>"

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close()
            self._let_go()

    def abandon(self) -> None:
        """Let the threads end, and wait for none. For finalisers, too."""
        if not self._closed:
            self._closed = True
            self._pool.stop()
            self._let_go()

    __del__ = abandon

    def _let_go(self) -> None:
        for block in (*self._blocks, *self._waited):
            block.let_go()
        self._blocks.clear()
        self._jobs.clear()
        self._whole = None

    def _next(self) -> Any:
        if not self._began:
            self._begin()
        samples: list[Any] = []
        runs = _Runs()
        while len(samples) < self._setup.list_size and (self._jobs or self._next_block()):
            whole, self._whole = self._whole, None
            if whole is not None and whole.is_batch and not samples:
                self._jobs.clear()
                for job in whole.jobs:
                    runs.add(job)
                runs.move(self._setup)
                return Collated(whole.batch, len(whole.jobs))
            job = self._jobs.popleft()
            if self._is_sample(job):
                runs.add(job)
                samples.append(job.take())
            if samples and self._ends_turn(job):
                break
        if not samples:
            raise StopIteration
        runs.move(self._setup)
        return samples

    # Records are planned and come back --------------------------------------------------------------------

    def _next_block(self) -> bool:
        """Wait for the next records. False where there are none."""
        self._refill()
        if not self._blocks:
            if self._error is not None:
                raise self._error
            return False
        block = self._blocks.popleft()
        self._refill()
        self._wait(block)
        self._jobs.extend(block.jobs)
        self._whole = block
        self._check_generators()
        block.let_go()
        return True

    def _wait(self, *blocks: Block) -> None:
        """Wait for blocks. Raises StopIteration where another thread or a signal handler ends the reading."""
        self._waited.extend(blocks)
        try:
            for block in blocks:
                if not self._closed:
                    block.wait()
        finally:
            self._waited.clear()
        if self._closed:
            raise StopIteration

    def _refill(self) -> None:
        """Keep the threads at work."""
        size, most = self._setup.list_size, self._setup.ahead
        if self._work.only_read:  # records may be far larger than samples
            size, most = min(size, 2 * self._setup.threads), 2
        while not self._ended and len(self._blocks) < most:
            self._add(self._plan_jobs(size - self._planned % size))

    def _plan_jobs(self, count: int) -> list[RecordJob]:
        """The next so many records, or as many as there are."""
        jobs: list[RecordJob] = []
        ends_turn = False
        try:
            for job in islice(self._ahead, count):
                jobs.append(job)
                if ends_turn := self._ends_turn(job):
                    break
        except Exception as exc:  # noqa: BLE001  raised when what came before it has been read
            self._error = exc
        self._ended = self._error is not None or (len(jobs) < count and not ends_turn)
        self._planned = 0 if ends_turn else self._planned + len(jobs)
        return jobs

    def _ends_turn(self, job: RecordJob) -> bool:
        """Whether a batch ends with a record, as one of another component may follow."""
        turn, after = self._plan.spec.turn, job.position + 1
        return turn > 1 and after == turn_end(job.position, job.lease.grant.slice.stop, turn)

    def _add(self, jobs: list[RecordJob], done: int = 0) -> None:
        """Let the threads have a block of jobs, of which the first may be done."""
        if not jobs:
            return
        collates = self._setup.collate is not None and not self._work.only_read
        whole = len(jobs) == self._setup.list_size
        rows = Rows(len(jobs), self._memory) if collates and whole else None
        block = Block(jobs, rows=rows, keeps_samples=self._keeps_samples)
        self._blocks.append(block)
        for job in jobs[:done]:
            job.settle()
        self._pool.add(jobs[done:])

    def _is_sample(self, job: RecordJob) -> bool:
        """Whether a record has become a sample. Raises, or has it put in quarantine, where it has not."""
        if job.is_raw and self._seeded is not None:
            job.transform_here(self._seeded, again=False)
        error = job.error
        if error is None:
            return True
        if not isinstance(error, Exception):
            raise error
        cut = job.lease.grant.slice
        if isinstance(error, StopIteration):
            error = too_few(self._reader, cut.stop - job.position)
        self._planned -= 1
        named = self._named.named(error, self._plan, cut, job.position)
        self._on_bad(job.lease.grant, job.position, named)
        return False

    # Random numbers ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Where transforms are seeded: transform the first record in this thread, and look whether that draws
        from a global generator."""
        self._began = True
        if not self._work.seeds:
            return
        first: list[RecordJob] = []
        while len(first) < self._setup.list_size and (jobs := self._plan_jobs(1)):
            first += jobs
            first[-1].read()
            if first[-1].error is None:  # what cannot be read does not show what its transform does
                break
        if not first:
            return
        done, quiet = len(first), GeneratorStates()
        if drawn := self._draws(first[-1], again=False):
            self._only_read(drawn)
        else:
            self._quiet = quiet
            if not self._ended and not self._ends_turn(first[-1]):
                first += self._plan_jobs(self._setup.list_size - done)
        self._add(first, done=done)

    def _check_generators(self) -> None:
        """Transform in this thread from now on where somebody has drawn from the global generators.

        What has not been handed out is transformed anew: by that one knows whether a transform has drawn.
        """
        quiet = self._quiet
        drawn = [] if quiet is None else GeneratorStates().unlike(quiet)
        if quiet is None or not drawn:
            return
        self._quiet = None
        self._only_read(drawn)
        self._work.skip_all = True
        self._wait(*self._blocks)
        for block in self._blocks:
            block.batch, block.is_batch = None, False  # samples are made anew
        self._work.skip_all = False
        self._whole = None
        jobs = chain(self._jobs, *(block.jobs for block in self._blocks))
        drew = [self._draws(job, again=True) for job in jobs]  # all of them
        if any(drew):
            quiet.restore()  # the loop's numbers go on as if no transform had drawn

    def _draws(self, job: RecordJob, *, again: bool) -> list[str]:
        """Transform a record. Returns the names of the global generators that were drawn from."""
        seeded, generators, transform = self._seeded, self._setup.generators, self._work.transform
        assert seeded is not None
        assert transform is not None
        in_thread = partial(transform_in_thread, transform, seed=job.seed)
        job.transform_here(generators.seeded(in_thread), again=again)
        drawn = [] if job.error is not None else generators.drawn_since(job.seed)
        if drawn:
            job.transform_here(seeded, again=True)
        generators.put_back()
        return drawn

    def _only_read(self, drawn: list[str]) -> None:
        """Leave transforms, from the next record that is planned, to the thread that iterates."""
        self._work.only_read = True
        log.info(
            "%s, or the loop, drew from the global generator of %s: one thread calls it, seeded for each "
            "record, while %d read. All threads call one that draws by torch, or from a parameter rng "
            "(numpy's); so do num_workers",
            name_of(self._work.transform),
            " and ".join(drawn),
            self._setup.threads,
        )


class _Runs:
    """The positions of a batch that is being made, and how long its records took."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []  # [task, first, after]
        self._read_s = self._transform_s = 0.0

    def add(self, job: RecordJob) -> None:
        runs, task, position = self._runs, job.lease.grant.task, job.position
        self._read_s += job.read_s
        self._transform_s += job.transform_s
        if runs and runs[-1][2] == position and runs[-1][0] == task:
            runs[-1][2] = position + 1
        else:
            runs.append([task, position, position + 1])

    def move(self, setup: IterationSetup) -> None:
        """Count them: the batch is handed over."""
        for task, first, after in self._runs:
            setup.tally.start(task, first)[2] = after
        if setup.times.begin_if_due():
            setup.times.add(self._read_s, self._transform_s)
