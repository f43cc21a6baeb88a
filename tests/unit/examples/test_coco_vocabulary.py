"""Captions to numbers and back."""

from __future__ import annotations

import pytest
from vocabulary import BOS, EOS, PAD, SPECIAL, UNKNOWN, Vocabulary, words_of

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


def test_saved_words_rebuild_the_same_vocabulary() -> None:
    vocabulary = Vocabulary.from_captions(CAPTIONS)
    again = Vocabulary(vocabulary.words)
    assert [again.encode(c) for c in CAPTIONS] == [vocabulary.encode(c) for c in CAPTIONS]
    assert len(again) == len(vocabulary) == len(SPECIAL) + len(set(vocabulary.words))


def test_order_of_captions_does_not_matter() -> None:
    assert Vocabulary.from_captions(CAPTIONS).words == Vocabulary.from_captions(CAPTIONS[::-1]).words


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


@pytest.mark.parametrize("numbers", [[], [EOS], [BOS, EOS, 4], [PAD, PAD]])
def test_nothing_before_the_end_is_an_empty_caption(numbers: list[int]) -> None:
    assert Vocabulary(["a"]).decode(numbers) == ""


def test_repr_shows_the_number_of_words() -> None:
    assert repr(Vocabulary(["a", "b"])) == "<Vocabulary words=2>"
