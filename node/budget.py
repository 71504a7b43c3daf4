"""The memory plan: does a policy fit on this machine, and how is it trained so that it does?

Facts of the model, the machine and the wishes of the configuration go in; how to tune, which optimiser,
whether engine and trainer share the device by turns, and how many tokens a pass takes come out, with every
estimate behind them. Nothing is loaded and nothing is measured here, so the same three inputs give the same
plan anywhere. Only the device's memory is planned: with CUDA, what lies in RAM meanwhile is not.

Two owners hold memory, trainer and engine. Each part of theirs is held always, or only while its owner works;
`concurrent` owners work at the same time, `sequential` ones do not.

MEASURED, the trainer of SmolLM2-135M in float32 on a CPU, most resident memory in a second step of two
passes:

    full, adamw       512 tokens a pass   4505 MiB   estimated 4425   -2 %
    full, adamw       256                 3918                 3860   -1 %
    full, adamw_8bit  256                 3395                 3094   -9 %
    lora, adamw       512                 3067                 2517  -18 %

Estimates for CUDA and vLLM have not been held against a GPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from node.config import NodeConfig
from node.rollout.policy import Policy
from protocol.errors import ConfigError
from protocol.messages import Charter

__all__ = ["BudgetError", "Machine", "MemoryPlan", "ModelFacts", "Part", "Wishes", "plan_memory"]

GIB = 2**30
USABLE = 0.9
"""Share of the free memory that is planned with; the rest is for fragments and for what is estimated low."""
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


class BudgetError(ConfigError):
    """The policy does not fit on this machine as wished; the message says what to change and shows the
    estimate."""


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
        hidden = int(config.get("hidden_size") or config.get("n_embd") or 1024)
        heads = int(config.get("num_attention_heads") or config.get("n_head") or max(1, hidden // 64))
        return cls(
            params=policy.params,
            layers=int(config.get("num_hidden_layers") or config.get("n_layer") or 1),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 4 * hidden),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=policy.vocab_size,
            max_positions=policy.max_positions,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def adapter_params(self, rank: int) -> int:
        """Of an adapter on all linear layers of attention and MLP."""
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def cache_bytes(self, dtype: str) -> int:
        """Keys and values of one token."""
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
class Machine:
    """The device that trainer and engine share."""

    device: Literal["cpu", "cuda"]
    name: str
    free_bytes: int
    """Memory that nobody else has."""
    total_bytes: int
    has_bitsandbytes: bool = True
    """8-bit moments can be kept."""
    has_peft: bool = True
    """An adapter can be trained."""

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.free_bytes)


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
    """Of vLLM's weights; the embedded engine computes as the trainer does."""
    fixed_cache_bytes: int = 0
    """Of vLLM's cache on a CPU."""
    fixed_share: float = 0.0
    """Of the GPU's memory for vLLM; 0: as much as it needs."""
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
        """Of a node of this swarm. `needs`: what its objective asks for (`node.train.objectives.Need`)."""
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
class Part:
    """One estimate. `always`: also while its owner does not work."""

    owner: Owner
    name: str
    size_bytes: int
    always: bool


@dataclass(frozen=True)
class MemoryPlan:
    """How to train, and what it takes."""

    machine: Machine
    tuning: str
    optimiser: str
    sharing: str
    dtype: str
    """Of the trainer's weights."""
    recompute: bool
    """Layers are computed once more on the way back."""
    micro_batch_tokens: int
    parts: tuple[Part, ...]
    engine_share: float = 0.0
    """Of the GPU's memory, for vLLM; 0 where that does not apply."""
    supervise: bool = False
    """Bad steps are taken back."""
    trains: bool = True
    """False for a follower, where what is tuned says what the owner tunes."""

    @property
    def total_bytes(self) -> int:
        """The most that is held at one time."""
        working = [
            sum(part.size_bytes for part in self.parts if part.owner == owner and not part.always)
            for owner in ("trainer", "engine")
        ]
        always = sum(part.size_bytes for part in self.parts if part.always)
        return always + (sum(working) if self.sharing == "concurrent" else max(working))

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.machine.usable_bytes

    def _way(self) -> str:
        if not self.trains:
            return f"follows {self.tuning} tuning"
        supervised = "supervised" if self.supervise else "unsupervised"
        return f"{self.tuning} tuning, {self.optimiser}, {self.sharing}, {supervised}"

    def lines(self) -> Iterator[str]:
        """The table, for people."""
        machine = self.machine
        yield (
            f"memory plan for {machine.name}: {self._way()}, "
            f"{self.micro_batch_tokens} tokens a pass{', layers recomputed' if self.recompute else ''}"
        )
        for owner in ("trainer", "engine"):
            parts = [part for part in self.parts if part.owner == owner]
            told = "  ".join(f"{part.name} {_gib(part.size_bytes)}" for part in parts)
            name = owner if self.trains or owner == "engine" else "follower"
            yield f"  {name:8} {told}  = {_gib(sum(part.size_bytes for part in parts))} GiB"
        at_once = "at the same time" if self.sharing == "concurrent" else "by turns"
        yield (
            f"  {at_once} {_gib(self.total_bytes)} of {_gib(machine.usable_bytes)} GiB "
            f"({_gib(machine.free_bytes)} free, {_gib(machine.total_bytes)} in all)"
        )


