"""Parameters counted from configs, against what the models' authors publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.open.architectures import KNOWN, count_params, facts_of
from node.rollout.policy import Policy, weight_facts
from node.state.paths import bundled
from protocol.errors import ModelError

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}
"""On their model cards."""


def test_known_models_have_the_parameters_that_were_published() -> None:
    assert {name: count_params(config) for name, config in KNOWN.items()} == PUBLISHED


@pytest.mark.parametrize("name", ["wren", "starling", "rook"])
def test_a_config_means_what_is_in_the_files(name: str) -> None:
    folder = bundled(f"models/{name}")
    assert facts_of(str(folder)).params == weight_facts(folder)[0]
    assert facts_of(str(folder / "config.json")).max_positions == Policy.open(folder).max_positions


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'nothing' is none of smollm2-135m, .* and no config\.json"):
        facts_of("nothing")
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(ModelError, match="has no vocab_size"):
        facts_of(str(file))
    file.write_text(json.dumps({**KNOWN["qwen2.5-3b"], "model_type": "mamba"}))
    with pytest.raises(ModelError, match="'mamba' model are not counted"):
        facts_of(str(tmp_path))
