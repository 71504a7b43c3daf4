"""The staleness lab without training: lags, resuming, intervals, reports, pictures, all from made-up runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch

from protocol.errors import ConfigError, OurFault
from swarm_cli.bench.staleness import bench, plot
from swarm_cli.bench.staleness import ledger as ledgers
from swarm_cli.bench.staleness.analysis import (
    area,
    collapsed,
    difference,
    final,
    mean,
    mean_curve,
    ratio_of_means,
)
from swarm_cli.bench.staleness.buffer import Buffer, Place, Schedule
from swarm_cli.bench.staleness.lagged import LAGGED, Lagged, RunResult
from swarm_cli.bench.staleness.lags import Lags, LagSize, parse_lag
from swarm_cli.bench.staleness.ledger import Ledger
from swarm_cli.bench.staleness.mismatch import NOISE, Mismatch, engine_weights, reported
from swarm_cli.bench.staleness.mixtures import Mixtures, MixtureSize
from swarm_cli.bench.staleness.objective import open_method
from swarm_cli.bench.staleness.swarm import SWARM, Swarm, SwarmResult
from swarm_cli.bench.staleness.workers import Crew
from tests.swarm_cli.conftest import Swarm as Command

# --- lags ---


def served(lags: tuple[int, ...], *, steps: int, groups: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """Version that generated each group, steps x groups, as a buffer hands them out."""
    version = 0

    def generate(places: Sequence[Place]) -> list[tuple[Place, int]]:
        return [(place, version) for place in places]

    schedule = Schedule(lags, steps=steps, groups=groups, seed=seed)
    buffer: Buffer[tuple[Place, int]] = Buffer(schedule, groups, generate)
    born = []
    for version in range(steps):
        taken = buffer.take(version)
        assert [place for place, _ in taken] == [Place(version, number) for number in range(groups)]
        born.append([at for _, at in taken])
    return np.array(born)


@pytest.mark.parametrize("lag", [0, 1, 4, 16, 64])
def test_a_version_trains_on_what_the_one_l_versions_before_it_generated(lag: int) -> None:
    steps = 3 * lag + 5
    expected = [[max(0, version - lag)] * 3 for version in range(steps)]
    assert served((lag,), steps=steps).tolist() == expected


def test_lag_two_written_out() -> None:
    assert served((2,), steps=6, groups=1)[:, 0].tolist() == [0, 0, 0, 1, 2, 3]


def test_a_mixture_serves_each_of_its_lags_and_no_other() -> None:
    born = served((0, 4, 16), steps=60, groups=8)
    lags = np.arange(60)[:, None] - born
    assert set(np.unique(lags[16:])) == {0, 4, 16}
    shares = [float((lags[16:] == lag).mean()) for lag in (0, 4, 16)]
    assert min(shares) > 0.25  # 352 draws of a third each: three standard deviations are 0.075


def test_a_mixture_is_the_same_for_one_seed_and_another_for_the_next() -> None:
    first = served((0, 4, 16), steps=40)
    assert np.array_equal(first, served((0, 4, 16), steps=40))
    assert not np.array_equal(first, served((0, 4, 16), steps=40, seed=1))


def test_nothing_is_generated_that_no_step_uses() -> None:
    schedule = Schedule((16,), steps=20, groups=2, seed=0)
    assert [len(schedule.due(version)) for version in range(20)] == [34, 2, 2, 2, *[0] * 16]


@pytest.mark.parametrize(("spelled", "lag"), [("0", (0,)), ("64", (64,)), ("0+16+64", (0, 16, 64))])
def test_how_lags_are_spelled(spelled: str, lag: tuple[int, ...]) -> None:
    assert parse_lag(spelled) == lag


@pytest.mark.parametrize("spelled", ["", "-1", "4+", "many", "0+-4"])
def test_what_is_no_lag(spelled: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of versions"):
        parse_lag(spelled)


# --- what a run trains with ---


def test_a_preset_with_options_and_a_learning_rate_that_follows_the_sample_size() -> None:
    method = open_method("tis:cap=3,old=snapshot+ess")
    assert method.ess_scaling
    assert method.snapshot
    assert not method.ewma
    assert not open_method("dppo_tv").ess_scaling
    assert open_method("ppo_ewma").ewma


@pytest.mark.parametrize("spelled", ["nosuch", "tis:cap", "tis:cup=3", "opsm"])
def test_what_is_no_preset(spelled: str) -> None:
    with pytest.raises(ConfigError):
        open_method(spelled)


def test_eight_bits_by_hand() -> None:
    weights = {
        "matrix": torch.tensor([[1.27, -0.634, 0.004], [0.0, 0.0, 0.0]]),
        "norm": torch.tensor([1.001]),
    }
    rounded = engine_weights(weights, Mismatch.INT8)
    assert torch.allclose(rounded["matrix"], torch.tensor([[1.27, -0.63, 0.0], [0.0, 0.0, 0.0]]))
    assert rounded["norm"].item() == weights["norm"].item()


def test_sixteen_bits_by_hand() -> None:
    # bfloat16 has 8 digits of mantissa: between 1 and 2 it steps by 1/128.
    rounded = engine_weights({"norm": torch.tensor([1.001, 1.005])}, Mismatch.BF16)
    assert rounded["norm"].tolist() == [1.0, 1 + 1 / 128]


def test_noise_is_as_large_as_told_and_the_same_for_one_seed() -> None:
    logprobs = np.full(20_000, -2.0, np.float32)
    told = reported(logprobs, Mismatch.NOISE, (7,))
    assert abs(float((told - logprobs).std()) - NOISE) < 0.002
    assert np.array_equal(told, reported(logprobs, Mismatch.NOISE, (7,)))
    assert not np.array_equal(told, reported(logprobs, Mismatch.NOISE, (8,)))
    assert reported(np.zeros(100, np.float32), Mismatch.NOISE, (7,)).max() == 0.0
    assert np.array_equal(reported(logprobs, Mismatch.INT8, (7,)), logprobs)


# --- numbers ---


def test_an_area_by_hand() -> None:
    curve = [(0, 0.2), (8, 0.4), (16, 0.4)]
    assert area(curve) == pytest.approx((8 * 0.3 + 8 * 0.4) / 16)
    assert area(curve, 8) == pytest.approx(0.3)
    assert area([(0, 0.2), (10, 0.2), (40, 0.6)]) == pytest.approx((10 * 0.2 + 30 * 0.4) / 40)


def test_the_final_value_is_the_mean_of_the_last_three_points() -> None:
    assert final([(0, 0.9), (1, 0.1), (2, 0.2), (3, 0.3)]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ((0.3, 0.5, 0.7, 0.7, 0.7), False),
        ((0.3, 0.5, 0.2, 0.2, 0.2), True),  # below its start
        ((0.1, 0.8, 0.3, 0.3, 0.3), True),  # below half of its best
        ((0.1, 0.8, 0.5, 0.5, 0.5), False),
    ],
)
def test_what_counts_as_collapsed(heights: Sequence[float], expected: bool) -> None:
    assert collapsed(list(enumerate(heights))) is expected


def test_a_bootstrap_of_two_seeds_by_hand() -> None:
    # Four ways to draw two of {0, 1}: means 0, 1/2, 1/2, 1. The 2.5 % quantile lies 0.075 of the way from the
    # first to the second.
    interval = mean([0.0, 1.0])
    assert interval.value == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.0375, 0.9625))


def test_a_ratio_draws_both_of_a_pair() -> None:
    # Ways: (1, 1)/(2, 2), (1, 3)/(2, 2) twice, (3, 3)/(2, 2): 1/2, 1, 1, 3/2.
    interval = ratio_of_means([1.0, 3.0], [2.0, 2.0])
    assert interval.value == 1.0
    assert (interval.low, interval.high) == pytest.approx((0.5375, 1.4625))
    # Unpaired draws would give anything from 1/4 to 4.
    same = ratio_of_means([1.0, 4.0], [1.0, 4.0])
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)


def test_a_difference_is_of_pairs() -> None:
    interval = difference([0.9, 0.2], [0.8, 0.1])
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.1, 0.1, 0.1))


def test_many_seeds_are_drawn_at_random_but_always_the_same() -> None:
    values = np.random.default_rng(0).normal(size=200).tolist()
    interval = mean(values)
    # The normal approximation: 1.96 standard errors to each side.
    half = 1.96 * float(np.std(values)) / 200**0.5
    assert interval.low == pytest.approx(interval.value - half, abs=0.1 * half)
    assert interval.high == pytest.approx(interval.value + half, abs=0.1 * half)
    assert mean(values) == interval


def test_the_mean_of_curves() -> None:
    middle = mean_curve([[(0, 0.25), (8, 0.5)], [(0, 0.5), (8, 1.0)]])
    assert middle == [(0, 0.375), (8, 0.75)]


# --- resuming ---


def result(*heights: float, every: int = 8) -> RunResult:
    curve = tuple((every * place, height) for place, height in enumerate(heights))
    return RunResult(curve=curve, skipped=0, kept=1.0, ess=1.0, gap=0.0, seconds={"train": 1.0}, cpu_s=1.0)


def settings(seed: int = 0, **changed: Any) -> Lagged:
    fields: dict[str, Any] = {"preset": "dppo_tv", "lags": (4,), "learning_rate": 1e-4, "steps": 8, **changed}
    return Lagged(seed=seed, **fields)


def make(wanted: Lagged) -> RunResult:
    if wanted.seed == 13:
        raise OurFault("bad luck")
    return result(0.1, 0.1 * wanted.seed)


def open_ledger(path: Path) -> Ledger[Lagged, RunResult]:
    return Ledger(path, LAGGED)


def test_a_second_start_makes_only_what_is_missing(tmp_path: Path) -> None:
    made: list[int] = []

    def counted(wanted: Lagged) -> RunResult:
        made.append(wanted.seed)
        return make(wanted)

    path, heard = tmp_path / "lab" / "runs.jsonl", list[str]()
    job = replace(LAGGED, run=counted)
    for seeds in (2, 4, 4):
        with Crew(0, [job], heard.append) as crew:
            crew.finish("lags", job, [settings(seed) for seed in range(seeds)], open_ledger(path))
    assert made == [0, 1, 2, 3]
    assert (crew.finished.made, crew.finished.reused) == (0, 4)
    assert open_ledger(path).get(settings(3)) == make(settings(3))


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"lags": (4, 0)}, {"learning_rate": 2e-4}, {"mismatch": Mismatch.BF16}, {"steps": 9}],
)
def test_other_settings_are_another_run(tmp_path: Path, changed: dict[str, Any]) -> None:
    ledger = open_ledger(tmp_path / "runs.jsonl")
    ledger.add(settings(), result(0.1, 0.2))
    assert ledger.get(settings(**changed)) is None


def test_a_line_that_was_cut_off_counts_as_not_there(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    ledger = open_ledger(path)
    for seed in range(2):
        ledger.add(settings(seed), make(settings(seed)))
    path.write_bytes(path.read_bytes()[:-20])
    again = open_ledger(path)
    assert again.get(settings(0)) is not None
    assert again.get(settings(1)) is None
    again.add(settings(2), make(settings(2)))
    assert open_ledger(path).get(settings(2)) == make(settings(2))


def test_experiments_share_a_file_and_not_their_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    open_ledger(path).add(settings(), result(0.1, 0.2))
    swarm = Swarm(variant="compat", seed=0, learning_rate=1e-4, steps=8, objective="topr")
    mixed = SwarmResult(curve=((0, 0.1),), curves=((0.1,),), foreign_groups=4.0, kept=1.0, skipped=0)
    Ledger(path, SWARM).add(swarm, mixed)
    assert open_ledger(path).get(settings()) is not None
    assert Ledger(path, SWARM).get(swarm) == mixed


def test_runs_of_other_code_are_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(ledgers, "source_digest", lambda: "before")
    open_ledger(path).add(settings(0), make(settings(0)))
    monkeypatch.setattr(ledgers, "source_digest", lambda: "now")
    ledger = open_ledger(path)
    ledger.add(settings(1), make(settings(1)))
    assert ledger.get(settings(0)) is not None
    assert ledger.made_by_other_code(settings(0))
    assert not ledger.made_by_other_code(settings(1))


def test_a_run_that_fails_is_told_and_left_out_and_tried_again(tmp_path: Path) -> None:
    ledger, heard = open_ledger(tmp_path / "runs.jsonl"), list[str]()
    job = replace(LAGGED, run=make)
    for _ in range(2):
        with Crew(0, [job], heard.append) as crew:
            crew.finish("lags", job, [settings(12), settings(13), settings(14)], ledger)
        assert [text.rpartition(": ")[2] for text in crew.finished.failures] == ["bad luck"]
    assert ledger.get(settings(14)) is not None
    assert ledger.get(settings(13)) is None


# --- the experiments ---


class Instant:
    """Instead of processes: every run comes out as `outcome` says, and is remembered."""

    def __init__(self, outcome: Callable[[Any], Any]) -> None:
        self.outcome = outcome
        self.runs: list[Any] = []

    def finish(self, title: str, job: object, runs: Sequence[Any], ledger: Ledger[Any, Any]) -> None:
        for wanted in runs:
            self.runs.append(wanted)
            ledger.add(wanted, self.outcome(wanted))


SIZE = LagSize(
    presets=("topr", "uncorrected"),
    lags=((0,), (16,), (64,), (256,)),
    seeds=3,
    steps=64,
    learning_rates=(1e-4, 2e-4),
    tuning_lags=((0,), (64,)),
    tuning_seeds=2,
)


def flat(wanted: Lagged) -> RunResult:
    """A run that stays where its lag, preset and seed put it; topr likes the larger rate."""
    harm = {"topr": 0.0002, "uncorrected": 0.002}[wanted.preset] * max(wanted.lags)
    gain = 0.1 if (wanted.preset == "topr") == (wanted.learning_rate == 2e-4) else 0.0
    height = 0.5 + gain - harm + 0.01 * wanted.seed
    return result(*[height] * (wanted.steps // 8 + 1))


def measured(tmp_path: Path, size: LagSize = SIZE) -> tuple[Instant, dict[str, Any]]:
    lab, crew = Lags(size, open_ledger(tmp_path / "runs.jsonl")), Instant(flat)
    lab.run(cast("Crew", crew))
    return crew, lab.report()


def test_learning_rates_are_chosen_with_seeds_of_their_own(tmp_path: Path) -> None:
    crew, report = measured(tmp_path)
    assert [row["learning_rate"] for row in report["presets"]] == [2e-4, 1e-4]
    tuning = [run for run in crew.runs if run.seed >= 1000]
    assert {run.seed for run in tuning} == {1000, 1001}
    assert {run.lags for run in tuning} == {(0,), (64,)}
    assert len(tuning) == 2 * 2 * 2 * 2  # presets x rates x lags x seeds
    assert {(run.preset, run.learning_rate) for run in crew.runs if run.seed < 1000} == {
        ("topr", 2e-4),
        ("uncorrected", 1e-4),
    }


def test_every_preset_and_lag_has_the_same_seeds_and_at_least_three_lags_of_steps(tmp_path: Path) -> None:
    crew, _ = measured(tmp_path)
    main = [run for run in crew.runs if run.seed < 1000]
    for preset in SIZE.presets:
        for lag in SIZE.lags:
            seeds = [run.seed for run in main if run.preset == preset and run.lags == lag]
            assert seeds == [0, 1, 2]
    steps = {run.lags[0]: run.steps for run in main}
    assert steps == {0: 768, 16: 64, 64: 192, 256: 768}  # lag 0 as long as the longest


def test_what_is_retained_and_what_is_gained_by_hand(tmp_path: Path) -> None:
    _, report = measured(tmp_path)
    at = {row["preset"]: {case["lag"]: case for case in row["lags"]} for row in report["presets"]}
    # Three seeds, 0.60, 0.61, 0.62 at lag 0; 64 versions cost topr 0.0128 and the other 0.128.
    assert at["topr"]["0"]["area"]["value"] == pytest.approx(0.61)
    assert at["topr"]["64"]["retained"]["value"] == pytest.approx((0.61 - 0.0128) / 0.61)
    assert at["topr"]["64"]["against_fresh"]["value"] == pytest.approx(-0.0128)
    assert at["topr"]["64"]["against_baseline"]["value"] == pytest.approx(0.128 - 0.0128)
    assert at["uncorrected"]["64"]["retained"]["value"] == pytest.approx((0.61 - 0.128) / 0.61)
    assert at["uncorrected"]["256"]["area"]["value"] == pytest.approx(0.61 - 0.512)
    assert at["uncorrected"]["64"]["against_baseline"]["value"] == 0.0


def test_the_verdict_is_about_the_largest_lag_with_a_bar(tmp_path: Path) -> None:
    _, report = measured(tmp_path)
    verdict = report["verdict"]
    assert verdict["lag"] == "64"
    assert verdict["holds"] is True  # keeps 0.979, and the difference is 0.115 for every seed
    assert verdict["default_over_baseline"]["low"] == pytest.approx(0.1152)


def test_a_lag_is_compared_with_lag_0_over_its_own_steps(tmp_path: Path) -> None:
    def rising(wanted: Lagged) -> RunResult:
        return result(*[8 * place / 768 for place in range(wanted.steps // 8 + 1)])

    lab = Lags(SIZE, open_ledger(tmp_path / "runs.jsonl"))
    lab.run(cast("Crew", Instant(rising)))
    cases = lab.report()["presets"][0]["lags"]
    assert [case["retained"]["value"] for case in cases] == [1.0, 1.0, 1.0, 1.0]
    assert cases[0]["area"]["value"] == pytest.approx(64 / 768 / 2)  # of its first 64 steps


def test_a_preset_that_lacks_a_run_has_no_area(tmp_path: Path) -> None:
    lab = Lags(SIZE, open_ledger(tmp_path / "runs.jsonl"))
    report = lab.report()
    assert report["presets"][0]["lags"][0] == {"lag": "0", "area": None}
    assert report["verdict"] is None
    assert "not all runs were made" in plot.terminal(report)
    ElementTree.fromstring(plot.svg(report))


def test_variants_of_the_swarm_are_compared_with_both_baselines(tmp_path: Path) -> None:
    heights = {"solo_4": 0.5, "solo_8": 0.6, "compat": 0.65}

    def outcome(wanted: Swarm) -> SwarmResult:
        height = heights[wanted.variant] + 0.01 * wanted.seed
        return SwarmResult(
            curve=((0, height), (8, height)), curves=(), foreign_groups=4.0, kept=1.0, skipped=0
        )

    size = MixtureSize(variants=("solo_4", "solo_8", "compat"), seeds=2, steps=8, learning_rate=1e-4)
    mixtures = Mixtures(size, Ledger(tmp_path / "runs.jsonl", SWARM))
    mixtures.run(cast("Crew", Instant(outcome)))
    report = mixtures.report()
    assert report["best"] == "compat"
    compat = report["variants"][2]
    assert compat["against_solo_4"]["value"] == pytest.approx(0.15)
    assert compat["against_solo_8"]["low"] == pytest.approx(0.05)


# --- pictures ---


def test_the_svg_is_well_formed_and_has_a_mark_for_every_case(tmp_path: Path) -> None:
    _, report = measured(tmp_path)
    report["presets"][1]["preset"] = "<a & b>"
    root = ElementTree.fromstring(plot.svg(report))
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert len(root.findall(f"{name}circle")) == 2 * 4
    assert len(root.findall(f"{name}polyline")) == 2 * 4
    assert "<a & b>" in [text.text for text in root.findall(f"{name}text")]


def test_the_terminal_shows_the_best_first_and_who_collapsed(tmp_path: Path) -> None:
    _, report = measured(tmp_path)
    report["presets"][1]["lags"][3]["collapsed"] = 2
    blocks = plot.terminal(report).split("\n\n")
    assert [block.split()[:2] for block in blocks if block] == [["lag", str(lag)] for lag in (0, 16, 64, 256)]
    rows = blocks[2].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["topr", "uncorrected"]
    assert rows[0].index("o", 16) > rows[1].index("o", 16)
    assert "0.597   98%" in rows[0]
    assert "2 collapsed" in blocks[3]


def test_a_report_is_json_and_its_summary_a_table(tmp_path: Path) -> None:
    _, lags = measured(tmp_path)
    report: dict[str, Any] = {
        "lags": lags,
        "swarm": None,
        "made": 1,
        "reused": 0,
        "failures": [],
        "wall_s": 1.0,
    }
    report |= {"cores": 2, "load_average": 0.1}
    assert msgspec.json.decode(msgspec.json.encode(report)) is not None
    summary = plot.summary(report)
    assert summary["verdict"]["holds"] is True
    assert summary["learning rates"] == {"topr": "0.0002", "uncorrected": "0.0001"}


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--lags", "soon"), "lag 'soon' is not a number of versions"),
        (("--presets", "nosuch"), "objective 'nosuch' is unknown"),
        (("--presets", "opsm"), "needs the option 'delta'"),
        (("--mismatch", "fp4"), "--mismatch 'fp4' is unknown"),
        (("--only", "half"), "--only 'half' is unknown"),
    ],
)
def test_what_the_command_refuses(swarm: Command, arguments: tuple[str, ...], sentence: str) -> None:
    ended = swarm("bench", "staleness", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert sentence in ended.err


def test_the_command_cuts_out_what_is_asked_for(
    swarm: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def measure(size: Any, path: Path, say: object) -> dict[str, Any]:
        asked.append((size, path))
        _, lags = measured(tmp_path)
        return {"bench": "staleness", "lags": lags, "swarm": None, "failures": ["one"]}

    monkeypatch.setattr(bench, "bench_staleness", measure)
    cut = ("--presets", "tis", "--presets", "vcpo+ess", "--lags", "0", "--lags", "0+8", "--seeds", "2")
    ended = swarm(
        *("bench", "staleness", *cut, "--rates", "1e-4", "--mismatch", "int8", "--only", "lags"),
        *("--svg", tmp_path / "lags.svg", "--home", tmp_path / "home", "--json"),
    )
    assert ended.code == 1  # a run failed
    assert msgspec.json.decode(ended.out)["lags"]["verdict"]["holds"] is True
    ElementTree.fromstring((tmp_path / "lags.svg").read_text(encoding="utf-8"))
    ((size, path),) = asked
    assert path == tmp_path / "home" / "bench" / "staleness" / "runs.jsonl"
    assert size.swarm is None
    assert bench.FULL.lags is not None
    assert size.lags == replace(
        bench.FULL.lags,
        presets=("tis", "vcpo+ess"),
        lags=((0,), (0, 8)),
        seeds=2,
        learning_rates=(1e-4,),
        mismatch=Mismatch.INT8,
    )
