"""A mark inside a training by Lightning: a callback for ``lightning.pytorch.Trainer``.

Where you write ``training_step`` yourself, ``return loss + self.mark()`` with a ``MarkTerm`` does the same. The
callback is for modules that are not to be touched: Lightning lets no callback change the loss, so the term's gradients
are added just before the optimiser's step (``on_before_optimizer_step``). There gradients are those of one update,
whatever batches were accumulated, no longer scaled by mixed precision, averaged over processes, and not yet clipped.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from deepseal.adapter import Classifier, Split
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark.key import Key
from deepseal.watermark.training import MarkTerm

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise InputError(
        "the package lightning for a callback", found="none", do="install it: pip install 'deepseal[loops]'"
    ) from error

_IN_PIECES = ("FSDP", "DeepSpeed", "ModelParallel")


class MarkCallback(pl.Callback):
    """Embeds the key's mark while ``Trainer.fit`` trains; the reference is the model as it is when training starts.

    Args:
        key, model, data, rng: see ``MarkTerm``; ``model`` holds the ``LightningModule`` or a part of it.

    Raises:
        InputError: when training starts: see ``MarkTerm``; or parameters that are spread over processes in pieces.
    """

    def __init__(self, key: Key, model: Classifier, data: Split, *, rng: Rng) -> None:
        super().__init__()
        self._given = key, model, data, rng
        self._term: MarkTerm | None = None
        self.value: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the term, now that the model is where it is trained."""
        key, model, data, rng = self._given
        strategy = type(trainer.strategy).__name__
        if strategy.startswith(_IN_PIECES):
            raise InputError("whole parameters in every process", found=strategy, do="use one device, or strategy=ddp")
        ours = {id(parameter) for parameter in model.module.parameters()}
        if not ours & {id(parameter) for parameter in pl_module.parameters()}:
            do = "pass the module, or the part of it, that is trained"
            raise InputError("a model in training", found=f"another one than {type(pl_module).__name__}", do=do)
        self._term = MarkTerm(key, model, data, rng=rng)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Adds the gradients; ``value`` is the term's."""
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
            do = "use bf16-mixed, or fused=False"
            raise InputError("unscaled gradients", found="a fused optimiser under 16-mixed", do=do)
        assert self._term is not None  # noqa: S101 - on_train_start
        self.value = self._term.add_gradients(p for group in optimizer.param_groups for p in group["params"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets go of the model."""
        self._term = None
