"""A node's whole configuration: one typed tree, TOML in, JSON out.

Order: defaults < `--config` files in order < `SWARM_...` environment (`SWARM_TRAIN__LEARNING_RATE=1e-4`, an
empty variable counts as unset) < `--set` and flags. A `--config` file that holds the rules of a swarm stands
for `charter` and the first model in them. Unknown keys are errors that name the nearest valid one.
The string under a field is its help; `swarm config schema` prints the JSON schema. Nothing here imports
torch. What all members of a swarm must share is not here but in the charter.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from node.state.paths import Home, bundled, default_home, read_text
from protocol.errors import ConfigError

__all__ = [
    "BroadcastConfig",
    "EvaluateConfig",
    "FollowConfig",
    "MergeConfig",
    "NetworkConfig",
    "NodeConfig",
    "OwnObjective",
    "PolicyConfig",
    "RolloutConfig",
    "ShareConfig",
    "SuperviseConfig",
    "TrainConfig",
    "VerifyConfig",
    "VllmConfig",
    "WeightConfig",
    "load_config",
]

_TEXTUAL = (str, Path)


OwnObjective = Literal[
    "a3po",
    "ais",
    "cispo",
    "copris",
    "dapo",
    "decoupled_ppo",
    "dis",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "f_opd",
    "grpo",
    "gspo",
    "icepop",
    "intellect2",
    "luspo",
    "m2po_clip",
    "m2po_mask",
    "minpro",
    "mis",
    "mu_grpo",
    "opsm",
    "pnpo",
    "ppo_clip",
    "ppo_ewma",
    "sat",
    "soft_sapo",
    "sparse_rl",
    "swarm_sapo",
    "tbpo",
    "tis",
    "topr",
    "topr_token",
    "uncorrected",
    "vcpo",
    "vespo",
]
"""Presets of `node.train.objectives` that are not for other models' groups only; not read from there, because
this module starts without torch."""


class Section(BaseModel):
    """A closed, immutable table of the configuration."""

    # Without infinities, which JSON cannot write: the resolved configuration must load again.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class PolicyConfig(Section):
    path: str = "models/starling"
    """Folder of the policy in Hugging Face layout; a relative path is looked up here, then among those that
    `swarm model get` fetched, then among the bundled ones (wren, starling, rook)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and engine run."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory the node may plan with; 0: what the device has."""
    tuning: Literal["auto", "full", "lora"] = "auto"
    """What is trained. full: all weights. lora: a low-rank adapter. auto: full where it fits."""
    lora_rank: int = Field(32, ge=1, le=512)
    """Rank of the adapter."""
    lora_alpha: float = Field(64.0, gt=0)
    """Scale of the adapter; its output is multiplied by alpha / rank."""
    sharing: Literal["auto", "concurrent", "sequential"] = "auto"
    """One device for engine and trainer. concurrent: both at a time. sequential: the engine sleeps while a
    step is trained. auto: concurrent where both fit."""

    def folder(self, home: Path) -> Path:
        """The policy's folder, absolute; `home` is that of the node. Raises ConfigError when it is
        nowhere."""
        for folder in (Path(self.path).expanduser(), Home(home).model(self.path)):
            if folder.is_dir():
                return folder.resolve()
        for name in (self.path, f"models/{self.path}"):
            with contextlib.suppress(ConfigError):
                return bundled(name)
        raise ConfigError(self._absent())

    def _absent(self) -> str:
        from node.known_models import KNOWN_MODELS

        if self.path in KNOWN_MODELS:
            return f"policy.path {self.path!r} is not on this machine yet; swarm model get {self.path}"
        return (
            f"policy.path {self.path!r} is no folder here, no model that `swarm model get` has fetched, and "
            "none that is bundled; give a folder in Hugging Face layout"
        )