def plan_memory(facts: ModelFacts, machine: Machine, wishes: Wishes) -> MemoryPlan:
    """The first way to train that fits, in this order: all weights; with 8-bit moments; by turns with the
    engine; an adapter; an adapter by turns. Each rather without computing layers anew, and with the most
    tokens a pass that fit. Where it is left to the plan, supervised if that way then still fits, with fewer
    tokens a pass perhaps; on a GPU only with an adapter, since all weights and moments take long to copy from
    there at every step. Raises BudgetError."""
    _require_share(facts, machine, wishes)
    if wishes.supervise != "auto":
        return _first(facts, machine, wishes)
    plan = _first(facts, machine, replace(wishes, supervise=False))
    if machine.device == "cuda" and plan.tuning == FULL:
        return plan
    same = replace(wishes, supervise=True, tuning=plan.tuning, optimiser=plan.optimiser, sharing=plan.sharing)
    ways = (way for way in _plans(facts, machine, same) if way.recompute == plan.recompute)
    return next((way for way in ways if way.fits), plan)


def _first(facts: ModelFacts, machine: Machine, wishes: Wishes) -> MemoryPlan:
    plans = _plans(facts, machine, wishes)
    smallest = next(plans)
    for plan in (smallest, *plans):
        if plan.fits:
            return plan
        if plan.total_bytes < smallest.total_bytes:
            smallest = plan
    raise BudgetError(
        f"this policy needs {_gib(smallest.total_bytes)} GiB here and may use {_gib(machine.usable_bytes)}; "
        f"{_remedy(facts, machine, wishes, smallest)}\n" + "\n".join(smallest.lines())
    )


def _require_share(facts: ModelFacts, machine: Machine, wishes: Wishes) -> None:
    """Raises BudgetError when vLLM cannot begin with the share of the GPU that is fixed for it."""
    if not wishes.fixed_share:
        return
    one_rollout = wishes.row_tokens * facts.cache_bytes(wishes.engine_dtype)
    needed = facts.params * BYTES[wishes.engine_dtype] + one_rollout + VLLM_GPU
    taken = int(wishes.fixed_share * machine.total_bytes)
    if taken < needed:
        share = needed / machine.total_bytes + 0.005  # never rounded down
        raise BudgetError(
            f"vllm.gpu_memory_share = {wishes.fixed_share:g} is {_gib(taken)} GiB, and vLLM needs "
            f"{_gib(needed)} for itself, the weights and one rollout; "
            + (f"set it to {share:.2f} or more, or to 0" if share < 1 else "choose a smaller policy")
        )


