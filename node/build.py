"""From a configuration to the parts of a node: charter, policy, memory plan, trainer, engine, environments.

Everything here blocks and is done once, before the network starts; each failure is one sentence. Torch is
imported by the functions that need it, so what needs none (charter, sandbox) is checked before it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from node.budget import Machine, MemoryPlan, ModelFacts, Wishes, plan_memory
from node.config import NodeConfig
from node.events import NoticeLevel
from node.rollout.adapter import AdapterSpec
from node.rollout.environment import Environment, open_environment
from node.rollout.policy import Policy
from node.sandbox.records import SandboxLimits
from node.sandbox.scorer import Scorer
from node.sandbox.strength import describe
from node.state.paths import Home, bundled
from node.state.stores import write_atomically
from node.verify.tokens import Decode
from protocol.charter import charter_bytes, decode_charter, found, is_member, swarm_id
from protocol.errors import CharterError, ConfigError, ModelError, SandboxError
from protocol.identity import Identity
from protocol.messages import Charter, Digest, PeerId

if TYPE_CHECKING:
    from node.core import NodeCore
    from node.rollout.engine.base import Engine, EngineError
    from node.rollout.engine.vllm import VllmEngine
    from node.train.settings import TrainSettings
    from node.train.step import Trainer

__all__ = [
    "Loaded",
    "LoadedFollower",
    "adapter_of",
    "as_begun",
    "device_of",
    "inspect_charter",
    "load",
    "load_charter",
    "load_follower",
    "load_role",
    "machine_of",
    "open_decoders",
    "open_engine",
    "open_environments",
    "open_node",
    "open_policy",
    "open_sandbox",
    "plan_of",
    "planned",
    "require_strength",
    "train_settings",
]

CGROUP = Path("/sys/fs/cgroup")
LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Files of either kind of control group: the limit, what is used of it, and what that is."""


def load_charter(config: NodeConfig, identity: Identity, now_ms: int) -> Charter:
    """The swarm's charter: a signed file, or TOML that this node founds a swarm of its own with. Without any,
    the demo's rules. Raises CharterError."""
    home = Home(config.home)
    path = _charter_path(config, home)
    with _named(path):
        if path.suffix == ".toml":
            charter = _found(identity, path.read_text(encoding="utf-8"), home.charter, now_ms)
        else:
            charter = decode_charter(path.read_bytes())
    if not is_member(charter, identity.peer_id):
        raise CharterError(
            f"swarm {charter.name} is closed and {identity.peer_id} is not a member; ask its founder"
        )
    return charter


def inspect_charter(config: NodeConfig) -> tuple[Path, str]:
    """Where the charter of a run would come from, and its swarm's name; founds nothing. Raises
    CharterError."""
    path = _charter_path(config, Home(config.home))
    with _named(path):
        if path.suffix == ".toml":
            return path, found(Identity.generate(), path.read_text(encoding="utf-8"), 0).name
        return path, decode_charter(path.read_bytes()).name


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of reading a charter, with the path in them."""
    try:
        yield
    except CharterError as error:
        raise CharterError(f"{path}: {error}") from None
    except OSError as error:
        raise CharterError(f"cannot read or keep the charter {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CharterError(f"{path} is no TOML text; a signed charter must not end in .toml") from None


def _charter_path(config: NodeConfig, home: Home) -> Path:
    if not config.charter:
        return home.charter if home.charter.exists() else bundled("demo-charter.toml")
    path = Path(config.charter).expanduser()
    if path.exists():
        return path
    try:
        return bundled(config.charter)
    except ConfigError:
        raise CharterError(f"there is no charter at {config.charter!r}, here or in configs/") from None


def _found(identity: Identity, rules: str, kept: Path, now_ms: int) -> Charter:
    """The swarm that `identity` founds with `rules`: the one in `kept` if it is this one, so that a founder
    that starts again stays in its swarm."""
    if kept.is_file():
        with contextlib.suppress(CharterError):
            known = decode_charter(kept.read_bytes())
            if swarm_id(found(identity, rules, known.created_at)) == swarm_id(known):
                return known
    charter = found(identity, rules, now_ms)
    write_atomically(kept, charter_bytes(charter))
    return charter


def open_policy(config: NodeConfig, charter: Charter) -> Policy:
    """The configured policy; its tokenizer must be one of the charter's."""
    policy = Policy.open(config.policy.folder(config.home))
    if policy.tokenizer_digest not in {spec.digest for spec in charter.tokenizers}:
        names = ", ".join(spec.name for spec in charter.tokenizers)
        raise ModelError(
            f"the tokenizer of {policy.path} ({policy.tokenizer_digest[:12]}) is not in the charter, "
            f"which knows {names}"
        )
    return policy


