"""Every record that crosses a boundary, in the order of the flow: identity, charter, rollout, share, network.

A record is frozen, typed and closed: an unknown field, a missing field or a wrong type is refused by
`protocol.codec.decode`. Bounds stand in the types, so a record that exists is within them. Token arrays are
raw little-endian bytes whose lengths `protocol/rollouts.py` compares with each other, because a peer's count
is never used to allocate.

Units: `*_at` are integer milliseconds since 1970, `*_ms` milliseconds, `*_s` seconds. Digests are 64
lower-case hex characters of SHA-256.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.constants import (
    MAX_ADDRESSES,
    MAX_BLOB_BYTES,
    MAX_CHAIN_LINKS,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_COMMITMENT_BYTES,
    MAX_ENVIRONMENTS,
    MAX_GROUP_ROLLOUTS,
    MAX_REVOKED_TOKENS,
    MAX_REWARD_COMPONENTS,
    MAX_ROLLOUT_TOKENS,
    MAX_SEGMENTS,
    MAX_TEXT_CHARS,
    MAX_WEIGHTS_BYTES,
    MIN_CHUNK_BYTES,
)
from protocol.errors import DecodeError

__all__ = [
    "Annex",
    "AnnexReply",
    "Announcement",
    "BlobRef",
    "BlobReply",
    "BlobRequest",
    "ChainReply",
    "ChainRequest",
    "Charter",
    "ChunkedBlob",
    "ChunksReply",
    "ChunksRequest",
    "Digest",
    "EnvironmentPin",
    "EnvironmentPins",
    "EnvironmentSegment",
    "EnvironmentSpec",
    "FinishReason",
    "Hello",
    "HelloReply",
    "KeyEpoch",
    "Lineage",
    "LinkKind",
    "MemberToken",
    "Millis",
    "ModelSpec",
    "Name",
    "Origin",
    "PeerId",
    "PeerRecord",
    "Pin",
    "PolicySegment",
    "PromptRef",
    "RecipeSpec",
    "ReconcileReply",
    "ReconcileRequest",
    "Record",
    "RewardComponent",
    "Rollout",
    "RolloutGroup",
    "RolloutReply",
    "RolloutRequest",
    "Sampling",
    "Segment",
    "SignedLink",
    "TokenizerSpec",
    "Uint",
    "VerificationRules",
    "WeightsLink",
]

PeerId = Annotated[str, Meta(min_length=52, max_length=52, pattern=r"^12D3KooW[1-9A-HJ-NP-Za-km-z]+\Z")]
"""Base58 text of an Ed25519 libp2p peer id; the public key is inside it."""
Digest = Annotated[str, Meta(min_length=64, max_length=64, pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-/]*\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Uint = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Millis = Annotated[int, Meta(ge=0, le=2**53)]
TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_ROLLOUT_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=2**24)]
Address = Annotated[str, Meta(max_length=256)]
"""A libp2p multiaddress."""
Pin = Annotated[
    str, Meta(max_length=160, pattern=r"^([A-Za-z0-9][\w.\-]*==[\w.+!\-]+|sha256:[0-9a-f]{64})?\Z")
]
"""Which code and data a task is: `distribution==version`, or `sha256:` and the hash of its files."""
Commitment = Annotated[bytes, Meta(max_length=MAX_COMMITMENT_BYTES)]
"""Room for evidence about how a group was computed. Empty today."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every record: immutable, closed, comparable by value."""


# --- charter: founder -> every node -------------------------------------------------------------------------


class EnvironmentSpec(Record, frozen=True):
    """One task of the swarm. `config` is canonical JSON text, so that hashing does not depend on a parser."""

    name: Name
    config: Annotated[str, Meta(max_length=8192)] = "{}"
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    pin: Pin = ""
    """What the founder had installed; empty where nobody compares."""


class EnvironmentPin(Record, frozen=True):
    """The code of a task that a member really has."""

    name: Name
    pin: Pin


