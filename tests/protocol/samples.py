"""One record of every kind with fixed contents: for golden bytes, and as the seeds that hostile tests
mutate."""

from __future__ import annotations

import struct

from protocol import charter as charters
from protocol import messages as m
from protocol.annex import issue_token, sign_annex
from protocol.codec import encode
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.links import sign_link
from protocol.merge_messages import MergeRemoval, MergeReply, MergeRequest, SignedRemoval
from protocol.receipts import prove, slot_digest
from protocol.rollouts import single_turn

NOW_MS = 1_700_000_000_000
IDENTITY = Identity.from_seed(bytes(range(32)))
ISSUER = Identity.from_seed(bytes(range(2, 34)))
MEMBER = Identity.from_seed(bytes(range(1, 33)))

CHARTER_TOML = f"""
name = "letters"
group_size = 4
max_new_tokens = 12
temperature = 0.9
closed = true
issuers = ["{ISSUER.peer_id}"]

[[environments]]
name = "reasoning_gym/spell_backward"
weight = 3
config = {{ min_word_len = 3, max_word_len = 5 }}

[[environments]]
name = "reasoning_gym/chain_sum"

[[tokenizers]]
name = "characters"
digest = "{"c" * 64}"
vocab_size = 64
end_token_ids = [1, 5]

[[models]]
name = "sparrow"
digest = "{"a" * 64}"
source = "https://models.example/sparrow"

[[recipes]]
max_params = 1_000_000
learning_rate = 3e-4
warmup_steps = 5
objective = "topr"

[rules]
max_logprob_gap = 3
"""

PINS = {
    "reasoning_gym/chain_sum": "reasoning-gym==0.1.25",
    "reasoning_gym/spell_backward": "sha256:" + 64 * "b",
}
CHARTER = charters.found(IDENTITY, CHARTER_TOML, NOW_MS, PINS)
SWARM_ID = charters.swarm_id(CHARTER)
TOKEN = issue_token(ISSUER, CHARTER, MEMBER.peer_id, now_ms=NOW_MS, expires_at=NOW_MS + 86_400_000)
ANNEX = sign_annex(
    ISSUER,
    CHARTER,
    m.Annex(
        SWARM_ID,
        sequence=3,
        issuer=ISSUER.peer_id,
        created_at=NOW_MS,
        bootstraps=("/ip4/192.0.2.7/tcp/4001",),
        relays=("/ip4/192.0.2.8/tcp/4001",),
        revoked=("7" * 64,),
        key_epochs=(m.KeyEpoch(1, NOW_MS, "6" * 64),),
    ),
)
TOPIC = f"murmuration/2/{SWARM_ID}/announcements"

LINEAGE = m.Lineage(owner=IDENTITY.peer_id, base_model="a" * 64, tokenizer="c" * 64)
PROMPT = m.PromptRef(window=12, slot=3, index=1234)


def rollout(text: str, token_ids: tuple[int, ...], reward: float) -> m.Rollout:
    count = len(token_ids)
    return single_turn(
        text,
        token_ids=struct.pack(f"<{count}I", *token_ids),
        logprobs=struct.pack(f"<{count}f", *(-0.25 * (i + 1) for i in range(count))),
        versions=struct.pack(f"<{count}I", *[7] * count),
        finish=m.FinishReason.STOP,
        reward=reward,
        seed=2**62 + 1,
    )


