"""A mark inside a training by Transformers: a callback for ``transformers.Trainer``.

``Trainer`` has one place for losses, ``compute_loss``, whose result is divided by the number of accumulated batches for
some models and not for others, and which evaluation calls too. The callback adds the term's gradients just before the
optimiser's step (``on_pre_optimizer_step``) instead. There gradients are those of one update, no longer scaled by
mixed precision, averaged over processes, and clipped; the term's are not clipped.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepseal.adapter import Classifier, Split
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark.key import Key
from deepseal.watermark.training import MarkTerm

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise InputError(
        "the package transformers for a callback", found="none", do="install it: pip install 'deepseal[loops]'"
    ) from error


class MarkCallback(TrainerCallback):
    """Embeds the key's mark while ``Trainer.train`` trains; the reference is the model as it is when training starts.

    Args:
        key, model, data, rng: see ``MarkTerm``; ``model`` holds the trained module or the part of it that is marked.

    Raises:
        InputError: when training starts: see ``MarkTerm``; parameters that are spread over processes in pieces; or
            gradients that are still scaled where callbacks see them.
    """

    def __init__(self, key: Key, model: Classifier, data: Split, *, rng: Rng) -> None:
        super().__init__()
        self._given = key, model, data, rng
        self._term: MarkTerm | None = None
        self.value: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the term, now that the model is where it is trained."""
        key, model, data, rng = self._given
        if args.fsdp or args.deepspeed:
            found = "deepspeed" if args.deepspeed else "fsdp"
            raise InputError("whole parameters in every process", found=found, do="use one device, or data parallel")
        if args.fp16 and not args.max_grad_norm:
            do = "use bf16, or set max_grad_norm"
            raise InputError("unscaled gradients", found="fp16 without clipping", do=do)
        trained: nn.Module = kwargs["model"]
        ours = {id(parameter) for parameter in model.module.parameters()}
        if not ours & {id(parameter) for parameter in trained.parameters()}:
            do = "pass the module, or the part of it, that is trained"
            raise InputError("a model in training", found=f"another one than {type(trained).__name__}", do=do)
        self._term = MarkTerm(key, model, data, rng=rng)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the gradients; ``value`` is the term's."""
        optimizer: Optimizer = kwargs["optimizer"]
        assert self._term is not None  # noqa: S101 - on_train_begin
        self.value = self._term.add_gradients(p for group in optimizer.param_groups for p in group["params"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lets go of the model."""
        self._term = None
