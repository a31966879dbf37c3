"""The concrete white box: a module plus an input spec, and nothing else."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from deepseal.adapter.access import Output
from deepseal.adapter.capture import Tap, evaluating, forward_to, forward_with
from deepseal.adapter.data import Split
from deepseal.adapter.inputs import Batch, call
from deepseal.adapter.oracle import Oracle, accuracy
from deepseal.adapter.outputs import pool as pooled
from deepseal.adapter.parametrised import deep_copy
from deepseal.adapter.precision import in_single_precision
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError
from deepseal.statistics import Rate

BATCH = 512


class Classifier:
    """A classifier, or a model without classes: the user's module, held and never changed, and the spec of its input.

    Args:
        module: maps normalised (N, …) inputs to (N, classes) logits, or to whatever ``spec`` says how to read.
        spec: what the module takes, and which of its outputs is the answer.
        architecture: ``package.module:factory`` that rebuilds the module, or None when unknown.
        metadata: plain values that travel with the weights, such as the training recipe.
    """

    output: Output = "logits"

    def __init__(
        self,
        module: nn.Module,
        spec: InputSpec,
        *,
        architecture: str | None = None,
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise InputError("a module with initialised weights", found="a lazy layer", do="run it once on an input")
        if isinstance(module, nn.DataParallel):
            raise InputError("a plain module", found="DataParallel", do="pass its .module")
        self.module = module
        self.spec = spec
        self.architecture = architecture
        self.metadata = MappingProxyType(copy.deepcopy(dict(metadata)))

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the module's parameters."""
        return next((p.dtype for p in self.module.parameters()), torch.float32)

    def logits(self, x: Batch) -> Tensor:
        """(N, classes) logits in evaluation mode, differentiable in ``x``; inputs follow the module's device and dtype.

        (N, D) embeddings of a model without classes.

        Raises:
            InputError: inputs that do not fit the spec, or a module whose output does not.
        """
        self.spec.check(x)
        prepared = self.prepare(x)
        with evaluating(self.module):
            return self.spec.read(call(self.module, prepared), prepared)

    def prepare(self, x: Batch) -> Batch:
        """``x`` normalised, on the module's device and in its dtype: what the module itself takes."""
        return self.spec.prepare(x, self.device, self.dtype)

    def probe(self, count: int = 1) -> Batch:
        """Prepared inputs within the bounds, for finding out shapes."""
        return self.prepare(self.spec.probe(count))

    @torch.no_grad()
    def query(self, x: Batch) -> Tensor:
        """Detached logits on the CPU in float32, batched."""
        if len(x) == 0:
            return torch.empty(0, self.spec.num_classes)
        return torch.cat([self.logits(part).float().cpu() for part in x.split(BATCH)])

    def predict(self, x: Batch) -> Tensor:
        """(N,) labels.

        Raises:
            InputError: a model without classes.
        """
        self.spec.require_classes()
        return self.query(x).argmax(dim=1)

    def features(self, x: Batch, layers: Sequence[str], *, pool: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """Outputs of the named layers for a whole data set: detached, on the CPU, float32, (N, features).

        They are computed in float32 at least, also of a module in half precision and inside ``torch.autocast``.

        Args:
            x: the data.
            layers: qualified names.
            pool: rule for each layer, one of ``outputs.POOLS``; ``none`` where there is none.

        Raises:
            UnknownNameError: an unknown layer.
            InputError: inputs that do not fit the spec, or a layer that gives no row for every input.
        """
        parts = list(self.stream(x, layers, pool=pool))
        return {name: torch.cat([part[name] for part in parts]) for name in dict.fromkeys(layers)}

    def stream(
        self, x: Batch, layers: Sequence[str], *, pool: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """``features`` batch by batch, for data whose activations do not fit into memory together."""
        self.spec.check(x)
        if len(x) == 0:
            raise InputError("at least one input", found="none", do="pass data")
        rules = pool or {}
        reader = Classifier(in_single_precision(self.module), self.spec)
        for part in x.split(BATCH):
            whole = torch.autocast(self.device.type, enabled=False)
            with evaluating(reader.module), torch.no_grad(), whole:
                prepared = reader.prepare(part)
                captured = forward_to(reader.module, prepared, layers)
                mask = self.spec.mask_of(prepared)
                rows = {name: pooled(value, rules.get(name, "none"), mask) for name, value in captured.items()}
            for name, value in rows.items():
                if len(value) != len(part):
                    found, do = f"{len(value)} rows for {len(part)} inputs", "choose another layer or pooling rule"
                    raise InputError(f"one row an input from layer {name!r}", found=found, do=do)
            yield {name: value.float().cpu() for name, value in rows.items()}

    def observe(self, x: Batch, taps: Sequence[Tap]) -> tuple[Tensor, dict[Tap, Tensor]]:
        """(N, classes) logits and (N, features) of each tap from one pass in evaluation mode, graph attached.

        On the module's device; features in float32 at least, as the module's own precision gives them.

        Raises:
            UnknownNameError: an unknown layer.
            InputError: inputs that do not fit the spec, or a layer that gives no row for every input.
        """
        self.spec.check(x)
        prepared = self.prepare(x)
        with evaluating(self.module):
            returned, captured = forward_with(self.module, prepared, [tap.layer for tap in taps])
        mask = self.spec.mask_of(prepared)
        rows = {tap: pooled(captured[tap.layer], tap.pool, mask) for tap in taps}
        for tap, value in rows.items():
            if len(value) != len(x):
                found, do = f"{len(value)} rows for {len(x)} inputs", "choose another layer or pooling rule"
                raise InputError(f"one row an input from layer {tap.layer!r}", found=found, do=do)
        return self.spec.read(returned, prepared), {tap: _single(value) for tap, value in rows.items()}

    def accuracy(self, split: Split) -> Rate:
        """Share of correctly classified samples with its 95 % interval.

        Raises:
            InputError: no samples, or labels outside the model's classes.
        """
        return accuracy(self, split)

    def copy(self, *, metadata: Mapping[str, Any] | None = None) -> Classifier:
        """An independent copy of the module with the same spec; ``metadata`` adds to what is there."""
        merged = {**self.metadata, **(metadata or {})}
        return Classifier(deep_copy(self.module), self.spec, architecture=self.architecture, metadata=merged)

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers by name, not copied.

        Raises:
            InputError: a module that keeps other state than tensors.
        """
        state = self.module.state_dict()
        foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if foreign:
            raise InputError(
                "a module whose state is tensors", found=str(foreign), do="keep the rest outside the module"
            )
        return dict(state)

    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all parameters and buffers."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def oracle(self, *, output: Output = "labels", max_queries: int | None = None) -> Oracle:
        """A black box over a copy of this model: counted queries, no public way back to the weights."""
        return Oracle(self.copy().query, self.spec, output=output, max_queries=max_queries)

    def __repr__(self) -> str:
        return f"Classifier({self.architecture or type(self.module).__name__}, {self.spec})"


def _single(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