EnvironmentPins = Annotated[tuple[EnvironmentPin, ...], Meta(max_length=MAX_ENVIRONMENTS)]
"""Of the swarm's tasks, in the charter's order."""


class TokenizerSpec(Record, frozen=True):
    """A tokenizer that may appear in this swarm. `digest` is SHA-256 of its `tokenizer.json`."""

    name: Name
    digest: Digest
    vocab_size: Annotated[int, Meta(ge=1, le=2**24)]
    """Token ids lie below it."""
    end_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=16)]
    """Any of them ends a completion. Ascending."""


class ModelSpec(Record, frozen=True):
    """A base model that whoever joins may begin with. Others that speak a listed tokenizer are welcome,
    too."""

    name: Name
    digest: Digest
    """As in `Lineage.base_model`."""
    source: Annotated[str, Meta(min_length=1, max_length=512)]
    """Where it comes from, for people."""


class RecipeSpec(Record, frozen=True):
    """How models of up to `max_params` parameters have learned well here. Advice, which binds nobody."""

    max_params: Annotated[int, Meta(ge=1, le=2**53)]
    learning_rate: Annotated[float, Meta(gt=0, le=1)]
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31)]
    objective: Name


class VerificationRules(Record, frozen=True):
    """What a receiver checks beyond signatures and shapes; the same for all members."""

    max_logprob_gap: Annotated[float, Meta(gt=0, le=100)] = 4.0
    """Nats per token by which a rollout's claimed log-probability may lie above the receiver's own; beyond
    it: suspect. Below it, chance allows ln 10,000 nats a rollout, whatever the models."""
    max_age_windows: Annotated[int, Meta(ge=1, le=1000)] = 3
    """A group older than this many windows is stale."""
    max_policy_lag: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """A group this many versions behind its lineage's newest announcement is stale."""


class Charter(Record, frozen=True):
    """The rules of one swarm. `swarm_id` is the SHA-256 of the canonical bytes with an empty signature."""

    name: Name
    protocol_version: Annotated[int, Meta(ge=1, le=1000)]
    founder: PeerId
    """Signs the charter."""
    created_at: Millis
    environments: Annotated[tuple[EnvironmentSpec, ...], Meta(min_length=1, max_length=MAX_ENVIRONMENTS)]
    tokenizers: Annotated[tuple[TokenizerSpec, ...], Meta(min_length=1, max_length=64)]
    models: Annotated[tuple[ModelSpec, ...], Meta(max_length=64)] = ()
    recipes: Annotated[tuple[RecipeSpec, ...], Meta(max_length=16)] = ()
    """The first one whose `max_params` is not below a model's is meant for it. Ascending."""
    closed: bool = False
    """Only for peers with a token of the founder or an issuer (`protocol/annex.py`)."""
    issuers: Annotated[tuple[PeerId, ...], Meta(max_length=16)] = ()
    """Who, beside the founder, signs annexes and members' tokens."""
    group_size: Annotated[int, Meta(ge=2, le=MAX_GROUP_ROLLOUTS)] = 8
    """Rollouts of one prompt."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_ROLLOUT_TOKENS)] = 16
    temperature: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Everybody samples at this temperature and cut."""
    window_ms: Annotated[int, Meta(ge=1000, le=86_400_000)] = 10_000
    """Prompts are assigned by windows of this length, the first of which begins at `created_at`."""
    universe_size: Annotated[int, Meta(ge=1, le=2**31)] = 4096
    """Prompts that exist."""
    pool_size: Annotated[int, Meta(ge=1, le=2**16)] = 128
    """Prompts of one window, about twice the slots, so that peers often share one."""
    slots_per_window: Annotated[int, Meta(ge=1, le=2**16)] = 64
    """Prompts of one peer in one window."""
    max_skip_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Of the slots up to the highest answered, so many may be missing."""
    receipt_windows: Annotated[int, Meta(ge=1, le=1000)] = 8
    """An author can be asked for the body behind a receipt until this many windows after its own."""
    rules: VerificationRules = VerificationRules()
    signature: Annotated[bytes, Meta(max_length=64)] = b""


# --- annex and tokens: founder or issuer -> every node ------------------------------------------------------


class KeyEpoch(Record, frozen=True):
    """From `begins_at` on members encrypt with the key of this hash. Room for swarms that encrypt; none does
    today."""

    number: Uint
    begins_at: Millis
    key: Digest


class Annex(Record, frozen=True):
    """What changes in a swarm's life, beside the charter. Of two the one with the higher sequence counts."""

    swarm_id: Digest
    sequence: Annotated[int, Meta(ge=1, le=2**53)]
    issuer: PeerId
    created_at: Millis
    bootstraps: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    relays: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    revoked: Annotated[tuple[Digest, ...], Meta(max_length=MAX_REVOKED_TOKENS)] = ()
    """Names of tokens that are no longer valid (`protocol.annex.token_name`)."""
    key_epochs: Annotated[tuple[KeyEpoch, ...], Meta(max_length=64)] = ()
    signature: Annotated[bytes, Meta(max_length=64)] = b""