def open_environments(charter: Charter) -> dict[str, Environment]:
    """Every environment of the charter by name. Raises CharterError for one whose prompts differ between
    machines."""
    environments = {
        spec.name: open_environment(spec.name, json.loads(spec.config)) for spec in charter.environments
    }
    for name, environment in environments.items():
        if not environment.reproducible:
            raise CharterError(
                f"prompts of {name} depend on Python's hash order, so peers cannot derive them again; "
                "leave it out of the charter"
            )
    return environments


def open_sandbox(config: NodeConfig, charter: Charter) -> Scorer:
    """The scoring sandbox of this charter, not started yet."""
    limits = SandboxLimits(
        cpu_s=max(1, round(config.verify.score_timeout_s)), wall_s=3 * config.verify.score_timeout_s
    )
    return Scorer(charter.environments, limits, hidden_paths=[str(config.home)])


def require_strength(sandbox: Scorer, environments: Mapping[str, Environment]) -> None:
    """Raise SandboxError when the started `sandbox` is too weak for what the charter asks."""
    evaluating = [name for name, environment in environments.items() if environment.evaluates_answers]
    if evaluating and not sandbox.report.may_evaluate:
        raise SandboxError(
            f"{evaluating[0]} executes the answers it scores, and the sandbox here is too weak for that "
            f"({describe(sandbox.report)}); leave that swarm, or run where user namespaces are allowed"
        )


@dataclass(frozen=True)
class Loaded:
    """What takes seconds to make and needs no network; the fields are named as in `NodeParts`."""

    policy: Policy
    environments: Mapping[str, Environment]
    settings: TrainSettings
    trainer: Trainer
    engine: Engine
    decoders: Mapping[Digest, Decode]


def load(
    config: NodeConfig, charter: Charter, notice: Callable[[NoticeLevel, str], None], peer_id: PeerId = ""
) -> tuple[NodeConfig, Loaded]:
    """Everything of a node that holds weights, gone on from the run's newest checkpoint, and `config` as that
    checkpoint or the memory plan decides what it leaves open. `notice(level, text)` hears the plan, and later
    of the engine, on any thread. Raises SwarmError; a policy that does not fit is refused before its weights
    are read."""
    policy = open_policy(config, charter)
    import torch

    from node.train.checkpoint import checkpoints_of, restore, resume
    from node.train.step import Trainer

    checkpoints = Home(config.home).run(config.run).checkpoints
    restore(checkpoints)
    plan = plan_of(config, charter, policy)
    notice(NoticeLevel.INFO, "\n".join(plan.lines()))
    config = planned(as_begun(config, policy), plan)
    if config.merge.enabled and config.policy.tuning == "lora":
        raise ConfigError(
            "merge.enabled is for all weights, and this node trains an adapter (policy.tuning 'lora', or "
            "'auto' with too little memory): adapters of different draws do not add up; turn merging off"
        )
    torch.manual_seed(config.seed)
    settings = replace(train_settings(config, charter), dtype=plan.dtype, recompute=plan.recompute)
    trainer = Trainer(policy, settings)
    begun = [folder.name for folder in checkpoints_of(checkpoints, policy.base_model)][:1]
    engine = open_engine(config, policy, notice, dtype=plan.dtype, draws="/".join([peer_id, *begun]))
    try:
        resume(trainer, engine, checkpoints)
        return config, Loaded(
            policy=policy,
            environments=open_environments(charter),
            settings=settings,
            trainer=trainer,
            engine=engine,
            decoders=open_decoders(policy, charter),
        )
    except BaseException:
        engine.close()
        raise


