"""The captioner: shapes, causality, greedy decoding, and that it can learn at all."""

from __future__ import annotations

import pytest
import torch
from model import Captioner, ModelConfig
from vocabulary import BOS, EOS, PAD, UNKNOWN

CONFIG = ModelConfig(vocabulary=12, image_size=32, max_tokens=9, width=16, heads=2, layers=1)


@pytest.fixture
def model() -> Captioner:
    torch.manual_seed(0)
    return Captioner(CONFIG)


def pictures(count: int, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def test_scores_have_one_row_for_each_token(model: Captioner) -> None:
    tokens = torch.randint(4, 12, (5, 7))
    assert model(pictures(5), tokens).shape == (5, 7, 12)


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


def test_greedy_does_not_depend_on_the_batch(model: Captioner) -> None:
    model.eval()
    features = model.encoder(pictures(4))
    together = model.greedy(features)
    for row in range(4):
        alone = model.greedy(features[row : row + 1])
        assert together[row, : alone.shape[1]].tolist() == alone[0].tolist()
        assert not together[row, alone.shape[1] :].any()  # PAD


def test_longest_caption_fits_the_model(model: Captioner) -> None:
    longest = torch.tensor([[BOS, *[4] * (CONFIG.max_tokens - 1), EOS]])
    assert torch.isfinite(model.loss(pictures(1), longest))
