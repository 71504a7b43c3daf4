"""What is wrong before `swarm run` and `swarm join` load torch: one sentence and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from node.state.keys import create_key, load_key
from node.state.lock import hold
from node.state.paths import bundled
from protocol.charter import charter_bytes, found
from protocol.codec import encode
from protocol.constants import PROTOCOL_VERSION
from protocol.identity import Identity
from tests.swarm_cli.conftest import Ended, Swarm

FOUNDER = Identity.from_seed(b"f" * 32)
PEER = Identity.from_seed(b"p" * 32).peer_id


def rules() -> str:
    return bundled("demo-charter.toml").read_text(encoding="utf-8")


def refuse(ended: Ended, sentence: str) -> None:
    """The command ended with code 2 and one sentence, the last line of stderr."""
    assert ended.code == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("swarm: ")
    assert sentence in last


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def run(swarm: Swarm) -> Callable[..., Ended]:
    """`swarm run` without a network, with keys set."""

    def run(*settings: str) -> Ended:
        options = [word for setting in settings for word in ("--set", setting)]
        return swarm("run", "--set", "network.transport=none", *options)

    return run


def test_a_missing_policy(run: Callable[..., Ended]) -> None:
    refuse(run("policy.path=models/nosuch"), "policy.path 'models/nosuch' is no folder here")


def test_a_port_in_use(swarm: Swarm) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        listen = f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}"
        refuse(swarm("run", "--set", f"network.listen={listen}"), f"cannot listen on {listen}")


def test_a_malformed_listening_address(swarm: Swarm) -> None:
    refuse(swarm("run", "--set", "network.listen=localhost"), "'localhost' is no listening address")


def test_the_simulated_network_is_not_for_a_real_node(run: Callable[..., Ended]) -> None:
    refuse(run("network.transport=memory"), "network.transport 'memory' is for `swarm demo`")


def charter(kind: str, path: Path) -> Path:
    """A bad charter of a kind, at `path`."""
    good = found(FOUNDER, rules(), 1)
    match kind:
        case "signature":
            path.write_bytes(encode(msgspec.structs.replace(good, signature=bytes(64))))
        case "version":
            path.write_bytes(encode(msgspec.structs.replace(good, protocol_version=PROTOCOL_VERSION + 1)))
        case "garbage":
            path.write_bytes(b"\x00\xffgarbage")
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "closed":
            path.write_bytes(charter_bytes(found(FOUNDER, f"closed = true\n{rules()}", 1)))
    return path


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("signature", "the signature of charter 'demo' is not by its founder"),
        ("version", "protocol"),
        ("garbage", "these bytes are no charter"),
        ("empty", "these bytes are no charter"),
        ("folder", "cannot read or keep the charter"),
        ("missing", "there is no charter at"),
        ("closed", "swarm demo is closed and"),
    ],
)
def test_a_bad_charter(run: Callable[..., Ended], tmp_path: Path, kind: str, sentence: str) -> None:
    refuse(run(f"charter={charter(kind, tmp_path / 'charter.bin')}"), sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            b'name = "x"\ngroup_sise = 3\n',
            "unknown key 'group_sise' in the charter: did you mean 'group_size'?",
        ),
        (b"name = ", "not valid TOML"),
        (b"\xff\xfe\x00", "is UTF-16 text; save it as UTF-8"),
        (b"\x80\x00", "not valid TOML"),
    ],
)
def test_bad_rules_of_an_own_swarm(
    run: Callable[..., Ended], tmp_path: Path, text: bytes, sentence: str
) -> None:
    (tmp_path / "rules.toml").write_bytes(text)
    refuse(run(f"charter={tmp_path / 'rules.toml'}"), sentence)


def test_a_key_that_others_can_read(run: Callable[..., Ended], home: Path) -> None:
    create_key(home / "identity.key")
    (home / "identity.key").chmod(0o644)
    refuse(run(), "`chmod 600")


def test_a_key_that_is_no_key(run: Callable[..., Ended], home: Path) -> None:
    (home / "identity.key").mkdir(parents=True)
    refuse(run(), "is not a regular file")
    (home / "identity.key").rmdir()
    (home / "identity.key").touch(mode=0o600)
    (home / "identity.key").write_bytes(b"x" * 68)
    refuse(run(), "not an Ed25519 libp2p private key")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_home_that_cannot_be_written(swarm: Swarm, tmp_path: Path, place: str) -> None:
    """A folder below a file fails for root too, unlike one without write permission."""
    (tmp_path / "file").touch()
    refuse(swarm("run", "--home", tmp_path / place), f"cannot make the folder {tmp_path / place}")
    refuse(swarm("key", "new", "--home", tmp_path / place), "choose another with --home or SWARM_HOME")


def test_a_home_whose_socket_path_is_too_long(swarm: Swarm, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    refuse(swarm("run", "--home", deep), "too long for a Unix socket")
    assert not deep.exists()


def test_two_nodes_on_one_home(swarm: Swarm, home: Path) -> None:
    home.mkdir()
    with hold(home / "lock"):
        refuse(swarm("run"), f"runs with the home {home}; stop it, or give this one a home of its own")
        refuse(swarm("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"), "runs with the home")


@pytest.mark.parametrize(
    "address",
    ["hello", "/ip4/127.0.0.1/tcp/1", f"/p2p/{PEER}", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWnobody", "\x1b[2J"],
)
def test_a_malformed_address(swarm: Swarm, home: Path, address: str) -> None:
    ended = swarm("join", address)
    refuse(ended, "is no address of the form /ip4/<address>/tcp/<port>/p2p/<peer id>")
    assert "\x1b" not in ended.err
    assert not home.exists()


def test_joining_needs_the_network(swarm: Swarm) -> None:
    refuse(
        swarm("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", "--set", "network.transport=none"),
        "joining needs 'hivemind'",
    )


def test_a_refused_start_leaves_the_key_that_was_there(run: Callable[..., Ended], home: Path) -> None:
    create_key(home / "identity.key")
    before = load_key(home / "identity.key").peer_id
    refuse(run("charter=nosuch.bin"), "there is no charter at 'nosuch.bin'")
    assert load_key(home / "identity.key").peer_id == before
    assert not list(home.rglob("*.tmp"))