class NetworkConfig(Section):
    transport: Literal["hivemind", "memory", "none"] = "hivemind"
    """hivemind: real sockets. memory: simulation in one process. none: train alone."""
    listen: str = "/ip4/0.0.0.0/tcp/0"
    """Multiaddr to listen on; TCP only. Port 0 picks a free one."""
    bootstraps: tuple[str, ...] = ()
    """Addresses of known nodes; tried again with back-off until one answers."""
    reconcile_s: float = Field(10.0, gt=0)
    """Neighbours compare the announcements they hold this often."""
    max_daemon_bytes: int = Field(512 * 2**20, gt=0)
    """The network daemon is restarted above this memory."""


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates. transformers: embedded, runs everywhere. vllm: in a process of its own; made for long
    rollouts and many at a time."""
    max_staleness: int = Field(1, ge=0)
    """From its completion on, a group is at most so many versions old when it is trained on (AReaL's
    admission rule). A long rollout may have begun earlier."""
    max_in_flight: int = Field(0, ge=0)
    """Partial rollouts: another group begins while fewer than so many rollouts are under way, so there are at
    most group_size - 1 more. Groups go on to training as they complete, and the rest goes on over weight
    updates. 0: synchronous, one batch of groups after the other."""
    in_flight: Literal["continue", "recompute", "recycle"] = "continue"
    """Rollouts under way when new weights come. continue: go on with the cache they have; cheap, and only
    rollouts of a single version have exact log-probabilities. recompute: compute their cache anew at once.
    recycle: stop, keep what they have, go on behind it when there is room."""
    token_budget: int = Field(0, ge=0)
    """Tokens sampled for one version; then generation holds, and the step takes the groups that are complete.
    0: none. Needs max_in_flight."""
    reuse_lenience: float = Field(0.0, ge=0)
    """SPEC-RL: earlier rollouts of a prompt are drafts of new ones. 1: exact acceptance rule; 1.65 in the
    paper with GRPO; 0: off. What is reused is not exactly on-policy."""
    parity_tolerance: float = Field(0.0, ge=0)
    """Nats a token by which engine and trainer may differ on the probe after an update, in the mean; 99 of
    100 tokens by five times as much. 0: 2e-4 in float32, 0.1 in bfloat16."""
    fallback: bool = False
    """When vLLM cannot be started or dies for good, go on with the transformers engine."""

    @pydantic.field_validator("token_budget")
    @classmethod
    def _needs_partial_rollouts(cls, token_budget: int, info: pydantic.ValidationInfo) -> int:
        if token_budget and not info.data.get("max_in_flight"):
            raise ValueError("needs rollout.max_in_flight, since a synchronous batch is never cut short")
        return token_budget


class VllmConfig(Section):
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type the engine computes in; bfloat16 on GPUs."""
    max_concurrent: int = Field(64, ge=1)
    """Rollouts generated at a time."""
    max_context: int = Field(4096, ge=16)
    """Tokens of prompt and answer together, at most what the policy has."""
    kv_cache_mib: int = Field(512, ge=16)
    """Memory for the key-value cache on a CPU."""
    gpu_memory_share: float = Field(0.0, ge=0, lt=1)
    """Share of the GPU's memory that the engine takes, weights and cache together; 0: by the memory plan."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline for loading the model."""
    deadline_s: float = Field(120.0, gt=0)
    """An engine that gives no sign of life for so long is stopped and started again."""
    max_restarts: int = Field(5, ge=0)
    """Deaths of the engine within an hour, failed starts among them, before the node gives up."""


class VerifyConfig(Section):
    enabled: bool = True
    """Off: peers' claims are believed. Only for comparisons."""
    score_timeout_s: float = Field(2.0, gt=0)
    """Limit for scoring one group in the sandbox."""
    queue: int = Field(64, ge=1)
    """Fetched bodies waiting for verification."""


class ShareConfig(Section):
    pool_groups: int = Field(64, ge=1)
    """Groups of peers kept for training."""
    max_uses: int = Field(2, ge=1)
    """How often one stored group is trained on."""
    fetch_parallel: int = Field(4, ge=1)
    """Bodies fetched at a time."""
    fetch_timeout_s: float = Field(10.0, gt=0)
    """Deadline of one body."""


class BroadcastConfig(Section):
    anchor_every: int = Field(32, ge=1, le=1000)
    """Versions between anchors, from which a newcomer starts."""
    keep_gib: float = Field(4.0, gt=0)
    """Disk that anchors and deltas may take, others' that this node passes on among them."""
    upload_mbit: float = Field(0.0, ge=0)
    """Upload of weights in Mbit/s, at most; 0: no limit."""
    download_mbit: float = Field(0.0, ge=0)
    """Download of weights in Mbit/s, at most; 0: no limit."""
    fetch_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one version's weights."""


