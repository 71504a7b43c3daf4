"""What a policy takes in memory, trained in one way or another: every estimate of the memory plan.

Facts of the model and the wishes of the configuration go in, sizes by owner and part come out. Nothing is
loaded and nothing is measured here, so the same inputs give the same estimates anywhere. Only the device's
memory is estimated: with CUDA, what lies in RAM meanwhile is not. Which way is chosen: `node/open/memory.py`.

Two owners hold memory, trainer and engine. Each part of theirs is there always, or only while its owner
works; `concurrent` owners work at the same time, `sequential` ones do not.

MEASURED, the trainer of SmolLM2-135M in float32 on a CPU, most resident memory in a second step of two
passes:

    full, adamw       512 tokens a pass   4505 MiB   estimated 4425   -2 %
    full, adamw       256                 3918                 3860   -1 %
    full, adamw_8bit  256                 3395                 3094   -9 %
    lora, adamw       512                 3067                 2517  -18 %

Estimates for CUDA and vLLM have not been held against a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from node.config import NodeConfig
from node.rollout.policy import Policy
from protocol.messages import Charter

__all__ = ["FULL", "GIB", "LORA", "ModelFacts", "Part", "Way", "Wishes", "parts_of"]

GIB = 2**30
PROMPT_TOKENS = 256
"""Room for a prompt; environments do not tell how long theirs get."""

TORCH_RAM = GIB // 2
"""MEASURED: torch, transformers and a tokenizer in one process, 0.49 GiB of RAM."""
CUDA_CONTEXT = GIB // 2
"""ASSUMED: context and kernels of one process on a GPU, 0.3 to 0.6 GiB on current drivers."""
VLLM_RAM = 3 * GIB // 2
"""ASSUMED: vLLM's own two processes on a CPU, beside weights and cache."""
VLLM_GPU = GIB
"""ASSUMED: vLLM's context, graphs and buffers on a GPU, beside weights and cache."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256}
"""Bytes per parameter: two moments, in 8 bits with a float32 scale for each 256 values."""
LOGIT_COPIES = 2
"""MEASURED: tensors of tokens x vocabulary that the trainer has at the peak, counted as float32: logits, and
either those of the start or the gradients."""
SCORED_COPIES = 3
"""As many of an engine that scores tokens: logits, log-probabilities, and one on the way between them."""
ADAPTER_FACTOR = 1.25
"""MEASURED: passes with an adapter hold about a quarter more than the inputs of the layers."""
FULL, LORA = "full", "lora"
Owner = Literal["trainer", "engine"]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder of the Llama kind."""

    params: int
    """Tied weights counted once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int

    @classmethod
    def of(cls, policy: Policy) -> ModelFacts:
        """From the policy's config.json and weight files. What this kind of model does not name is taken from
        usual proportions."""
        config = json.loads((policy.path / "config.json").read_bytes())
        return cls.read(config, policy.params, policy.max_positions)

    @classmethod
    def read(cls, config: Mapping[str, Any], params: int, max_positions: int) -> ModelFacts:
        """From the values of a config.json."""
        hidden = int(config.get("hidden_size") or config.get("n_embd") or 1024)
        heads = int(config.get("num_attention_heads") or config.get("n_head") or max(1, hidden // 64))
        return cls(
            params=params,
            layers=int(config.get("num_hidden_layers") or config.get("n_layer") or 1),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 4 * hidden),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            max_positions=max_positions,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def adapter_params(self, rank: int) -> int:
        """Number of parameters of an adapter on all linear layers of attention and MLP."""
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def cache_bytes(self, dtype: str) -> int:
        """Size of the keys and values of one token."""
        return 2 * self.layers * self.kv_width * BYTES[dtype]

    def pass_bytes(self, dtype: str, *, adapter: bool, recompute: bool) -> int:
        """What one token of a training pass keeps for the way back, logits apart: in each layer the inputs of
        its norms, projections, attention and MLP; with `recompute` its own input, and the rest of one."""
        inputs = 8 * self.hidden + 5 * self.query_width + 4 * self.kv_width + 4 * self.intermediate
        layer = BYTES[dtype] * inputs
        if adapter:
            # The adapter's inputs are cast to its own type, for each linear layer anew.
            cast = 5 * self.hidden + self.query_width + self.intermediate if dtype != "float32" else 0
            layer = int(ADAPTER_FACTOR * layer) + 4 * cast
        return layer + self.layers * BYTES[dtype] * self.hidden if recompute else self.layers * layer


@dataclass(frozen=True)
class Wishes:
    """What the configuration fixes ("auto" leaves it to the plan) and how much work there is."""

    tuning: str
    optimiser: str
    sharing: str
    lora_rank: int
    micro_batch_tokens: int
    """At most so many padded tokens in a pass."""
    step_tokens: int
    """All rollouts of a step, with their prompts."""
    row_tokens: int
    """One rollout with its prompt: the smallest pass there is."""
    rollouts: int
    """In flight at a time."""
    group_size: int
    engine: str
    engine_dtype: str
    """Type of vLLM's weights; the embedded engine computes as the trainer does."""
    fixed_cache_bytes: int = 0
    """Size of vLLM's cache on a CPU."""
    fixed_share: float = 0.0
    """Share of the GPU's memory for vLLM; 0: as much as it needs."""
    fallback: bool = False
    """The newest weights are kept for an engine that takes vLLM's place."""
    supervise: bool | Literal["auto"] = False
    """A state to go back to is kept before each step."""
    probes: bool = False
    """And another one at each probe."""
    snapshots: int = 0
    """Earlier versions of the weights that the objective needs, the newest among them."""
    snapshot_bytes: int = 0
    """Their limit; 0: none."""
    averages: int = 0
    """Moving averages of the weights that the objective needs."""
    trains: bool = True
    """False for a follower: there is no trainer, and weights that come in are kept beside the engine's."""
    anew: Wishes | None = None
    """Those of a new run, where this one's checkpoint fixes what the configuration leaves open."""

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        charter: Charter,
        facts: ModelFacts,
        device: str,
        needs: Collection[str] = (),
    ) -> Wishes:
        """What a node of this swarm wishes for. `needs`: what its objective asks for
        (`node.train.objectives.Need`)."""
        row_tokens = min(facts.max_positions, PROMPT_TOKENS + charter.max_new_tokens)
        train, on_vllm = config.train, config.rollout.engine == "vllm"
        rollouts = train.local_groups * charter.group_size
        if config.rollout.max_in_flight:  # a group begins while fewer are under way
            rollouts = config.rollout.max_in_flight + charter.group_size - 1
        groups = train.local_groups + (train.external_groups if config.network.transport != "none" else 0)
        return cls(
            tuning=config.policy.tuning,
            optimiser=train.optimiser,
            sharing=config.policy.sharing,
            lora_rank=config.policy.lora_rank,
            micro_batch_tokens=train.micro_batch_tokens,
            step_tokens=groups * charter.group_size * row_tokens,
            row_tokens=row_tokens,
            rollouts=min(rollouts, config.vllm.max_concurrent) if on_vllm else rollouts,
            group_size=charter.group_size,
            engine=config.rollout.engine,
            engine_dtype=config.vllm.dtype,
            fixed_cache_bytes=config.vllm.kv_cache_mib * 2**20 if on_vllm and device == "cpu" else 0,
            fixed_share=config.vllm.gpu_memory_share if on_vllm and device == "cuda" else 0.0,
            fallback=on_vllm and config.rollout.fallback,
            supervise=config.supervise.enabled if config.role == "trainer" else False,
            probes=config.supervise.probe_every > 0,
            snapshots=train.snapshots if "snapshot" in needs else 0,
            snapshot_bytes=train.snapshot_bytes,
            averages=int("ewma" in needs),
            trains=config.role == "trainer",
        )


