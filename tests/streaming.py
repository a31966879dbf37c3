"""Small networks with a residual stream, for the attack that rotates it and the alignment that turns it back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec

Norm = Callable[[int], nn.Module]


class Root(nn.Module):
    """RMSNorm as libraries write it for themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


NORMS: dict[str, Norm] = {"rms": nn.RMSNorm, "root": Root, "layer": nn.LayerNorm, "none": lambda _: nn.Identity()}


class Block(nn.Module):
    """Attention and a perceptron of two layers, or a gated one (SwiGLU)."""

    def __init__(self, width: int, hidden: int, norm: Norm, *, heads: int, causal: bool, gated: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden) if gated else None

    def forward(self, h: Tensor) -> Tensor:
        n, t, width = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        read = self.norm2(h)
        if self.gate is None:
            return h + self.down(torch.relu(self.up(read)))
        return h + self.down(nn.functional.silu(self.gate(read)) * self.up(read))


class Transformer(nn.Module):
    """Rows of an image (N, 1, 8, 8) as tokens, to classes; with ``words`` tokens (N, T) to the logits of the next."""

    def __init__(
        self,
        classes: int,
        norm: Norm,
        *,
        words: int = 0,
        width: int = 64,
        hidden: int = 128,
        blocks: int = 2,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.words = words
        self.embed = nn.Embedding(words, width) if words else nn.Linear(8, width)
        self.place = nn.Parameter(0.5 * torch.randn(64 if words else 8, width))
        self.blocks = nn.ModuleList(
            Block(width, hidden, norm, heads=4, causal=words > 0, gated=gated) for _ in range(blocks)
        )
        self.norm, self.head = norm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x if self.words else x.flatten(1, 2))
        h = h + self.place[: h.shape[1]]
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return self.head(h if self.words else h.mean(dim=1))


class Perceptron(nn.Module):
    """A residual perceptron of (N, 1, 8, 8), whose stream is normalised or not."""

    def __init__(self, classes: int, norm: Norm, width: int = 48, hidden: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, classes)
        self.norms = nn.ModuleList(norm(width) for _ in range(blocks))
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(hidden, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.flatten(1))
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            h = h + down(torch.relu(up(norm(h))))
        return self.head(h)


def rows(spec: InputSpec, norm: str = "rms", gated: bool = False) -> nn.Module:
    """A transformer that tells images by their rows; ``norm`` is one of ``NORMS``."""
    return Transformer(spec.num_classes, NORMS[norm], gated=gated)


def perceptron(spec: InputSpec, norm: str = "none") -> nn.Module:
    """A residual perceptron."""
    return Perceptron(spec.num_classes, NORMS[norm])


def decoder(norm: str = "rms", words: int = 17, gated: bool = True) -> Classifier:
    """A language model of tokens, with all its logits as the answer; not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Transformer(words, NORMS[norm], words=words, gated=gated)
    return Classifier(module, InputSpec((-1,), 0, bounds=(0, words - 1), integer=True, reduce="all"))
