"""Small networks of kinds that the library's own zoo does not have, trained briefly on digits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from subject import Measured, Subject, answers
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 17


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels 0 … 16 as (N, 64) integers and labels: 1,297 to train on, 500 to judge with."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(bunch.data).long()[order], torch.from_numpy(bunch.target).long()[order]
    return x[:1297], y[:1297], x[1297:], y[1297:]


class MixtureOfExperts(nn.Module):
    """Shazeer et al. (2017): every token goes to the two experts that its gate likes best, and to no other.

    Takes (N, 8, 8): the rows of an image as tokens. An expert sees (tokens, width), whatever their images.
    """

    def __init__(self, width: int = 64, experts: int = 4, hidden: int = 96, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.1 * torch.randn(8, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.gate = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(blocks))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        parts = zip(self.qkv, self.out, self.gate, self.norm, self.experts, strict=True)
        for qkv, out_proj, gate, norm, experts in parts:
            h = h + out_proj(F.scaled_dot_product_attention(*qkv(h).chunk(3, dim=-1)))
            tokens = norm(h).flatten(0, 1)
            score, chosen = gate(tokens).topk(2, dim=1)
            score = score.softmax(dim=1)
            out = torch.zeros_like(tokens)
            for index, expert in enumerate(experts):
                row, rank = (chosen == index).nonzero(as_tuple=True)
                if len(row):
                    out = out.index_add(0, row, score[row, rank, None] * expert(tokens[row]))
            h = h + out.view_as(h)
        return self.head(h.mean(dim=1))


class SelectiveStateSpace(nn.Module):
    """One block of Mamba (Gu and Dao, 2023): h_t = exp(dt A) h_(t-1) + dt B x_t, y_t = C h_t + D x_t."""

    def __init__(self, width: int, inner: int, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        self._sizes = [rank, state, state]

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(self.norm(u)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(x).split(self._sizes, dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(dt[..., None] * -self.A_log.exp())
        drive = (dt * x)[..., None] * b[:, :, None]
        state, seen = torch.zeros_like(decay[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            seen.append((state * c[:, t, None]).sum(dim=-1))
        y = torch.stack(seen, dim=1) + self.D * x
        return u + self.out_proj(y * F.silu(z))


class Mamba(nn.Module):
    """Reads an image row by row, (N, 8, 8); gives (N, 10) logits."""

    def __init__(self, width: int = 64, inner: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(SelectiveStateSpace(width, inner) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(dim=1))


class Block(nn.Module):
    """Pre-norm attention that sees only the past, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        n, t, width = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, width)
        h = h + self.out(mixed)
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Decoder(nn.Module):
    """A small language model of pixels: (N, T) tokens to (N, T, 17) logits of the next; head and embedding are tied."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(LEVELS, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LEVELS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def rows(x: Tensor) -> Tensor:
    """Pixels as (N, 8, 8) numbers in [0, 1]."""
    return x.view(-1, 8, 8) / 16.0


def classification(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(rows(x)), y)


def next_token(module: nn.Module, x: Tensor, _y: Tensor) -> Tensor:
    return F.cross_entropy(module(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@functools.cache
def _trained(make: Callable[[], nn.Module], loss: Callable[..., Tensor], epochs: int) -> nn.Module:
    """The network after so many passes over the images, in evaluation mode; the global random state is left alone."""
    x, y, *_ = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
        total, done = epochs * math.ceil(len(x) / 64), 0
        for _ in range(epochs):
            for index in torch.randperm(len(x)).split(64):
                for group in optimizer.param_groups:
                    group["lr"] = 1.5e-3 * (1 + math.cos(math.pi * done / total))
                optimizer.zero_grad()
                loss(module, x[index], y[index]).backward()
                optimizer.step()
                done += 1
    module.zero_grad(set_to_none=True)
    return module.eval()


def mixture_of_experts() -> nn.Module:
    return copy.deepcopy(_trained(MixtureOfExperts, classification, 15))


def mamba() -> nn.Module:
    return copy.deepcopy(_trained(Mamba, classification, 12))


def decoder() -> nn.Module:
    return copy.deepcopy(_trained(Decoder, next_token, 12))


def told(module: nn.Module) -> Measured:
    """How often an image that nobody trained on gets its label."""
    _, _, x, y = digits()
    return {"accuracy": float((answers(module, rows(x)).argmax(dim=1) == y).float().mean())}


def foretold(module: nn.Module) -> Measured:
    """How often the likeliest pixel is the next one, and the inverse of the perplexity."""
    *_, x, _ = digits()
    scores, wanted = answers(module, x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()
    right = float((scores.argmax(dim=1) == wanted).float().mean())
    return {"next pixel": right, "1 / perplexity": float(torch.exp(-F.cross_entropy(scores, wanted)))}


ROWS = {"shape": (8, 8), "num_classes": 10}
PIXELS = {"shape": (-1,), "integer": True, "num_classes": 0, "bounds": (0, LEVELS - 1), "reduce": "all"}


def _classifier(build: Callable[[], nn.Module]) -> Subject:
    return Subject(build, lambda: rows(digits()[0]), told, ROWS, labels=lambda: digits()[1], params={"groups": 16})


SMALL = {
    "experts": _classifier(mixture_of_experts),
    "mamba": _classifier(mamba),
    "decoder": Subject(decoder, lambda: digits()[0], foretold, PIXELS),
}
