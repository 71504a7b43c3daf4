"""The configured policy, and the charter's tokenizers and tasks.

Everything here blocks and is done once, before the network starts; each failure is one sentence.
"""

from __future__ import annotations

from dataclasses import replace

from node.config import NodeConfig
from node.environment.framing import framing
from node.rollout.adapter import AdapterSpec
from node.rollout.policy import Policy
from node.sandbox.host import SandboxedHost
from node.sandbox.records import SandboxLimits
from node.state.paths import Home, bundled
from node.state.tasks import blobs_of
from node.verify.tokens import Decode
from protocol.errors import CharterError, ModelError, SandboxError
from protocol.messages import Charter, Digest

__all__ = [
    "adapter_of",
    "open_decoders",
    "open_host",
    "open_policy",
    "require_fit",
]


def open_policy(config: NodeConfig, charter: Charter) -> Policy:
    """The configured policy, which samples no row beyond the charter's words and frames questions as the
    charter says. Raises ConfigError for what is no framing, ModelError when its
    tokenizer is not one of the charter's, or its end token not one that the charter names for it."""
    policy = Policy.open(config.policy.folder(config.home))
    if policy.tokenizer_digest not in {spec.digest for spec in charter.tokenizers}:
        names = ", ".join(spec.name for spec in charter.tokenizers)
        raise ModelError(
            f"the tokenizer of {policy.path} ({policy.tokenizer_digest[:12]}) is not in the charter, "
            f"which knows {names}"
        )
    spec = next(spec for spec in charter.tokenizers if spec.digest == policy.tokenizer_digest)
    if not set(policy.end_token_ids) <= set(spec.end_token_ids):
        theirs, ours = (" or ".join(map(str, ids)) for ids in (spec.end_token_ids, policy.end_token_ids))
        raise ModelError(
            f"{policy.path} ends with token {ours}, the charter's {spec.name} with {theirs}: peers would "
            "refuse its completions; mend eos_token in tokenizer_config.json, eos_token_id in config.json "
            "and generation_config.json"
        )
    # Whatever the charter has for an end is one: peers refuse what goes on behind it.
    policy = replace(policy, end_token_ids=spec.end_token_ids).limited_to(spec.vocab_size)
    policy = policy.framed({each.name: framing(each) for each in charter.environments})
    for each in charter.environments:
        policy.encode_prompt("What is 3 + 4?", each.name)  # a template may refuse what a charter frames
    return policy


def adapter_of(config: NodeConfig) -> AdapterSpec | None:
    """The adapter that is trained, or None for all weights."""
    if config.policy.tuning != "lora":
        return None
    return AdapterSpec(config.policy.lora_rank, config.policy.lora_alpha)


def open_host(config: NodeConfig, charter: Charter) -> SandboxedHost:
    """The tasks of this charter behind their walls, not started yet. Raises ConfigError for a task in a file
    that is not here."""
    limits = SandboxLimits(
        cpu_s=max(1, round(config.verify.score_timeout_s)), wall_s=3 * config.verify.score_timeout_s
    )
    blobs = blobs_of(Home(config.home), charter.environments)
    return SandboxedHost(charter.environments, limits, blobs=blobs, hidden_paths=[str(config.home)])


def require_fit(host: SandboxedHost) -> None:
    """Raise CharterError when the started `host` has a task whose prompts differ between machines, and
    SandboxError when its walls are too weak for one that executes answers."""
    for name in host.unrepeatable:
        raise CharterError(
            f"prompts of {name} depend on Python's hash order, so peers cannot derive them again; "
            "leave it out of the charter"
        )
    if host.evaluating and not host.report.may_evaluate:
        raise SandboxError(
            f"{host.evaluating[0]} executes the answers it scores, and the sandbox here is too weak for that "
            f"({host.walls}); leave that swarm, or run where user namespaces are allowed"
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