class FollowConfig(Section):
    owner: str = ""
    """Peer id of the node to generate for; empty: by need and trust, among those of the same base model."""
    owner_timeout_s: float = Field(60.0, gt=0)
    """An owner that shows no sign of life for so long is given up for another one."""


class MergeConfig(Section):
    enabled: bool = False
    """Now and then take the mean of what trainers of this base model have learnt, where a probe on held-out
    prompts is not worse for it. For trainers of all weights. Nodes merge with those whose rule (`strategy` to
    `min_contributions`) is the same."""
    every_windows: int = Field(60, ge=2)
    """Windows of the charter between merges."""
    settle_s: float = Field(20.0, gt=0)
    """A merge is made once nothing new was heard for so long, or half of the time to the next is over."""
    strategy: Literal["mean", "trimmed", "clipping"] = "mean"
    """mean: by age. trimmed: per weight, without the outermost values. clipping: no author moves it far. The
    latter two are for swarms where authors may lie, and need more of them."""
    max_age_windows: int = Field(64, ge=0)
    """Contributions older than the newest by more than this are left out."""
    norm_limit: float = Field(3.0, ge=1)
    """Changes longer than so many times the median are shortened to that."""
    trim: float = Field(0.2, ge=0, lt=0.5)
    """trimmed: share of values left out at each end."""
    clip_radius: float = Field(1.0, gt=0)
    """clipping: radius, in median lengths."""
    clip_rounds: int = Field(3, ge=1)
    """clipping: rounds."""
    min_contributions: int = Field(2, ge=2)
    """Fewer are not merged."""
    probe_prompts: int = Field(64, ge=16)
    """Held-out prompts that are answered before and after."""
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """Of the lower bound of the gain in mean reward that decides."""
    tolerance: float = Field(0.0, ge=0)
    """Loss of mean reward that counts as none. With 0 a gain must be shown, or nothing change."""


class WeightConfig(Section):
    advantage: Literal["dr_grpo", "gapo", "grpo", "mad", "max_rl", "mc_grpo", "rloo"] = "grpo"
    """Advantage inside one group; `swarm objectives list` tells them apart. dr_grpo also divides the loss by
    a constant length instead of by tokens. mc_grpo is for swarms with groups of an odd size, and leaves the
    median rollout of each out."""
    external: Literal["auto", "compat", "hacpo", "own"] = "own"
    """How peers' groups enter the loss. own: as own groups do, by `train.objective`, but by `compat` where
    the tokenizer is another. auto: GRAFT where our group failed and theirs is mixed, HACPO's capability-aware
    term where a prompt is shared, `compat` elsewhere."""
    newcomer_trust: float = Field(0.5, ge=0, le=1)
    """Trust in a peer never seen before."""
    quarantine_windows: float = Field(20.0, gt=0)
    """How long a peer caught lying is left alone the first time; twice as long each further time."""


class TrainConfig(Section):
    steps: int = Field(100, ge=1)
    """Optimiser steps of this run, beyond those of the checkpoint it goes on from."""
    local_groups: int = Field(4, ge=1)
    """Own groups in a step (I)."""
    external_groups: int = Field(4, ge=0)
    """Peers' groups in a step (J), as many as there are in time."""
    external_wait_s: float = Field(2.0, ge=0)
    """How long a step waits for peers' groups before it goes on with fewer; no wait without peers."""
    objective: OwnObjective = "topr"
    """Loss of the own groups: `swarm objectives list` tells them apart."""
    objective_options: dict[str, float | bool | str] = {}
    """Options of the objective in place of its defaults, as in objective_options = { cap = 3.0 }."""
    snapshots: int = Field(8, ge=1)
    """Versions of the weights, the newest among them, that are kept for objectives which need old
    log-probabilities by the very version that generated a token. In RAM: up to a copy of what learns each."""
    snapshot_bytes: int = Field(0, ge=0)
    """RAM that they may take; then fewer are kept. 0: no limit."""
    ewma_beta: float = Field(0.889, ge=0, lt=1)
    """Decay of the moving average of the weights, kept for objectives that need one: the mean age in it is
    beta / (1 - beta) steps."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW's step size after the warm-up."""
    ess_scaling: bool = False
    """Shrink the learning rate of steps that few rollouts decide (VCPO), by the effective sample size of the
    own and followers' ones."""
    slow_fast: bool = False
    """Make four passes over each batch (SFPO): three, a part of the way back, one more; until the entropy
    rises."""
    warmup_steps: int = Field(5, ge=0)
    """Steps of linear warm-up."""
    optimiser: Literal["auto", "adamw", "adamw_8bit"] = "auto"
    """adamw_8bit keeps its moments in 8 bits (needs bitsandbytes). auto: adamw where it fits."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Padded tokens of one forward and backward pass, at most; the memory plan may choose fewer."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; one is written at the end in any case. A run of the same name goes on from
    the newest."""


