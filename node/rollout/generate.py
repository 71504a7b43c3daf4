"""Assigned prompts -> complete, scored groups: the work of the rollout stage, without its loop.

    AssignedPrompt --request--> GenerationRequest --engine--> rollouts --complete--> Accepted, encoded body

`Generator.generate` does all of it and blocks: for tests, notebooks, and whoever needs a few groups. The
stage (`stage.py`) takes the same steps one by one, each where it may block. Not for choosing prompts
(`prompts.py`), nor for what happens to a group afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from node.config import NodeConfig
from node.environment.host import HostFailure, ScoredGroup
from node.membership import Membership
from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt
from node.rollout.reuse import ReuseBook
from node.rollout.scoring import OwnScorer, answers_of
from node.share.accepted import Accepted
from protocol.charter import sampling
from protocol.codec import digest, encode
from protocol.errors import LocalProtocolError, ModelError, OurFault
from protocol.messages import Lineage, PeerId, PromptRef, Rollout, RolloutGroup
from protocol.rollouts import max_body_bytes, parse_tokens, version_span

__all__ = ["Generator", "NoGroupError", "request_seed"]


class NoGroupError(OurFault):
    """A prompt gives no group that could be used; the text says why."""


class Generator:
    """Makes groups of `lineage` with `engine`, signed by this member. Sampling is the charter's. Raises
    ConfigError for settings that do not go together."""

    def __init__(
        self,
        membership: Membership,
        lineage: Lineage,
        policy: Policy,
        engine: Engine,
        scorer: OwnScorer,
        config: NodeConfig,
    ) -> None:
        charter, rollout = membership.charter, config.rollout
        self.lineage = lineage
        self.engine = engine
        self.group_size = charter.group_size
        self.sampling = sampling(charter)
        self.reuse = (
            ReuseBook(rollout.reuse_lenience, top_p=charter.top_p) if rollout.reuse_lenience else None
        )
        """Earlier rollouts as drafts of new ones; None when off."""
        self._membership = membership
        self._policy = policy
        self._scorer = scorer
        self._seed = config.seed
        self._max_body_bytes = max_body_bytes(charter)

    @property
    def own_lineage(self) -> bool:
        """Whether this node trains the policy that it generates with."""
        return self.lineage.owner == self._membership.peer_id

    def take_faults(self) -> list[str]:
        """What tasks did on own answers that they must not, each kind once."""
        return self._scorer.take_faults()

    def too_old(self, prompt: PromptRef) -> bool:
        """Whether peers refuse a group of this slot for its age."""
        return self._membership.too_old(prompt)

    def generate(self, prompts: Sequence[AssignedPrompt], *, at_ms: int) -> list[Accepted]:
        """The groups of `prompts`, in their order; those that give none are left out. `at_ms` is the swarm
        time that the groups get. Blocking. Raises EngineError."""
        requests = []
        for assigned in prompts:
            with contextlib.suppress(NoGroupError):
                requests.append((assigned, self.request(assigned)))
        began_s = time.monotonic()
        generated = self.engine.generate([self.drafted(*each) for each in requests])
        each_s = (time.monotonic() - began_s) / max(1, len(requests))
        complete = [
            (assigned, rollouts, each_s) for (assigned, _), rollouts in zip(requests, generated, strict=True)
        ]
        made = self.complete(complete, at_ms)
        return [each[0] for each in made if not isinstance(each, NoGroupError)]

    def request(self, assigned: AssignedPrompt) -> GenerationRequest:
        """What the engine is asked for. Raises NoGroupError when prompt and answer have no room in it: one
        long prompt of a task must not end the node."""
        author, version = self._membership.peer_id, self.engine.policy_version
        try:
            prompt_ids = tuple(self._policy.encode_prompt(assigned.prompt.text, assigned.prompt.environment))
        except ModelError as error:
            raise NoGroupError(str(error)) from error
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            n=self.group_size,
            seed=request_seed(self._seed, author, assigned.ref, version),
            sampling=self.sampling,
        )
        tokens, most = len(request.prompt_ids) + self.sampling.max_new_tokens, self.engine.context
        if tokens > most:
            raise NoGroupError(f"prompt and answer may take {tokens} of the engine's {most} tokens")
        return request

    def drafted(self, assigned: AssignedPrompt, request: GenerationRequest) -> GenerationRequest:
        """`request` with what may be kept of the last group on this prompt. Blocking: the engine scores the
        drafts. Raises EngineError."""
        if self.reuse is None:
            return request
        return replace(request, prefixes=self.reuse.prefixes(self.engine, assigned.ref.index, request))

    def complete(
        self, groups: Sequence[tuple[AssignedPrompt, Sequence[Rollout], float]], at_ms: int
    ) -> list[tuple[Accepted, bytes] | NoGroupError]:
        """Of generated rollouts, and the seconds that they took, the scored group and the bytes that peers
        get; or why there is none: it could not be scored, or must not be sent. Blocking; scoring many at once
        costs hardly more than one."""
        scored = self._scorer.score(
            [answers_of(assigned.prompt, rollouts) for assigned, rollouts, _ in groups]
        )
        made: list[tuple[Accepted, bytes] | NoGroupError] = []
        for (assigned, rollouts, generate_s), scores in zip(groups, scored, strict=True):
            try:
                made.append(self._group(assigned, rollouts, scores, at_ms, generate_s))
            except NoGroupError as error:
                made.append(error)
        return made

    def _group(
        self,
        assigned: AssignedPrompt,
        rollouts: Sequence[Rollout],
        scored: ScoredGroup | HostFailure,
        at_ms: int,
        generate_s: float,
    ) -> tuple[Accepted, bytes]:
        if self.reuse is not None:
            self.reuse.remember(assigned.ref.index, rollouts)
        if isinstance(scored, HostFailure):
            raise NoGroupError(f"it could not be scored ({scored.reason})")
        rewards = scored.rewards
        tokens = tuple(map(parse_tokens, rollouts))
        versions = version_span(tokens)
        group = RolloutGroup(
            author=self._membership.peer_id,
            lineage=self.lineage,
            policy_version=versions.newest,
            mean_version=versions.mean,
            oldest_version=versions.oldest,
            environment=assigned.prompt.environment,
            prompt=assigned.ref,
            question=assigned.prompt.text,
            sampling=self.sampling,
            engine=self.engine.name,
            dtype=self.engine.dtype,
            rollouts=tuple(
                msgspec.structs.replace(rollout, reward=float(reward))
                for rollout, reward in zip(rollouts, rewards, strict=True)
            ),
        )
        try:
            body = encode(group)
        except LocalProtocolError as error:
            raise NoGroupError(str(error)) from error
        if len(body) > self._max_body_bytes:
            raise NoGroupError(f"its body is larger than the {self._max_body_bytes} bytes allowed")
        return Accepted(digest(body), group, tokens, rewards, at_ms, generate_s, own=True), body


def request_seed(node_seed: int, author: PeerId, prompt: PromptRef, policy_version: int) -> int:
    """63-bit seed of one group's sampling: differs by node, slot and version. With the peer id in it, two
    nodes with equal weights do not draw equal completions, which would be called a copy. The transformers
    engine draws by it; vLLM draws by the seed of its process, and there it only tells groups apart."""
    text = f"{node_seed}/{author}/{prompt.window}/{prompt.slot}/{policy_version}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
