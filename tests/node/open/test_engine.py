"""Which engine opens, and what takes its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from node.config import load_config
from node.open import engine as opening
from node.open.engine import open_engine
from node.rollout.engine.base import EngineError
from node.rollout.engine.fallback import FallbackEngine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.state.paths import bundled
from protocol.errors import ConfigError, ModelError, SwarmError
from protocol.identity import Identity

OURS = Identity.from_seed(b"o" * 32)
THEIRS = Identity.from_seed(b"t" * 32)


class Dying(TransformersEngine):
    """Stands for vLLM."""

    name = "vllm"
    lost = False

    def pause(self) -> None:
        if self.lost:
            raise EngineError("vLLM was started 6 times in a row")
        super().pause()


def test_the_embedded_engine_has_the_type_of_the_trainer(tiny_policy_path: Path) -> None:
    config, policy = load_config([], {"policy.device": "cpu"}), Policy.open(tiny_policy_path)
    assert [open_engine(config, policy).dtype, open_engine(config, policy, dtype="bfloat16").dtype] == [
        "float32",
        "bfloat16",
    ]


def test_no_two_nodes_sample_alike(tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.rollout.engine import vllm

    seeds: list[int] = []
    monkeypatch.setattr(vllm, "VllmEngine", lambda *_, seed, **__: seeds.append(seed))
    policy = Policy.open(tiny_policy_path)
    for seed, peer_id in ((0, OURS.peer_id), (0, THEIRS.peer_id), (1, OURS.peer_id), (0, OURS.peer_id)):
        config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "seed": seed})
        open_engine(config, policy, draws=peer_id)
    assert len(set(seeds)) == 3
    assert seeds[0] == seeds[3]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_without_fallback_an_engine_that_cannot_start_ends_the_node(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ConfigError("vLLM is not installed here")

    monkeypatch.setattr(opening, "_open_vllm", broken)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm"})
    with pytest.raises(ConfigError, match="not installed"):
        open_engine(config, Policy.open(tiny_policy_path))
    policy = Policy.open(tiny_policy_path)
    monkeypatch.setattr(opening, "_open_vllm", lambda *_: Dying(policy))
    assert isinstance(open_engine(config, policy), Dying)


@pytest.mark.parametrize(
    "error", [ConfigError("no vLLM"), ModelError("no such model"), EngineError("no start")]
)
def test_with_fallback_the_other_engine_takes_its_place(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch, error: SwarmError
) -> None:
    def broken(*_: object) -> None:
        raise error

    notices: list[tuple[str, str]] = []
    monkeypatch.setattr(opening, "_open_vllm", broken)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "rollout.fallback": True})
    engine = open_engine(config, Policy.open(tiny_policy_path), lambda *told: notices.append(told))
    assert engine.name == "transformers"
    assert notices == [
        ("warning", f"vLLM cannot be started, the transformers engine takes its place: {error}")
    ]


def test_with_fallback_a_lost_engine_is_replaced_and_that_is_told(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.open(tiny_policy_path)
    dying = Dying(policy)
    notices: list[tuple[str, str]] = []
    monkeypatch.setattr(opening, "_open_vllm", lambda *_: dying)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "rollout.fallback": True})
    engine = open_engine(config, policy, lambda *told: notices.append(told))
    assert isinstance(engine, FallbackEngine)
    engine.pause()
    assert (engine.name, notices) == ("vllm", [])
    dying.lost = True
    engine.pause()
    assert engine.name == "transformers"
    assert [level for level, _ in notices] == ["warning"]
    assert notices[0][1].startswith(
        "vLLM is lost, the transformers engine takes its place: vLLM was started 6"
    )


def test_vllm_is_refused_for_weights_that_have_other_names_in_memory(tmp_path: Path) -> None:
    """Experts in four files' tensors each are one in memory: found before vLLM is started."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = Path(shutil.copytree(bundled("models/wren"), tmp_path / "moe"))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = Qwen3MoeConfig(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    policy = Policy.open(folder)
    assert any("experts.3.down_proj" in name for name in policy.tensor_shapes())
    vllm = load_config([], {"rollout.engine": "vllm", "rollout.fallback": False})
    with pytest.raises(ModelError, match=r"updates of .*experts.*qwen3_moe models .* 'transformers'"):
        open_engine(vllm, policy)
    Policy.open(bundled("models/wren")).require_names_of_files()
