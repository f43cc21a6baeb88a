"""Words and their numbers: what a caption is to the model, and back.

It must not know images, models or files: a checkpoint stores `words` and rebuilds it from them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

PAD, BOS, EOS, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def words_of(caption: str) -> list[str]:
    """The caption's words in lower case, without punctuation."""
    return re.findall(r"\w+(?:['’]\w+)*", caption.lower())


class Vocabulary:
    """A fixed list of words; a word's number is its place behind the four special ones."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words, start=len(SPECIAL))}

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 1) -> Vocabulary:
        """All words that occur at least `min_count` times, in alphabetical order."""
        counts = Counter(word for caption in captions for word in words_of(caption))
        return cls(sorted(word for word, count in counts.items() if count >= min_count))

    def encode(self, caption: str, max_words: int | None = None) -> list[int]:
        """Numbers of the caption's words between BOS and EOS; unknown words become UNKNOWN."""
        numbers = [self._numbers.get(word, UNKNOWN) for word in words_of(caption)[:max_words]]
        return [BOS, *numbers, EOS]

    def decode(self, numbers: Iterable[int]) -> str:
        """The words up to EOS as one string."""
        words = []
        for number in numbers:
            if number == EOS:
                break
            if number == UNKNOWN or number >= len(SPECIAL):
                words.append(SPECIAL[UNKNOWN] if number == UNKNOWN else self.words[number - len(SPECIAL)])
        return " ".join(words)

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    def __repr__(self) -> str:
        return f"<Vocabulary words={len(self.words)}>"