@dataclass(frozen=True)
class LoadedFollower:
    """As `Loaded`, of a node without a trainer; the fields are named as in `CoreParts`."""

    policy: Policy
    environments: Mapping[str, Environment]
    engine: Engine


def load_follower(
    config: NodeConfig, charter: Charter, notice: Callable[[NoticeLevel, str], None], peer_id: PeerId = ""
) -> tuple[NodeConfig, LoadedFollower]:
    """As `load`, for `role = "follower"`: an engine with the policy's own weights, which are what an owner's
    anchors start from. Its `policy.tuning` must be the owner's; "auto" means all weights."""
    policy = open_policy(config, charter)
    import torch

    plan = plan_of(config, charter, policy)
    notice(NoticeLevel.INFO, "\n".join(plan.lines()))
    config = planned(config, plan)
    torch.manual_seed(config.seed)
    environments = open_environments(charter)
    engine = open_engine(config, policy, notice, dtype=plan.dtype, draws=peer_id)
    return config, LoadedFollower(policy=policy, environments=environments, engine=engine)


def load_role(
    config: NodeConfig, charter: Charter, notice: Callable[[NoticeLevel, str], None], peer_id: PeerId = ""
) -> tuple[NodeConfig, Loaded | LoadedFollower]:
    """What a node of the configured role needs: `load_follower` or `load`."""
    if config.role == "follower":
        return load_follower(config, charter, notice, peer_id)
    return load(config, charter, notice, peer_id)


def open_node(config: NodeConfig, loaded: Loaded | LoadedFollower, rest: Mapping[str, Any]) -> NodeCore:
    """The node of what was loaded. `rest`: the other fields of `CoreParts`, by name."""
    if isinstance(loaded, LoadedFollower):
        from node.core import CoreParts
        from node.follower import Follower

        return Follower(config, CoreParts(**vars(loaded), **rest))
    from node.node import Node, NodeParts

    return Node(config, NodeParts(**vars(loaded), **rest))


def plan_of(config: NodeConfig, charter: Charter, policy: Policy) -> MemoryPlan:
    """How this policy is trained on this machine; a run that was begun, as it was. Raises BudgetError."""
    facts, machine, begun = ModelFacts.of(policy), machine_of(config), as_begun(config, policy)
    needs = _needs(config)
    wishes, anew = (Wishes.of(each, charter, facts, machine.device, needs) for each in (begun, config))
    return plan_memory(facts, machine, replace(wishes, anew=anew if begun != config else None))


def _needs(config: NodeConfig) -> frozenset[str]:
    """Names of what the own objective asks for (`Need`). Raises ConfigError."""
    from node.train.objectives import open_objective

    return frozenset(open_objective(config.train.objective, config.train.objective_options).needs)


def as_begun(config: NodeConfig, policy: Policy) -> NodeConfig:
    """`config` with tuning and optimiser, where it leaves them open, as the run's newest checkpoint of this
    policy has them: the memory that is free today does not change how a run is trained."""
    checkpoints = Home(config.home).run(config.run).checkpoints
    if "auto" not in (config.policy.tuning, config.train.optimiser) or not checkpoints.is_dir():
        return config
    from node.train.checkpoint import checkpoints_of, read_state

    newest = next(iter(checkpoints_of(checkpoints, policy.base_model)), None)
    if newest is None:
        return config
    state = read_state(newest)
    update: dict[str, object] = {}
    if config.policy.tuning == "auto":
        tuning: dict[str, object] = {"tuning": "full"}
        if state.adapter is not None:
            tuning = {"tuning": "lora", "lora_rank": state.adapter.rank, "lora_alpha": state.adapter.alpha}
        update["policy"] = config.policy.model_copy(update=tuning)
    if config.train.optimiser == "auto":
        update["train"] = config.train.model_copy(update={"optimiser": state.optimiser})
    return config.model_copy(update=update)


