"""The staleness lab's runs: real policies, a few steps. Rollouts are exact, runs repeat and are paired."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from node.rollout.engine.base import TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.rollout.tiny import MAX_NEW_TOKENS
from node.state.paths import bundled
from protocol.errors import ModelError, OurFault
from protocol.prompts import is_held_out
from swarm_cli.bench.staleness import answers as answers_module
from swarm_cli.bench.staleness.answers import Answered, Answers
from swarm_cli.bench.staleness.bench import QUICK, bench_staleness
from swarm_cli.bench.staleness.buffer import Place
from swarm_cli.bench.staleness.lagged import LAGGED, Lagged, RunResult, run_lagged
from swarm_cli.bench.staleness.ledger import Ledger
from swarm_cli.bench.staleness.mismatch import Mismatch
from swarm_cli.bench.staleness.plain import Plain
from swarm_cli.bench.staleness.swarm import VARIANTS, Swarm, run_swarm
from swarm_cli.bench.staleness.tasks import Tasks, open_tasks
from swarm_cli.bench.staleness.workers import Crew

pytestmark = pytest.mark.slow

PROMPTS = (
    "Spell this word backward (example: sun -> nus): tree",
    "State the final answer to the following arithmetic problem: 3 + 4 =",
    "Sort",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def wren() -> Policy:
    return Policy.open(bundled("models/wren"))


@pytest.fixture(scope="module")
def weights(wren: Policy) -> Mapping[str, torch.Tensor]:
    return dict(wren.load_model().named_parameters())


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    return open_tasks()


# --- rollouts ---


def test_rollouts_have_the_log_probabilities_of_the_engine(wren: Policy, weights: Mapping[str, Any]) -> None:
    prompts = [wren.encode_prompt(text) for text in PROMPTS]  # three lengths: padding must not show
    groups = Plain(wren).draw(weights, prompts, np.random.default_rng(0).random((3, 5, MAX_NEW_TOKENS)))
    engine = TransformersEngine(wren)
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 5
        for drawn in group:
            assert drawn.finished == (drawn.tokens[-1] == wren.eos_token_id)
            assert drawn.finished or len(drawn.tokens) == MAX_NEW_TOKENS
            assert wren.eos_token_id not in drawn.tokens[:-1]
            (scored,) = engine.logprobs([TokenSequence(tuple(prompt), tuple(drawn.tokens.tolist()), 1.0)])
            np.testing.assert_allclose(drawn.logprobs, scored, atol=2e-5)
    engine.close()


def test_scores_are_those_of_the_engine(wren: Policy, weights: Mapping[str, Any]) -> None:
    sequences = [
        (wren.encode_prompt(text), [5 + place, 9, 40][: place + 1]) for place, text in enumerate(PROMPTS)
    ]
    engine = TransformersEngine(wren)
    expected = engine.logprobs([TokenSequence(tuple(prompt), tuple(ids), 1.0) for prompt, ids in sequences])
    engine.close()
    for ours, theirs in zip(Plain(wren).logprobs(weights, sequences), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_uniform_numbers_decide_the_tokens(wren: Policy, weights: Mapping[str, Any]) -> None:
    """The token where the cumulated probability passes u, from the engine's probabilities of all first
    tokens."""
    prompt = wren.encode_prompt(PROMPTS[1])
    engine = TransformersEngine(wren)
    first = [TokenSequence(tuple(prompt), (token,), 1.0) for token in range(wren.vocab_size)]
    cumulated = np.exp(np.concatenate(engine.logprobs(first)).astype(np.float64)).cumsum()
    engine.close()
    uniforms = np.linspace(0.03, 0.97, 40)[None, :, None]
    (group,) = Plain(wren).draw(weights, [prompt], uniforms)
    expected = [int(np.searchsorted(cumulated, uniform)) for uniform in uniforms[0, :, 0]]
    assert [drawn.tokens.tolist() for drawn in group] == [[token] for token in expected]


def test_chunks_do_not_change_what_is_generated(
    wren: Policy, weights: Mapping[str, Any], tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(wren, tasks, seed=3, group_size=4)
    places = [Place(step, number) for step in range(4) for number in range(2)]
    whole = answers.answer(weights, places, 0)
    monkeypatch.setattr(answers_module, "_ROWS", 4)
    for one, other in zip(whole, answers.answer(weights, places, 0), strict=True):
        assert [each.tokens.tolist() for each in one.drawn] == [each.tokens.tolist() for each in other.drawn]
        assert one.rewards == other.rewards


def test_a_policy_of_another_kind_is_refused(tiny_policy_path: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_policy_path / "config.json").read_bytes())
    for file in tiny_policy_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ModelError, match="make-tiny"):
        Plain(Policy.open(tmp_path))


def test_questions_to_train_on_are_never_held_out(tasks: Tasks) -> None:
    for training, testing in zip(tasks.train, tasks.held_out, strict=True):
        assert not any(is_held_out(question.prompt.text) for question in training)
        assert all(is_held_out(question.prompt.text) for question in testing)
        assert len({question.prompt.text for question in testing}) == len(testing) >= 20


@pytest.mark.parametrize("mismatch", [Mismatch.BF16, Mismatch.INT8, Mismatch.NOISE])
def test_a_mismatched_engine_and_the_exact_old_log_probabilities(
    wren: Policy, weights: Mapping[str, Any], tasks: Tasks, mismatch: Mismatch
) -> None:
    answers = Answers(wren, tasks, seed=0, group_size=8)
    gaps = []
    for answered in answers.answer(
        weights, [Place(0, number) for number in range(4)], 0, mismatch=mismatch, old=True
    ):
        sequences = [(answered.prompt, drawn.tokens.tolist()) for drawn in answered.drawn]
        for drawn, old, exact in zip(
            answered.drawn, answered.old, answers.plain.logprobs(weights, sequences), strict=True
        ):
            np.testing.assert_allclose(old, exact, atol=2e-5)
            gaps.extend(np.abs(drawn.logprobs - exact).tolist())
    low, high = {Mismatch.BF16: (1e-4, 0.03), Mismatch.INT8: (1e-3, 0.1), Mismatch.NOISE: (0.02, 0.2)}[
        mismatch
    ]
    assert low < float(np.mean(gaps)) < high


# --- runs ---


def heard(settings: Lagged) -> tuple[RunResult, list[list[Answered]]]:
    steps: list[list[Answered]] = []
    return run_lagged(settings, lambda _, answered: steps.append(list(answered))), steps


def settings(**changed: Any) -> Lagged:
    fields: dict[str, Any] = {"preset": "dppo_tv", "lags": (0,), "seed": 0, "learning_rate": 1e-3, "steps": 8}
    return Lagged(**{**fields, "groups": 2, "group_size": 4, "evaluate_every": 4, **changed})


def questions(steps: Sequence[Sequence[Answered]]) -> list[list[str]]:
    return [[answered.question.prompt.text for answered in step] for step in steps]


def tokens(step: Sequence[Answered]) -> list[list[int]]:
    return [drawn.tokens.tolist() for answered in step for drawn in answered.drawn]


def test_rollouts_carry_the_version_that_generated_them_and_its_probabilities() -> None:
    result, steps = heard(settings(lags=(3,)))
    assert [[answered.born for answered in step] for step in steps] == [
        [max(0, version - 3)] * 2 for version in range(8)
    ]
    for rollout in steps[5][0].rollouts():
        assert rollout.versions_T is not None
        assert set(rollout.versions_T.tolist()) == {2}
    assert result.gap > 0.05  # at a learning rate of 1e-3 three versions are far apart
    fresh, _ = heard(settings())
    assert fresh.gap < 1e-5
    assert fresh.ess > 0.9999


def test_equal_settings_give_equal_numbers() -> None:
    first, again = run_lagged(settings(lags=(0, 2))), run_lagged(settings(lags=(0, 2)))
    assert dataclasses_equal(first, again)
    assert first.curve != run_lagged(settings(lags=(0, 2), seed=1)).curve


def dataclasses_equal(one: RunResult, other: RunResult) -> bool:
    return (one.curve, one.kept, one.ess, one.gap) == (other.curve, other.kept, other.ess, other.gap)


def test_runs_of_one_seed_are_paired_over_presets_and_lags() -> None:
    runs = [
        heard(settings(preset=preset, lags=lags))[1]
        for preset, lags in (("dppo_tv", (0,)), ("uncorrected", (0,)), ("dppo_tv", (4,)))
    ]
    assert questions(runs[0]) == questions(runs[1]) == questions(runs[2])
    assert tokens(runs[0][0]) == tokens(runs[1][0]) == tokens(runs[2][0])
    # Version 0 generated what version 4 trains on; the same draws, but of other weights, where the lag is 0.
    assert tokens(runs[2][4]) != tokens(runs[0][4])
    other = heard(settings(seed=1))[1]
    assert questions(other) != questions(runs[0])


def test_without_lag_and_with_one_update_the_correction_changes_nothing() -> None:
    plain, corrected = run_lagged(settings(preset="uncorrected")), run_lagged(settings(preset="dppo_tv"))
    assert plain.curve == corrected.curve


def test_steps_that_overflow_are_counted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    clip = torch.nn.utils.clip_grad_norm_

    def overflows(*args: Any, **options: Any) -> torch.Tensor:
        steps.append(len(steps))
        return torch.tensor(float("nan")) if steps[-1] in (2, 3) else clip(*args, **options)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflows)
    result, heard_steps = heard(settings(lags=(2,)))
    assert result.skipped == 2
    assert [step[0].born for step in heard_steps] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert json.loads(msgspec.json.encode(result))["gap"] > 0


@pytest.mark.parametrize("preset", ["copris", "ppo_ewma", "vcpo+ess", "opsm:delta=0.5", "a3po"])
def test_what_some_objectives_need_besides_is_there(preset: str) -> None:
    result = run_lagged(settings(preset=preset, lags=(2,), steps=4, mismatch=Mismatch.INT8))
    assert result.skipped == 0
    assert [at for at, _ in result.curve] == [0, 4]


def swarm_settings(variant: str, **changed: Any) -> Swarm:
    fields = {"seed": 0, "learning_rate": 1e-4, "steps": 3, "objective": "topr", "evaluate_every": 2}
    return Swarm(variant=variant, **(fields | changed))


def test_one_preset_on_everything_is_that_of_the_own_groups_too() -> None:
    """Three steps on rollouts of unlike policies: the masked and the tapered objective part."""
    curves = {
        name: run_swarm(swarm_settings(name, objective=own, learning_rate=1e-3)).curves
        for name, own in (("dppo_tv", "topr"), ("topr", "dppo_tv"))
    }
    assert (
        curves["dppo_tv"] == run_swarm(swarm_settings("dppo_tv", objective="tis", learning_rate=1e-3)).curves
    )
    assert curves["topr"] != curves["dppo_tv"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_swarm_shares_as_its_variant_says(variant: str) -> None:
    result = run_swarm(swarm_settings(variant, steps=3))
    assert [at for at, _ in result.curve] == [0, 2, 3]
    assert len(result.curves) == 2
    for place, (_, height) in enumerate(result.curve):
        assert height == pytest.approx((result.curves[0][place] + result.curves[1][place]) / 2)
    assert result.skipped == 0
    shared = VARIANTS[variant].foreign is not None
    assert (result.foreign_groups > 0) == shared
    assert result.foreign_groups <= 4
    assert (result.kept > 0) == shared


def test_nodes_of_a_swarm_begin_alike_in_every_variant() -> None:
    starts = {
        run_swarm(swarm_settings(variant, steps=1)).curve[0] for variant in ("solo_4", "solo_8", "compat")
    }
    assert len(starts) == 1


# --- the whole ---


def test_processes_give_the_numbers_of_this_one_and_tell_what_fails(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.jsonl", LAGGED)
    runs = [settings(steps=2), settings(steps=2, preset="nosuch"), settings(steps=2, seed=1)]
    with Crew(2, [LAGGED], lambda _: None) as crew:
        crew.finish("lags", LAGGED, runs, ledger)
    assert crew.finished.made == 2
    assert len(crew.finished.failures) == 1
    assert "objective 'nosuch' is unknown" in crew.finished.failures[0]
    result = ledger.get(runs[2])
    assert result is not None
    assert dataclasses_equal(result, run_lagged(runs[2]))


def die(_: Lagged) -> RunResult:
    raise SystemExit(3)


def test_a_process_that_dies_ends_the_lab(tmp_path: Path) -> None:
    job = dataclasses.replace(LAGGED, run=die)
    ledger = Ledger(tmp_path / "runs.jsonl", LAGGED)
    with (
        Crew(1, [job], lambda _: None) as crew,
        pytest.raises(OurFault, match=r"a process of the lab died in .*dppo_tv"),
    ):
        crew.finish("lags", job, [settings()], ledger)


@pytest.mark.timeout(300)
def test_the_quick_mode_and_its_second_start(tmp_path: Path) -> None:
    path, said = tmp_path / "runs.jsonl", list[str]()
    assert QUICK.lags is not None
    assert QUICK.swarm is not None
    size = dataclasses.replace(
        QUICK,
        lags=dataclasses.replace(QUICK.lags, steps=8, lags=((0,), (2,))),
        swarm=dataclasses.replace(QUICK.swarm, steps=6),
    )
    report = bench_staleness(size, path, said.append)
    assert report["failures"] == []
    assert report["made"] == 2 * 2 * 2 + 2 * 2
    assert [case["lag"] for case in report["lags"]["presets"][0]["lags"]] == ["0", "2"]
    assert report["lags"]["presets"][0]["lags"][0]["retained"]["value"] == 1.0
    assert 0.1 < report["lags"]["presets"][0]["lags"][0]["area"]["value"] < 0.9
    again = bench_staleness(size, path, said.append)
    assert (again["made"], again["reused"]) == (0, 12)
    assert again["lags"]["presets"] == report["lags"]["presets"]
    assert again["swarm"] == report["swarm"]
