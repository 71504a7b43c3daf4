"""How presets are found, opened, described and refused."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from node.config import OwnObjective, WeightConfig, load_config
from node.open.settings import train_settings
from node.state.paths import bundled
from node.train.objectives import (
    EVERY_TRAINER,
    Aggregation,
    Evidence,
    Level,
    Need,
    Reference,
    all_presets,
    open_objective,
    require,
)
from node.train.objectives.controls.drop import Metric
from node.train.objectives.presets.decoupled import decoupled_ppo, mis, ppo_ewma, tis
from node.train.objectives.presets.proximal import copris
from node.train.objectives.presets.sequence import gspo, luspo
from node.train.settings import TrainSettings
from node.weight.advantage.registry import ADVANTAGES
from node.weight.settings import WeightSettings
from protocol.charter import found
from protocol.errors import ConfigError
from protocol.identity import Identity
from protocol.messages import Charter

PRESETS = {each.name: each for each in all_presets()}
every_preset = pytest.mark.parametrize("name", PRESETS)


@pytest.fixture(scope="module")
def charter() -> Charter:
    return found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)


def settings_of(charter: Charter, **train: Any) -> TrainSettings:
    keys = {f"{'weight' if key == 'advantage' else 'train'}.{key}": value for key, value in train.items()}
    return train_settings(load_config([], keys), charter)


@every_preset
def test_every_preset_says_what_it_is(name: str) -> None:
    preset = PRESETS[name]
    summary, _, rest = preset.description.partition("\n")
    assert summary.endswith(".")
    assert "L_t = " in rest or "L = " in rest
    assert preset.source
    made = preset.make(**dict.fromkeys(preset.required, 1.0))
    assert made.name == name
    assert made.needs == preset.needs
    assert hash(made) == hash(preset.make(**dict.fromkeys(preset.required, 1.0)))  # settings are values


def test_what_is_only_reconstructed_says_so() -> None:
    labels = {name: preset.evidence for name, preset in PRESETS.items()}
    assert {name for name, label in labels.items() if label is Evidence.RECONSTRUCTED} == {
        *("ais", "compat", "erils", "f_opd", "graft", "mu_grpo", "ppo_ewma", "sparse_rl", "tbpo")
    }
    assert {name for name, label in labels.items() if label is Evidence.CORE} == {
        *("dis", "dppo_kl", "dro", "minpro", "pnpo", "sat", "swarm_sapo")
    }


def test_the_config_names_every_preset_for_own_groups() -> None:
    own = sorted(name for name, preset in PRESETS.items() if not preset.foreign)
    assert sorted(get_args(OwnObjective)) == own
    assert {name for name, preset in PRESETS.items() if preset.foreign} == {
        *("compat", "erils", "graft", "hacpo")
    }


def test_the_config_names_every_advantage_inside_one_group() -> None:
    for model, field in ((WeightConfig, "advantage"), (WeightSettings, "advantage")):
        assert sorted(get_args(get_type_hints(model)[field])) == sorted(ADVANTAGES)


def test_what_presets_need() -> None:
    needs = {name: preset.needs for name, preset in PRESETS.items()}
    assert needs["uncorrected"] == needs["swarm_sapo"] == needs["hacpo"] == needs["compat"] == set()
    assert needs["dppo_tv"] == needs["gspo"] == needs["tis"] == needs["opsm"] == {Need.BEHAVIOUR}
    assert needs["a3po"] == needs["f_opd"] == {Need.BEHAVIOUR, Need.VERSIONS}
    assert needs["copris"] == {Need.SNAPSHOT}
    assert needs["ppo_ewma"] == {Need.BEHAVIOUR, Need.EWMA}
    assert needs["graft"] == {Need.OWN_ROLLOUTS}
    assert needs["erils"] == {Need.OWN_ROLLOUTS, Need.REWARDS}
    assert gspo(denominator=Reference.SNAPSHOT).needs == {Need.SNAPSHOT}


def test_an_objective_without_its_inputs_is_refused_by_name_with_who_provides_them() -> None:
    for objective, message in (
        (copris(), "objective copris needs log pi_old of each token by the version .* snapshots"),
        (decoupled_ppo(old=Reference.SNAPSHOT), "objective decoupled_ppo needs .* snapshots"),
        (ppo_ewma(), "objective ppo_ewma needs log pi by a moving average"),
    ):
        with pytest.raises(ConfigError, match=message):
            require(objective)
        require(objective, EVERY_TRAINER | {Need.SNAPSHOT, Need.EWMA})
    with pytest.raises(ConfigError, match="objective tis needs log mu of each token"):
        require(tis(), {Need.VERSIONS})


def test_the_configuration_is_refused_before_anything_starts(charter: Charter) -> None:
    for train, message in (
        ({"objective": "opsm"}, "opsm needs the option 'delta'"),
        ({"objective_options": {"capp": 3}}, "topr has no option 'capp'"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings_of(charter, **train)
    assert settings_of(charter, objective="opsm", objective_options="{ delta = 0.5 }").own.name == "opsm"
    # what a node keeps as soon as an objective asks for it
    assert Need.SNAPSHOT in settings_of(charter, objective="copris").needs
    assert Need.EWMA in settings_of(charter, objective="tis", objective_options={"old": "ewma"}).needs
    assert not settings_of(charter).needs & {Need.SNAPSHOT, Need.EWMA}


def test_options_are_typed() -> None:
    assert open_objective("tis", {"cap": 3}) == tis(cap=3.0)
    assert open_objective("tis", {"level": "sequence"}) == tis(level=Level.SEQUENCE)
    assert open_objective("mis", {"normalise": True, "metric": "k3"}) == mis(normalise=True, metric=Metric.K3)
    for name, options, message in (
        ("tis", {"cap": "three"}, "option cap = 'three' of objective tis"),
        ("tis", {"cap": -1.0}, "cap = -1.0 of objective tis is no number of at least 0"),
        ("tis", {"cap": float("nan")}, "is no number of at least 0"),
        ("tis", {"cap": float("inf")}, "is no number of at least 0"),
        ("tis", {"normalise": 1}, "option normalise = 1"),
        ("tis", {"level": "word"}, "level 'word' is unknown; choose one of token, sequence"),
        ("vcpo", {"clip_low": 0.1}, "no option 'clip_low'; it has aggregation, cap"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_objective(name, options)


def test_dr_grpo_advantages_divide_any_objective_by_a_constant(charter: Charter) -> None:
    constant = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    for objective in ("dppo_tv", "luspo", "grpo"):
        settings = settings_of(charter, objective=objective, advantage="dr_grpo")
        assert settings.own.aggregation is settings.compat.aggregation is constant
    chosen = {"aggregation": "token_mean"}
    settings = settings_of(charter, objective="grpo", advantage="dr_grpo", objective_options=chosen)
    assert settings.own.aggregation is Aggregation.TOKEN_MEAN
    assert settings_of(charter, objective="luspo").own == luspo()


def test_objectives_are_values() -> None:
    assert dataclasses.replace(tis(), name="objective") != tis()
    assert tis() == tis()
    assert tis(cap=3.0) != tis()