class SuperviseConfig(Section):
    enabled: Literal[True, False, "auto"] = "auto"
    """Take a bad update back: weights and moments as before it, as a new version. Costs a copy of both in RAM
    (12 bytes for each weight that learns, twice that with probes) at every step. auto: where that fits beside
    the rest; on a GPU only with an adapter, since all weights take long to copy from there."""
    kl_step: float = Field(0.5, ge=0)
    """Bad is a step that moves the policy by more than this on what it trained on, nats per token; 0: no
    limit. Not measured where engine and trainer take turns on the device."""
    ess: float = Field(0.05, ge=0, lt=1)
    """Bad is a step whose own tokens have a smaller effective sample size than this share of them; 0: no
    limit. To be lowered where rollouts are many versions old."""
    grad_norm: float = Field(10.0, ge=0)
    """Bad is a gradient norm of more than this times the usual one; 0: no limit."""
    in_a_row: int = Field(3, ge=1)
    """After so many bad updates in a row, or bad probes, the run ends; after so many large gradient norms
    they are the usual ones."""
    probe_every: int = Field(0, ge=0)
    """Steps between probes on held-out prompts, for a decline that no single step shows; 0: none."""
    probe_prompts: int = Field(64, ge=16)
    """Held-out prompts of a probe."""
    probe_tolerance: float = Field(0.0, ge=0)
    """Bad is a probe that is surely worse than the last good one by more than this loss of mean reward."""

    @pydantic.field_validator("grad_norm")
    @classmethod
    def _above_the_usual(cls, grad_norm: float) -> float:
        if 0 < grad_norm <= 1:
            raise ValueError("is a multiple of the usual norm, more than 1; 0 for no limit")
        return grad_norm


class EvaluateConfig(Section):
    prompts_per_task: int = Field(128, ge=1)
    """Held-out prompts of each task, the same before, during and after."""
    every: int = Field(50, ge=1)
    """Steps between evaluations."""