GROUP = m.RolloutGroup(
    author=IDENTITY.peer_id,
    lineage=LINEAGE,
    policy_version=7,
    mean_version=7.0,
    oldest_version=7,
    environment="reasoning_gym/spell_backward",
    prompt=PROMPT,
    question="Spell this word backward (example: sun -> nus): wéb",
    sampling=m.Sampling(max_new_tokens=12),
    engine="transformers",
    dtype="float32",
    rollouts=(rollout("béw", (12, 9, 44, 1), 1.0), rollout("web", (44, 9, 12, 1), 0.0)),
)
ANNOUNCEMENT = m.Announcement(
    lineage=LINEAGE,
    policy_version=7,
    mean_version=6.5,
    oldest_version=5,
    prompt=PROMPT,
    completions=slot_digest(IDENTITY.peer_id, LINEAGE, PROMPT, GROUP.rollouts),
    rewards=(1.0, 0.0),
    body=m.BlobRef(digest="e" * 64, size=1234),
    pin=PINS["reasoning_gym/spell_backward"],
    commitment=b"evidence",
    token=TOKEN,
)
CONVERSATION = m.Rollout(
    text="béw",
    segments=(
        m.PolicySegment(bytes(4), bytes(4), bytes(4), m.FinishReason.STOP),
        m.EnvironmentSegment(bytes(8), m.Origin.TOOL),
        m.PolicySegment(bytes(8), bytes(8), bytes(8), m.FinishReason.LENGTH),
    ),
    reward=0.75,
    seed=11,
    reward_components=(m.RewardComponent("answer", 0.5), m.RewardComponent("format", 0.25)),
)
PEER_RECORD = m.PeerRecord(
    name="sparrow", protocol_version=2, addresses=("/ip4/192.0.2.7/tcp/4001",), lineage=LINEAGE
)
BLOB = m.ChunkedBlob(root="f" * 64, size=100_000, chunk_bytes=16_384)
LINK = m.WeightsLink(
    lineage=LINEAGE,
    policy_version=8,
    kind=m.LinkKind.DELTA,
    base_version=7,
    base="1" * 64,
    result="2" * 64,
    blob=BLOB,
    created_at=NOW_MS,
)
REMOVAL = MergeRemoval(IDENTITY.peer_id, base="1" * 64, tags=("8" * 64, "9" * 64), created_at=NOW_MS)
HAVE = tuple(m.EnvironmentPin(spec.name, spec.pin) for spec in CHARTER.environments)
RECORDS: tuple[m.Record, ...] = (
    CHARTER,
    GROUP,
    ANNOUNCEMENT,
    PEER_RECORD,
    m.BlobRequest("e" * 64),
    m.BlobReply(1234),
    m.RolloutRequest(ANNOUNCEMENT.completions, 1),
    m.RolloutReply(CONVERSATION, prove(GROUP.rollouts, 1)),
    m.ReconcileRequest(TOPIC, bytes(16)),
    m.ReconcileReply(2),
    m.AnnexReply(ANNEX),
    m.Hello(SWARM_ID, PEER_RECORD, environments=HAVE, token=TOKEN, annex=3),
    m.HelloReply(PEER_RECORD, NOW_MS, environments=HAVE, annex=2),
    LINK,
    sign_link(IDENTITY, SWARM_ID, LINK),
    m.ChainRequest(owner=IDENTITY.peer_id, base_model="a" * 64, after=7, wait_ms=15_000),
    m.ChainReply(2),
    m.ChunksRequest("f" * 64),
    m.ChunksReply(bytes(7 * 32), b"\x15"),
    REMOVAL,
    SignedRemoval(encode(REMOVAL), bytes(64)),
    MergeRequest(base_model="a" * 64, base="1" * 64, rule="3" * 64, held="4" * 64, taken="5" * 64),
    MergeReply(base="1" * 64, rule="3" * 64, held="6" * 64, links=2, removals=1),
)


def envelope_bytes(
    sequence: int = 5,
    *,
    payload: bytes = b"payload",
    topic: str = TOPIC,
    swarm_id: str = SWARM_ID,
    now_ms: int = NOW_MS,
    ttl_ms: int = 60_000,
    identity: Identity = IDENTITY,
) -> bytes:
    return seal(
        identity,
        swarm_id=swarm_id,
        topic=topic,
        sequence=sequence,
        payload=payload,
        now_ms=now_ms,
        ttl_ms=ttl_ms,
    )
