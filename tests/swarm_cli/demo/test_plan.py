"""What a demo consists of."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest

from node.config import load_config
from node.environment.installed import DEMO_ENVIRONMENTS
from node.state.keys import load_key
from node.state.paths import bundled
from protocol.charter import decode_charter, swarm_id
from protocol.codec import digest
from protocol.errors import ConfigError
from swarm_cli.demo.plan import OWN_KEYS, DemoOptions, DemoPlan, DemoRole, check_settings, make_plan


def plan(root: Path, options: DemoOptions | None = None, **settings: str) -> DemoPlan:
    return make_plan(options or DemoOptions(), root, settings)


def test_three_unequal_nodes_that_know_the_first(tmp_path: Path) -> None:
    made = plan(tmp_path)
    names = [node.config.name for node in made.nodes]
    assert names == ["wren", "starling", "rook"]
    assert [node.config.policy.path for node in made.nodes] == [f"models/{name}" for name in names]
    addresses = [node.address for node in made.nodes]
    assert len(set(addresses)) == 3
    known = [list(node.config.network.bootstraps) for node in made.nodes]
    assert known == [[], addresses[:1], addresses[:1]]
    for node in made.nodes:
        assert decode_charter(node.home.charter.read_bytes()) == made.charter
        assert load_key(node.home.key).peer_id == node.identity.peer_id
        assert stat.S_IMODE(node.home.key.stat().st_mode) == 0o600


def test_what_a_process_reads_is_what_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_HOME")  # as in the processes of a demo
    for node in plan(tmp_path, DemoOptions(with_liar=True)).nodes:
        assert load_config([node.home.root / "node.json"]).model_dump() == node.config.model_dump()
        assert "seed" in json.loads((node.home.root / "node.json").read_text())
        assert node.identity.to_libp2p().hex() not in (node.home.root / "node.json").read_text()


def test_a_seed_gives_the_same_keys_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        [node.identity.peer_id for node in plan(tmp_path / str(n), DemoOptions(seed=seed)).nodes]
        for n, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert not set(first) & set(other)


def test_the_liar_is_a_node_of_another_role(tmp_path: Path) -> None:
    made = plan(tmp_path, DemoOptions(nodes=1, with_liar=True))
    assert [node.role for node in made.nodes] == [DemoRole.NODE, DemoRole.LIAR]
    assert [node.config.name for node in made.honest] == ["wren"]


def test_an_engine_is_chosen_for_honest_nodes_and_kept_small(tmp_path: Path) -> None:
    made = plan(tmp_path, DemoOptions(nodes=1, engine="vllm", with_liar=True), **{"vllm.kv_cache_mib": "32"})
    assert [node.config.rollout.engine for node in made.nodes] == ["vllm", "transformers"]
    assert (made.nodes[0].config.vllm.kv_cache_mib, made.nodes[0].config.vllm.max_context) == (32, 128)


def test_solo_nodes_train_alone(tmp_path: Path) -> None:
    for node in plan(tmp_path, DemoOptions(solo=True, solo_groups=8)).nodes:
        assert node.config.network.transport == "none"
        assert (node.config.train.local_groups, node.config.train.external_groups) == (8, 0)


def test_more_nodes_than_policies_have_names_of_their_own(tmp_path: Path) -> None:
    names = [node.config.name for node in plan(tmp_path, DemoOptions(nodes=5, transport="memory")).nodes]
    assert names == ["wren", "starling", "rook", "wren2", "starling2"]


def test_settings_reach_every_node(tmp_path: Path) -> None:
    made = plan(tmp_path, **{"train.learning_rate": "1e-5"})
    assert {node.config.train.learning_rate for node in made.nodes} == {1e-5}


@pytest.mark.parametrize("key", OWN_KEYS)
def test_keys_that_the_demo_decides_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {key}: the demo sets this itself"):
        check_settings(DemoOptions(), {key: "1"})


def test_other_settings_are_checked_before_anything_is_made() -> None:
    check_settings(DemoOptions(), {"train.local_groups": "8"})
    with pytest.raises(ConfigError, match="use --solo-groups"):
        check_settings(DemoOptions(solo=True), {"train.local_groups": "8"})
    with pytest.raises(ConfigError, match=r"nearest valid one is 'train\.steps'"):
        check_settings(DemoOptions(), {"train.stepz": "8"})


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in the demo TMPDIR or --keep"):
        plan(tmp_path / ("x" * 90))


def test_demos_of_one_seed_have_the_same_prompts(tmp_path: Path) -> None:
    """`--solo` and `--no-verify` are compared with a plain demo on equal held-out prompts."""
    made = [
        plan(tmp_path / str(number), options).charter
        for number, options in enumerate(
            (DemoOptions(), DemoOptions(solo=True), DemoOptions(verify=False), DemoOptions(seed=2))
        )
    ]
    ids = [swarm_id(charter) for charter in made]
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_the_charter_lists_the_tasks_that_the_policies_know_and_their_tokenizers(tmp_path: Path) -> None:
    charter = plan(tmp_path).charter
    assert tuple(msgspec.structs.replace(spec, pin="") for spec in charter.environments) == DEMO_ENVIRONMENTS
    assert all(spec.pin for spec in charter.environments)
    folders = [bundled(f"models/{name}") for name in ("wren", "starling", "rook")]
    digests = {digest((folder / "tokenizer.json").read_bytes()) for folder in folders}
    assert {spec.digest for spec in charter.tokenizers} == digests
    assert len(digests) >= 2


def test_followers_have_the_policy_of_the_node_they_are_for(tmp_path: Path) -> None:
    made = plan(tmp_path, DemoOptions(nodes=2, followers=3))
    assert [node.config.name for node in made.honest] == ["wren", "starling"]
    assert [(node.config.name, node.config.role, node.config.policy.path) for node in made.followers] == [
        ("follower1", "follower", "models/wren"),
        ("follower2", "follower", "models/wren"),
        ("follower3", "follower", "models/starling"),
    ]
    assert {node.config.role for node in made.honest} == {"trainer"}
    # The others' keys and configurations are as without followers.
    again = plan(tmp_path / "again", DemoOptions(nodes=2))
    assert [node.identity.peer_id for node in again.nodes] == [node.identity.peer_id for node in made.honest]


@pytest.mark.parametrize("key", ["role", "follow.owner"])
def test_roles_are_the_demos_choice(key: str) -> None:
    with pytest.raises(ConfigError, match="the demo sets this itself"):
        check_settings(DemoOptions(), {key: "follower"})