@dataclass(frozen=True)
class Way:
    """One way to train."""

    tuning: str
    optimiser: str
    sharing: str
    recompute: bool
    """Layers are computed once more on the way back."""
    micro_batch_tokens: int
    """At most so many padded tokens in a pass."""
    on_gpu: bool
    rollouts: int = 0
    """In flight at a time, for which the engine has cache; 0: as many as are wished for."""

    @property
    def dtype(self) -> str:
        """Type of the trainer's weights. Frozen ones need no more digits than they came with; those that
        learn need all."""
        return "bfloat16" if self.tuning == LORA and self.on_gpu else "float32"


@dataclass(frozen=True)
class Part:
    """One estimate. `always`: also while its owner does not work."""

    owner: Owner
    name: str
    size_bytes: int
    always: bool


def parts_of(facts: ModelFacts, wishes: Wishes, way: Way) -> tuple[Part, ...]:
    """Everything that trainer (or follower) and engine keep in memory when the policy is trained this way."""
    pass_tokens = min(max(way.micro_batch_tokens, wishes.row_tokens), wishes.step_tokens)
    wishes = replace(wishes, rollouts=way.rollouts or wishes.rollouts)
    if wishes.engine != "vllm":
        wishes = replace(wishes, engine_dtype=way.dtype)
    trainer = _trainer_parts(facts, wishes, way, pass_tokens)
    if not wishes.trains:
        trainer = _follower_parts(facts, wishes, way)
    return (*trainer, *_engine_parts(facts, wishes, way, pass_tokens))


