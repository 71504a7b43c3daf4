"""Does a follower's engine compute with the weights that were tracked? (D7)

A follower has no trainer to compare with. Its reference is a second engine: the embedded one, which copies
tensors by name, on the CPU in float32, with the weights that were verified against their owner's hash. Only
an engine that asks for it is probed (`Engine.probe_each`), at the first version and at every PROBE_EVERY-th
after it: the reference takes 4 bytes a parameter, and a pass on the CPU takes seconds for a large policy. Not
for a node that trains (`engine_sync.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import Engine
from node.rollout.engine.parity import PROBE_PROMPTS, PROBE_TOKENS, ParityError, ParityProbe, make_probe
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy

__all__ = ["FollowerProbe"]

PROBE_EVERY = 8


class FollowerProbe:
    """Gives `engine` new weights and probes it. `prompt(number)` gives real ones, and may block."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        adapter: AdapterSpec | None,
        *,
        prompt: Callable[[int], str],
        tolerance: float,
    ) -> None:
        self.engine = engine
        self.policy = policy
        self._adapter = adapter
        self._prompt = prompt
        self._tolerance = tolerance
        self._versions = 0
        """How many an engine that asks to be probed was given."""
        self._made: tuple[TransformersEngine, ParityProbe] | None = None
        self.not_sharing = ""
        """Why nothing must be shared, once the engine has failed its probe for good."""

    def update(self, weights: Mapping[str, Tensor], policy_version: int) -> bool:
        """These weights into the engine; whether all had to be loaded anew. Blocking. Raises EngineError,
        ParityError (once, then `not_sharing` is set) for an engine that can go on, but wrongly."""
        due = self.engine.probe_each and not self.not_sharing and self._versions % PROBE_EVERY == 0
        self._versions += self.engine.probe_each
        if not due:
            self.engine.update(weights, policy_version)
            return False
        reference, probe = self._made = self._made or self._make()
        reference.update(weights, policy_version)
        try:
            expected = reference.logprobs(probe.sequences)
            return probe.update(self.engine, weights, policy_version, expected)[1]
        except ParityError as error:
            self.not_sharing = str(error)
            raise

    def _make(self) -> tuple[TransformersEngine, ParityProbe]:
        policy, context = self.policy, self.engine.context
        texts = [self._prompt(number) for number in range(PROBE_PROMPTS)]
        prompts = [policy.encode_prompt(text)[: context - PROBE_TOKENS] for text in texts]
        return (
            TransformersEngine(policy, adapter=self._adapter),
            make_probe(prompts, policy.vocab_size, context, self._tolerance),
        )
