"""The memory plan: numbers by hand, and which way to train is chosen where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from node.config import load_config
from node.open.estimate import GIB, ModelFacts, Wishes
from node.open.machine import Machine
from node.open.memory import BudgetError, MemoryPlan, plan_memory
from node.rollout.policy import Policy
from node.state.paths import bundled
from protocol.charter import found
from protocol.errors import ConfigError
from protocol.identity import Identity

# The sizes of Qwen2.5.
HALF = ModelFacts(494_032_768, 24, 896, 4864, 14, 2, 64, 151_936, 32_768)
ONE_AND_A_HALF = ModelFacts(1_543_714_304, 28, 1536, 8960, 12, 2, 128, 151_936, 32_768)
SEVEN = ModelFacts(7_615_616_512, 28, 3584, 18_944, 28, 4, 128, 152_064, 32_768)

WISHES = Wishes(
    tuning="auto",
    optimiser="auto",
    sharing="auto",
    lora_rank=32,
    micro_batch_tokens=16_384,
    step_tokens=64 * 1280,
    row_tokens=1280,
    rollouts=32,
    group_size=8,
    engine="vllm",
    engine_dtype="bfloat16",
)


def card(gib: float) -> Machine:
    return Machine("cuda", f"a card of {gib:g} GiB", int(gib * GIB), int(gib * GIB))


def way(plan: MemoryPlan) -> tuple[str, str, str]:
    return plan.way.tuning, plan.way.optimiser, plan.way.sharing


def sizes(plan: MemoryPlan, owner: str) -> dict[str, int]:
    return {part.name: part.size_bytes for part in plan.parts if part.owner == owner}


def test_by_hand() -> None:
    plan = plan_memory(HALF, card(24), WISHES)
    assert way(plan) == ("full", "adamw", "concurrent")
    assert (plan.way.dtype, plan.way.recompute, plan.way.micro_batch_tokens) == ("float32", False, 1024)
    params, tokens = 494_032_768, 1280  # 1024 is less than one rollout with its prompt
    layer = 4 * (8 * 896 + 5 * 896 + 4 * 128 + 4 * 4864)
    assert sizes(plan, "trainer") == {
        "weights": 4 * params,
        "start copy": 4 * params,
        "moments": 8 * params,
        "gradients": 4 * (params + 2 * 151_936 * 896),
        "activations": tokens * 24 * layer,
        "logits": tokens * 151_936 * 4 * 2,
        "fixed": GIB // 2,
    }
    assert sizes(plan, "engine") == {
        "weights": 2 * params,
        "cache": 32 * 1280 * 2 * 24 * 128 * 2,
        "logits": 1280 * 151_936 * 4 * 3,
        "fixed": GIB,
    }
    assert plan.total_bytes == sum(part.size_bytes for part in plan.parts)
    share = (2 * params + 32 * 1280 * 2 * 24 * 128 * 2 + GIB) / (24 * GIB)
    assert plan.engine_share == pytest.approx(share, abs=1e-3)
    assert plan.engine_share >= share


@pytest.mark.parametrize(
    ("facts", "gib", "expected"),
    [
        (HALF, 8, ("lora", "adamw", "sequential")),
        (HALF, 15, ("full", "adamw", "sequential")),
        (HALF, 18, ("full", "adamw_8bit", "concurrent")),
        (HALF, 80, ("full", "adamw", "concurrent")),
        (ONE_AND_A_HALF, 24, ("lora", "adamw", "concurrent")),
        (ONE_AND_A_HALF, 80, ("full", "adamw", "concurrent")),
        (SEVEN, 24, ("lora", "adamw", "sequential")),
        (SEVEN, 80, ("lora", "adamw", "concurrent")),
    ],
)
def test_the_best_way_that_fits(facts: ModelFacts, gib: int, expected: tuple[str, str, str]) -> None:
    plan = plan_memory(facts, card(gib), WISHES)
    assert way(plan) == expected
    assert plan.total_bytes <= 0.9 * gib * GIB
    assert plan.way.dtype == ("float32" if expected[0] == "full" else "bfloat16")


def test_more_memory_is_spent_on_larger_passes() -> None:
    tokens = [
        plan_memory(HALF, card(gib), replace(WISHES, tuning="full")).way.micro_batch_tokens
        for gib in (40, 80)
    ]
    assert tokens == sorted(set(tokens))
    odd = plan_memory(HALF, card(80), replace(WISHES, micro_batch_tokens=3000))
    assert odd.way.micro_batch_tokens == 3000


@pytest.mark.parametrize("facts", [SEVEN, ONE_AND_A_HALF])
def test_what_cannot_fit_is_refused_with_the_table(facts: ModelFacts) -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(facts, card(4), WISHES)
    first, *table = str(caught.value).splitlines()
    assert "may use 3.6; set policy.path to a smaller policy" in first
    assert table[0].startswith("memory plan for a card of 4 GiB: lora tuning")
    assert "weights" in table[1]
    assert table[2].lstrip().startswith("engine")
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sharing": "concurrent"}, "policy.sharing"),
        ({"tuning": "full"}, "policy.tuning"),
        ({"fixed_share": 0.9}, "vllm.gpu_memory_share"),
    ],
)
def test_a_wish_in_the_way_is_named(changes: dict[str, object], key: str) -> None:
    with pytest.raises(BudgetError, match=f"leave {key} at its default"):
        plan_memory(SEVEN, card(24), replace(WISHES, **changes))


def test_wishes_are_kept_where_they_fit() -> None:
    wishes = replace(WISHES, tuning="lora", optimiser="adamw_8bit", sharing="sequential")
    assert way(plan_memory(HALF, card(80), wishes)) == ("lora", "adamw_8bit", "sequential")
    shared = plan_memory(HALF, card(80), replace(WISHES, fixed_share=0.4))
    assert shared.engine_share == 0.4
    assert sum(sizes(shared, "engine").values()) >= 0.4 * 80 * GIB


def test_nothing_is_planned_that_is_not_installed() -> None:
    bare = replace(card(16), has_bitsandbytes=False, has_peft=False)
    with pytest.raises(BudgetError, match=r"pip install 'murmuration\[node\]', with which it fits"):
        plan_memory(ONE_AND_A_HALF, bare, WISHES)
    with pytest.raises(BudgetError, match=r"pip install 'murmuration\[eight-bit\]', with which"):
        plan_memory(ONE_AND_A_HALF, replace(bare, free_bytes=32 * GIB), WISHES)
    with pytest.raises(BudgetError, match="no policy is small enough"):
        plan_memory(replace(HALF, params=1, layers=1, vocab=2), card(1), WISHES)
    with pytest.raises(BudgetError, match=r"lower vllm\.kv_cache_mib, rollout\.max_in_flight"):
        plan_memory(HALF, card(24), replace(WISHES, rollouts=4096, group_size=4096))
    assert plan_memory(HALF, replace(card(16), has_bitsandbytes=False), WISHES).way.optimiser == "adamw"


def test_a_share_that_is_too_small_for_vllm_is_refused_with_the_number() -> None:
    # 0.92 GiB of weights, 0.015 of cache, 1 of its own: 1.94 of 24.
    with pytest.raises(BudgetError, match=r"share = 0\.05 is 1\.2 GiB, and vLLM needs 1\.9 .* 0\.09 or more"):
        plan_memory(HALF, card(24), replace(WISHES, fixed_share=0.05))
    assert plan_memory(HALF, card(24), replace(WISHES, fixed_share=0.09)).engine_share == 0.09
    with pytest.raises(BudgetError, match=r"needs 15\.3 .*; choose a smaller policy"):
        plan_memory(SEVEN, card(8), replace(WISHES, fixed_share=0.9))


def test_the_embedded_engine_computes_as_the_trainer_does() -> None:
    wishes = replace(WISHES, engine="transformers", engine_dtype="float32")
    lora, full = (plan_memory(HALF, card(80), replace(wishes, tuning=tuning)) for tuning in ("lora", "full"))
    assert (lora.way.dtype, full.way.dtype) == ("bfloat16", "float32")
    assert sizes(lora, "engine")["weights"] == 2 * HALF.params
    assert sizes(full, "engine")["weights"] == 4 * HALF.params
    assert sizes(full, "engine")["cache"] == 2 * sizes(lora, "engine")["cache"]


def test_an_engine_to_fall_back_with_costs_a_copy_of_what_learns() -> None:
    machine = Machine("cpu", "the CPU", 64 * GIB, 64 * GIB)
    name = "copy to fall back with"
    for tuning, learning in (("full", HALF.params), ("lora", HALF.adapter_params(32))):
        wishes = replace(WISHES, tuning=tuning)
        plain = plan_memory(HALF, machine, wishes)
        plan = plan_memory(HALF, machine, replace(wishes, fallback=True))
        assert sizes(plan, "engine") == {**sizes(plain, "engine"), name: 4 * learning}
    assert name not in sizes(plan_memory(HALF, card(80), replace(WISHES, fallback=True)), "engine")


def test_a_run_that_was_begun_is_not_told_to_be_another() -> None:
    wishes = replace(WISHES, tuning="full", optimiser="adamw", anew=WISHES)
    with pytest.raises(BudgetError, match="goes on only as it was begun, or give it another name"):
        plan_memory(ONE_AND_A_HALF, card(24), wishes)
    with pytest.raises(BudgetError, match=r"set policy\.path to a smaller policy"):
        plan_memory(ONE_AND_A_HALF, card(4), wishes)


def test_by_turns_on_a_cpu_everything_but_the_work_stays() -> None:
    machine = Machine("cpu", "the CPU", 64 * GIB, 64 * GIB)
    wishes = replace(WISHES, engine="transformers", engine_dtype="float32")
    both, turns = (
        plan_memory(HALF, machine, replace(wishes, sharing=sharing, micro_batch_tokens=1280))
        for sharing in ("concurrent", "sequential")
    )
    engine = sizes(turns, "engine")
    assert both.total_bytes - turns.total_bytes == engine["cache"] + engine["logits"]
    assert (turns.engine_share, turns.way.dtype) == (0.0, "float32")


def test_what_a_configuration_wishes(tiny_policy_path: Path) -> None:
    facts = ModelFacts.of(Policy.open(tiny_policy_path))
    assert (facts.params, facts.layers, facts.hidden, facts.kv_width) == (20_064, 2, 32, 16)
    charter = found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)
    config = load_config([], {"rollout.engine": "vllm", "vllm.max_concurrent": 20, "vllm.kv_cache_mib": 64})
    wishes = Wishes.of(config, charter, facts, "cpu")
    assert wishes.row_tokens == 128  # the policy has no more positions
    assert wishes.rollouts == 20
    assert wishes.step_tokens == (4 + 4) * 8 * 128
    assert (wishes.fixed_cache_bytes, wishes.fixed_share) == (64 * 2**20, 0.0)
    alone = load_config([], {"network.transport": "none", "rollout.max_in_flight": 48})
    wishes = Wishes.of(alone, charter, facts, "cpu")
    # With 47 under way one more group of 8 begins.
    assert (wishes.rollouts, wishes.step_tokens, wishes.fixed_cache_bytes) == (55, 4 * 8 * 128, 0)
    assert not wishes.fallback
    falling = load_config([], {"rollout.engine": "vllm", "rollout.fallback": True})
    assert Wishes.of(falling, charter, facts, "cpu").fallback


def test_a_follower_needs_no_moments_and_no_gradients() -> None:
    """Four copies in bfloat16 on a CPU: of the base, this version, the next, and the one for the engine. A
    machine that is too small does not make it follow an adapter."""
    ram = Machine("cpu", "RAM", 16 * GIB, 16 * GIB)
    wishes = replace(WISHES, trains=False, engine="transformers")
    plan = plan_memory(HALF, ram, wishes)
    assert sizes(plan, "trainer") == {"versions": 4 * 2 * 494_032_768, "fixed": GIB // 2}
    assert next(plan.lines()).startswith("memory plan for RAM: follows full tuning, ")
    with pytest.raises(BudgetError):
        plan_memory(HALF, Machine("cpu", "RAM", 5 * GIB, 5 * GIB), wishes)


# --- copies of earlier weights -----------------------------------------------------------------------------

RAM = replace(WISHES, engine="transformers", engine_dtype="float32", micro_batch_tokens=1280)


def cpu(gib: float) -> Machine:
    return Machine("cpu", "the CPU", int(gib * GIB), int(gib * GIB))


def test_steps_are_supervised_where_it_fits_beside_the_rest() -> None:
    """A good state is 12 bytes for each of 494 million weights, 5.5 GiB, beside 22.4 GiB for all else."""
    auto = replace(RAM, supervise="auto")
    alone = plan_memory(HALF, cpu(64), RAM)
    plan = plan_memory(HALF, cpu(64), auto)
    assert (plan.supervise, alone.supervise) == (True, False)
    assert plan.total_bytes - alone.total_bytes == sizes(plan, "trainer")["good state"] == 12 * HALF.params
    assert "supervised" in next(plan.lines())
    tight = cpu((alone.total_bytes + 6 * HALF.params) / 0.9 / GIB)
    assert not plan_memory(HALF, tight, auto).supervise
    assert way(plan_memory(HALF, tight, auto)) == way(alone)
    assert "unsupervised" in next(plan_memory(HALF, tight, auto).lines())


def test_a_supervised_step_rather_takes_smaller_passes() -> None:
    wishes = replace(RAM, micro_batch_tokens=8192)
    alone = plan_memory(HALF, cpu(64), replace(wishes, tuning="full"))
    tight = cpu((alone.total_bytes + 6 * HALF.params) / 0.9 / GIB)
    plan = plan_memory(HALF, tight, replace(wishes, tuning="full", supervise="auto"))
    assert plan.supervise
    assert way(plan) == way(alone)
    assert plan.way.micro_batch_tokens < alone.way.micro_batch_tokens


def test_supervision_that_is_wished_for_is_planned_for() -> None:
    """Moments in 8 bits make room for it; where that is not wanted either, the wish in the way is named."""
    alone = plan_memory(HALF, cpu(64), RAM)
    tight = cpu((alone.total_bytes + GIB) / 0.9 / GIB)
    assert way(plan_memory(HALF, tight, RAM)) == way(alone) == ("full", "adamw", "concurrent")
    plan = plan_memory(HALF, tight, replace(RAM, supervise=True))
    assert (plan.supervise, *way(plan)) == (True, "full", "adamw_8bit", "concurrent")
    strict = replace(RAM, supervise=True, tuning="full", optimiser="adamw", sharing="concurrent")
    with pytest.raises(BudgetError, match=r"leave supervise\.enabled at its default"):
        plan_memory(HALF, tight, strict)


def test_beside_a_card_a_good_state_lies_in_ram_and_only_an_adapter_is_copied_there_unasked() -> None:
    for tuning, supervised in (("full", False), ("lora", True)):
        wishes = replace(WISHES, tuning=tuning)
        plain, auto, asked = (
            plan_memory(HALF, card(80), replace(wishes, supervise=wish)) for wish in (False, "auto", True)
        )
        assert (plain.supervise, auto.supervise, asked.supervise) == (False, supervised, True)
        assert plain.parts == auto.parts == asked.parts


def test_probes_and_old_weights_cost_their_copies() -> None:
    wishes = replace(
        RAM, tuning="full", optimiser="adamw_8bit", supervise=True, probes=True, averages=1, snapshots=3
    )
    parts = sizes(plan_memory(HALF, cpu(640), wishes), "trainer")
    moments = int(HALF.params * (2 + 1 / 32))
    assert parts["good state"] == 2 * (4 * HALF.params + moments)
    assert (parts["average"], parts["snapshots"]) == (4 * HALF.params, 12 * HALF.params)
    limited = replace(wishes, snapshot_bytes=5 * GIB)
    assert sizes(plan_memory(HALF, cpu(640), limited), "trainer")["snapshots"] == 5 * GIB
    follower = replace(wishes, trains=False)
    assert "good state" not in sizes(plan_memory(HALF, cpu(640), follower), "trainer")


def test_rollouts_at_a_time_are_the_plans_to_choose() -> None:
    """1.5 B with answers of 1,024 tokens on 8 GB: an adapter, by turns, and fewer rollouts at a time."""
    wishes = replace(WISHES, rollouts=71)
    roomy = plan_memory(ONE_AND_A_HALF, card(80), wishes)
    assert (roomy.way.rollouts, roomy.fewer) == (71, False)
    tight = plan_memory(ONE_AND_A_HALF, card(8), wishes)
    assert tight.way.tuning == "lora"
    assert tight.fewer == (tight.way.rollouts < 71)
    cache = 2 * 28 * 2 * 128 * 2  # keys and values of a token: 28 layers, 2 heads of 128, two bytes
    assert sizes(tight, "engine")["cache"] == tight.way.rollouts * 1280 * cache
    assert tight.max_in_flight == tight.way.rollouts - 7  # one more group of eight begins below that


def test_the_last_resort_is_one_group_at_a_time() -> None:
    wishes = replace(WISHES, rollouts=512, tuning="lora", optimiser="adamw", sharing="sequential")
    plans = (_planned(ONE_AND_A_HALF, card(tenths / 10), wishes) for tenths in range(50, 90))
    least = next(plan for plan in plans if plan is not None)
    assert (least.way.rollouts, least.fewer, least.max_in_flight) == (8, True, 1)


def _planned(facts: ModelFacts, machine: Machine, wishes: Wishes) -> MemoryPlan | None:
    try:
        return plan_memory(facts, machine, wishes)
    except BudgetError:
        return None