def _trainer_parts(facts: ModelFacts, wishes: Wishes, way: Way, pass_tokens: int) -> list[Part]:
    """By turns with the engine on a GPU, the trainer's weights lie in RAM while it does not work."""
    full, on_gpu = way.tuning == FULL, way.on_gpu
    weights = facts.params * BYTES[way.dtype]
    learning = _learning(facts, wishes, way)
    # Two more gradients of the vocabulary's matrix while its uses at both ends are added up.
    ends = 2 * facts.vocab * facts.hidden if full else 0
    activations = facts.pass_bytes(way.dtype, adapter=not full, recompute=way.recompute)
    beside = Part("trainer", "start copy", weights, not on_gpu)
    if not full:
        beside = Part("trainer", "adapter", learning * 4, not on_gpu)
    return [
        Part("trainer", "weights", weights, not on_gpu),
        beside,
        *([] if on_gpu else _copies(facts, wishes, way)),
        Part("trainer", "moments", int(learning * MOMENTS[way.optimiser]), not on_gpu),
        Part("trainer", "gradients", (learning + ends) * 4, False),
        Part("trainer", "activations", pass_tokens * activations, False),
        Part("trainer", "logits", pass_tokens * facts.vocab * 4 * LOGIT_COPIES, False),
        Part("trainer", "fixed", CUDA_CONTEXT if on_gpu else TORCH_RAM, True),
    ]


def _learning(facts: ModelFacts, wishes: Wishes, way: Way) -> int:
    """How many parameters are trained."""
    return facts.params if way.tuning == FULL else facts.adapter_params(wishes.lora_rank)


def _copies(facts: ModelFacts, wishes: Wishes, way: Way) -> list[Part]:
    """What is kept in RAM of the trained parameters at other times: to go back to, and to say how probable a
    rollout once was."""
    learning = _learning(facts, wishes, way)
    weights = learning * BYTES["float32"]
    states = 0 if wishes.supervise is not True else 2 if wishes.probes else 1
    # A version takes as little as half a copy, but a whole one at a high learning rate.
    snapshots = min(wishes.snapshots * weights, wishes.snapshot_bytes or wishes.snapshots * weights)
    sizes = {
        "good state": states * (weights + int(learning * MOMENTS[way.optimiser])),
        "snapshots": snapshots,
        "average": wishes.averages * weights,
    }
    return [Part("trainer", name, size, True) for name, size in sizes.items() if size]


def _follower_parts(facts: ModelFacts, wishes: Wishes, way: Way) -> list[Part]:
    """In the trainer's place: three copies in bfloat16 in RAM (of the base, of this version, of the next one
    while it is made), one on its way into the engine, and in RAM what vLLM is probed against."""
    copies = 1 if way.on_gpu else 4
    probed = wishes.engine == "vllm" and not way.on_gpu
    return [
        *([Part("trainer", "reference", facts.params * BYTES["float32"], True)] if probed else []),
        Part("trainer", "versions", copies * _learning(facts, wishes, way) * BYTES["bfloat16"], True),
        Part("trainer", "fixed", CUDA_CONTEXT if way.on_gpu else TORCH_RAM, True),
    ]


def _engine_parts(facts: ModelFacts, wishes: Wishes, way: Way, pass_tokens: int) -> list[Part]:
    """vLLM gives a GPU's memory back while it sleeps; the embedded engine keeps its weights, and lives in the
    trainer's process."""
    on_vllm, on_gpu = wishes.engine == "vllm", way.on_gpu
    weights = facts.params * BYTES[wishes.engine_dtype]
    if on_vllm and not on_gpu and way.tuning == FULL:
        weights *= 2  # the copy that weight updates are found against
    cache = wishes.fixed_cache_bytes or (
        wishes.rollouts * wishes.row_tokens * facts.cache_bytes(wishes.engine_dtype)
    )
    at_once = wishes.row_tokens if on_vllm else min(pass_tokens, wishes.group_size * wishes.row_tokens)
    scored = max(wishes.rollouts, at_once)
    fixed = (VLLM_GPU if on_gpu else VLLM_RAM) if on_vllm else 0
    parts = [
        Part("engine", "weights", weights, not (on_vllm and on_gpu)),
        Part("engine", "cache", cache, not on_gpu and on_vllm),
        Part("engine", "logits", scored * facts.vocab * 4 * SCORED_COPIES, False),
        Part("engine", "fixed", fixed, True),
    ]
    if wishes.fallback and not on_gpu:
        kept = _learning(facts, wishes, way) * BYTES["float32"]
        parts.append(Part("engine", "copy to fall back with", kept, True))
    return parts