class NodeConfig(Section):
    """Everything one node needs to know besides the charter."""

    name: str = Field("node", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,31}$")
    """Shown to others; not an identity."""
    home: Path = Field(default_factory=default_home)
    """Folder of key, charter, state and runs."""
    run: str = Field("latest", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$")
    """Name of the run's folder under `<home>/runs`."""
    charter: str = ""
    """Path of the charter (signed, or TOML for a swarm of our own); empty: `<home>/charter.bin`, else the
    demo's."""
    seed: int = Field(0, ge=0)
    """Seed of sampling and of everything else random in this node."""
    linger: bool = False
    """After the last step go on serving peers until stopped."""
    role: Literal["trainer", "follower"] = "trainer"
    """trainer: owns a policy and trains it. follower: has no trainer; tracks another node's policy and
    generates for it."""
    policy: PolicyConfig = PolicyConfig()
    network: NetworkConfig = NetworkConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()
    verify: VerifyConfig = VerifyConfig()
    share: ShareConfig = ShareConfig()
    broadcast: BroadcastConfig = BroadcastConfig()
    follow: FollowConfig = FollowConfig()
    merge: MergeConfig = MergeConfig()
    weight: WeightConfig = WeightConfig()
    train: TrainConfig = TrainConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @pydantic.field_validator("rollout")
    @classmethod
    def _reuse_is_for_one(cls, rollout: RolloutConfig, info: pydantic.ValidationInfo) -> RolloutConfig:
        network = info.data.get("network")
        if rollout.reuse_lenience and network is not None and network.transport != "none":
            raise ValueError(
                "rollout.reuse_lenience needs network.transport 'none': groups that repeat earlier ones are "
                "refused by peers as replayed"
            )
        return rollout

    @pydantic.field_validator("merge")
    @classmethod
    def _merging_is_for_trainers(cls, merge: MergeConfig, info: pydantic.ValidationInfo) -> MergeConfig:
        network = info.data.get("network")
        if not merge.enabled:
            return merge
        if info.data.get("role") == "follower":
            raise ValueError("merge.enabled is for role 'trainer'; a follower takes its owner's weights")
        if network is not None and network.transport == "none":
            raise ValueError("merge.enabled needs a network; there is nobody to merge with")
        return merge

    @pydantic.field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        """`~` means the user's folder wherever the key comes from, and other processes get this path too."""
        return home.expanduser().absolute()


def load_config(files: Iterable[Path] = (), overrides: Mapping[str, Any] | None = None) -> NodeConfig:
    """The resolved configuration. `overrides` maps dotted keys to values or to TOML text of them. Raises
    ConfigError in one sentence."""
    known = dict(_known_keys(NodeConfig))
    values: dict[str, Any] = {}
    for file in files:
        _merge(values, _read(file))
    for key, value in {**_environment(), **(overrides or {})}.items():
        _refuse_unknown_key(key, known)
        *sections, last = key.split(".")
        nested = {last: _plain(value, is_text=known[key] in _TEXTUAL)}
        for section in reversed(sections):
            nested = {section: nested}
        _merge(values, nested)
    _refuse_unknown_keys(values, known)
    try:
        return NodeConfig.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"config key {key} = {first.get('input')!r}: {first['msg']}") from None


def _environment() -> dict[str, str]:
    """`SWARM_TRAIN__STEPS=3` as {"train.steps": "3"}."""
    prefix = "SWARM_"
    found = {
        key[len(prefix) :]: value for key, value in os.environ.items() if key.startswith(prefix) and value
    }
    return {key.lower().replace("__", "."): value for key, value in found.items()}


def _plain(value: Any, *, is_text: bool) -> Any:
    """A flag's or variable's text as the TOML value it spells, or as the text itself. Where text is wanted,
    `7` and `2026-01-31` are text."""
    if not isinstance(value, str):
        return value
    try:
        spelled = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
    return value if is_text and not isinstance(spelled, str) else spelled


def _read(file: Path) -> dict[str, Any]:
    path = file if file.is_file() or not _is_bare_name(file) else _profile(file)
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"config file {str(file)!r} cannot be read: {error.strerror}") from None
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        values = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a table of config keys")
    return _for_founding(path, values) if "environments" in values else values


def _for_founding(path: Path, rules: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules of a swarm mean as a configuration: found it, with the first model that they name."""
    match rules.get("models"):
        case [{"name": str(name)}, *_]:
            return {"charter": str(path.absolute()), "policy": {"path": name}}
    return {"charter": str(path.absolute())}


def _is_bare_name(file: Path) -> bool:
    """Only a name can mean a profile; a path with a folder in it means that file."""
    return file.parent == Path(".")


def _profile(file: Path) -> Path:
    try:
        return bundled(file.name if file.suffix else f"{file.name}.toml")
    except ConfigError:
        raise ConfigError(f"no config file {str(file)!r}, and no profile of that name in configs/") from None


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _refuse_unknown_key(key: str, known: Collection[str]) -> None:
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown config key {key!r}; the nearest valid one is {nearest!r}")


def _refuse_unknown_keys(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> None:
    for key, value in values.items():
        _refuse_unknown_key(prefix + key, known)
        if isinstance(value, Mapping) and _is_section(known[prefix + key]):
            _refuse_unknown_keys(value, known, f"{prefix}{key}.")


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Every dotted key with its type; sections too."""
    for name, field in model.model_fields.items():
        yield prefix + name, field.annotation
        if _is_section(field.annotation):
            yield from _known_keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