def _plans(facts: ModelFacts, machine: Machine, wishes: Wishes) -> Iterator[MemoryPlan]:
    """All that the wishes allow, the preferred first."""
    order = (
        (FULL, "adamw", "concurrent"),
        (FULL, "adamw_8bit", "concurrent"),
        (FULL, "adamw", "sequential"),
        (FULL, "adamw_8bit", "sequential"),
        (LORA, "adamw", "concurrent"),
        (LORA, "adamw_8bit", "concurrent"),
        (LORA, "adamw", "sequential"),
        (LORA, "adamw_8bit", "sequential"),
    )
    for tuning, optimiser, sharing in order:
        wanted = (wishes.tuning, wishes.optimiser, wishes.sharing)
        if any(
            wish not in ("auto", way) for wish, way in zip(wanted, (tuning, optimiser, sharing), strict=True)
        ):
            continue
        if tuning == LORA and wishes.tuning == "auto" and not (machine.has_peft and wishes.trains):
            continue  # what a follower gets is what its owner tunes, not what fits
        if optimiser == "adamw_8bit" and wishes.optimiser == "auto" and not machine.has_bitsandbytes:
            continue
        for recompute, tokens in itertools.product((False, True), _pass_sizes(wishes)):
            yield _plan(facts, machine, wishes, tuning, optimiser, sharing, recompute, tokens)


def _pass_sizes(wishes: Wishes) -> Iterator[int]:
    """The wish, then powers of two below it, down to one rollout at a time."""
    tokens = wishes.micro_batch_tokens
    yield tokens
    while tokens > wishes.row_tokens:
        tokens = 1 << (tokens - 1).bit_length() - 1
        yield tokens


def _plan(
    facts: ModelFacts,
    machine: Machine,
    wishes: Wishes,
    tuning: str,
    optimiser: str,
    sharing: str,
    recompute: bool,
    micro_batch_tokens: int,
) -> MemoryPlan:
    on_gpu = machine.device == "cuda"
    # Frozen weights need no more digits than they came with; weights that learn need all.
    dtype = "bfloat16" if tuning == LORA and on_gpu else "float32"
    pass_tokens = min(max(micro_batch_tokens, wishes.row_tokens), wishes.step_tokens)
    if wishes.engine != "vllm":
        wishes = replace(wishes, engine_dtype=dtype)
    trainer = (
        _trainer_parts(facts, wishes, tuning, optimiser, dtype, recompute, pass_tokens, on_gpu=on_gpu)
        if wishes.trains
        else _follower_parts(facts, wishes, tuning, on_gpu=on_gpu)
    )
    engine = _engine_parts(facts, wishes, tuning, pass_tokens, on_gpu=on_gpu)
    if wishes.fixed_share:
        taken = int(wishes.fixed_share * machine.total_bytes)
        engine = [Part("engine", "share", max(0, taken - VLLM_GPU), False), *engine[2:]]
    share = 0.0
    if on_gpu and wishes.engine == "vllm":
        # vLLM makes cache of all it is given; logits of scored prompts come on top.
        needed = sum(p.size_bytes for p in engine if p.name != "logits") / machine.total_bytes
        share = wishes.fixed_share or min(0.99, round(needed + 0.0005, 3))
    return MemoryPlan(
        machine=machine,
        tuning=tuning,
        optimiser=optimiser,
        sharing=sharing,
        dtype=dtype,
        recompute=recompute,
        micro_batch_tokens=micro_batch_tokens,
        parts=(*trainer, *engine),
        engine_share=share,
        supervise=wishes.supervise is True,
        trains=wishes.trains,
    )


def _trainer_parts(
    facts: ModelFacts,
    wishes: Wishes,
    tuning: str,
    optimiser: str,
    dtype: str,
    recompute: bool,
    pass_tokens: int,
    *,
    on_gpu: bool,
) -> list[Part]:
    """By turns with the engine on a GPU, the trainer's weights lie in RAM while it does not work."""
    weights = facts.params * BYTES[dtype]
    learning = facts.params if tuning == FULL else facts.adapter_params(wishes.lora_rank)
    # Two more gradients of the vocabulary's matrix while its uses at both ends are added up.
    ends = 2 * facts.vocab * facts.hidden if tuning == FULL else 0
    activations = facts.pass_bytes(dtype, adapter=tuning == LORA, recompute=recompute)
    parts = [Part("trainer", "weights", weights, not on_gpu)]
    if tuning == FULL:
        parts.append(Part("trainer", "start copy", weights, not on_gpu))
    else:
        parts.append(Part("trainer", "adapter", learning * 4, not on_gpu))
    return [
        *parts,
        *([] if on_gpu else _copies(facts, wishes, tuning, optimiser)),
        Part("trainer", "moments", int(learning * MOMENTS[optimiser]), not on_gpu),
        Part("trainer", "gradients", (learning + ends) * 4, False),
        Part("trainer", "activations", pass_tokens * activations, False),
        Part("trainer", "logits", pass_tokens * facts.vocab * 4 * LOGIT_COPIES, False),
        Part("trainer", "fixed", CUDA_CONTEXT if on_gpu else TORCH_RAM, True),
    ]


