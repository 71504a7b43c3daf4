"""A policy is tried before the network starts: what would fail at the first step fails now, in one sentence.

    a question --> a few tokens sampled --> verification's own check of them
               --> scored by engine and trainer --> a gradient, thrown away

For: what no file says beforehand: an engine that computes something else than the trainer, numbers that are
none, weights that no gradient reaches. Costs one short batch. Not where engine and trainer take turns on a
device, which has no room for both, and not for what the files say (`rollout/policy.py`, `open/policy.py`).
`swarm doctor` and `swarm model get` try a policy alone, on the CPU, where it is small enough for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from node.events import NoticeLevel
from node.open.engine import NoticeFunction
from node.rollout.engine.base import Engine, GenerationRequest, TokenSequence
from node.rollout.engine.parity import largest_gap
from node.rollout.policy import Policy
from node.verify.tokens import tokens_fault
from protocol.errors import ModelError
from protocol.messages import Sampling, TokenizerSpec
from protocol.rollouts import parse_tokens

if TYPE_CHECKING:
    from node.train.step import Trainer

__all__ = ["try_alone", "try_policy"]

QUESTION = "What is 3 + 4?"
TOKENS = 4
TOLERANCE = {"float32": 1e-2}
COARSE_TOLERANCE = 0.5
"""Nats between two computations of one token's log-probability; beside a wrong one they are small."""
_NAMED = 3
_ALONE_BYTES = 20
"""A parameter, of an engine's weights, a trainer's, and their gradient in float32; with room for the rest."""


def try_policy(
    policy: Policy, spec: TokenizerSpec, engine: Engine, trainer: Trainer | None, notice: NoticeFunction
) -> None:
    """`spec` is what the charter has for its tokenizer. Raises ModelError, or EngineError. `notice` hears of
    weights that do not learn: of experts that a short answer does not reach, too."""
    prompt = tuple(policy.encode_prompt(QUESTION))
    request = GenerationRequest(prompt, 2, 1, Sampling(temperature=1.0, max_new_tokens=TOKENS))
    (rollouts,) = engine.generate([request])
    sampled = [parse_tokens(each) for each in rollouts]
    for rollout, arrays in zip(rollouts, sampled, strict=True):
        fault = tokens_fault(rollout, arrays, spec, TOKENS, policy.decode)
        if fault is not None:
            raise ModelError(
                f"peers would refuse what the {engine.name} engine samples of {policy.path} ({fault}: tokens "
                f"{arrays.token_ids_T.tolist()}, text {rollout.text!r}): compare its tokenizer with its "
                "weights, and its end tokens with the charter's"
            )
    sequences = [TokenSequence(prompt, tuple(each.token_ids_T.tolist())) for each in sampled]
    scored = engine.logprobs(sequences)
    tolerance = TOLERANCE.get(engine.dtype, COARSE_TOLERANCE)
    off = largest_gap([each.logprobs_T for each in sampled], scored)
    if not off <= tolerance:
        raise ModelError(
            f"the {engine.name} engine scores what it has just sampled of {policy.path} otherwise, by "
            f"{off:.3g} nats a token ({tolerance:g} at most): take another engine or another model"
        )
    if trainer is None:
        return
    off = largest_gap(trainer.logprobs(sequences), scored)
    if not off <= tolerance:
        raise ModelError(
            f"trainer and {engine.name} engine give the tokens of {policy.path} probabilities {off:.3g} nats "
            f"apart ({tolerance:g} at most): take another engine or another model"
        )
    idle = trainer.without_gradient(sequences)
    if idle:
        names = ", ".join(idle[:_NAMED]) + (", ..." if len(idle) > _NAMED else "")
        notice(
            NoticeLevel.WARNING,
            f"no gradient of a short answer reaches {len(idle)} of the weights that are to learn in "
            f"{policy.path} ({names}): if they are no experts, they will not learn",
        )


def try_alone(policy: Policy) -> str:
    """`try_policy` on the CPU without a charter: what came of it, in a few words. Raises ModelError."""
    from node.rollout.engine.transformers import TransformersEngine
    from node.train.settings import TrainSettings
    from node.train.step import Trainer

    needed, free = policy.params * _ALONE_BYTES, psutil.virtual_memory().available
    if needed > free / 2:
        return f"not tried: that takes {needed / 2**30:.1f} GiB here and {free / 2**30:.1f} are free"
    spec = TokenizerSpec(policy.path.name, policy.tokenizer_digest, policy.vocab_size, policy.end_token_ids)
    told: list[str] = []
    engine = TransformersEngine(policy)
    try:
        trainer = Trainer(policy, TrainSettings(measure_start_kl=False))
        try_policy(policy, spec, engine, trainer, lambda _, text: told.append(text))
    finally:
        engine.close()
    return "; ".join(told) or "a sample, its scores and a gradient are right"
