"""What the COCO example is made of: its words, model, sheet of captions and demo."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import demo
import numpy as np
import preloaded
import pytest
import torch
from model import Captioner, ModelConfig
from sheet import GREEN, INK, MOST_LINES, RED, Cell, _width, draw_sheet, wrap
from vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary, words_of

from edl_torch.errors import EdlError

CONFIG = ModelConfig(vocabulary=12, image_size=32, max_tokens=9, width=16, heads=2, layers=1)


@pytest.fixture
def model() -> Captioner:
    torch.manual_seed(0)
    return Captioner(CONFIG)


def pictures(count: int, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", [16, 32, 50])
def test_any_image_size_works(size: int) -> None:
    model = Captioner(ModelConfig(vocabulary=12, image_size=size, width=16, heads=2, layers=1))
    assert model(pictures(2, size), torch.full((2, 3), BOS)).shape == (2, 3, 12)


def test_scores_do_not_depend_on_later_words(model: Captioner) -> None:
    model.eval()
    tokens = torch.randint(4, 12, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = 5
    with torch.no_grad():
        torch.testing.assert_close(model(pictures(2), tokens)[:, :4], model(pictures(2), changed)[:, :4])


def test_padding_does_not_change_the_loss(model: Captioner) -> None:
    model.eval()
    captions = torch.tensor([[BOS, 5, 6, EOS], [BOS, 7, 8, EOS]])
    padded = torch.cat([captions, torch.full((2, 3), PAD)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(pictures(2), captions), model.loss(pictures(2), padded))


def test_model_learns_captions_by_heart_and_says_them(model: Captioner) -> None:
    images = pictures(3)
    captions = torch.tensor([[BOS, 4, 5, EOS, PAD], [BOS, 6, 7, 8, EOS], [BOS, 9, EOS, PAD, PAD]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(images, captions)
        loss.backward()
        optimizer.step()
    model.eval()
    said = model.greedy(model.encoder(images))
    assert said.tolist() == captions[:, 1:].tolist()  # PAD after each end


def test_greedy_ends_when_nothing_says_the_end(model: Captioner) -> None:
    with torch.no_grad():
        model.scores.bias[EOS] = -1e9
    model.eval()
    assert model.greedy(model.encoder(pictures(2))).shape == (2, CONFIG.max_tokens)


def test_greedy_never_says_a_special_word(model: Captioner) -> None:
    with torch.no_grad():
        model.scores.bias[[PAD, BOS, UNKNOWN]] = 1e9
    model.eval()
    said = model.greedy(model.encoder(pictures(2)))
    assert not set(said[said != PAD].tolist()) & {BOS, UNKNOWN}
    assert said[:, 0].min() > 0


def test_longest_caption_fits_the_model(model: Captioner) -> None:
    longest = torch.tensor([[BOS, *[4] * (CONFIG.max_tokens - 1), EOS]])
    assert torch.isfinite(model.loss(pictures(1), longest))


# Captions to numbers and back -------------------------------------------------------------------------------


CAPTIONS = ["A red star.", "There is a RED star, on the left!", "A man's dog; a café"]


def test_words_are_lower_case_without_punctuation() -> None:
    assert words_of("A man's dog -- at the café, 2nd floor.") == [
        "a",
        "man's",
        "dog",
        "at",
        "the",
        "café",
        "2nd",
        "floor",
    ]


def test_encoded_caption_decodes_to_its_words() -> None:
    vocabulary = Vocabulary.from_captions(CAPTIONS)
    for caption in CAPTIONS:
        numbers = vocabulary.encode(caption)
        assert (numbers[0], numbers[-1]) == (BOS, EOS)
        assert vocabulary.decode(numbers) == " ".join(words_of(caption))


def test_rare_and_unseen_words_are_unknown() -> None:
    vocabulary = Vocabulary.from_captions(CAPTIONS, min_count=2)
    assert vocabulary.words == ["a", "red", "star"]
    assert vocabulary.encode("a blue star") == [BOS, 4, UNKNOWN, 6, EOS]
    assert vocabulary.decode([4, UNKNOWN, 6]) == "a <unk> star"


def test_long_captions_are_cut_but_end() -> None:
    vocabulary = Vocabulary.from_captions(CAPTIONS)
    numbers = vocabulary.encode("a red star a red star", max_words=2)
    assert vocabulary.decode(numbers) == "a red"
    assert numbers[-1] == EOS


# The sheet of pictures and captions -------------------------------------------------------------------------


SENTENCE = "a small turquoise triangle to the left of a large orange star on a light background"


def picture(height: int = 40, width: int = 40) -> np.ndarray:
    return np.full((height, width, 3), 90, dtype=np.uint8)


def has(sheet: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(sheet.astype(int) - colour).max(axis=-1) < 12).any())


def test_wrapped_lines_keep_the_words_and_fit() -> None:
    lines = wrap(SENTENCE, 240)
    assert 1 < len(lines) <= MOST_LINES
    assert " ".join(lines) == SENTENCE
    assert wrap("", 240) == []
    assert all(_width(line) <= 240 for line in lines)


def test_what_does_not_fit_is_cut_visibly() -> None:
    lines = wrap(" ".join([SENTENCE] * 3), 240)
    assert len(lines) == MOST_LINES
    assert lines[-1].endswith("...")
    assert all(_width(line) <= 240 for line in [*lines, *wrap("x" * 200, 240)])


def test_right_is_green_and_wrong_is_red_and_unknown_is_neither() -> None:
    right, wrong, unknown = (
        draw_sheet([Cell(picture=picture(), caption=SENTENCE, right=verdict)], "title")
        for verdict in (True, False, None)
    )
    assert has(right, GREEN)
    assert not has(right, RED)
    assert has(wrong, RED)
    assert not has(wrong, GREEN)
    assert has(unknown, INK)
    assert not has(unknown, GREEN)
    assert not has(unknown, RED)


def test_pictures_of_any_shape_and_captions_of_any_script_are_drawn() -> None:
    cells = [
        Cell(picture=picture(*size), caption="un café ☕ très noir")
        for size in ((10, 400), (400, 10), (1, 1))
    ]
    sheet = draw_sheet(cells, "title")
    assert has(sheet, (90, 90, 90))
    assert has(draw_sheet([], "no cells"), INK)


# The demo: it says what it does, kills a rank and the master, and proves the result -------------------------


TORCHRUN = Path(__file__).parents[2] / "preloaded_torchrun.py"
TINY = (
    *("--demo-images", "40", "--epochs", "4", "--batch-size", "2", "--width", "16", "--image-size", "32"),
    *("--checkpoint-steps", "10", "--device", "cpu"),
)
RECORDS = 40 * 5 * 4


class Preloaded:
    """What the demo uses of `subprocess`; its processes find torch imported."""

    @staticmethod
    def Popen(command: list[str], **options: Any) -> preloaded.Popen:
        if command[1:3] == ["-m", "torch.distributed.run"]:
            command[1:3] = [str(TORCHRUN)]
        return preloaded.Popen(command, **options)


def test_a_rank_and_the_master_are_killed_and_the_result_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()  # of an earlier run: it is not gone on from
    (tmp_path / "checkpoints" / "00000009").mkdir()
    monkeypatch.setenv("EDL_MASTER_ADDR", "localhost:1")
    monkeypatch.setattr(demo, "subprocess", Preloaded)
    assert demo.main(["--output", str(tmp_path), *TINY]) == 0, capfd.readouterr()
    story = [
        r"edl-torch master --addr \S+ --state \S+",
        *([r"Watch it at http://127.0.0.1:\d+/"] if find_spec("aiohttp") else []),
        "Two ranks train one model",
        r"Rank 1 was just killed \(kill -9 \d+\)",
        "They go on from the last checkpoint",
        r"the master is killed \(kill -9 \d+\)",
        r"edl-torch master --addr \S+ --state \S+",
        f"delivered {RECORDS} of {RECORDS} annotations, each once",
        "captions.png",
        r"drawn in \S+audit.html",
        "PROVEN, data the same by names\n",
    ]
    said = capfd.readouterr().out
    assert re.search(".*".join(story), said, re.S), said
    assert f"acknowledged {RECORDS} " in said
    assert "✓ PROVEN" in (tmp_path / "audit.html").read_text("utf-8")
    assert (tmp_path / "captions.png").stat().st_size > 1000
    assert json.loads((tmp_path / "metrics.json").read_text())["deliveries"]["repeated"] == 0


def test_wrong_input_is_one_line_and_nothing_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--quiet", "--output", str(tmp_path / "out"), "--epochs", "none"]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == "error: argument --epochs: 'none' is not a whole number from 1 (--help lists the arguments)\n"
    )
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_a_job_that_ends_before_anybody_was_killed_is_an_error(tmp_path: Path) -> None:
    class Ended(demo.Job):
        over = True
        last_words = "no reason"

        def __init__(self) -> None:
            self.output = tmp_path

    with pytest.raises(EdlError, match="ended before anybody was killed:\nno reason"):
        Ended().wait_until(lambda: False)
