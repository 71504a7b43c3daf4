"""The memory plan: does a policy fit on this machine, and how is it trained so that it does?

Facts of the model, the machine and the wishes of the configuration go in; how to tune, which optimiser,
whether engine and trainer share the device by turns, and how many tokens a pass takes come out, with every
estimate (`node/open/estimate.py`) behind them. The same three inputs give the same plan anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.open.estimate import BYTES, FULL, GIB, LORA, VLLM_GPU, ModelFacts, Part, Way, Wishes, parts_of
from node.open.machine import Machine
from protocol.errors import ConfigError

__all__ = ["BudgetError", "MemoryPlan", "plan_memory"]

_HALVINGS = 2
"""Of the rollouts at a time, before another way to train is preferred."""


class BudgetError(ConfigError):
    """The policy does not fit on this machine as wished; the message says what to change and shows the
    estimate."""


@dataclass(frozen=True)
class MemoryPlan:
    """How to train, and what it takes."""

    machine: Machine
    way: Way
    parts: tuple[Part, ...]
    engine_share: float = 0.0
    """Share of the GPU's memory for vLLM; 0 where that does not apply."""
    supervise: bool = False
    """Bad steps are taken back."""
    trains: bool = True
    """False for a follower, where what is tuned says what the owner tunes."""
    fewer: bool = False
    """There is no room for as many rollouts at a time as were wished for."""
    max_in_flight: int = 0
    """Rollouts while fewer than which another group begins, so that there are never more than the way has
    room for."""

    @property
    def total_bytes(self) -> int:
        """The most that is in use at one time."""
        working = [
            sum(part.size_bytes for part in self.parts if part.owner == owner and not part.always)
            for owner in ("trainer", "engine")
        ]
        always = sum(part.size_bytes for part in self.parts if part.always)
        return always + (sum(working) if self.way.sharing == "concurrent" else max(working))

    @property
    def fits(self) -> bool:
        """Whether the machine has that much."""
        return self.total_bytes <= self.machine.usable_bytes

    def _title(self) -> str:
        if not self.trains:
            return f"follows {self.way.tuning} tuning"
        supervised = "supervised" if self.supervise else "unsupervised"
        return f"{self.way.tuning} tuning, {self.way.optimiser}, {self.way.sharing}, {supervised}"

    def lines(self) -> Iterator[str]:
        """The table, for people."""
        machine, way = self.machine, self.way
        yield (
            f"memory plan for {machine.name}: {self._title()}, "
            f"{way.micro_batch_tokens} tokens a pass{', layers recomputed' if way.recompute else ''}, "
            f"{way.rollouts} rollouts at a time"
        )
        for owner in ("trainer", "engine"):
            parts = [part for part in self.parts if part.owner == owner]
            told = "  ".join(f"{part.name} {_gib(part.size_bytes)}" for part in parts)
            name = owner if self.trains or owner == "engine" else "follower"
            yield f"  {name:8} {told}  = {_gib(sum(part.size_bytes for part in parts))} GiB"
        at_once = "at the same time" if way.sharing == "concurrent" else "by turns"
        yield (
            f"  {at_once} {_gib(self.total_bytes)} of {_gib(machine.usable_bytes)} GiB "
            f"({_gib(machine.free_bytes)} free, {_gib(machine.total_bytes)} in all)"
        )


