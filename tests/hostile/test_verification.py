"""Groups that lie, through the real pipeline: real tasks, the real sandbox, real slots.

Items 19 and 22 of the list of hostile inputs, the four lies of the demo's liar, and bytes that mean nothing.
The proof is always the same: the group is refused for the right reason, its author is blamed, and the node
goes on to accept an honest group.
"""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import string
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from node.environment.host import Answers, HostFailure, ScoredGroup, TrustedHost
from node.environment.installed import DEMO_ENVIRONMENTS
from node.environment.records import Environment
from node.environment.tasks import open_environment
from node.rollout.prompts import Universe
from node.sandbox.host import SandboxedHost
from node.sandbox.records import Layer, SandboxLimits
from node.share.heard import Candidate
from node.verify.base import Judgement
from node.verify.pipeline import Verifier
from protocol.charter import swarm_id
from protocol.codec import encode
from protocol.messages import (
    Charter,
    EnvironmentSpec,
    FinishReason,
    Lineage,
    PeerId,
    PromptRef,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenizerSpec,
)
from protocol.prompts import slots
from protocol.rollouts import single_turn
from swarm_cli.liar import Liar, Lie
from tests.node.runtimes import make_peers, make_runtime
from tests.node.verify.world import (
    EPOCH_MS,
    FixedClock,
    announcement_of,
    candidate,
    fingerprint,
    identity,
    served,
)
from tests.rollouts import changed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")]

replace = msgspec.structs.replace
ALICE, MALLORY = identity("alice").peer_id, identity("mallory").peer_id
EOS, VOCAB = 0, 128
COUNTDOWN = "reasoning_gym/countdown"
TOKENIZER = TokenizerSpec(
    name="characters", digest=fingerprint("characters"), vocab_size=VOCAB, end_token_ids=(EOS,)
)
CHARTER = Charter(
    name="hostile",
    protocol_version=1,
    founder=ALICE,
    created_at=EPOCH_MS - 1_000_000,
    environments=(
        *DEMO_ENVIRONMENTS,
        EnvironmentSpec(name=COUNTDOWN),
    ),
    tokenizers=(TOKENIZER,),
    max_new_tokens=256,
    pool_size=64,
    slots_per_window=32,
)
SWARM_ID = swarm_id(CHARTER)


@functools.cache
def environments() -> dict[str, Environment]:
    specs = CHARTER.environments
    return {spec.name: open_environment(spec.name, msgspec.json.decode(spec.config)) for spec in specs}


@functools.cache
def universe() -> Universe:
    return Universe(SWARM_ID, CHARTER, TrustedHost(environments()))


@pytest.fixture(scope="module")
def scorer() -> Iterator[SandboxedHost]:
    with SandboxedHost(CHARTER.environments) as running:
        yield running


@pytest.fixture
def verifier(scorer: SandboxedHost) -> Verifier:
    return make_verifier(scorer)


def make_verifier(scorer: Any, *, enabled: bool = True) -> Verifier:
    return Verifier(
        *make_peers(make_runtime(FixedClock(EPOCH_MS)), identity("node"), CHARTER),
        universe().item,
        scorer,
        {TOKENIZER.digest: lambda ids: "".join(chr(each) for each in ids if each != EOS)},
        enabled=enabled,
    )


def written(text: str, reward: float, policy: str = "") -> Rollout:
    """A rollout of one token per character; each prefix has its log-probability under `policy`."""
    ids = [*text.encode("ascii"), EOS]
    prefixes = [f"{policy} {ids[: place + 1]}" for place in range(len(ids))]
    logprobs = [-random.Random(each).expovariate(8.0) for each in prefixes]
    return single_turn(
        text=text,
        token_ids=np.asarray(ids, dtype="<u4").tobytes(),
        logprobs=np.asarray(logprobs, dtype="<f4").tobytes(),
        versions=np.full(len(ids), 3, dtype="<u4").tobytes(),
        finish=FinishReason.STOP,
        reward=reward,
        seed=0,
    )


