"""Which tasks this machine has: their names, packages and versions, without importing any.

For: whoever must know what would run before it runs, in the node's own process. Opening a task is
`tasks.py`'s, which only the sandbox's worker imports.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from node.environment.schema import known_tasks, nearest
from protocol.errors import ConfigError
from protocol.messages import EnvironmentSpec

__all__ = [
    "DEMO_ENVIRONMENTS",
    "ENTRY_POINT_GROUP",
    "REASONING_GYM",
    "VERIFIERS",
    "package_paths",
    "pin",
    "registered",
    "unknown",
    "verifiers_environments",
    "verifiers_module",
]

ENTRY_POINT_GROUP = "murmuration.environments"
"""Packages register `loader(config) -> Environment` here, under the environment's name."""
REASONING_GYM = "reasoning_gym/"
"""Before the name of each of its tasks."""
VERIFIERS = "verifiers/"
"""Before the id of an environment of the package verifiers."""
_VERIFIERS_ID = re.compile(r"[A-Za-z][A-Za-z0-9_\-]*")
_NEEDS_VERIFIERS = re.compile(r"verifiers(?![\w.\-])", re.IGNORECASE)

DEMO_ENVIRONMENTS: tuple[EnvironmentSpec, ...] = (
    EnvironmentSpec("reasoning_gym/spell_backward", '{"max_word_len":5,"min_word_len":3}'),
    EnvironmentSpec(
        "reasoning_gym/number_sorting",
        '{"max_decimals":0,"max_numbers":3,"max_value":9.0,"min_decimals":0,"min_numbers":3,"min_value":0.0}',
    ),
    EnvironmentSpec("reasoning_gym/chain_sum", '{"max_digits":1,"max_terms":2,"min_digits":1,"min_terms":2}'),
)
"""The tasks of `swarm demo`, within reach of 0.3 M parameters. No constant answer scores above 0.1 on any."""


def registered() -> dict[str, metadata.EntryPoint]:
    """The environments of installed packages, by name. Imports nothing foreign."""
    return {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def pin(name: str) -> str:
    """Which code and data the environment of this name is on this machine, as `protocol.messages.Pin` says
    it: the distribution's version of a reasoning-gym task, else the SHA-256 over the files of the package
    that has it, and for an environment of verifiers over the version of verifiers, too. Imports nothing
    foreign. Raises ConfigError for an unknown one."""
    if name.startswith(REASONING_GYM):
        try:
            return f"reasoning-gym=={metadata.version('reasoning-gym')}"
        except metadata.PackageNotFoundError as error:
            raise ConfigError(f"reasoning-gym, of which {name} is a task, is not installed") from error
    module, folders = _package_of(name)
    files = {module.name: module}
    for folder in folders:
        files |= {file.relative_to(folder).as_posix(): file for file in folder.rglob("*")}
    runs_on = f"verifiers=={_verifiers_version(name)}" if name.startswith(VERIFIERS) else ""
    return f"sha256:{_files_digest(files, runs_on)}"


def package_paths(names: Iterable[str]) -> list[Path]:
    """Files and folders of the packages that register these environments, for whoever must be able to read
    them. Imports nothing foreign. Raises ConfigError for an unknown name."""
    paths: list[Path] = []
    for name in names:
        if not name.startswith(REASONING_GYM):
            module, folders = _package_of(name)
            paths += folders or [module]
        if name.startswith(VERIFIERS):
            paths.append(Path(os.devnull))  # dill, which verifiers imports, opens it when it is imported
    return paths


def verifiers_environments() -> dict[str, str]:
    """The installed environments of verifiers by name, and the version of each: packages that require
    verifiers and whose module of the same name speaks of `load_environment`. Imports nothing foreign."""
    found = {}
    for each in metadata.distributions():
        name = VERIFIERS + each.name
        if _VERIFIERS_ID.fullmatch(each.name) and _needs_verifiers(each):
            spec = importlib.util.find_spec(verifiers_module(name))
            if spec is not None and spec.origin is not None:
                source = Path(spec.origin)
                if source.suffix == ".py" and b"load_environment" in source.read_bytes():
                    found[name] = each.version
    return found


def verifiers_module(name: str) -> str:
    """The module of an environment of verifiers. Raises ConfigError for a name that no package has."""
    identity = name.removeprefix(VERIFIERS)
    if not _VERIFIERS_ID.fullmatch(identity):
        raise ConfigError(
            f"{name!r} names no environment of verifiers: it is {VERIFIERS} and a package's name"
        )
    return identity.replace("-", "_")


def _verifiers_package(name: str) -> str:
    """The module of an installed one. A charter may name any module, so the package must be made for it."""
    module = verifiers_module(name)
    try:
        made_for_it = _needs_verifiers(metadata.distribution(name.removeprefix(VERIFIERS)))
    except metadata.PackageNotFoundError:
        made_for_it = False
    if not made_for_it:
        known = nearest(name, sorted(verifiers_environments()))
        raise ConfigError(f"{name} is no installed environment of verifiers; {known}")
    _verifiers_version(name)
    return module


def _needs_verifiers(package: metadata.Distribution) -> bool:
    return any(_NEEDS_VERIFIERS.match(each) for each in package.requires or ())


def _verifiers_version(name: str) -> str:
    try:
        return metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{name} needs verifiers; pip install 'murmuration[verifiers]'") from None


def _package_of(name: str) -> tuple[Path, list[Path]]:
    """First file and folders of the package that has an environment. Raises ConfigError."""
    if name.startswith(VERIFIERS):
        package = _verifiers_package(name)
    else:
        entries = registered()
        if name not in entries:
            raise unknown(name, sorted(entries))
        package = entries[name].module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {package} of environment {name!r} has no files")
    return Path(spec.origin), [Path(folder) for folder in spec.submodule_search_locations or ()]


def _files_digest(files: Mapping[str, Path], runs_on: str) -> str:
    """SHA-256 over names and contents in order of the names, each behind its 8-byte length, and before them
    over what they run on. What Python compiled is left out: it holds times."""
    hashed = hashlib.sha256(runs_on.encode())
    for name, file in sorted(files.items()):
        if file.is_file() and "__pycache__" not in file.parts:
            for part in (name.encode(), file.read_bytes()):
                hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()


def unknown(name: str, own: Sequence[str]) -> ConfigError:
    """The error of a name that is neither a task of reasoning-gym nor one of `own`."""
    known = [REASONING_GYM + task for task in known_tasks()]
    return ConfigError(f"unknown environment {name!r}; {nearest(name, [*own, *known])}")
