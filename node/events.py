"""The node's one typed event stream: what happened, as frozen records.

Everything that shows a node reads this and nothing else: `metrics.jsonl` (one JSON object a line), the local
socket that `swarm monitor` and `swarm status` attach to, the demo's table, trackers. Stages emit; they never
format. Not a log of peers' bytes: text of a peer is cut to `MAX_SHOWN_CHARS` and stripped of control
characters here, once.

Fields named `*_s` are measured seconds (the only ones that differ between two runs of the deterministic
simulation); `at` is swarm time in milliseconds. A line carries its record's name in `type`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

__all__ = [
    "LAG_BUCKETS",
    "BlobStatus",
    "CheckCount",
    "CheckOutcome",
    "Evaluated",
    "Event",
    "EventBus",
    "Gap",
    "Gaps",
    "GroupJudged",
    "Health",
    "MergeJudged",
    "NodeStarted",
    "NodeStopped",
    "Notice",
    "NoticeLevel",
    "PeerStatus",
    "PeersSeen",
    "RolledBack",
    "SourceShare",
    "StageStatus",
    "StagesSeen",
    "StepDone",
    "VersionPublished",
    "VersionReached",
    "WeightsSeen",
    "decode_event",
    "encode_event",
    "inert",
]

MAX_SHOWN_CHARS = 2000
LAG_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)
"""First lag, in versions, of each place of a histogram; the last one has no end."""


def inert(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Peer text made harmless for screens and logs: control, format and bidirectional characters become
    U+FFFD (newline and tab stay), and what is over `max_chars` is cut."""
    cut = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"} else "\ufffd"
        for c in cut
    )


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="type", kw_only=True):
    """Base of every event. `at` is swarm time in milliseconds."""

    at: int


class NodeStarted(Event, frozen=True, kw_only=True):
    """First event of a run."""

    name: str
    peer_id: str
    role: str = "trainer"
    """trainer | follower"""
    swarm: str
    swarm_id: str
    addresses: tuple[str, ...]
    model: str
    params: int
    engine: str
    sandbox: str
    """One sentence: how strong the scoring sandbox is here."""
    run_dir: str


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the strip `rollout | verify | share | weight | train | broadcast`."""

    stage: str
    queued: int
    capacity: int
    waiting_for: str
    """Name of the wait this stage is in, or "" while it works."""
    waiting_s: float
    stalled_s: float = 0.0
    """How long it has stood still, once that is far longer than usual; else 0."""


class StagesSeen(Event, frozen=True, kw_only=True):
    """Snapshot of all stages, about twice a second."""

    stages: tuple[StageStatus, ...]
    rollouts_in_flight: int = 0
    tokens_sampled: int = 0
    """Tokens sampled for own groups since the start of the run."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the peers table."""

    peer_id: str
    name: str
    connected: bool
    """Its application answered within the last 30 s."""
    accepted: int
    rejected: dict[str, int]
    """Counts by reason."""
    trust: float
    """0 to 1."""
    policy_version: int
    """Newest version this peer announced, -1 before the first announcement."""
    lag: float
    """How many versions, on average, its accepted groups were behind that at arrival."""
    age_windows: float
    """Mean age, in windows, of its accepted groups at arrival."""
    last_seen_at: int
    same_tokenizer: bool
    follows: str = ""
    """Peer id of the node whose policy it generates with, "" for its own."""
    frozen: bool = False
    """The link stands, and its application has not answered for longer than that."""
    answered_at: int = 0
    """When the application answered last over this link, 0 before."""


class PeersSeen(Event, frozen=True, kw_only=True):
    """Snapshot of the peers table."""

    peers: tuple[PeerStatus, ...]


class CheckCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one check gave each verdict so far, and what it cost in all."""

    check: str
    accepted: int
    rejected: int
    suspected: int
    cost_s: float


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict of one check on one group."""

    check: str
    verdict: str
    """accept | reject | suspect"""
    reason: str
    cost_s: float


class GroupJudged(Event, frozen=True, kw_only=True):
    """A group was admitted or refused: own groups after scoring, peers' after verification."""

    author: str
    own: bool
    accepted: bool
    reason: str
    """Reason of the refusal, "" when accepted."""
    group: str
    """Short digest of the body."""
    environment: str
    window: int
    slot: int
    policy_version: int
    question: str
    completions: tuple[str, ...]
    rewards: tuple[float, ...]
    """As scored here; the author's claim where it was refused before scoring."""
    checks: tuple[CheckOutcome, ...]


class SourceShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one source (own, or one peer), or one kind of source, contributed to a step."""

    source: str
    """"own" or a peer id; of a kind: own | follower | foreign."""
    groups: int
    tokens: int
    weight: float
    """lambda of the loss sum times the author's trust."""
    loss: float
    kept: float
    """Share of tokens that carry gradient."""
    dropped: float = 0.0
    """Share of tokens that the objective took out, or whose advantage is no finite number."""
    clipped: float = 0.0
    """Share of tokens that count and carry no gradient: the rest."""
    ess: float
    """Effective sample size of the importance weights, as a share of the tokens."""
    advantage_abs: float
    gap: float
    """Mean |log ratio| per token against the behaviour policy, nats."""
    k1: float = 0.0
    """Estimate of KL(behaviour || current), nats per token: mean of -log ratio, may be negative."""
    k3: float = 0.0
    """The same by ratio - 1 - log ratio: never negative."""
    lags: tuple[int, ...] = ()
    """Tokens by lag, one count for each of `LAG_BUCKETS`. In the own lineage the lag is that of each token
    behind the version trained here, in others that of the group behind its lineage's newest."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """How far a policy q is from p, whose tokens these are; nats per token, 0 without tokens."""

    tokens: int
    mean_abs: float
    k1: float
    """Mean of log p - log q: unbiased for KL(p || q), may be negative."""
    k3: float
    """Mean of q/p - 1 - log q/p: never negative."""


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """The two factors of a token's ratio, apart, over tokens whose generating weights are kept
    (`train.snapshots`). Their k1 add up to that of the current policy from the engine."""

    mismatch: Gap
    """From the engine's log-probabilities to the trainer's at the same version: what the engine does to
    weights."""
    staleness: Gap
    """From the trainer's log-probabilities at that version to the current ones: what training did since."""
    exact: float
    """Share of the own lineage's tokens whose generating weights are kept."""


class StepDone(Event, frozen=True, kw_only=True):
    """One optimiser step. `policy_version` is the version it made, also when that was rolled back."""

    policy_version: int
    loss: float
    reward: float
    """Mean reward of the own groups generated for this step, zero-variance ones included."""
    reward_external: float
    entropy: float
    """Mean entropy of the sampling distribution on own tokens, nats."""
    kl_start: float
    """k3 estimate of KL(current || start) on own tokens, nats per token."""
    length_mean: float
    finished_share: float
    zero_variance_share: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    """True when the NaN guard left parameters and optimiser untouched."""
    rolled_back: bool = False
    """True when it was taken back: see `RolledBack`."""
    nonfinite: int = 0
    """Rollouts that were left out because their advantage is no finite number."""
    ess: float = 1.0
    """Effective sample size of the own lineage's completions, by their sequence weights, as a share."""
    kl_step: float | None = None
    """Estimate of KL(before || after) on own rollouts, nats per token; None: not measured."""
    groups_local: int
    groups_external: int
    hacpo_groups: int
    graft_groups: int
    prompts_shared: int
    """External groups of this step whose prompt this node answered too."""
    staleness: float
    """Mean lag in versions: own groups against the own version, external ones against their lineage's
    newest."""
    age_windows: float
    """Mean age of the external groups, windows."""
    off_policy_share: float = 0.0
    """Share of the own tokens that an older version than the one trained here sampled."""
    partial_groups: int = 0
    """Own groups that several versions sampled."""
    groups_followers: int = 0
    """External groups that followers generated with this node's policy."""
    staleness_followers: float = 0.0
    """Mean lag of the followers' groups, in versions behind the one trained here."""
    groups_across_merge: int = 0
    """Own and followers' groups that a version before the last adopted merge generated: their lag counts
    versions, and a merge is further than a step."""
    sources: tuple[SourceShare, ...]
    kinds: tuple[SourceShare, ...] = ()
    """The same by kind of source: own, follower, foreign, where there are any."""
    gaps: Gaps | None = None
    """None without snapshots."""
    pool: int
    """Groups in the replay pool after the draw."""
    generate_s: float
    train_s: float
    wait_s: float


class RolledBack(Event, frozen=True, kw_only=True):
    """Updates were found bad and taken back."""

    sign: str
    """kl_step | ess | grad_norm | probe_reward"""
    value: float
    """What gave them away; 0 if it was no finite number."""
    limit: float
    bad_version: int
    """Newest version that was undone."""
    good_version: int
    """Version whose weights came back."""
    policy_version: int
    """Version under which these weights are published now."""
    total: int
    """Roll-backs of this run so far, this one included."""
    why: str
    """One sentence for the operator."""


class BlobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Weights on their way to this node."""

    chunks: int
    have: int
    peers: int
    """Who sends them."""
    bytes_per_s: float


class WeightsSeen(Event, frozen=True, kw_only=True):
    """Snapshot of how a lineage's weights travel, about twice a second: from their owner, or to a
    follower."""

    owner: str
    """Peer id of the lineage's owner, this node itself perhaps; "" while a follower has none."""
    policy_version: int
    """Published (owner), or generated with (follower); -1 before the first."""
    head: int
    """Newest version that this node knows of, -1 before the first."""
    followers: int
    """Connected peers that follow this lineage."""
    sent_bytes: int
    received_bytes: int
    blobs: tuple[BlobStatus, ...] = ()
    """Blobs that are being fetched."""


class VersionPublished(Event, frozen=True, kw_only=True):
    """An owner's version can be fetched."""

    policy_version: int
    kind: str
    """anchor | delta"""
    digest: str
    """SHA-256 of the weights in hex (`protocol.delta.weights_digest`)."""
    blob_bytes: int
    full_bytes: int
    """Size of a full bfloat16 copy of these weights."""
    publish_s: float


class VersionReached(Event, frozen=True, kw_only=True):
    """A follower generates with this version from now on."""

    owner: str
    policy_version: int
    digest: str
    apply_s: float
    """Seconds that the engine took for the new weights."""


class MergeJudged(Event, frozen=True, kw_only=True):
    """Weights that were merged from several trainers were probed here, and adopted or not."""

    policy_version: int
    """The trainer's version from now on: that of the merged weights, or a new number for its own."""
    adopted: bool
    prompts: int
    """Held-out prompts that were answered with both, 0 when the engine failed at it."""
    gain: float
    """Mean reward with the merged weights minus that with the own ones."""
    lower_bound: float
    """Lower confidence bound of `gain`, at the configured confidence. Both are 0 with too few prompts to say
    anything."""
    contributions: str
    """Digest of the set that was merged."""
    authors: tuple[str, ...]
    """Peer ids whose weights are in it."""
    why: str
    """One sentence for the operator."""
    judge_s: float


class Evaluated(Event, frozen=True, kw_only=True):
    """Held-out evaluation: exact match and end token, in [0, 1]."""

    policy_version: int
    moment: str
    """before | during | after"""
    prompts: int
    sampled: float
    """Mean over tasks at T = 1."""
    greedy: float
    sampled_tasks: dict[str, float]
    greedy_tasks: dict[str, float]
    evaluate_s: float


class Health(Event, frozen=True, kw_only=True):
    """Process health, about once a second. Differs between runs."""

    loop_lag_p99_s: float
    rss_bytes: int
    descriptors: int = 0
    """Open files and sockets."""
    tasks: int = 0
    """Of the event loop, under way."""
    transport_restarts: int
    sandbox_restarts: int
    host_waited_s: float = 0.0
    """Seconds that threads of this node have waited for tasks since it started: questions and own answers.
    Other work goes on beside them."""
    refused: dict[str, int]
    """Refusals below verification (rate, size, signature ...) by reason."""
    announced: int
    bodies_fetched: int
    bodies_served: int = 0
    unshared: int = 0
    """Own groups that took so long that peers would refuse them."""
    not_sharing: str = ""
    """Why this node announces nothing more, "" while it does."""
    checks: tuple[CheckCount, ...] = ()
    """Checks of verification that have run, cheap ones first."""


class NoticeLevel(StrEnum):
    """How much a notice matters to the operator."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Notice(Event, frozen=True, kw_only=True):
    """Something this operator should know or can fix."""

    level: NoticeLevel
    text: str


class NodeStopped(Event, frozen=True, kw_only=True):
    """Last event of a run."""

    reason: str
    steps: int
    """Versions made in this run; by a follower, reached."""
    wall_s: float


AnyEvent = (
    NodeStarted
    | StagesSeen
    | PeersSeen
    | GroupJudged
    | StepDone
    | RolledBack
    | WeightsSeen
    | VersionPublished
    | VersionReached
    | MergeJudged
    | Evaluated
    | Health
    | Notice
    | NodeStopped
)

_decoder = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """One JSON line, newline included."""
    return _encoder.encode(event) + b"\n"


def decode_event(line: bytes) -> Any:
    """The event of one line. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(line)


class EventBus:
    """Hands each event to every sink, in order of subscription. A sink must not block."""

    def __init__(self) -> None:
        self._sinks: list[Callable[[Event], None]] = []

    def subscribe(self, sink: Callable[[Event], None]) -> None:
        """Add a sink for all later events."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Hand `event` to every sink."""
        for sink in self._sinks:
            sink(event)
