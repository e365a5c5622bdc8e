"""The two trainings that `train` measures, written once for both sides. Imports torch: for ranks and scripts only."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Workload:
    """What to train: same on both sides of the comparison."""

    net: nn.Module
    dataset: Dataset[tuple[Tensor, ...]]
    batch_size: int


def digits() -> Workload:
    """The quickstart's network on the digits of scikit-learn."""
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10)),
    )
    return Workload(net, TensorDataset(images[:1437], torch.tensor(data.target)[:1437]), batch_size=32)


class Text(Dataset[tuple[Tensor, ...]]):
    """Windows of Python's own documentation, one character a token, with the text one further as target."""

    def __init__(self, context: int = 64) -> None:
        text = "".join(pydoc_data.topics.topics.values())
        self.vocabulary = sorted(set(text))
        index = {character: i for i, character in enumerate(self.vocabulary)}
        self.tokens = torch.tensor([index[character] for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.out(mixed)
        widened: Tensor = self.mlp(self.norm2(x))
        return x + widened


class GPT(nn.Module):
    """A character-level GPT of 0.8 million parameters."""

    def __init__(self, vocabulary: int, context: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)  # classes second, as cross_entropy wants them


def gpt() -> Workload:
    """A small GPT on the text of Python's language reference."""
    torch.manual_seed(0)
    dataset = Text()
    return Workload(GPT(len(dataset.vocabulary)), dataset, batch_size=8)


WORKLOADS = {"digits": digits, "gpt": gpt}
