"""Networks of many kinds: tokens with a mask, recurrent, one logit, answers in tuples and mappings, experts, states."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Field, Inputs, InputSpec

WORDS = 60


@dataclasses.dataclass
class Answer:
    """Like the outputs of a well-known library: attributes, and nothing to index."""

    hidden: Tensor
    scores: tuple[Tensor, Tensor]


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        bias = None if mask is None else torch.where(mask[:, None, :] > 0, 0.0, -1e4).to(x)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.causal)
        x = x + self.out(attended)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Encoder(nn.Module):
    """Tokens and their mask to an ``Answer``."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, *, tokens: Tensor, mask: Tensor) -> Answer:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return Answer(x, (self.head(x), x))


class Decoder(nn.Module):
    """Tokens to the logits of the next one, (N, T, words)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, None)
        return {"hidden": x, "logits": self.head(x)}


class Recurrent(nn.Module):
    """Frames (N, T, 8) through an LSTM; ``first`` gives (T, N, …) inside."""

    def __init__(self, classes: int, batch_first: bool = True, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, num_layers=2, batch_first=batch_first)
        self.dense, self.head = nn.Linear(width, width), nn.Linear(width, classes)
        self.batch_first = batch_first

    def forward(self, frames: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(frames if self.batch_first else frames.transpose(0, 1))
        return self.head(torch.relu(self.dense(hidden[-1])))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the expert that the router chooses (top 1)."""

    def __init__(self, classes: int, width: int = 32, count: int = 4) -> None:
        super().__init__()
        self.entry, self.router = nn.Linear(8, width), nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, frames: Tensor) -> Tensor:
        x = torch.relu(self.entry(frames))
        gates = self.router(x).softmax(dim=-1)
        chosen = gates.argmax(dim=-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            place = chosen == index
            if bool(place.any()):
                result[place] = expert(x[place]) * gates[place][:, index : index + 1]
        return self.head(torch.relu(self.mix(x + result)).mean(dim=1))


class StateSpace(nn.Module):
    """A selective state-space block (Gu and Dao, 2023): the state decays by a step size that the input chooses."""

    def __init__(self, classes: int, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.entry, self.step = nn.Linear(8, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.into, self.out_of = nn.Linear(width, states), nn.Linear(width, states)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.exit, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, frames: Tensor) -> Tensor:
        x, gate = self.entry(frames).chunk(2, dim=-1)
        x = nn.functional.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, into, out_of = nn.functional.softplus(self.step(x)), self.into(x), self.out_of(x)
        state = x.new_zeros(len(x), x.shape[2], into.shape[2])
        outputs = []
        for t in range(x.shape[1]):
            state = state * torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = state + (step[:, t] * x[:, t])[..., None] * into[:, t, None, :]
            outputs.append((state * out_of[:, t, None, :]).sum(dim=-1))
        return self.head(self.exit(torch.stack(outputs, dim=1) * nn.functional.silu(gate)).mean(dim=1))


class OneLogit(nn.Module):
    """A score of the second of two classes, (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x.flatten(1)))))
        return self.head(hidden).squeeze(1)


TOKENS = {
    "tokens": Field((-1,), bounds=(0, WORDS - 1), integer=True),
    "mask": Field((-1,), bounds=(0, 1), integer=True, mask=True),
}


def encoder(num_classes: int = 0, width: int = 32) -> Classifier:
    """Masked tokens; an embedding, or classes."""
    torch.manual_seed(0)
    chosen = ("scores.0", "mask") if num_classes else ("hidden", "mask")
    spec = InputSpec((), num_classes, fields=TOKENS, output=chosen[0], reduce=chosen[1])
    return Classifier(Encoder(num_classes or 4, width), spec)


def sentences(count: int, seed: int = 0) -> Inputs:
    """Random tokens, padded to 12."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    return Inputs({"tokens": torch.randint(1, WORDS, (count, 12), generator=generator) * mask, "mask": mask})
