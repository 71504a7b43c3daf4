"""From a configuration to the parts of a node: policy, trainer, engine, environments, sandbox, charter.

Everything here blocks and is done once, before the network starts; each failure is one sentence. Heavy
imports (torch) happen on importing this module, so the command line imports it late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from node.config import NodeConfig
from node.paths import Home, bundled
from node.rollout.engine.base import Engine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.environment import Environment, open_environment
from node.rollout.policy import Policy
from node.sandbox.records import SandboxLimits
from node.sandbox.scorer import Scorer
from node.sandbox.strength import describe
from node.state import write_atomically
from node.train.objectives import open_objective
from node.train.settings import TrainSettings, Treatment, TreatmentSettings
from node.verify.tokens import Decode
from protocol.charter import charter_bytes, decode_charter, found, is_member
from protocol.errors import CharterError, ConfigError, ModelError, SandboxError
from protocol.identity import Identity
from protocol.messages import Charter, Digest

__all__ = [
    "load_charter",
    "open_decoders",
    "open_engine",
    "open_environments",
    "open_policy",
    "open_sandbox",
    "train_settings",
]

FORCED = {"auto": None, "compat": Treatment.COMPAT, "hacpo": Treatment.HACPO, "dppo_tv": Treatment.OWN}


def load_charter(config: NodeConfig, identity: Identity, now_ms: int) -> Charter:
    """The swarm's charter: a signed file, or TOML that this node founds a swarm of its own with. Without any,
    the demo's rules. Raises CharterError or ConfigError."""
    home = Home(config.home)
    path = Path(config.charter).expanduser() if config.charter else home.charter
    if config.charter and not path.exists():
        path = bundled(config.charter)
    if path.exists() and path.suffix != ".toml":
        try:
            charter = decode_charter(path.read_bytes())
        except CharterError as error:
            raise CharterError(f"{path}: {error}") from None
    else:
        text = (path if path.exists() else bundled("demo-charter.toml")).read_text(encoding="utf-8")
        charter = found(identity, text, now_ms)
        write_atomically(home.charter, charter_bytes(charter))
    if not is_member(charter, identity.peer_id):
        raise CharterError(
            f"swarm {charter.name} is closed and {identity.peer_id} is not a member; ask its founder"
        )
    return charter


def open_policy(config: NodeConfig, charter: Charter) -> Policy:
    """The configured policy; its tokenizer must be one of the charter's."""
    policy = Policy.open(config.policy.folder())
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


def open_sandbox(config: NodeConfig, charter: Charter, environments: Mapping[str, Environment]) -> Scorer:
    """The started scoring sandbox. Raises SandboxError when it is too weak for what the charter asks."""
    limits = SandboxLimits(
        cpu_s=max(1, round(config.verify.score_timeout_s)), wall_s=3 * config.verify.score_timeout_s
    )
    scorer = Scorer(charter.environments, limits, hidden_paths=[str(config.home)])
    report = scorer.start()
    evaluating = [name for name, environment in environments.items() if environment.evaluates_answers]
    if evaluating and not report.may_evaluate:
        scorer.close()
        raise SandboxError(
            f"{evaluating[0]} executes the answers it scores, and the sandbox here is too weak for that "
            f"({describe(report)}); leave that swarm, or run where user namespaces are allowed"
        )
    return scorer


def open_engine(
    config: NodeConfig, policy: Policy, notice: Callable[[str, str], None] | None = None
) -> Engine:
    """The configured engine with its own copy of the weights. `notice(level, text)` hears of slow starts and
    of restarts, on any thread. Raises ConfigError when vLLM is asked for and not installed, ModelError when
    it cannot use the policy."""
    if config.rollout.engine == "vllm":
        from node.rollout.engine.vllm import VllmEngine

        return VllmEngine(policy, config.vllm, seed=config.seed, notice=notice)
    return TransformersEngine(policy, device=device_of(config))


def device_of(config: NodeConfig) -> str:
    """`cuda` or `cpu`. Raises ConfigError when CUDA is asked for and not there."""
    if config.policy.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("policy.device is 'cuda' and torch sees no CUDA device; set it to 'auto' or 'cpu'")
    available = config.policy.device != "cpu" and torch.cuda.is_available()
    return "cuda" if available else "cpu"


def train_settings(config: NodeConfig, charter: Charter) -> TrainSettings:
    """What the trainer and the batches need."""
    train, weight = config.train, config.weight
    return TrainSettings(
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        micro_batch_tokens=train.micro_batch_tokens,
        external_weight=weight.external_weight,
        # Another tokenizer may need several of ours for one of its tokens.
        max_completion_tokens=8 * charter.max_new_tokens,
        length_norm_tokens=charter.max_new_tokens,
        own=open_objective(train.objective),
        treatment=TreatmentSettings(force=FORCED[weight.external], advantage=weight.advantage),
        device=device_of(config),
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
