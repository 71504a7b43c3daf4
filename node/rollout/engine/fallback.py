"""An engine that is replaced by another when its processes are lost for good.

For: a node that would rather go on slowly than end (`rollout.fallback`). The newest weights are kept in RAM;
the engine that takes over gets them, and groups in flight are begun anew there with their seeds, so that each
is of one engine alone. Not for restarts, which the vLLM engine makes itself, nor for requests that no engine
could do: those errors stay the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from node.rollout.engine.base import Engine, EngineError, Generation, GenerationRequest, TokenSequence
from protocol.messages import Rollout

if TYPE_CHECKING:
    import torch

__all__ = ["FallbackEngine"]

Result = TypeVar("Result")


class FallbackEngine(Engine):
    """`engine` until an error after which `lost()` is true, then what `fall_back(error)` opens."""

    def __init__(
        self, engine: Engine, *, lost: Callable[[], bool], fall_back: Callable[[EngineError], Engine]
    ) -> None:
        self.current = engine
        self._first: Engine | None = engine
        self._lost = lost
        self._fall_back = fall_back
        self._lock = threading.Lock()
        self._weights: tuple[dict[str, torch.Tensor], int] | None = None
        self._paused = False
        self._closed = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.current.name

    @property
    def probe_each(self) -> bool:  # type: ignore[override]
        return self.current.probe_each

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.current.dtype

    @property
    def context(self) -> int:  # type: ignore[override]
        return self.current.context

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        return self.current.policy_version

    def open(self, *, greedy: bool = False) -> Generation:
        return _Generation(self, greedy=greedy)

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return self._attempt(lambda engine: engine.logprobs(sequences))

    def update(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self._attempt(lambda engine: engine.update(state, policy_version))
        self._remember(state, policy_version)

    def reload(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self._attempt(lambda engine: engine.reload(state, policy_version))
        self._remember(state, policy_version)

    def pause(self) -> None:
        self._paused = True
        self._attempt(lambda engine: engine.pause())

    def resume(self) -> None:
        self._paused = False
        self._attempt(lambda engine: engine.resume())

    def sleep(self) -> None:
        self._paused = True
        self._attempt(lambda engine: engine.sleep())

    def wake(self) -> None:
        self._paused = False
        self._attempt(lambda engine: engine.wake())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.current.close()

    def _remember(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        if self.current is self._first:
            self._weights = {name: tensor.cpu() for name, tensor in state.items()}, policy_version

    def _attempt(self, work: Callable[[Engine], Result]) -> Result:
        engine = self.current
        try:
            return work(engine)
        except EngineError as error:
            if not self.replaced(engine, error):
                raise
        return work(self.current)

    def replaced(self, engine: Engine, error: EngineError) -> bool:
        """Whether another engine has taken over from `engine`, which raised `error`; now, if it is lost."""
        with self._lock:
            if self.current is not engine:
                return True
            if self._closed or engine is not self._first or not self._lost():
                return False
            successor = self._fall_back(error)
            if self._weights is not None:
                successor.update(*self._weights)
            if self._paused:
                successor.pause()
            self.current, self._first, self._weights = successor, None, None
        engine.close()
        return True


class _Generation(Generation):
    """Tickets of its own, since those of another engine begin again."""

    def __init__(self, owner: FallbackEngine, *, greedy: bool) -> None:
        self._owner = owner
        self._greedy = greedy
        self._numbers = itertools.count()
        self._requests: dict[int, GenerationRequest] = {}
        """In flight, by our ticket."""
        self._tickets: dict[int, int] = {}
        """Ours by the engine's."""
        self._sampled_before = 0
        self._closed = False
        self._engine = owner.current
        self._inner = self._engine.open(greedy=greedy)

    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        theirs = self._attempt(lambda inner: inner.start(requests))
        ours = [next(self._numbers) for _ in requests]
        self._requests.update(zip(ours, requests, strict=True))
        self._tickets.update(zip(theirs, ours, strict=True))
        return ours

    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        done = self._attempt(lambda inner: inner.wait(tokens=tokens))
        complete = [(self._tickets.pop(ticket), rollouts) for ticket, rollouts in done]
        for ticket, _ in complete:
            del self._requests[ticket]
        return complete

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    @property
    def sampled(self) -> int:  # type: ignore[override]
        return self._sampled_before + self._inner.sampled

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    def _attempt(self, work: Callable[[Generation], Result]) -> Result:
        try:
            return work(self._inner)
        except EngineError as error:
            if not self._moved(error):
                raise
        return work(self._inner)

    def _moved(self, error: EngineError) -> bool:
        """Whether everything in flight was begun anew on an engine that took over."""
        if not self._owner.replaced(self._engine, error):
            return False
        self._sampled_before += self._inner.sampled
        with contextlib.suppress(EngineError):
            self._inner.close()
        self._engine = self._owner.current
        self._inner = self._engine.open(greedy=self._greedy)
        theirs = self._inner.start(list(self._requests.values()))
        self._tickets = dict(zip(theirs, self._requests, strict=True))
        if self._closed:  # meanwhile, when it was still the other one
            self._inner.close()
        return True
