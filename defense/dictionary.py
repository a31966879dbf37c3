"""DeepFense's input defender: sparse reconstruction of patches over a learned dictionary.

Source: B. Rouhani, M. Samragh, M. Javaheripi, T. Javidi, F. Koushanfar, "DeepFense: online accelerated defense against
adversarial deep learning", ICCAD 2018, section 4.2. The dictionary is learned by alternating sparse codes with least
squares (K. Engan, S. Aase, J. Husoy, "Method of optimal directions for frame design", ICASSP 1999); atoms that nobody
uses become the patches that were matched worst.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.defense.omp import code, residuals
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_FLOOR = 1e-10  # mean squared error of 100 dB: what single precision leaves of an image that is matched exactly
_RIDGE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dictionary(Parameters):
    """Rouhani et al., 2018: how badly an image's patches are matched by a few atoms of a dictionary of clean patches.

    The score is minus the peak signal-to-noise ratio of the reconstruction, in decibels. One dictionary a class, of
    which that of the predicted class is used, is the paper's; a shared one takes a tenth of the time and memory to
    learn, and as long to score.
    """

    name: ClassVar[str] = "dictionary"

    patch: int = parameter(7, "side of a patch, in pixels", minimum=2, maximum=64)
    stride: int | None = parameter(None, "distance of neighbouring patches; none: side by side", minimum=1)
    atoms: int = parameter(225, "atoms of a dictionary", minimum=1, maximum=65_536)
    nonzeros: int = parameter(5, "atoms that match a patch", minimum=1, maximum=1024)
    learned_nonzeros: int = parameter(5, "the same while learning", minimum=1, maximum=1024)
    shared: bool = parameter(False, "one dictionary for all classes")
    rounds: int = parameter(10, "rounds of learning", minimum=0, maximum=10_000)
    patches: int = parameter(10_000, "most patches that a dictionary is learned from", minimum=2)

    @property
    def needs(self) -> Needs:
        return Needs(images=True)

    def placed(self, model: BlackBox) -> Dictionary:
        """The same with a patch that is no larger than the image.

        Raises:
            InputError: inputs that are no images.
        """
        shape = model.spec.shape
        if len(shape) != 3 or not model.spec.is_plain:
            do = "leave out this detector, or use input-pca"
            raise InputError("images of shape (C, H, W)", found=f"inputs of shape {shape}", do=do)
        side = min(self.patch, *shape[1:])
        if side < 2:
            raise InputError("images of at least 2 x 2 pixels", found=str(shape), do="leave out this detector")
        return dataclasses.replace(self, patch=side, stride=min(self.stride or side, side))

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """(1 or C, A, D) atoms of unit length; a class without samples gets the dictionary of all of them together.

        Raises:
            InputError: nothing but blank images.
        """
        labels = reference.split.y
        groups = [torch.ones(len(labels), dtype=torch.bool)]
        if not self.shared:
            groups = [labels == label for label in range(reference.classes)]
        bank: list[Tensor | None] = [None] * len(groups)
        for index, rows in enumerate(groups):
            found = self._patches(reference, rows, rng.child("patches", index))
            bank[index] = self._learn(found, rng.child("atoms", index)) if len(found) else None
        spare = None
        if any(atoms is None for atoms in bank):
            found = self._patches(reference, torch.ones(len(labels), dtype=torch.bool), rng.child("all"))
            if not len(found):
                raise InputError("images that are not blank", found="nothing but zeros", do="check the data")
            spare = self._learn(found, rng.child("spare"))
        return {"atoms": torch.stack([spare if atoms is None else atoms for atoms in bank])}  # type: ignore[misc]

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) minus the peak signal-to-noise ratio, in decibels.

        Its gradient is exact wherever the choice of atoms does not change: that of |r|^2, r the part of a patch outside
        the chosen atoms' span, is 2 r.
        """
        patches = self._cut(context.x, context.model.spec.bounds)
        count, size = patches.shape[1], patches.shape[2]
        rows = patches.reshape(-1, size)
        bank = state["atoms"].to(rows)
        left = torch.zeros_like(rows.detach())
        seen = (rows.detach() != 0.0).any(dim=1)
        group = torch.zeros(len(context), dtype=torch.int64, device=rows.device)
        if len(bank) > 1:
            group = context.predicted.to(rows.device)
        group = group.repeat_interleave(count)
        for index in group.unique().tolist():
            mine = torch.nonzero(seen & (group == index)).reshape(-1)
            left[mine] = residuals(rows.detach()[mine], bank[index], self.nonzeros)
        energy = left.square().sum(dim=1)
        if context.graph:
            energy = energy + 2.0 * (left * (rows - rows.detach())).sum(dim=1)
        return 10.0 * torch.log10(energy.reshape(-1, count).sum(dim=1) / (count * size) + _FLOOR)

    def _cut(self, x: Tensor, bounds: tuple[float, float]) -> Tensor:
        """(N, patches, C * patch * patch), values 0 … 1; the last patches touch the image's lower and right edges."""
        low, high = bounds
        scaled = (x if x.dtype == torch.float64 else x.float()).sub(low).div(high - low)
        step = self.stride or self.patch
        parts = []
        for tops in _starts(x.shape[2], self.patch, step):
            for lefts in _starts(x.shape[3], self.patch, step):
                within = scaled[:, :, tops[0] : tops[1], lefts[0] : lefts[1]]
                cut = within.unfold(2, self.patch, step).unfold(3, self.patch, step)
                parts.append(cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        return torch.cat(parts, dim=1)

    def _patches(self, reference: Reference, rows: Tensor, rng: Rng) -> Tensor:
        """At most so many patches of some images, in any order; blank ones are left out, they need no atom."""
        generator = rng.torch()
        places = torch.nonzero(rows).reshape(-1)
        places = places[torch.randperm(len(places), generator=generator)]
        found: list[Tensor] = []
        for part in places.split(256):
            cut = self._cut(reference.split.tensor[part], reference.model.spec.bounds).flatten(0, 1).float()
            found.append(cut[(cut != 0.0).any(dim=1)])
            if sum(map(len, found)) >= self.patches:
                break
        together = torch.cat(found) if found else torch.empty(0, 0)
        return together[torch.randperm(len(together), generator=generator)[: self.patches]]

    def _learn(self, patches: Tensor, rng: Rng) -> Tensor:
        """(A, D) atoms of unit length from (P, D) patches."""
        generator, size = rng.torch(), patches.shape[1]
        atoms = torch.randn(self.atoms, size, generator=generator)
        drawn = patches[torch.randperm(len(patches), generator=generator)[: self.atoms]]
        atoms[: len(drawn)] = drawn
        atoms = _unit(atoms)
        for _ in range(self.rounds):
            second = torch.zeros(self.atoms, self.atoms)
            cross = torch.zeros(self.atoms, size)
            worst = []
            for part in patches.split(4096):
                found = code(part, atoms, self.learned_nonzeros)
                dense = found.dense(self.atoms)
                second += dense.T @ dense
                cross += dense.T @ part
                worst.append(found.residual.square().sum(dim=1))
            used = second.diagonal() > 0.0
            ridge = _RIDGE * float(second.diagonal().mean()) + 1e-12
            solved = torch.linalg.solve(second.double() + ridge * torch.eye(self.atoms).double(), cross.double())
            atoms = torch.where(used[:, None], _unit(solved.float()), atoms)
            unused = torch.nonzero(~used).reshape(-1)[: len(patches)]
            atoms[unused] = _unit(patches[torch.cat(worst).topk(len(unused)).indices])
        return atoms


def _unit(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp_min(math.sqrt(_FLOOR))


def _starts(length: int, patch: int, step: int) -> Iterator[tuple[int, int]]:
    """Where the regular patches begin and end, and one more that touches the edge where they do not."""
    regular = (length - patch) // step * step + patch
    yield 0, regular
    if regular < length:
        yield length - patch, length