class AnnexReply(Record, frozen=True):
    """The second frame of `CHARTER_PROTOCOL`, after the charter: the newest annex known, None where there is
    none."""

    annex: Annex | None


class MemberToken(Record, frozen=True):
    """issuer -> member -> everybody: this peer is a member of the closed swarm until `expires_at`."""

    swarm_id: Digest
    peer_id: PeerId
    issuer: PeerId
    created_at: Millis
    expires_at: Millis
    signature: Annotated[bytes, Meta(max_length=64)] = b""


# --- rollout: engine -> environment -> share, train ---------------------------------------------------------


class FinishReason(StrEnum):
    """Why generation ended: the policy's end token, or the length cap."""

    STOP = "stop"
    LENGTH = "length"


class Lineage(Record, frozen=True):
    """One policy's chain of versions: who owns it, which weights it began with, which tokenizer it speaks."""

    owner: PeerId
    base_model: Digest
    tokenizer: Digest


class Sampling(Record, frozen=True):
    """How tokens were drawn. `logprobs` of a rollout are after temperature and top-p."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_ROLLOUT_TOKENS)]
    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class PromptRef(Record, frozen=True):
    """Where a prompt comes from: slot of a peer's order in a window, and the universe index it must give."""

    window: Uint
    slot: Annotated[int, Meta(ge=0, le=2**20)]
    index: Annotated[int, Meta(ge=0, le=2**31)]


class Origin(StrEnum):
    """Who wrote a segment that the policy did not: the environment, or a tool that the policy called."""

    ENVIRONMENT = "environment"
    TOOL = "tool"


class PolicySegment(Record, frozen=True, tag="policy"):
    """T tokens that the policy sampled, the end token included if `finish` is STOP. Trained on.

    `token_ids` T x uint32, `logprobs` T x float32 (behaviour policy, natural log), `versions` T x uint32, all
    little-endian.
    """

    token_ids: TokenBytes
    logprobs: TokenBytes
    versions: TokenBytes
    finish: FinishReason


class EnvironmentSegment(Record, frozen=True, tag="environment"):
    """T tokens that the policy read between its own: `token_ids` T x uint32, little-endian. Not trained
    on."""

    token_ids: TokenBytes
    origin: Origin


Segment = PolicySegment | EnvironmentSegment
"""One stretch of a rollout by one author. On the wire its first field is `type`: policy or environment."""


class RewardComponent(Record, frozen=True):
    """One named part of a reward."""

    name: Name
    value: float