def honest(author: PeerId, slot: int, environment: str = "") -> RolloutGroup:
    """Right and wrong answers in turn, in the first slot from `slot` on that belongs to `environment`."""
    derived = slots(SWARM_ID, CHARTER, 100, author)
    while environment and universe().item(derived[slot]).environment != environment:
        slot += 1
    item = universe().item(derived[slot])
    right = str(environments()[item.environment].prompt(item.seed, 0).entry["answer"])
    letters = random.Random(f"{author} {slot}").sample(string.ascii_letters, 4)
    wrong = [f"{right}{letter}" for letter in letters]
    texts = [right if place % 2 else wrong[place // 2] for place in range(CHARTER.group_size)]
    return RolloutGroup(
        author=author,
        lineage=Lineage(owner=author, base_model=fingerprint(author), tokenizer=TOKENIZER.digest),
        policy_version=3,
        mean_version=3.0,
        oldest_version=3,
        environment=item.environment,
        prompt=PromptRef(window=100, slot=slot, index=derived[slot]),
        question=item.text,
        sampling=Sampling(max_new_tokens=CHARTER.max_new_tokens),
        engine="test",
        dtype="float32",
        rollouts=tuple(written(text, float(text == right), f"{author} {slot}") for text in texts),
    )


def with_first(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    return replace(group, rollouts=(changed(group.rollouts[0], **changes), *group.rollouts[1:]))


def refused(verifier: Verifier, lie: RolloutGroup | Candidate) -> str:
    """The reason; the author is blamed, and an honest group is still accepted afterwards."""
    item = candidate(lie) if isinstance(lie, RolloutGroup) else lie
    judgement = verifier.judge(item)
    assert not judgement.accepted
    assert judgement.verdict.blames_author
    assert verifier.judge(candidate(honest(ALICE, 0))).accepted
    return judgement.reason


@pytest.mark.parametrize("environment", [each.name for each in DEMO_ENVIRONMENTS])
def test_honest_groups_of_every_task_are_accepted(verifier, environment):
    group = honest(MALLORY, 0, environment)
    judgement = verifier.judge(candidate(group))
    assert judgement.accepted
    assert set(judgement.suspicions) <= {"skipped_too_much"}  # no receipts of the slots before
    assert judgement.rewards == tuple(each.reward for each in group.rollouts) == (0.0, 1.0) * 4


# --- item 19: rewards and prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [each.name for each in DEMO_ENVIRONMENTS])
def test_claimed_rewards_are_never_used(verifier, environment):
    group = honest(MALLORY, 0, environment)
    claims = tuple(replace(each, reward=1.0) for each in group.rollouts)
    assert refused(verifier, replace(group, rollouts=claims)) == "false_reward"


def test_unfinished_answers_earn_nothing(verifier):
    """A right answer that was cut at the limit is no right answer, whatever its author claims."""
    group = honest(MALLORY, 0)
    right = group.rollouts[1]
    padded = right.text + " " * (CHARTER.max_new_tokens - len(right.text))
    cut = written(padded[:-1], 1.0)
    ids = np.frombuffer(cut.answer.token_ids, dtype="<u4").copy()
    ids[-1] = ord(" ")
    cut = changed(cut, text=padded, token_ids=ids.tobytes(), finish=FinishReason.LENGTH)
    lie = replace(group, rollouts=(group.rollouts[0], cut, *group.rollouts[2:]))
    assert refused(verifier, lie) == "false_reward"


@pytest.mark.parametrize(
    "prompt",
    [
        lambda mine, theirs: replace(mine, slot=mine.slot + 1),
        lambda mine, theirs: replace(mine, window=mine.window - 1),
        lambda mine, theirs: replace(mine, index=mine.index + 1),
        lambda mine, theirs: replace(mine, slot=CHARTER.slots_per_window),
        lambda mine, theirs: theirs,
    ],
    ids=["another slot", "another window", "another index", "a slot too many", "a neighbour's slot"],
)
def test_prompts_not_derived_from_swarm_window_and_peer(verifier, prompt):
    group = honest(MALLORY, 2)
    lie = replace(group, prompt=prompt(group.prompt, honest(ALICE, 2).prompt))
    assert refused(verifier, lie) == "tampered_prompt"


# --- answers that are programs: countdown evaluates what it is given ----------------------------------------

LIMITS = SandboxLimits(cpu_s=1, wall_s=4.0)
WALLS = {"everything": tuple(Layer), "walls alone": tuple(set(Layer) - {Layer.DETECTION})}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[dict[str, SandboxedHost]]:
    """Behind all layers the answer is refused before it runs; behind the walls alone it does run."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(SandboxedHost(CHARTER.environments, LIMITS, layers=layers))
            for name, layers in WALLS.items()
        }


@pytest.fixture(params=WALLS)
def sandbox(request: pytest.FixtureRequest, sandboxes: dict[str, SandboxedHost]) -> SandboxedHost:
    found = sandboxes[request.param]
    if not found.report.may_evaluate:
        pytest.skip(f"this machine refuses tasks that evaluate answers: {found.report.missing}")
    return found


class Overheard:
    """The real sandbox; `last` is what it said."""

    def __init__(self, sandbox: SandboxedHost) -> None:
        self._sandbox = sandbox
        self.last: ScoredGroup | HostFailure | None = None

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        assert strangers
        said = self._sandbox.score(groups, strangers=strangers)
        self.last = said[0]
        return said


def attack(sandbox: SandboxedHost, source: str) -> None:
    """Judge an answer that runs `source` and then exits with status 42; where it fails, with 7. So it never
    scores as a merely wrong answer, and a wall that gave way would be seen."""
    program = f"import os\ntry: {source}\nexcept BaseException: os._exit(7)\nos._exit(42)"
    reason, said = judge_answer(sandbox, f"exec({program!r})")
    assert said.detail != "exit status 42", f"the attack succeeded: {source}"
    if Layer.DETECTION in sandbox.report.layers:
        assert reason == "scorer_forbidden"


def judge_answer(sandbox: SandboxedHost, answer: str) -> tuple[str, HostFailure]:
    """The reason for refusing a group with this answer; an honest group on the same task is then accepted."""
    overheard = Overheard(sandbox)
    verifier = make_verifier(overheard)
    group = honest(MALLORY, 0, COUNTDOWN)
    lie = replace(group, rollouts=(written(answer, 1.0), *group.rollouts[1:]))
    judgement = verifier.judge(candidate(lie))
    assert (judgement.accepted, judgement.verdict.blames_author) == (False, True)
    assert judgement.checks[-1].check == "reward"
    assert judgement.reason in {"scorer_forbidden", "scorer_crashed", "scorer_timeout"}
    said = overheard.last
    assert isinstance(said, HostFailure)
    after = honest(ALICE, 0, COUNTDOWN)
    accepted = verifier.judge(candidate(after))
    assert accepted.accepted
    assert accepted.rewards == tuple(each.reward for each in after.rollouts)
    assert sandbox.restarts == 0
    return judgement.reason, said


def test_an_answer_that_writes_a_file(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    for target in (tmp_path / "touched", Path("/tmp/swarm-verification")):
        attack(sandbox, f"open({str(target)!r}, 'w').write('x')")
        assert not target.exists()


def test_an_answer_that_opens_a_socket(sandbox):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        address = listener.getsockname()
        attack(sandbox, f"import socket; socket.create_connection({address!r}, 1)")
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_answer_that_reads_the_key(sandbox, tmp_path):
    key = tmp_path / "identity.key"
    key.touch(0o600)
    key.write_text("secret")
    attack(sandbox, f"open({str(key)!r}).read()")


def test_an_answer_that_forks(sandbox):
    before = len(psutil.Process().children(recursive=True))
    attack(sandbox, "import os; [os.fork() for _ in range(50)]")
    attack(sandbox, "import subprocess; subprocess.run(['/bin/sleep', '60'])")
    assert len(psutil.Process().children(recursive=True)) <= before


def test_an_answer_that_never_returns(sandbox):
    """No bytecode runs in that multiplication, so only the kernel can end it."""
    reason, _ = judge_answer(sandbox, "9**9**9")
    assert reason == "scorer_timeout"


# --- the demo's liar ----------------------------------------------------------------------------------------


def lie_of(verifier: Verifier, kind: Lie) -> Judgement:
    liar = Liar(CHARTER, SWARM_ID, honest(MALLORY, 0).lineage)
    mine = slots(SWARM_ID, CHARTER, 100, MALLORY)
    theirs = slots(SWARM_ID, CHARTER, 100, ALICE)
    group = honest(MALLORY, 0)
    if kind is Lie.COPY:
        group = honest(ALICE, next(slot for slot, index in enumerate(theirs) if index in mine))
        assert verifier.judge(candidate(group, EPOCH_MS)).accepted
    made = liar.lie(kind, group)
    assert made is not None
    announcement, body = made
    return verifier.judge(served(MALLORY, announcement, body, EPOCH_MS + 1))


@pytest.mark.parametrize("kind", list(Lie))
def test_every_lie_is_refused_for_its_own_reason_and_believed_without_verification(scorer, kind):
    checked = lie_of(make_verifier(scorer), kind)
    assert (checked.accepted, checked.reason, checked.verdict.blames_author) == (
        False,
        kind.reason,
        kind is not Lie.COPY,  # losing a race is no fault
    )
    believed = lie_of(make_verifier(scorer, enabled=False), kind)
    assert believed.accepted
    assert len(set(believed.rewards)) > 1


# --- item 22: values that would reach the optimiser ---------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "not_finite"),
        (np.inf, "not_finite"),
        (-np.inf, "not_finite"),
        (1e30, "positive_logprob"),
        (-1e30, "impossible_logprobs"),
        (0.5, "positive_logprob"),
    ],
)
def test_bad_log_probabilities(verifier, value, reason):
    group = honest(MALLORY, 0)
    logprobs = np.frombuffer(group.rollouts[0].answer.logprobs, dtype="<f4").copy()
    logprobs[1] = value
    assert refused(verifier, with_first(group, logprobs=logprobs.tobytes())) == reason


@pytest.mark.parametrize(
    ("token", "reason"), [(VOCAB, "token_range"), (2**32 - 1, "token_range"), (EOS, "termination")]
)
def test_bad_token_ids(verifier, token, reason):
    group = honest(MALLORY, 0)
    ids = np.frombuffer(group.rollouts[0].answer.token_ids, dtype="<u4").copy()
    ids[0] = token
    assert refused(verifier, with_first(group, token_ids=ids.tobytes())) == reason


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_rewards_that_are_no_canonical_floats(verifier, reward):
    group = honest(MALLORY, 0)
    body = msgspec.msgpack.encode(with_first(group, reward=float(reward)))
    announcement = replace(announcement_of(group, body), rewards=(0.0,) * 8)
    assert refused(verifier, served(MALLORY, announcement, body, EPOCH_MS)) == "not_finite"


def test_a_huge_reward_is_a_false_one(verifier):
    assert refused(verifier, with_first(honest(MALLORY, 0), reward=1e30)) == "false_reward"


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "versions"])
@pytest.mark.parametrize("cut", [1, 4])
def test_arrays_of_wrong_length(verifier, field, cut):
    group = honest(MALLORY, 0)
    short = getattr(group.rollouts[0].answer, field)[:-cut]
    assert refused(verifier, with_first(group, **{field: short})) == "array_length"


# --- bytes that mean nothing --------------------------------------------------------------------------------


def mutated(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def test_mutated_bodies_raise_nothing_and_take_no_time(scorer):
    """Announced with the right digest, so that the whole pipeline sees them. A mutation of what does not
    matter (an engine's name, say) may be accepted; the rewards are then our own."""
    rng = random.Random(22)
    group = honest(MALLORY, 0)
    body = encode(group)
    rewards = tuple(each.reward for each in group.rollouts)
    slowest_s = 0.0
    for _ in range(500):
        verifier = make_verifier(scorer)
        broken = mutated(body, rng)
        item = served(MALLORY, announcement_of(group, broken), broken, EPOCH_MS)
        started_s = time.process_time()
        judgement = verifier.judge(item)
        slowest_s = max(slowest_s, time.process_time() - started_s)
        assert judgement.accepted == (judgement.reason == "")
        if judgement.accepted:
            assert judgement.rewards == rewards
    assert slowest_s < 0.05
