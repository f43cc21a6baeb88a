"""The captioner: a small convolutional encoder and a transformer decoder.

Images come as uint8 and captions as word numbers; it must not know files, words or training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vocabulary import BOS, EOS, PAD, UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What fixes the model's shape; a checkpoint stores it."""

    vocabulary: int
    image_size: int = 64
    max_tokens: int = 28
    width: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0


class Encoder(nn.Module):
    """(B, 3, S, S) uint8 to (B, (S / 8)², width): one feature vector for each 8 × 8 pixels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.layers = nn.Sequential(
            _block(3, width // 4, stride=2),
            _block(width // 4, width // 2, stride=2),
            _block(width // 2, width, stride=2),
            _block(width, width),
        )
        cells = -(-config.image_size // 8)
        self.position = nn.Parameter(torch.randn(cells * cells, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images.float() / 127.5 - 1)
        return features.flatten(2).transpose(1, 2) + self.position


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Captioner(nn.Module):
    """Next-word scores for captions of images."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.words = nn.Embedding(config.vocabulary, config.width, padding_idx=PAD)
        self.position = nn.Parameter(torch.randn(config.max_tokens, config.width) * 0.02)
        layer = nn.TransformerDecoderLayer(
            config.width,
            config.heads,
            dim_feedforward=2 * config.width,
            dropout=config.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.decoder = nn.TransformerDecoder(layer, config.layers, norm=nn.LayerNorm(config.width))
        self.scores = nn.Linear(config.width, config.vocabulary)
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Images (B, 3, S, S) uint8 and tokens (B, T) int64 to scores (B, T, V) of each next token."""
        return self.decode(self.encoder(images), tokens)

    def decode(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Scores (B, T, V) from the encoder's features and the tokens so far."""
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        embedded = self.words(tokens) + self.position[:length]
        scores: Tensor = self.scores(self.decoder(embedded, features, tgt_mask=later, tgt_is_causal=True))
        return scores

    def loss(self, images: Tensor, captions: Tensor) -> Tensor:
        """Mean cross-entropy per word of captions (B, T), which begin with BOS and are padded with PAD."""
        return self.caption_loss(self.encoder(images), captions)

    def caption_loss(self, features: Tensor, captions: Tensor, reduction: str = "mean") -> Tensor:
        """The same from the encoder's features (B, cells, width)."""
        scores = self.decode(features, captions[:, :-1])
        targets = captions[:, 1:].reshape(-1)
        return F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=PAD, reduction=reduction)

    @torch.no_grad()
    def greedy(self, features: Tensor) -> Tensor:
        """The likeliest known word again and again: (B, up to max_tokens) without BOS, PAD after EOS."""
        tokens = torch.full((len(features), 1), BOS, device=features.device)
        never = torch.tensor([PAD, BOS, UNKNOWN], device=features.device)
        ended = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        while tokens.shape[1] <= self.config.max_tokens and not bool(ended.all()):
            scores = self.decode(features, tokens)[:, -1].index_fill(1, never, -torch.inf)
            best = scores.argmax(-1).masked_fill(ended, PAD)
            ended |= best == EOS
            tokens = torch.cat([tokens, best[:, None]], dim=1)
        return tokens[:, 1:]


class WithLoss(nn.Module):
    """A captioner whose call is its loss: what DDP wraps has to be called."""

    def __init__(self, captioner: Captioner) -> None:
        super().__init__()
        self.captioner = captioner

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """As `Captioner.loss`."""
        return self.captioner.loss(images, captions)
