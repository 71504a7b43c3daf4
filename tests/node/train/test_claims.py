"""A lie about log-probabilities moves no gradient by more than a stated factor, whatever the objective."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from node.train.claims import bounded_claims
from node.train.objectives import (
    MAX_CLAIM_FACTOR,
    LossInputs,
    all_presets,
    open_objective,
    require_disbelief,
)
from protocol.errors import ConfigError
from tests.node.train.test_objective_invariants import OBJECTIVES, on_policy, random_inputs, slope

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
ROWS, TOKENS = 8, 24
BELIEVING = sorted(name for name, objective in OBJECTIVES.items() if objective.believes_claims)
DISBELIEVING = sorted(OBJECTIVES.keys() - set(BELIEVING))
NOBODYS = torch.zeros(ROWS, dtype=torch.bool)


def truth(sign: float) -> LossInputs:
    """A peer's group, of which one rollout succeeded (`sign` 1) or failed (-1)."""
    advantages_B = torch.full((ROWS,), -sign / (ROWS - 1), dtype=torch.float64)
    advantages_B[0] = sign
    inputs = random_inputs(0, 2.0, ROWS, TOKENS)
    whole = torch.ones_like(inputs.mask_BT)
    return on_policy(
        dataclasses.replace(
            inputs,
            mask_BT=whole,
            advantages_B=advantages_B,
            rewards_B=(advantages_B > 0).double(),
            uses_B=torch.zeros_like(advantages_B),
            source_B=torch.zeros_like(inputs.sources()),
            own_tokens_N=torch.full((6,), float(TOKENS), dtype=torch.float64),
        )
    )


def lies(inputs: LossInputs) -> Iterator[LossInputs]:
    """By so many nats a token, about one rollout, all, all but one, or about one token of it."""
    generator = torch.Generator().manual_seed(1)
    for nats in (-40.0, -14.0, -1.0, -0.1, 0.1, 1.0, 14.0, 40.0):
        for rows in (slice(1), slice(1, 2), slice(None), slice(1, None)):
            for tokens in (slice(None), slice(1)):
                yield claiming(inputs, torch.full_like(inputs.logprobs_BT, nats), rows, tokens)
    for size in (0.1, 1.0, 14.0):
        noise_BT = size * torch.randn(inputs.logprobs_BT.shape, generator=generator, dtype=torch.float64)
        yield claiming(inputs, noise_BT, slice(None), slice(None))


def claiming(inputs: LossInputs, nats_BT: Tensor, rows: slice, tokens: slice) -> LossInputs:
    behaviour_BT = inputs.behaviour_BT.clone()
    behaviour_BT[rows, tokens] += nats_BT[rows, tokens]
    return dataclasses.replace(inputs, behaviour_BT=behaviour_BT, behaviour_sum_B=behaviour_BT.sum(-1))


def factor(name: str, *, bounded: bool) -> float:
    """By how much a lie makes the gradient of some rollout larger, at most."""
    worst = 0.0
    for sign in (1.0, -1.0):
        honest = truth(sign)
        expected_B = slope(OBJECTIVES[name], honest).norm(dim=-1)
        for lie in lies(honest):
            given = bounded_claims(lie, NOBODYS) if bounded else lie
            found_B = slope(OBJECTIVES[name], given).norm(dim=-1)
            worst = max(worst, float((found_B / expected_B).max()))
    return worst


@pytest.mark.parametrize("name", DISBELIEVING)
def test_a_lie_moves_no_gradient_by_more_than_the_stated_factor(name: str) -> None:
    assert factor(name, bounded=True) <= MAX_CLAIM_FACTOR * (1 + 1e-9)


@pytest.mark.parametrize("name", BELIEVING)
def test_what_is_refused_would_be_moved_further(name: str) -> None:
    """So nothing is refused without need."""
    assert factor(name, bounded=True) > MAX_CLAIM_FACTOR


@pytest.mark.parametrize("name", ["grpo", "ppo_clip", "pnpo", "sat", "a3po"])
def test_without_the_bound_it_moves_a_million_times_as_far(name: str) -> None:
    assert factor(name, bounded=False) > 1e6


def test_own_rollouts_are_as_their_engine_computed_them() -> None:
    lie = next(lies(truth(1.0)))
    own = bounded_claims(lie, ~NOBODYS)
    assert torch.equal(own.behaviour_BT, lie.behaviour_BT)
    assert torch.equal(own.behaviour_sum_B, lie.behaviour_sum_B)


def test_a_claim_within_the_factor_is_believed() -> None:
    said = claiming(truth(1.0), torch.full((ROWS, TOKENS), -0.69, dtype=torch.float64), slice(3), slice(None))
    found = bounded_claims(said, NOBODYS)
    assert torch.equal(found.behaviour_BT, said.behaviour_BT)
    assert torch.equal(found.behaviour_sum_B, said.behaviour_sum_B)


@pytest.mark.parametrize(
    ("name", "options"), [("dro", {}), ("vcpo", {}), ("topr", {"cap": 3.0}), ("dppo_tv", {"kl_tau": 0.1})]
)
def test_a_believing_objective_is_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"objective {name}, .* choose one of .*tis, topr"):
        require_disbelief(open_objective(name, options))


def test_the_page_names_what_is_refused_and_what_is_not() -> None:
    def named(part: str) -> set[str]:
        text = PAGE.read_text(encoding="utf-8").partition(f"<!-- {part} -->")[2]
        lines = text.partition(f"<!-- end {part} -->")[0].splitlines()
        first = (line.split("|")[1] if line.startswith("|") else line for line in lines)
        return set(re.findall(r"`(\w+)`", "\n".join(first)))

    assert named("refused") == {each.name for each in all_presets() if not each.for_peers}
    assert named("allowed") == {each.name for each in all_presets() if each.for_peers}


@pytest.mark.parametrize(
    ("name", "options"), [("tis", {"normalise": True}), ("topr", {"cap": 2.1}), ("dppo_kl", {"kl_tau": 0.1})]
)
def test_options_that_the_page_names_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="believes the log-probabilities"):
        require_disbelief(open_objective(name, options))


def test_the_default_is_for_peers() -> None:
    assert {"topr", "compat", "hacpo", "graft"} <= {each.name for each in all_presets() if each.for_peers}
