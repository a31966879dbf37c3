"""How DeepSigns is embedded: what a recipe asks of every bit, and at what pace."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Numbers of a recipe; the scheme's parameters of the same names replace them.

    Attributes:
        margin: projection of each bit, in standard deviations of the original's.
        relative_margin: score of each bit, in standard deviations of chance.
        prune: highest pruning rate the mark is read through.
        drift: weight noise it is read through, in standard deviations of a layer's weights.
        hold: weight of keeping the model's own outputs; None where labels are kept instead.
        steps, learning_rate: updates of Adam, and its step size; where outputs are kept, in units of each weight
            tensor's root mean square, which is ten times as large in one pretrained network as in another.
        batch: inputs a carrier and update.
        batch_size: inputs of the task an update.
    """

    margin: float
    relative_margin: float
    prune: float
    drift: float
    hold: float | None
    steps: int
    learning_rate: float
    batch: int
    batch_size: int


# The paper's takes the step size only.
ROBUST = Settings(
    margin=5.0,
    relative_margin=2.5,
    prune=0.9,
    drift=0.5,
    hold=None,
    steps=320,
    learning_rate=1e-3,
    batch=4,
    batch_size=128,
)
# A large pretrained network breaks at pruning rates that a mark of this size survives anyway, so it is read through
# less; what it costs the network's answers is what counts.
GENTLE = Settings(
    margin=0.0,
    relative_margin=3.0,
    prune=0.2,
    drift=0.0,
    hold=10.0,
    steps=150,
    learning_rate=5e-3,
    batch=4,
    batch_size=32,
)
RECIPES = {"robust": ROBUST, "gentle": GENTLE, "paper": ROBUST}
