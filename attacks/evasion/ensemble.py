"""Several attacks that fail on different models, one after the other: what is left is what none of them fools.

Source: F. Croce, M. Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks", ICML 2020 (arXiv 2003.01690), section 6 (AutoAttack): APGD on the cross-entropy, targeted APGD on the DLR
loss, FAB, and Square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Evasion, Perturbed
from deepseal.attacks.evasion.apgd import APGD
from deepseal.attacks.evasion.fab import FAB
from deepseal.attacks.evasion.search import sizes
from deepseal.attacks.evasion.square import Square
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Parameters):
    """Croce and Hein, 2020 (L-inf): each member attacks what the earlier ones did not fool; nothing is to be tuned.

    With fewer than four classes the DLR loss is the untargeted one, with two there is none.
    """

    name: ClassVar[str] = "auto"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    steps: int = parameter(100, "steps of the gradient members", minimum=2, maximum=100_000)
    queries: int = parameter(5000, "queries an input of the member without gradients", minimum=1, maximum=1_000_000)

    def members(self, classes: int) -> list[Evasion]:
        """The attacks, in their order, for a model with so many classes."""
        gradient = [APGD(epsilon=self.epsilon, steps=self.steps)]
        if classes > 2:
            loss = "dlr" if classes == 3 else "targeted"
            gradient.append(APGD(epsilon=self.epsilon, steps=self.steps, loss=loss))
        walks = min(9, max(1, classes - 1))
        return [
            *gradient,
            FAB(epsilon=self.epsilon, steps=self.steps, restarts=walks),
            Square(epsilon=self.epsilon, queries=self.queries),
        ]

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Run the members.

        Raises:
            InputError: see ``search.first_success``.
        """
        data.check(model.spec)
        x, fooled = data.tensor.clone(), torch.zeros(len(data), dtype=torch.bool)
        rows, reports = torch.arange(len(data)), []
        for place, member in enumerate(self.members(model.spec.num_classes)):
            if not len(rows):
                break
            found = member.perturb(model, data.take(rows), rng=rng.child("member", place))
            reports.append({"attack": member.name, **member.as_dict(), **found.evidence})
            x[rows], fooled[rows] = found.x, found.fooled
            rows = rows[~found.fooled]
        return Perturbed(x, fooled, {**totals(reports), **sizes(x, data.tensor, fooled), "members": reports})


def totals(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of the whole: attacked by the first, and the sums of what each did."""
    summed = ("fooled", "undone_in_another_batch", "unsound_candidates", "asked_alone", "fooled_alone")
    return {"attacked": reports[0]["attacked"], **{name: sum(one[name] for one in reports) for name in summed}}