def _copies(facts: ModelFacts, wishes: Wishes, tuning: str, optimiser: str) -> list[Part]:
    """Of what learns at other times, in RAM: to go back to, and to say how probable it once was."""
    learning = facts.params if tuning == FULL else facts.adapter_params(wishes.lora_rank)
    weights = learning * BYTES["float32"]
    states = 0 if wishes.supervise is not True else 2 if wishes.probes else 1
    # A version takes as little as half a copy, but a whole one at a high learning rate.
    snapshots = min(wishes.snapshots * weights, wishes.snapshot_bytes or wishes.snapshots * weights)
    sizes = {
        "good state": states * (weights + int(learning * MOMENTS[optimiser])),
        "snapshots": snapshots,
        "average": wishes.averages * weights,
    }
    return [Part("trainer", name, size, True) for name, size in sizes.items() if size]


def _follower_parts(facts: ModelFacts, wishes: Wishes, tuning: str, *, on_gpu: bool) -> list[Part]:
    """In the trainer's place: three copies in bfloat16 in RAM (of the base, of this version, of the next one
    while it is made), one on its way into the engine, and in RAM what vLLM is probed against."""
    tracked = facts.params if tuning == FULL else facts.adapter_params(wishes.lora_rank)
    copies = 1 if on_gpu else 4
    probed = wishes.engine == "vllm" and not on_gpu
    return [
        *([Part("trainer", "reference", facts.params * BYTES["float32"], True)] if probed else []),
        Part("trainer", "versions", copies * tracked * BYTES["bfloat16"], True),
        Part("trainer", "fixed", CUDA_CONTEXT if on_gpu else TORCH_RAM, True),
    ]


def _engine_parts(
    facts: ModelFacts, wishes: Wishes, tuning: str, pass_tokens: int, *, on_gpu: bool
) -> list[Part]:
    """vLLM gives a GPU's memory back while it sleeps; the embedded engine keeps its weights, and lives in the
    trainer's process."""
    on_vllm = wishes.engine == "vllm"
    weights = facts.params * BYTES[wishes.engine_dtype]
    if on_vllm and not on_gpu and tuning == FULL:
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
        learning = facts.params if tuning == FULL else facts.adapter_params(wishes.lora_rank)
        parts.append(Part("engine", "copy to fall back with", learning * BYTES["float32"], True))
    return parts


def _remedy(facts: ModelFacts, machine: Machine, wishes: Wishes, smallest: MemoryPlan) -> str:
    """What to change: the one thing that stands in the way, or else what takes the most."""
    if wishes.anew is not None and any(plan.fits for plan in _plans(facts, machine, wishes.anew)):
        return "free memory for this run, which goes on only as it was begun, or give it another name"
    for key, freed in (
        ("supervise.enabled", replace(wishes, supervise="auto")),
        ("train.optimiser", replace(wishes, optimiser="auto")),
        ("policy.sharing", replace(wishes, sharing="auto")),
        ("vllm.gpu_memory_share", replace(wishes, fixed_share=0.0)),
        ("policy.tuning", replace(wishes, tuning="auto")),
    ):
        if freed != wishes and any(plan.fits for plan in _plans(facts, machine, freed)):
            return f"leave {key} at its default"
    for package, equipped in (
        ("murmuration[eight-bit]", replace(machine, has_bitsandbytes=True)),
        ("murmuration[node]", replace(machine, has_peft=True)),
    ):
        if equipped != machine and any(plan.fits for plan in _plans(facts, equipped, wishes)):
            return f"pip install '{package}', with which it fits"
    largest = max(smallest.parts, key=lambda part: part.size_bytes).name
    if largest == "cache":
        return "lower vllm.kv_cache_mib, rollout.max_in_flight or train.local_groups"
    if largest == "fixed":
        return "raise policy.memory_gib, or run on a machine with more memory; no policy is small enough"
    return "set policy.path to a smaller policy"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
