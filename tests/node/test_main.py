"""The real parts of a node: what they take over from an earlier run of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.build import load
from node.config import NodeConfig, load_config
from node.paths import Home, bundled
from node.train.checkpoint import save_checkpoint
from protocol.charter import found
from protocol.identity import Identity
from protocol.messages import Charter

pytestmark = pytest.mark.slow


@pytest.fixture
def charter() -> Charter:
    return found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)


def config_of(home: Path, run: str = "latest", policy: str = "models/wren") -> NodeConfig:
    return load_config([], {"home": home, "run": run, "policy.path": policy, "policy.device": "cpu"})


def test_a_run_goes_on_from_its_newest_checkpoint_and_no_other_does(tmp_path: Path, charter: Charter) -> None:
    state = torch.random.get_rng_state()
    try:
        config = config_of(tmp_path)
        told: list[str] = []
        planned, first = load(config, charter, lambda level, text: told.append(text))
        assert told[0].startswith(
            "memory plan for the CPU: full tuning, adamw, concurrent, 16384 tokens a pass"
        )
        assert (planned.policy.tuning, planned.train.optimiser) == ("full", "adamw")
        assert (first.trainer.policy_version, first.engine.policy_version) == (0, 0)
        with torch.no_grad():
            for parameter in first.trainer.model.parameters():
                parameter += 0.5
        first.trainer.policy_version = 41
        save_checkpoint(first.trainer, Home(tmp_path).run("latest").checkpoints / "v41")

        _, again = load(config, charter, lambda level, text: None)
        assert (again.trainer.policy_version, again.engine.policy_version) == (41, 41)
        for name, tensor in first.trainer.state_dict().items():
            assert torch.equal(again.trainer.state_dict()[name], tensor)
        assert again.policy.base_model == first.policy.base_model  # the lineage is the same
        for other in (config_of(tmp_path, run="other"), config_of(tmp_path, policy="models/rook")):
            assert load(other, charter, lambda level, text: None)[1].trainer.policy_version == 0
    finally:
        torch.random.set_rng_state(state)