def planned(config: NodeConfig, plan: MemoryPlan) -> NodeConfig:
    """`config` with nothing left open."""
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"tuning": plan.tuning, "sharing": plan.sharing}),
            "train": config.train.model_copy(
                update={"optimiser": plan.optimiser, "micro_batch_tokens": plan.micro_batch_tokens}
            ),
            "vllm": config.vllm.model_copy(update={"gpu_memory_share": plan.engine_share}),
            "supervise": config.supervise.model_copy(update={"enabled": plan.supervise}),
        }
    )


def machine_of(config: NodeConfig) -> Machine:
    """The device that trainer and engine get, with `policy.memory_gib` in place of what is free there."""
    device = device_of(config)
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
    else:
        memory = psutil.virtual_memory()
        free, total, name = min(memory.available, _container_bytes()), memory.total, "the CPU"
    if config.policy.memory_gib:
        free = int(config.policy.memory_gib * 2**30)
    return Machine(
        device=device,
        name=name,
        free_bytes=free,
        total_bytes=total,
        has_bitsandbytes=find_spec("bitsandbytes") is not None,
        has_peft=find_spec("peft") is not None,
    )


def _container_bytes() -> int:
    """What this process's control group leaves it; the largest of numbers without a limit."""
    for limit, current, parts in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            return max(0, int((CGROUP / limit).read_text()) - _held_bytes(CGROUP / current, CGROUP / parts))
    return sys.maxsize


def _held_bytes(current: Path, parts: Path) -> int:
    """What a control group uses and cannot give back at once, as cached files can be; 0 if it does not
    tell."""
    with contextlib.suppress(OSError, ValueError):
        told = dict(line.split() for line in parts.read_text().splitlines())
        cached = int(told.get("active_file", 0)) + int(told.get("inactive_file", 0))
        return max(0, int(current.read_text()) - cached)
    return 0


def open_engine(
    config: NodeConfig,
    policy: Policy,
    notice: Callable[[NoticeLevel, str], None] | None = None,
    *,
    dtype: str = "float32",
    draws: str = "",
) -> Engine:
    """The configured engine with its own copy of the weights. `notice(level, text)` hears of slow starts and
    of restarts, on any thread; `dtype` is the trainer's, which the embedded engine shares; with other `draws`
    (a node's, a run's) vLLM samples otherwise. Raises ConfigError when vLLM is asked for and not installed,
    ModelError when it cannot use the policy; with `rollout.fallback` the transformers engine takes its place.
    """
    if config.rollout.engine != "vllm":
        return _open_transformers(config, policy, dtype)
    from node.rollout.engine.base import EngineError

    try:
        engine = _open_vllm(config, policy, notice, draws)
    except (ConfigError, ModelError, EngineError) as error:
        if not config.rollout.fallback:
            raise
        _tell_fallback(notice, "cannot be started", error)
        return _open_transformers(config, policy, dtype)
    if not config.rollout.fallback:
        return engine
    from node.rollout.engine.fallback import FallbackEngine

    def fall_back(error: EngineError) -> Engine:
        _tell_fallback(notice, "is lost", error)
        return _open_transformers(config, policy, dtype)

    return FallbackEngine(engine, lost=lambda: engine.lost, fall_back=fall_back)


def _tell_fallback(notice: Callable[[NoticeLevel, str], None] | None, problem: str, error: Exception) -> None:
    if notice is not None:
        notice(NoticeLevel.WARNING, f"vLLM {problem}, the transformers engine takes its place: {error}")


def _open_vllm(
    config: NodeConfig, policy: Policy, notice: Callable[[NoticeLevel, str], None] | None, draws: str
) -> VllmEngine:
    from node.rollout.engine.vllm import VllmEngine

    return VllmEngine(
        policy,
        config.vllm,
        in_flight=config.rollout.in_flight,
        adapter=adapter_of(config),
        sleeps=config.policy.sharing == "sequential",
        seed=_engine_seed(config.seed, draws),
        notice=notice,
    )