class Rollout(Record, frozen=True):
    """One completion of a prompt: its segments, in the order in which they were written.

    `text` is what is scored (special tokens removed). `reward` is the author's claim, and so are its parts,
    none where it has one part only: receivers compare `reward`, and use their own.
    `protocol.rollouts.single_turn` makes the rollout of one policy segment.
    """

    text: Text
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    reward: float
    seed: Uint
    reward_components: Annotated[tuple[RewardComponent, ...], Meta(max_length=MAX_REWARD_COMPONENTS)] = ()

    @property
    def answer(self) -> PolicySegment:
        """The one policy segment of a single-turn rollout, which is the only kind today. Raises DecodeError
        (`segments`) for every other one."""
        if len(self.segments) == 1 and isinstance(self.segments[0], PolicySegment):
            return self.segments[0]
        kinds = ", ".join(type(segment).__name__ for segment in self.segments)
        raise DecodeError(f"the environments here have one turn, this rollout has {kinds}", reason="segments")

    @property
    def finish(self) -> FinishReason:
        """Why the answer ended. Raises as `answer` does."""
        return self.answer.finish


class RolloutGroup(Record, frozen=True):
    """The G rollouts of one prompt by one lineage: the body blob. worker -> train, share -> verify ->
    pool."""

    author: PeerId
    lineage: Lineage
    policy_version: Uint
    """Newest version that produced a token of this group."""
    mean_version: float
    """Sum of the versions of all its tokens divided by their number, in float64."""
    oldest_version: Uint
    environment: Name
    prompt: PromptRef
    question: Text
    sampling: Sampling
    engine: Name
    dtype: Name
    rollouts: Annotated[tuple[Rollout, ...], Meta(min_length=1, max_length=MAX_GROUP_ROLLOUTS)]
    commitment: Commitment = b""


# --- share: author -> gossip -> everybody -------------------------------------------------------------------


class BlobRef(Record, frozen=True):
    """Content-addressed bytes: SHA-256 and length."""

    digest: Digest
    size: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]


class Announcement(Record, frozen=True):
    """The signed receipt of one slot, and the offer of its group. The author answers for it with the body, or
    with any one rollout, for `receipt_windows` of the charter, also where all rewards are alike (D4)."""

    lineage: Lineage
    policy_version: Uint
    mean_version: float
    oldest_version: Uint
    """Versions as in `RolloutGroup`."""
    prompt: PromptRef
    completions: Digest
    """`protocol.receipts.slot_digest` of author, lineage, prompt and rollouts: nobody else can announce
    it."""
    rewards: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MAX_GROUP_ROLLOUTS)]
    body: BlobRef
    pin: Pin = ""
    """Code of the environment that the author scored with. Whoever has another one does not judge."""
    commitment: Commitment = b""
    token: MemberToken | None = None
    """In a closed swarm the author's: most who hear of it have never met the author."""

    @property
    def mixed(self) -> bool:
        """Whether the rewards differ: a group whose rewards are all alike teaches nothing and is not
        fetched."""
        return len(set(self.rewards)) > 1


# --- broadcast: owner -> followers, follower <-> follower ---------------------------------------------------


class ChunkedBlob(Record, frozen=True):
    """Weights on their way: `root` is the hash over size, chunk size and the hashes of all chunks
    (`protocol.chunks`)."""

    root: Digest
    size: Annotated[int, Meta(ge=1, le=MAX_WEIGHTS_BYTES)]
    chunk_bytes: Annotated[int, Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]


class LinkKind(StrEnum):
    """What a link's delta starts from: weights that whoever follows has already, the base model's, or the
    version that was published before."""

    ANCHOR = "anchor"
    DELTA = "delta"


class WeightsLink(Record, frozen=True):
    """One version of a lineage and how to reach it: applying `blob` to weights with the hash `base` gives
    weights with the hash `result` (`protocol.delta.weights_digest`). A chain is an anchor and the deltas
    after it; a version may have one of each kind, with the same result."""

    lineage: Lineage
    policy_version: Uint
    kind: LinkKind
    base_version: Uint
    """For a delta the version published before, which lies below `policy_version` by more than one when
    versions in between were not published; for an anchor its own version."""
    base: Digest
    result: Digest
    blob: ChunkedBlob
    created_at: Millis


