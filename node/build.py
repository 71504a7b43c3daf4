"""From a configuration to the parts of a node: policy, trainer, engine, environments, sandbox, charter.

Everything here blocks and is done once, before the network starts; each failure is one sentence. Torch is
imported by the functions that need it, so what needs none (charter, sandbox) is checked before it is loaded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.paths import Home, bundled
from node.rollout.environment import Environment, open_environment
from node.rollout.policy import Policy
from node.sandbox.records import SandboxLimits
from node.sandbox.scorer import Scorer
from node.sandbox.strength import describe
from node.state import write_atomically
from node.verify.tokens import Decode
from protocol.charter import charter_bytes, decode_charter, found, is_member, swarm_id
from protocol.errors import CharterError, ConfigError, ModelError, SandboxError
from protocol.identity import Identity
from protocol.messages import Charter, Digest

if TYPE_CHECKING:
    from node.rollout.engine.base import Engine
    from node.train.settings import TrainSettings

__all__ = [
    "device_of",
    "inspect_charter",
    "load_charter",
    "open_decoders",
    "open_engine",
    "open_environments",
    "open_policy",
    "open_sandbox",
    "require_strength",
    "train_settings",
]


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


def open_engine(
    config: NodeConfig, policy: Policy, notice: Callable[[str, str], None] | None = None
) -> Engine:
    """The configured engine with its own copy of the weights. `notice(level, text)` hears of slow starts and
    of restarts, on any thread. Raises ConfigError when vLLM is asked for and not installed, ModelError when
    it cannot use the policy."""
    if config.rollout.engine == "vllm":
        from node.rollout.engine.vllm import VllmEngine

        return VllmEngine(policy, config.vllm, seed=config.seed, notice=notice)
    from node.rollout.engine.transformers import TransformersEngine

    return TransformersEngine(policy, device=device_of(config))


def device_of(config: NodeConfig) -> str:
    """`cuda` or `cpu`. Raises ConfigError when CUDA is asked for and not there."""
    import torch

    if config.policy.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("policy.device is 'cuda' and torch sees no CUDA device; set it to 'auto' or 'cpu'")
    available = config.policy.device != "cpu" and torch.cuda.is_available()
    return "cuda" if available else "cpu"


def train_settings(config: NodeConfig, charter: Charter) -> TrainSettings:
    """What the trainer and the batches need."""
    from node.train.objectives import Aggregation, Compat, open_objective
    from node.train.settings import TrainSettings, Treatment, TreatmentSettings

    train, weight = config.train, config.weight
    # Dr.GRPO divides by a constant length instead of by the tokens there are.
    dr_grpo = {"aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM_NORM} if weight.advantage == "dr_grpo" else {}
    return TrainSettings(
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        micro_batch_tokens=train.micro_batch_tokens,
        external_weight=weight.external_weight,
        # Another tokenizer may need several of ours for one of its tokens.
        max_completion_tokens=8 * charter.max_new_tokens,
        length_norm_tokens=charter.max_new_tokens,
        own=open_objective(train.objective, dr_grpo),
        compat=open_objective(Compat.name, dr_grpo),
        treatment=TreatmentSettings(
            force=None if weight.external == "auto" else Treatment(weight.external),
            advantage=weight.advantage,
        ),
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
