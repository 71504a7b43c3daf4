"""A toy swarm to verify in: a charter, honest authors with tabular policies, a scorer that knows the answers.

The item of index i asks for the number i; characters are tokens, 0 is the end token. A `ToyPolicy` has a
fixed distribution after every prefix, so log-probabilities are exact, equal weights give equal bits, and
unlike policies can be made as like or unlike as a test needs."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup
from node.environment.records import Prompt, Score
from node.membership import Membership
from node.peers.book import PeerBook
from node.share.heard import Candidate, Heard
from node.verify.pipeline import Verifier
from protocol.charter import sampling, swarm_id
from protocol.codec import digest, encode
from protocol.constants import PROTOCOL_VERSION
from protocol.identity import Identity
from protocol.messages import (
    Announcement,
    BlobRef,
    Charter,
    EnvironmentSpec,
    FinishReason,
    Lineage,
    PeerId,
    PromptRef,
    Rollout,
    RolloutGroup,
    TokenizerSpec,
)
from protocol.prompts import slots
from protocol.receipts import slot_digest
from protocol.rollouts import single_turn
from tests.node.runtimes import make_peers, make_runtime

EPOCH_MS = 1_700_000_000_000
EOS = 0
VOCAB = 128
ALPHABET = [ord(character) for character in "0123456789"]
ENVIRONMENT = "toy/number"
SEED_STEP = 7


def identity(name: str) -> Identity:
    return Identity.from_seed(hashlib.sha256(name.encode()).digest())


def fingerprint(text: str) -> str:
    return digest(text.encode())


TOKENIZER = TokenizerSpec(
    name="characters", digest=fingerprint("tokenizer"), vocab_size=VOCAB, end_token_ids=(EOS,)
)
SHIFTED = TokenizerSpec(
    name="shifted", digest=fingerprint("shifted"), vocab_size=VOCAB + 1, end_token_ids=(EOS,)
)
"""The same characters, each with the next id."""


class FixedClock:
    def __init__(self, now_ms: int) -> None:
        self.now = now_ms

    def now_ms(self) -> int:
        return self.now

    def monotonic_s(self) -> float:
        return self.now / 1000


def nobody(peer_id: PeerId) -> bool:
    """Has earned trust."""
    return False


def item_at(index: int) -> Prompt:
    return Prompt(ENVIRONMENT, f"Say the number {index}.", seed=index * SEED_STEP, index=0, entry={})


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != EOS)


class Judge:
    """1 for the right and finished number, else 0; fails on the text that `failures` names."""

    walls = "none"
    restarts = 0
    waited_s = 0.0

    def __init__(self, failures: dict[str, FailureReason] | None = None) -> None:
        self.failures = failures or {}
        self.calls = 0

    def questions(self, environment: str, seeds: Sequence[int]) -> Sequence[str | HostFailure | None]:
        raise NotImplementedError

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        assert strangers
        self.calls += 1
        return [self._scored(group) for group in groups]

    def _scored(self, group: Answers) -> ScoredGroup | HostFailure:
        for position, completion in enumerate(group.completions):
            if completion.text in self.failures:
                return HostFailure(self.failures[completion.text], "as told", position)
        answer = str(group.seed // SEED_STEP)
        rewards = [float(each.text == answer and each.finished) for each in group.completions]
        return ScoredGroup(tuple(Score(reward, ()) for reward in rewards))


@dataclass(frozen=True)
class ToyPolicy:
    """Logits after a prefix: a part all policies share, a part of its own times `own`, all times `sharpness`.
    The right next character gets `skill` more."""

    name: str
    own: float = 1.0
    sharpness: float = 1.0
    skill: float = 3.0

    @lru_cache(maxsize=100_000)  # noqa: B019  (few policies, and each is used until the end)
    def logprobs(self, index: int, prefix: tuple[int, ...], temperature: float = 1.0) -> dict[int, float]:
        tokens = [*ALPHABET, EOS]
        shared = random.Random(f"{index} {prefix}")
        mine = random.Random(f"{self.name} {index} {prefix}")
        logits = [shared.gauss(0, 1) + self.own * mine.gauss(0, 1) for _ in tokens]
        answer = (*(ord(character) for character in str(index)), EOS)
        if prefix == answer[: len(prefix)]:
            logits[tokens.index(answer[len(prefix)])] += self.skill
        logits = [self.sharpness * logit / temperature for logit in logits]
        total = math.log(sum(math.exp(logit) for logit in logits))
        return {token: logit - total for token, logit in zip(tokens, logits, strict=True)}

    def sample(self, index: int, max_new_tokens: int, rng: random.Random) -> tuple[list[int], list[float]]:
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < max_new_tokens and (not token_ids or token_ids[-1] != EOS):
            options = self.logprobs(index, tuple(token_ids))
            token = rng.choices(list(options), [math.exp(logprob) for logprob in options.values()])[0]
            token_ids.append(token)
            logprobs.append(options[token])
        return token_ids, logprobs


def rollout(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    reward: float,
    version: int = 0,
    seed: int = 0,
    **changes: Any,
) -> Rollout:
    count = len(token_ids)
    fields: dict[str, Any] = {
        "text": changes["text"] if "text" in changes else decode(token_ids),
        "token_ids": np.asarray(token_ids, dtype="<u4").tobytes(),
        "logprobs": np.asarray(logprobs, dtype="<f4").tobytes(),
        "versions": np.full(count, version, dtype="<u4").tobytes(),
        "finish": FinishReason.STOP if token_ids and token_ids[-1] == EOS else FinishReason.LENGTH,
        "reward": reward,
        "seed": seed,
    }
    return single_turn(**(fields | changes))


def announcement_of(group: RolloutGroup, body: bytes) -> Announcement:
    return Announcement(
        lineage=group.lineage,
        policy_version=group.policy_version,
        mean_version=group.mean_version,
        oldest_version=group.oldest_version,
        prompt=group.prompt,
        completions=slot_digest(group.author, group.lineage, group.prompt, group.rollouts),
        rewards=tuple(each.reward for each in group.rollouts),
        body=BlobRef(digest=digest(body), size=len(body)),
        commitment=group.commitment,
    )


def heard(sender: PeerId, announcement: Announcement, arrived_at: int = EPOCH_MS) -> Heard:
    return Heard(sender, announcement, arrived_at, envelope="d" * 64)


def served(sender: PeerId, announcement: Announcement, body: bytes, arrived_at: int = EPOCH_MS) -> Candidate:
    return Candidate(heard(sender, announcement, arrived_at), body)


def candidate(group: RolloutGroup, arrived_at: int = EPOCH_MS, sender: PeerId | None = None) -> Candidate:
    body = encode(group)
    return served(sender or group.author, announcement_of(group, body), body, arrived_at)


@dataclass
class World:
    """One charter and the means to make groups and verifiers for it."""

    group_size: int = 8
    max_new_tokens: int = 5
    pool_size: int = 32
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {
            "name": "toy",
            "protocol_version": PROTOCOL_VERSION,
            "founder": identity("founder").peer_id,
            "created_at": EPOCH_MS - 100 * 10_000,
            "environments": (EnvironmentSpec(name=ENVIRONMENT),),
            "tokenizers": (TOKENIZER, SHIFTED),
            "group_size": self.group_size,
            "max_new_tokens": self.max_new_tokens,
            "universe_size": 900,
            "pool_size": self.pool_size,
            "slots_per_window": self.pool_size // 2,
        }
        self.charter = Charter(**(fields | self.changes))
        self.swarm_id = swarm_id(self.charter)
        self.clock = FixedClock(EPOCH_MS)
        self.judge = Judge()

    def prompt(self, author: PeerId, slot: int, window: int = 100) -> PromptRef:
        index = slots(self.swarm_id, self.charter, window, author)[slot]
        return PromptRef(window=window, slot=slot, index=index)

    def shared_slots(self, one: PeerId, other: PeerId, window: int = 100) -> list[tuple[int, int]]:
        """Slots of both at which they answer the same prompt."""
        mine = slots(self.swarm_id, self.charter, window, one)
        theirs = slots(self.swarm_id, self.charter, window, other)
        return [(i, theirs.index(index)) for i, index in enumerate(mine) if index in theirs]

    def lineage(self, owner: PeerId, base: str = "", tokenizer: TokenizerSpec = TOKENIZER) -> Lineage:
        return Lineage(owner=owner, base_model=fingerprint(base or owner), tokenizer=tokenizer.digest)

    def group(
        self,
        author: PeerId,
        policy: ToyPolicy | None = None,
        *,
        slot: int = 0,
        window: int = 100,
        version: int = 0,
        seed: int = 0,
        base: str = "",
        prompt: PromptRef | None = None,
    ) -> RolloutGroup:
        """An honest group with mixed rewards: draws until it has one."""
        policy = policy or ToyPolicy(author)
        prompt = prompt or self.prompt(author, slot, window)
        for attempt in range(1000):
            rng = random.Random(f"{author} {seed} {prompt} {version} {attempt}")
            rollouts = tuple(self.draw(policy, prompt.index, version, rng) for _ in range(self.group_size))
            if len({each.reward for each in rollouts}) > 1:
                break
        return RolloutGroup(
            author=author,
            lineage=self.lineage(author, base),
            policy_version=version,
            mean_version=version,
            oldest_version=version,
            environment=ENVIRONMENT,
            prompt=prompt,
            question=item_at(prompt.index).text,
            sampling=sampling(self.charter),
            engine="toy",
            dtype="float32",
            rollouts=rollouts,
        )

    def draw(self, policy: ToyPolicy, index: int, version: int, rng: random.Random) -> Rollout:
        token_ids, logprobs = policy.sample(index, self.max_new_tokens, rng)
        right = token_ids[-1] == EOS and decode(token_ids) == str(index)
        return rollout(token_ids, logprobs, reward=float(right), version=version)

    def member(self) -> tuple[Membership, PeerBook]:
        """A node of this swarm, and its empty book."""
        return make_peers(make_runtime(self.clock), identity("node"), self.charter)

    def verifier(self, *, peers: PeerBook | None = None, **options: Any) -> Verifier:
        membership, book = self.member()
        defaults: dict[str, Any] = {
            "item_at": item_at,
            "host": self.judge,
            "decoders": {TOKENIZER.digest: decode},
        }
        return Verifier(membership, peers or book, **(defaults | options))
