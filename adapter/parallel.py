"""Training one model in several processes, each with its share of every batch (data parallel).

The processes are started by ``torchrun`` or ``accelerate launch`` and joined by ``torch.distributed``. All of them call
the same function with the same arguments, inside ``data_parallel()``, and all of them get the same result.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepseal.errors import InputError, TransportError

_SECONDS = 300
_BUCKET = 1 << 22  # numbers that are averaged together


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that train together: this one's number and how many there are."""

    rank: int = 0
    count: int = 1

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of a batch; the whole batch where there is too little for all."""
        own = rows[self.rank :: self.count]
        return own if len(own) > 1 or self.count == 1 else rows

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each floating-point tensor by its mean over all processes, in place.

        Raises:
            TransportError: a process did not come along in time.
        """
        if self.count == 1:
            return
        for bucket in _buckets([tensor for tensor in tensors if tensor.is_floating_point()]):
            flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
            try:
                work = dist.all_reduce(flat, async_op=True)
                work.wait(datetime.timedelta(seconds=_SECONDS))
            except RuntimeError as error:
                found = f"none within {_SECONDS} s, or a lost one ({str(error)[:120]})"
                do = "call it in every process, with the same arguments"
                raise TransportError(f"gradients of all {self.count} processes", found=found, do=do) from error
            parts = (flat / self.count).split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.reshape(tensor.shape))

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Mean of the gradients over all processes; one that has none for a parameter counts as 0."""
        if self.count == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.average(gradients)


_ALONE = Workers()
_WORKERS: ContextVar[Workers] = ContextVar("workers", default=_ALONE)  # noqa: B039 - frozen


def workers() -> Workers:
    """Who trains together here: this process alone, unless inside ``data_parallel``."""
    return _WORKERS.get()


@contextmanager
def data_parallel() -> Iterator[Workers]:
    """Inside, training shares every batch among the processes of ``torch.distributed``, on CPUs or GPUs.

    Raises:
        InputError: the processes have not been joined.
    """
    if not dist.is_available() or not dist.is_initialized():
        do = "start the script with torchrun, and call torch.distributed.init_process_group or make an Accelerator"
        raise InputError("processes joined by torch.distributed", found="none", do=do)
    token = _WORKERS.set(Workers(dist.get_rank(), dist.get_world_size()))
    try:
        yield workers()
    finally:
        _WORKERS.reset(token)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(part.numel() for part in bucket) >= _BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
