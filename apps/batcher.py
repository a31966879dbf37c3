"""Requests that come together are judged together: a bounded wait, one batch at a time, to each its own answer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from deepseal.defense.monitor import Detection
from deepseal.errors import InputError

Judge = Callable[[Tensor], Detection]


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    x: Tensor
    answer: asyncio.Future[Detection]


class Batcher:
    """Judges what is submitted, in batches, in a thread of its own.

    Args:
        judge: gives the answers to a batch.
        batch: most inputs in one batch; a request is never divided.
        wait: seconds that the first request waits for company.
        judged: called with every batch's answers.
    """

    def __init__(self, judge: Judge, *, batch: int, wait: float, judged: Callable[[Detection], None]) -> None:
        self._judge, self._batch, self._wait, self._judged = judge, batch, wait, judged
        self._queue: deque[_Waiting] = deque()
        self._came, self._full = asyncio.Event(), asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._since: float | None = None

    @property
    def depth(self) -> int:
        """Inputs that wait."""
        return sum(len(item.x) for item in self._queue)

    @property
    def busy(self) -> float:
        """Seconds since the batch under way began; 0 when there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def submit(self, x: Tensor, *, seconds: float) -> Detection:
        """The answers to one request.

        Raises:
            InputError: inputs that the monitor cannot judge.
            TimeoutError: no answer in time; the request is taken out of the queue if it still waits.
        """
        item = _Waiting(x, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._came.set()
        if self.depth >= self._batch:
            self._full.set()
        try:
            return await asyncio.wait_for(item.answer, seconds)
        finally:
            if item in self._queue:
                self._queue.remove(item)

    async def close(self) -> None:
        """Stop; requests that still wait are given up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            if not self._queue:
                self._came.clear()
                await self._came.wait()
            if self._wait > 0 and self.depth < self._batch:
                self._full.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._full.wait(), self._wait)
            items = self._taken()
            if items:
                await self._answer(items)

    def _taken(self) -> list[_Waiting]:
        items: list[_Waiting] = []
        count = 0
        while self._queue and (not items or count + len(self._queue[0].x) <= self._batch):
            items.append(self._queue.popleft())
            count += len(items[-1].x)
        return items

    async def _answer(self, items: list[_Waiting]) -> None:
        self._since = time.monotonic()
        try:
            found = await self._judged_by_worker(torch.cat([item.x for item in items]))
        except Exception as error:
            if len(items) > 1:  # one of them spoils it for all: each on its own
                for item in items:
                    await self._answer([item])
            elif not items[0].answer.done():
                items[0].answer.set_exception(error)
            return
        finally:
            self._since = None
        start = 0
        for item in items:
            end = start + len(item.x)
            if not item.answer.done():
                item.answer.set_result(_rows(found, start, end))
            start = end

    async def _judged_by_worker(self, x: Tensor) -> Detection:
        found = await asyncio.get_running_loop().run_in_executor(self._worker, self._judge, x)
        if len(found.predicted) != len(x):
            raise InputError("an answer for each input", found=str(len(found.predicted)), do="check the model")
        self._judged(found)
        return found


def _rows(found: Detection, start: int, end: int) -> Detection:
    parts = {field.name: getattr(found, field.name)[start:end] for field in dataclasses.fields(found)}
    return Detection(**parts)