class SignedLink(Record, frozen=True):
    """A link as its owner signed it, so that anybody can pass it on. `link` holds a canonical WeightsLink."""

    link: Annotated[bytes, Meta(max_length=2048)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class ChainRequest(Record, frozen=True):
    """follower -> whoever has the lineage: links from version `after` on, or from the newest anchor. While
    the newest version is `after` the answer waits for news, at most `wait_ms`."""

    owner: PeerId
    base_model: Digest
    after: Uint | None
    wait_ms: Annotated[int, Meta(ge=0, le=15_000)]


class ChainReply(Record, frozen=True):
    """The answer: how many SignedLinks follow, one a frame, oldest first: the newest anchor, that of version
    `after` itself, by which a fork shows, and all later ones; without those of before the anchor where no
    deltas lead on from `after`. The last one is always of the newest version; when that is older than
    `after`, it comes alone and at once."""

    count: Annotated[int, Meta(ge=0, le=MAX_CHAIN_LINKS)]


class ChunksRequest(Record, frozen=True):
    """downloader -> uploader, opens an exchange of one blob's chunks over this stream."""

    root: Digest


class ChunksReply(Record, frozen=True):
    """uploader -> downloader: the hashes of all chunks (32 bytes each), and a bit for each that is here, the
    first chunk in the lowest bit of the first byte. Empty when the blob is not here."""

    hashes: Annotated[bytes, Meta(max_length=32 * MAX_CHUNKS)]
    have: Annotated[bytes, Meta(max_length=MAX_CHUNKS // 8)]


# --- network: node <-> node ---------------------------------------------------------------------------------


class PeerRecord(Record, frozen=True):
    """Who a node is: payload of its DHT record (one key per owner) and of the stream handshake."""

    name: Name
    protocol_version: Annotated[int, Meta(ge=0, le=2**31)]
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]
    lineage: Lineage | None


class BlobRequest(Record, frozen=True):
    """collector -> author, over a stream."""

    digest: Digest


class BlobReply(Record, frozen=True):
    """author -> collector: the size that follows in frames, or 0 when the blob is not here (any more)."""

    size: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]


class RolloutRequest(Record, frozen=True):
    """verifier -> author: the rollout at this place of the group that the receipt `completions` stands
    for."""

    completions: Digest
    index: Annotated[int, Meta(ge=0, lt=MAX_GROUP_ROLLOUTS)]


class RolloutReply(Record, frozen=True):
    """author -> verifier: the rollout and its path to the root (`protocol.receipts`), None when it is not
    here (any more)."""

    rollout: Rollout | None
    path: Annotated[bytes, Meta(max_length=32 * (MAX_GROUP_ROLLOUTS - 1).bit_length())]


class ReconcileRequest(Record, frozen=True):
    """neighbour -> neighbour: short digests (8 bytes each) of the unexpired envelopes I hold on one topic."""

    topic: Annotated[str, Meta(max_length=256)]
    held: Annotated[bytes, Meta(max_length=8 * 65_536)]


class ReconcileReply(Record, frozen=True):
    """neighbour -> neighbour: how many envelopes follow, one a frame, that were missing from `held`."""

    count: Annotated[int, Meta(ge=0, le=65_536)]


class Hello(Record, frozen=True):
    """connecting node -> connected node: which swarm I mean, who I am and what I have."""

    swarm_id: Digest
    peer: PeerRecord
    environments: EnvironmentPins = ()
    token: MemberToken | None = None
    annex: Uint = 0
    """Sequence of the newest annex known, 0 without one. Whoever knows a lower one asks for it."""


class HelloReply(Record, frozen=True):
    """connected node -> connecting node: who I am, or one sentence why not (other swarm, version, not a
    member)."""

    peer: PeerRecord | None
    clock_at: Millis
    """The answering node's time: both sides learn when a clock is off."""
    refusal: Annotated[str, Meta(max_length=256)] = ""
    environments: EnvironmentPins = ()
    token: MemberToken | None = None
    annex: Uint = 0
    """As in `Hello`; nothing of it with a refusal."""
