"""One vLLM process as a place of work: who may enter, what is under way, which weights are here.

For: `vllm.py`, which starts a new life after a death, and `_vllm_generation.py`, whose rollouts live here.
All of it runs on the event loop of the process, so nothing needs a lock. A request for a rollout is a `Leg`:
it ends with the rollout, or is stopped, and then hands over what it has. The key of every block of vLLM's
cache names the update that it was made under, so no leg begins on the cache of older weights. Not for:
deciding when weights change, or how a process ends (`_vllm_process`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.rollout.engine._vllm_patch import TensorPatch, send
from node.rollout.engine._vllm_process import VllmProcess
from node.rollout.engine.base import EngineError

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from node.rollout.engine._vllm_adapters import Adapter

__all__ = ["SCORERS", "Leg", "Life"]

SCORERS = 8
"""Sequences scored at a time, beside the rollouts and never behind them."""


@dataclass(eq=False)
class Leg:
    """One request under way for a rollout."""

    label: str
    owner: object
    update: int
    """Number of the update that it began under."""
    version: int
    adapter: Adapter | None
    begun: bool = False
    """It has a first token."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Life:
    """A started process."""

    def __init__(self, process: VllmProcess, max_concurrent: int, policy_version: int) -> None:
        self.process = process
        self.engine = process.engine
        self.version = policy_version
        self.update = 0
        """Number of the last complete update; the worker counts patches alike."""
        self.adapter: Adapter | None = None
        """What new requests are answered with, where the policy is an adapter."""
        self.slots = asyncio.Semaphore(max_concurrent)
        self.scorers = asyncio.Semaphore(SCORERS)
        self.gate = asyncio.Event()
        """Open while rollouts may enter."""
        self.asleep = False
        """Its memory on the device is given away."""
        self.legs: dict[str, Leg] = {}
        self._labels = itertools.count()
        self._adapters: list[Adapter] = []

    # --- requests ------------------------------------------------------------------------------------------

    def enter(self, owner: object) -> Leg:
        """A leg under the weights of now. To be followed by `outputs` at once, and by `leave`."""
        leg = Leg(str(next(self._labels)), owner, self.update, self.version, self.adapter)
        self.legs[leg.label] = leg
        return leg

    def leave(self, leg: Leg) -> None:
        del self.legs[leg.label]
        leg.ended.set()

    def unchanged(self, leg: Leg) -> bool:
        """The weights are still those that the leg began under."""
        return (leg.update, leg.version) == (self.update, self.version)

    async def outputs(
        self, token_ids: Sequence[int], params: SamplingParams, leg: Leg | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's answer to one request, of a leg or for scoring. Raises EngineError, EngineDeadError."""
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        # In this form vLLM knows the request before anything else runs here; `stop` relies on that.
        prompt = tokens_input(list(token_ids), cache_salt=f"update {self.update}")
        label = str(next(self._labels)) if leg is None else leg.label
        adapter = self.adapter if leg is None else leg.adapter
        lora = None if adapter is None else adapter.request()
        try:
            async with aclosing(self.engine.generate(prompt, params, label, lora_request=lora)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError:
            raise  # the watch over the caller knows more
        except Exception as error:
            raise EngineError(f"vLLM failed at a request: {error.__cause__ or error}") from error

    async def stop(self, legs: Collection[Leg]) -> None:
        """End these legs; they have handed over what they have when this returns."""
        if legs:
            await self.engine.abort([leg.label for leg in legs])
            await asyncio.gather(*(leg.ended.wait() for leg in legs))

    # --- turns ---------------------------------------------------------------------------------------------

    async def halt(self, *, stop: bool, recompute: bool = False) -> None:
        """No rollout enters, no pass runs. `stop` ends all legs; otherwise those that have no token yet, as
        what they have in the cache would go stale. With `recompute` the caches are dropped instead."""
        self.gate.clear()
        await self.engine.pause_generation(mode="keep", clear_cache=recompute)
        if stop or not recompute:
            await self.stop([leg for leg in self.legs.values() if stop or not leg.begun])

    async def go_on(self, *, enter: bool) -> None:
        """Undo `halt`; rollouts stay outside unless they may `enter`."""
        if not self.asleep:
            await self.engine.resume_generation()
        if enter:
            self.gate.set()

    async def sleep(self) -> None:
        """Weights to the host's memory, the cache away. After `halt` with `stop`."""
        self.asleep = True
        await self.engine.sleep(level=1, mode="keep")

    async def wake(self, *, weights_only: bool = False) -> None:
        """Undo `sleep`; `weights_only` prepares for new ones and leaves the cache away. Raises EngineError
        when the memory is not free."""
        if not self.asleep:
            return
        try:
            self.asleep = not await self.engine.wake_up(["weights"] if weights_only else None)
        except Exception as error:
            self.process.raise_if_dead()
            raise EngineError(f"the engine cannot take its memory back: {error}") from error

    # --- weights -------------------------------------------------------------------------------------------

    async def label(self, policy_version: int) -> None:
        """The weights that are here are those of this version."""
        await self.engine.update_weight_version(str(policy_version))
        self.version = policy_version

    async def patch(
        self, patches: Sequence[TensorPatch], policy_version: int, dtype: str, *, whole: bool
    ) -> None:
        """Between `halt` and `go_on`. Raises whatever vLLM raises; then nobody knows what is here."""
        if patches:
            base, update = 0 if whole else self.update, self.update + 1
            await send(self.engine, patches, base=base, update=update, dtype=dtype)
            self.update = update
        await self.label(policy_version)

    async def adapt(self, adapter: Adapter) -> None:
        """New requests get this adapter. Raises EngineError when vLLM does not take it."""
        try:
            await self.engine.add_lora(adapter.request())
        except Exception as error:
            self.process.raise_if_dead()
            raise EngineError(
                f"the engine does not take version {adapter.policy_version}: {error}"
            ) from error
        self._adapters.append(adapter)
        self.adapter = adapter
        self.update += 1
        await self.label(adapter.policy_version)

    async def drop_adapters(self) -> None:
        """Unload the adapters that no request needs any more, and remove their folders."""
        needed = {id(leg.adapter) for leg in self.legs.values()} | {id(self.adapter)}
        for adapter in [one for one in self._adapters if id(one) not in needed]:
            await self.engine.remove_lora(adapter.number)
            self._adapters.remove(adapter)
            adapter.remove()
