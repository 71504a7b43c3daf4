"""What a demo consists of: its nodes, their homes, keys, ports and the charter. Makes folders, starts
nothing.

Every node gets a home of its own under the demo's folder, and a complete configuration; the nodes then run
exactly as a user's `swarm run --config <home>/node.json` would. The seed gives the keys and the charter, and
so the universe of prompts and the held-out ones: demos with the same seed (`--solo`, `--no-verify`) are
comparable.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from node.config import NodeConfig, load_config
from node.open.charter import installed_pins
from node.state.keys import create_key
from node.state.paths import Home, bundled
from node.state.stores import write_atomically
from protocol.charter import charter_bytes, found
from protocol.errors import ConfigError
from protocol.identity import Identity
from protocol.messages import Charter

__all__ = ["DemoOptions", "DemoPlan", "DemoRole", "PlannedNode", "check_settings", "make_plan"]

MODELS = ("wren", "starling", "rook")
FOUNDED_AT = 1_767_225_600_000
"""Founding time of every demo swarm (2026-01-01): a charter's hash, and with it all prompts, depends on
it."""
OWN_KEYS = {
    "name": "",
    "role": "--followers",
    "follow.owner": "",
    "home": "--keep",
    "charter": "",
    "seed": "--seed",
    "policy.path": "",
    "rollout.engine": "--engine",
    "network.transport": "--transport or --solo",
    "network.listen": "",
    "network.bootstraps": "",
    "train.steps": "--steps",
    "verify.enabled": "--no-verify",
}
"""Config keys that the demo gives each node, and the option to use instead."""
FOLLOWERS_EACH = 2
LOWEST_PORT, LOWEST_EPHEMERAL = 20_000, 32_768
SMALL_VLLM = {"vllm.kv_cache_mib": 64, "vllm.max_context": 128}
"""Three engines of tiny policies on one machine; prompt and answer take 20 tokens."""


class DemoRole(StrEnum):
    """What a planned process does."""

    NODE = "node"
    FOLLOWER = "follower"
    LIAR = "liar"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of `swarm demo`."""

    nodes: int = 3
    steps: int = 100
    seed: int = 1
    transport: str = "hivemind"
    engine: str = "transformers"
    with_liar: bool = False
    verify: bool = True
    solo: bool = False
    solo_groups: int | None = None
    followers: int = 0


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One process of the demo."""

    role: DemoRole
    config: NodeConfig
    identity: Identity
    address: str

    @property
    def home(self) -> Home:
        return Home(self.config.home)


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """All processes of the demo and the charter they share."""

    options: DemoOptions
    root: Path
    charter: Charter
    nodes: tuple[PlannedNode, ...]

    @property
    def honest(self) -> tuple[PlannedNode, ...]:
        return tuple(node for node in self.nodes if node.role is DemoRole.NODE)

    @property
    def followers(self) -> tuple[PlannedNode, ...]:
        return tuple(node for node in self.nodes if node.role is DemoRole.FOLLOWER)


def check_settings(options: DemoOptions, settings: Mapping[str, Any]) -> None:
    """Refuse what the demo decides itself, and what no node could run with. Raises ConfigError."""
    for key in settings:
        if key in OWN_KEYS:
            hint = OWN_KEYS[key]
            raise ConfigError(f"--set {key}: the demo sets this itself" + (f"; use {hint}" if hint else ""))
        if options.solo and key in ("train.external_groups", "train.local_groups"):
            raise ConfigError(f"--set {key}: --solo sets this itself; use --solo-groups")
    load_config([Path("demo.toml")], settings)


def make_plan(options: DemoOptions, root: Path, settings: Mapping[str, Any]) -> DemoPlan:
    """Keys, ports, charter and configurations, written under `root`. Raises ConfigError."""
    cast = _cast(options)
    names = [name for name, _, _ in cast]
    identities = [Identity.from_seed(_seed_bytes(options.seed, name)) for name in names]
    rules = bundled("demo-charter.toml").read_text(encoding="utf-8")
    pins = installed_pins(found(identities[0], rules, FOUNDED_AT))
    charter = found(identities[0], rules, FOUNDED_AT, pins)
    addresses = _addresses(options.transport, identities)
    nodes = []
    for number, (identity, address) in enumerate(zip(identities, addresses, strict=True)):
        name, role, model = cast[number]
        home = Home(root / name).create()
        home.socket(name)
        create_key(home.key, identity)
        write_atomically(home.charter, charter_bytes(charter))
        config = load_config(
            [Path("demo.toml")],
            {
                **(SMALL_VLLM if options.engine == "vllm" else {}),
                **settings,
                # Only the first node is known beforehand; the others are found through it.
                **_overrides(options, number, name, home, addresses[: min(number, 1)], address),
                "role": "follower" if role is DemoRole.FOLLOWER else "trainer",
                "policy.path": f"models/{model}",
                # The liar's answers are lies; any engine will do.
                "rollout.engine": "transformers" if role is DemoRole.LIAR else options.engine,
            },
        )
        write_atomically(home.root / "node.json", config.model_dump_json(indent=2).encode())
        nodes.append(PlannedNode(role, config, identity, address))
    return DemoPlan(options, root, charter, tuple(nodes))


def _overrides(
    options: DemoOptions, number: int, name: str, home: Home, bootstraps: list[str], address: str
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": name,
        "home": str(home.root),
        "charter": str(home.charter),
        "seed": options.seed * 1000 + number,
        "network.transport": "none" if options.solo else options.transport,
        "network.listen": address.partition("/p2p/")[0],
        "network.bootstraps": bootstraps,
        "train.steps": options.steps,
        "verify.enabled": options.verify,
    }
    if options.solo:
        values["train.external_groups"] = 0
        if options.solo_groups is not None:
            values["train.local_groups"] = options.solo_groups
    return values


def _addresses(transport: str, identities: list[Identity]) -> list[str]:
    if transport == "memory":
        return [f"/memory/p2p/{identity.peer_id}" for identity in identities]
    ports = _free_ports(len(identities))
    return [
        f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
        for port, identity in zip(ports, identities, strict=True)
    ]


def _cast(options: DemoOptions) -> list[tuple[str, DemoRole, str]]:
    """Name, role and policy of every process: the nodes, their followers, the liar. Two followers for the
    first node, two for the second, and so on: they have its policy on disk, and find it by that."""
    models = [MODELS[number % len(MODELS)] for number in range(options.nodes)]
    cast = [(_node_name(number), DemoRole.NODE, models[number]) for number in range(options.nodes)]
    for number in range(options.followers):
        model = models[number // FOLLOWERS_EACH % options.nodes]
        cast.append((f"follower{number + 1}", DemoRole.FOLLOWER, model))
    if options.with_liar:
        cast.append(("liar", DemoRole.LIAR, MODELS[options.nodes % len(MODELS)]))
    return cast


def _node_name(number: int) -> str:
    model = MODELS[number % len(MODELS)]
    return model if number < len(MODELS) else f"{model}{number // len(MODELS) + 1}"


def _seed_bytes(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"murmuration demo {seed} {name}".encode()).digest()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, all different, and below those that the system gives to whoever asks for any:
    engines of nodes that start earlier ask for many."""
    ports: list[int] = []
    for port in random.Random().sample(range(LOWEST_PORT, LOWEST_EPHEMERAL), LOWEST_EPHEMERAL - LOWEST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ConfigError(f"there are no {count} free ports from {LOWEST_PORT} to {LOWEST_EPHEMERAL - 1}")