def _engine_seed(seed: int, draws: str) -> int:
    """31 bits, of vLLM's own random numbers: with equal ones, nodes of equal weights would draw equal
    rollouts, which peers call copies."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{draws}".encode()).digest()[:4], "big") >> 1


def _open_transformers(config: NodeConfig, policy: Policy, dtype: str) -> Engine:
    from node.rollout.engine.transformers import TransformersEngine

    return TransformersEngine(
        policy,
        device=device_of(config),
        dtype=dtype,
        in_flight=config.rollout.in_flight,
        adapter=adapter_of(config),
        max_batch_tokens=config.train.micro_batch_tokens,
    )


def adapter_of(config: NodeConfig) -> AdapterSpec | None:
    """The adapter that is trained, or None for all weights."""
    if config.policy.tuning != "lora":
        return None
    return AdapterSpec(config.policy.lora_rank, config.policy.lora_alpha)


def device_of(config: NodeConfig) -> Literal["cpu", "cuda"]:
    """Where trainer and engine run. Raises ConfigError when CUDA is asked for and not there."""
    if config.policy.device == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if config.policy.device == "cuda" and not available:
        raise ConfigError("policy.device is 'cuda' and torch sees no CUDA device; set it to 'auto' or 'cpu'")
    return "cuda" if available else "cpu"


def train_settings(config: NodeConfig, charter: Charter) -> TrainSettings:
    """What the trainer and the batches need, memory plan apart. Raises ConfigError for an objective that this
    node cannot feed, and for options that it does not have."""
    from node.train.ess_scaling import EssScaling
    from node.train.objectives import EVERY_TRAINER, Aggregation, Need, open_objective, require
    from node.train.settings import TrainSettings, Treatment, TreatmentSettings
    from node.train.slow_fast import SlowFastSettings
    from node.weight.advantage import ADVANTAGES

    train, weight, device = config.train, config.weight, device_of(config)
    own, compat = open_objective(train.objective, train.objective_options), open_objective("compat")
    require(own, EVERY_TRAINER | {Need.SNAPSHOT, Need.EWMA})  # which are kept as soon as one is needed
    if ADVANTAGES[weight.advantage].drops_pivot and charter.group_size % 2 == 0:
        raise ConfigError(
            f"weight.advantage {weight.advantage!r} leaves one rollout of each group out and needs groups of "
            f"an odd size; those of swarm {charter.name} have {charter.group_size}"
        )
    if weight.advantage == "dr_grpo":
        # Dr.GRPO divides by a constant length instead of by the tokens there are.
        constant = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
        compat = replace(compat, aggregation=constant)
        if "aggregation" not in train.objective_options:
            own = replace(own, aggregation=constant)
    return TrainSettings(
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        optimiser="adamw_8bit" if train.optimiser == "adamw_8bit" else "adamw",
        micro_batch_tokens=train.micro_batch_tokens,
        external_weight=weight.external_weight,
        # Another tokenizer may need several of ours for one of its tokens.
        max_completion_tokens=8 * charter.max_new_tokens,
        length_norm_tokens=charter.max_new_tokens,
        own=own,
        compat=compat,
        ess_scaling=EssScaling(train.ess_base, train.ess_rule) if train.ess_scaling else None,
        slow_fast=SlowFastSettings() if train.slow_fast else None,
        treatment=TreatmentSettings(
            force=None if weight.external == "auto" else Treatment(weight.external),
            advantage=weight.advantage,
        ),
        device=device,
        by_turns=device == "cuda" and config.policy.sharing == "sequential",
        adapter=adapter_of(config),
    )


def open_decoders(policy: Policy, charter: Charter) -> dict[Digest, Decode]:
    """Tokenizers of the charter that this machine has: its own policy's and the bundled ones."""
    wanted = {spec.digest for spec in charter.tokenizers}
    decoders: dict[Digest, Decode] = {policy.tokenizer_digest: policy.decode}
    for folder in sorted(bundled("models").iterdir()):
        if not wanted - decoders.keys():
            break
        if (folder / "tokenizer.json").is_file():
            other = Policy.open(folder)
            if other.tokenizer_digest in wanted:
                decoders.setdefault(other.tokenizer_digest, other.decode)
    return decoders