def plan_memory(facts: ModelFacts, machine: Machine, wishes: Wishes) -> MemoryPlan:
    """The first way to train that fits, in this order: all weights; with 8-bit moments; by turns with the
    engine; an adapter; an adapter by turns. Each with as many rollouts at a time as are wished for, else half
    or a quarter of them; fewer, down to one group, only where no way fits with those. Each rather without
    computing layers anew, and with the most tokens a pass that fit. Where it is left to the plan, supervised
    if that way then still fits, with fewer tokens a pass perhaps; on a GPU only with an adapter, since all
    weights and moments take long to copy from there at every step. Raises BudgetError."""
    _require_share(facts, machine, wishes)
    if wishes.supervise != "auto":
        return _first(facts, machine, wishes)
    plan = _first(facts, machine, replace(wishes, supervise=False))
    if machine.device == "cuda" and plan.way.tuning == FULL:
        return plan
    same = replace(
        wishes,
        supervise=True,
        tuning=plan.way.tuning,
        optimiser=plan.way.optimiser,
        sharing=plan.way.sharing,
    )
    others = (each for each in _plans(facts, machine, same) if each.way.recompute == plan.way.recompute)
    return next((each for each in others if each.fits), plan)


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
    for few, (tuning, optimiser, sharing) in itertools.product((False, True), order):
        if (
            wishes.tuning not in ("auto", tuning)
            or wishes.optimiser not in ("auto", optimiser)
            or wishes.sharing not in ("auto", sharing)
        ):
            continue
        if tuning == LORA and wishes.tuning == "auto" and not (machine.has_peft and wishes.trains):
            continue  # what a follower gets is what its owner tunes, not what fits
        if optimiser == "adamw_8bit" and wishes.optimiser == "auto" and not machine.has_bitsandbytes:
            continue
        sizes = list(_pass_sizes(wishes))
        for rollouts, recompute, tokens in itertools.product(_at_once(wishes, few=few), (False, True), sizes):
            way = Way(tuning, optimiser, sharing, recompute, tokens, machine.device == "cuda", rollouts)
            yield _plan(facts, machine, wishes, way)


def _at_once(wishes: Wishes, *, few: bool) -> Iterator[int]:
    """Rollouts that the engine has cache for: as many as are wished for, half and a quarter of them; `few`:
    fewer than that, down to one group. What a fixed cache holds is fixed."""
    rollouts = wishes.rollouts
    for halvings in itertools.count():
        if few == (halvings > _HALVINGS):
            yield rollouts
        if rollouts <= wishes.group_size or wishes.fixed_cache_bytes or wishes.fixed_share:
            return
        rollouts = max(wishes.group_size, rollouts // 2)


def _pass_sizes(wishes: Wishes) -> Iterator[int]:
    """The wish, then powers of two below it, down to one rollout at a time."""
    tokens = wishes.micro_batch_tokens
    yield tokens
    while tokens > wishes.row_tokens:
        tokens = 1 << (tokens - 1).bit_length() - 1
        yield tokens


def _plan(facts: ModelFacts, machine: Machine, wishes: Wishes, way: Way) -> MemoryPlan:
    parts = parts_of(facts, wishes, way)
    share = 0.0
    if way.on_gpu and wishes.engine == "vllm":
        # vLLM makes cache of all it is given; logits of scored prompts come on top.
        engine = (part.size_bytes for part in parts if part.owner == "engine" and part.name != "logits")
        share = wishes.fixed_share or min(0.99, round(sum(engine) / machine.total_bytes + 0.0005, 3))
    return MemoryPlan(
        machine=machine,
        way=way,
        parts=parts if not wishes.fixed_share else _with_share(parts, machine, wishes),
        engine_share=share,
        supervise=wishes.supervise is True,
        trains=wishes.trains,
        fewer=way.rollouts < wishes.rollouts,
        max_in_flight=max(1, way.rollouts - wishes.group_size + 1),
    )


def _with_share(parts: tuple[Part, ...], machine: Machine, wishes: Wishes) -> tuple[Part, ...]:
    """`parts` where vLLM takes the fixed share of the GPU for its weights and cache, whatever they need."""
    taken = int(wishes.fixed_share * machine.total_bytes)
    share = Part("engine", "share", max(0, taken - VLLM_GPU), False)
    trainer = [part for part in parts if part.owner == "trainer"]
    rest = [part for part in parts if part.owner == "engine" and part.name not in ("weights", "cache")]
    return (*trainer, share, *rest)


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
