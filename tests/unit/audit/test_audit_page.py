"""The page of an audit draws what the audit found, whole, small, and without letting a name be markup."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from audited_job import SMALL, SPEC, Job, Writer
from chromium import browsing, needs_chromium
from hypothesis import given
from hypothesis import strategies as st
from page_reader import Element, bars, cells, figures, number, read
from test_verdict_property import falsify, histories, play, specs

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.drawing import MOST_EPOCHS, MOST_LINEAGES, MOST_TRAINERS, OUTCOMES
from edl_torch.audit.findings import WRONG
from edl_torch.audit.verdict import Judgement, judge
from edl_torch.cli.audit_page import render
from edl_torch.cli.main import main
from edl_torch.shard import Source

NASTY = "<script>alert(1)</script>\"'&{{policy}}\x1b[31m</style>"


def page_of(folder: Path, **options) -> tuple[Judgement, Element]:
    (judgement,) = judge([folder], **options)
    return judgement, read(render([judgement], [str(folder)], written="now"))


def expected(judgement: Judgement, kind: str, epoch: int) -> set[int]:
    """Records of one epoch that have an outcome, by their numbers within it; by sets of integers."""
    parts, size = judgement.era.parts, judgement.verdict.size
    quarantined = {n for part in parts for n in numbers(part.quarantined) - numbers(part.begun)}
    sets = {
        "quarantined": quarantined,
        "dropped": {n for part in parts for n in numbers(part.dropped)},
        "open": numbers(judgement.open),
        "acknowledged": {n for part in parts for n in numbers(part.own)} - quarantined,
    }
    found = sets[kind] if kind in sets else numbers(judgement.found.records[kind])
    return {n % size for n in found if n // size == epoch}


def numbers(records) -> set[int]:
    return {n for start, end in records for n in range(start, end)}


@given(specs, histories, st.integers(0, 1000), st.sampled_from(["nothing", "remove", "twice", "shorten"]))
def test_what_is_drawn_is_what_was_found(spec, events, place, what):
    with tempfile.TemporaryDirectory() as folder:
        play(Job(Path(folder), spec), events)
        if what != "nothing":
            falsify(Path(folder), place, what)
        judgement, page = page_of(Path(folder), listed=7)
    verdict = judgement.verdict
    assert verdict.outcome.label in page.one("div", "word").text
    said = figures(page)
    assert said["must have one outcome"] == verdict.records
    assert {kind: said.get(kind, 0) for kind in OUTCOMES} == {
        kind: getattr(verdict, kind) for kind in OUTCOMES
    }
    assert (said["rolled back"], said["lineages"]) == (verdict.rolled_back, verdict.lineages)
    for epoch, article in enumerate(page.all("article")):  # 25 records: each has a cell of its own
        outcomes, *trainers = article.all("ul", "lanes")
        drawn = bars(outcomes)
        wanted = {kind: expected(judgement, kind, epoch) for kind in OUTCOMES}
        assert drawn == {kind: (len(cells), cells) for kind, cells in wanted.items() if cells}
        together = {cell for lanes in trainers for _, cells in bars(lanes).values() for cell in cells}
        assert together == wanted["acknowledged"] | wanted["quarantined"]
    assert len(page.all("article")) == spec.num_epochs
    check_lineages(judgement, page)
    rows = [[cell.text for cell in row.all("td")] for row in page.all("tr") if row.all("td")]
    assert sorted((row[0].split(":")[0], *row[1:4], row[5]) for row in rows) == sorted(
        (f.kind, str(f.records.epoch), str(f.records.start), str(f.records.end - 1), f.records.name)
        for f in verdict.findings
    )


def check_lineages(judgement: Judgement, page: Element) -> None:
    """All that counts and all that was rolled back is in the tree, from the beginning to the final model."""
    verdict, tree = judgement.verdict, page.one("ol", "tree")
    said = [item.one("p").text.split("done") for item in tree.all("div")]
    pairs = [part[-1].rpartition(" counted, ") for part in said]
    assert sum(number(before.split(". ")[-1]) for before, _, _ in pairs) == (
        verdict.acknowledged + verdict.quarantined
    )
    assert sum(number(after) for _, _, after in pairs) == verdict.rolled_back
    counting = [item for item in tree.inside if isinstance(item, Element) and item.all("div", "counts")]
    assert len(counting) == len(judgement.era.parts)
    names = [item.one("div", "counts").one("strong").text for item in counting]
    keys = [part.lineage.key for part in reversed(judgement.era.parts)]
    assert [number(name.removeprefix("lineage")) for name in names] == [lineage for _, lineage in keys]
    assert "the final model" in counting[-1].one("div", "counts").text
    done = [cells(item.one("div", "counts").one("svg")) for item in counting]
    union = set().union(*(drawn.get("counted", set()) for drawn in done))
    own = {n for part in judgement.era.parts for n in numbers(part.own)}
    assert union == own  # at most 75 records in all: each has a cell of its own


def test_each_way_to_be_refuted_is_seen(tmp_path):
    lost, doubled = Writer(tmp_path / "l"), Writer(tmp_path / "d")
    lost.whole(1, 0)
    doubled.whole(1, 0)
    doubled.whole(2, 1)
    doubled.whole(3, 0, 2, 3)
    _, page = page_of(tmp_path / "l")
    assert "✕ REFUTED" in page.one("div", "word").text
    assert "8 lost (no outcome)" in page.one("section", "verdict").text
    assert [c.text for c in page.one("table", "wrong").all("td")] == (
        ["lost: no outcome", "0", "108", "115", "8", "a.csv", "nobody"]
    )
    assert bars(page.one("article").all("ul", "lanes")[0])["lost"] == (8, set(range(8, 16)))
    _, page = page_of(tmp_path / "d")
    row = [c.text for c in page.one("table", "wrong").all("td")]
    assert row[:6] == ["doubled: more than one outcome", "0", "102", "104", "3", "a.csv"]
    assert row[6] == "s (lineage 1, task 1); s (lineage 1, task 3)"

    forgotten = Job(tmp_path / "f", SMALL)
    heard = forgotten.ledger.snapshot().encode()
    forgotten.finish()
    _, page = page_of(tmp_path / "f", words={"training": FinalWord(token=heard)})
    assert bars(page.one("article").all("ul", "lanes")[0])["forgotten"] == (16, set(range(16)))

    wrong = Job(tmp_path / "c")
    wrong.train_batches(2)
    right = wrong.ledger.snapshot()
    word = FinalWord(token=replace(right, acknowledged=right.acknowledged - 1, dropped=1).encode())
    judgement, page = page_of(tmp_path / "c", words={"training": word})
    (contradiction,) = judgement.verdict.contradictions
    assert contradiction in page.one("p", "bad").text
    assert "1 contradiction" in page.one("section", "verdict").text


def test_a_name_is_never_markup(tmp_path):
    spec = replace(SMALL, name=NASTY, sources=(Source(name=f"{NASTY}.csv", count=16),))
    writer = Writer(tmp_path, session="s", spec=spec)
    writer.log.worker_id = NASTY
    writer.whole(1, 0)
    writer.whole(2, 0, 2, 3)
    path = writer.log.path
    path.write_text(path.read_text().replace('"worker_id":"s"', f'"worker_id":{json.dumps(NASTY)}'))
    (judgement,) = judge([tmp_path])
    text = render([judgement], [NASTY], written="now")
    assert NASTY not in text
    assert "\x1b" not in text
    page = read(text)
    assert not page.all("script")
    assert len(page.all("style")) == 2
    assert page.one("table", "wrong").all("td")[5].text.startswith("<script>alert(1)</script>\"'&{{policy}}")
    assert page.one("article").all("li")[-1].one("span", "what").text.startswith("<script>")


def test_the_page_is_one_file_that_may_load_nothing(tmp_path):
    Job(tmp_path).finish()
    (judgement,) = judge([tmp_path])
    text = render([judgement], ["d"], written="now")
    page = read(text)
    policies = [meta.attributes["content"] for meta in page.all("meta") if "http-equiv" in meta.attributes]
    (policy,) = policies
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    for foreign in ("<script", " style=", " onclick", " onload", " src=", "@import"):
        assert foreign not in text


def test_the_page_of_a_huge_job_is_small_and_says_what_it_leaves_out(tmp_path):
    shards, per_shard, epochs = 1_000_000, 1000, 50
    spec = replace(
        SPEC,
        sources=(Source(name="records", count=shards * per_shard),),
        records_per_shard=per_shard,
        num_epochs=epochs,
    )
    job = Job(tmp_path, spec)
    token = job.checkpoint(0)
    for _ in range(MOST_LINEAGES + 20):
        job.train_batches(1)
        job.restore(0, token)
    for place in range(MOST_TRAINERS + 3):
        session, here = f"s{place}", {"lineage": job.ledger.lineage, "ledger": job.ledger_id}
        writer = Writer(tmp_path, session=session, spec=spec, **here)
        for step in range(2 * epochs):  # here and there, in every epoch
            task, shard = 1000 + step * 100 + place, (step * 5003 + place * 70_001) % shards
            writer.take(task, shard, 0, per_shard, epoch=step % epochs)
            writer.say(task, per_shard - place)
    (judgement,) = judge([tmp_path], unfinished=True)
    text = render([judgement], ["d"], written="now")
    assert len(text) < 1_000_000
    page = read(text)
    articles = page.all("article")
    assert len(articles) == MOST_EPOCHS
    assert f"{epochs - MOST_EPOCHS} epochs more, not drawn" in page.text
    rest = page.text.rpartition("not drawn: ")[2]
    for kind in ("open", "acknowledged"):
        drawn = sum(bars(one.all("ul", "lanes")[0])[kind][0] for one in articles)
        assert drawn + number(rest.partition(f"{kind} ")[2]) == getattr(judgement.verdict, kind)
    assert all(len(bars(one.all("ul", "lanes")[1])) == MOST_TRAINERS for one in articles)
    assert page.text.count("3 trainers more, not drawn") == MOST_EPOCHS
    assert len(page.one("ol", "tree").all("strong")) == MOST_LINEAGES
    assert "lineages more, not drawn" in page.text


def test_the_command_writes_it_and_says_the_same_as_without_and_where_it_is(tmp_path, capsys):
    job = Job(tmp_path / "audit")
    job.kill(0, heard=False)
    target = tmp_path / "out" / "audit.html"
    target.parent.mkdir()
    for options, status in (([], 1), (["--json"], 1), (["--unfinished"], 2)):
        assert main(["audit", str(job.directory), *options]) == status
        said = capsys.readouterr().out
        assert main(["audit", str(job.directory), "--html", str(target), *options]) == status
        where = "" if options == ["--json"] else f"page: 1 dataset(s) drawn to {target}\n"
        assert capsys.readouterr().out == said + where
    assert [path.name for path in target.parent.iterdir()] == ["audit.html"]
    assert "… UNFINISHED" in read(target.read_text("utf-8")).one("div", "word").text


def test_a_page_that_cannot_be_written_is_one_error(tmp_path, capsys):
    job = Job(tmp_path / "audit")
    for target, why in ((tmp_path / "none" / "x.html", "No such file"), (tmp_path, "Is a directory")):
        assert main(["audit", str(job.directory), "--html", str(target)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"edl-torch: error: '{target}' cannot be written: {why}")
        assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["audit"]


def test_logs_that_cannot_be_used_make_no_page(tmp_path, capsys):
    job = Job(tmp_path / "audit", SMALL)
    path = job.trainers[0].log.path
    way = '{"event":"way","way":"step","ms":0}'
    path.write_text(f"{path.read_text()}{way}\n7 99 0 8 1 1 1 1\n=\n")  # a shard of other data
    target = tmp_path / "audit.html"
    assert main(["audit", str(job.directory), "--html", str(target)]) == 2
    assert "positions 0 to 8 of shard 99, epoch 7, are not in dataset 'training'" in capsys.readouterr().err
    assert not target.exists()


def test_the_verdict_of_several_datasets_is_the_worst_and_each_is_linked(tmp_path):
    Job(tmp_path, replace(SPEC, name="good")).finish()
    Job(tmp_path, replace(SPEC, name="gone"))
    judgements = judge([tmp_path])
    page = read(render(judgements, ["d"], written="now"))
    assert page.one("title").text.startswith("REFUTED: gone, good –")
    links = [link.attributes["href"] for link in page.one("section", "verdict").all("a")]
    assert links == [f"#{heading.attributes['id']}" for heading in page.all("h2")]
    assert [c.text for c in page.all("span", "chip") if "PROVEN" in c.text or "REFUTED" in c.text] == (
        ["✕ REFUTED", "✓ PROVEN"]
    )
    assert set(WRONG) <= set(figures_of(page, 0))


def figures_of(page: Element, place: int) -> list[str]:
    return [row.one("dt").text for row in page.all("dl")[place].all("div")]


# In a browser: its style is admitted, and it fits a phone in both themes ------------------------------------


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1240, False), (390, True)])
def test_the_page_fits_and_may_run_nothing(tmp_path: Path, width: int, dark: bool) -> None:
    job = Job(tmp_path / "audit")
    job.train_batches(2)
    job.restore(0, job.checkpoint(0))
    job.train_batches(2)
    page = tmp_path / "audit.html"
    assert main(["audit", str(job.directory), "--html", str(page)]) == 1

    async def look() -> None:
        async with browsing(tmp_path / "browser", page.as_uri(), width=width, dark=dark) as tab:
            assert "✕ REFUTED" in await tab.text()
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
            colour = await tab.run("getComputedStyle(document.body).backgroundColor")
            assert colour == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 248)")
            drawn = "document.querySelector('path.lost').getBoundingClientRect().height"
            assert await tab.run(drawn) == pytest.approx(22, abs=4)
            assert not tab.complaints
            (tmp_path / "audit.png").write_bytes(await tab.picture())

    asyncio.run(asyncio.wait_for(look(), 120))
