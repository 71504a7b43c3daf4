"""Rules of the repository that no linter knows: exports match, files stay readable, output has one owner."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "node", "swarm_cli")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 600


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def bound_names(module: ast.Module) -> set[str]:
    """Names that the module's own statements bind, those inside `if` and `try` included."""
    names: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def exports(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def module_of(dotted: str) -> Path | None:
    """File of a module of ours, None for any other and for packages."""
    path = ROOT.joinpath(*dotted.split(".")).with_suffix(".py")
    return path if path in MODULES else None


# One test for each rule, over all modules: the number of tests is no measure of the number of files.


def test_what_is_exported_exists() -> None:
    """Each name in `__all__` once, and bound by the module; ruff sees to the order."""
    offenders = {}
    for path in MODULES:
        names = exports(parsed(path)) or []
        wrong = {name for name in names if names.count(name) > 1} | (set(names) - bound_names(parsed(path)))
        if wrong:
            offenders[name_of(path)] = sorted(wrong)
    assert offenders == {}


def test_what_is_imported_is_exported() -> None:
    """A module takes from another only the classes and functions that this one offers; constants are free."""
    offenders = []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or (source := module_of(node.module or "")) is None:
                continue
            taken = {alias.name for alias in node.names if not alias.name.isupper()}
            missing = taken - set(exports(parsed(source)) or [])
            offenders += [f"{name_of(path)} imports {name} from {node.module}" for name in sorted(missing)]
    assert offenders == []


def test_files_stay_readable() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    assert [name_of(path) for path, text in texts.items() if text.count("\n") > MAX_LINES] == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [path for path in MODULES if parsed(path).body and not ast.get_docstring(parsed(path))]
    assert [name_of(path) for path in silent] == []


def test_only_the_command_line_writes_to_the_terminal() -> None:
    """No `print`, and no use of stdout or stderr but by the modules that own them."""
    owners = {"swarm_cli/output.py", "swarm_cli/app.py"}
    offenders = []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if text.startswith(("print(", "sys.stdout.write(", "sys.stderr.write(")):
                offenders.append(f"{name_of(path)}: {text[:60]}")
    assert [offender for offender in offenders if offender.partition(":")[0] not in owners] == []


def test_files_that_are_named_exist() -> None:
    """In documents and in the code: paths from the root, and links."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    missing = []
    for path in [*documents, *MODULES, *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"`((?:node|protocol|swarm_cli|tests|configs|docs)/[\w./-]*)`", text)
        missing += [f"{name_of(path)}: {name}" for name in named if not (ROOT / name).exists()]
    for path in documents:
        links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
        missing += [f"{name_of(path)}: {link}" for link in links if not (path.parent / link).exists()]
    assert missing == []


def test_extras_that_are_named_exist() -> None:
    """What a message, a comment or the README tells to install can be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named: dict[str, set[str]] = {}
    for path in [*MODULES, *(ROOT / "configs").rglob("*.toml"), ROOT / "README.md"]:
        for extras in re.findall(r"murmuration\[([^\]{}]+)\]", path.read_text(encoding="utf-8")):
            for extra in extras.split(","):
                named.setdefault(extra.strip(), set()).add(name_of(path))
    assert {"node", "vllm", "eight-bit"} <= named.keys()
    unknown = named.keys() - project["optional-dependencies"].keys()
    assert {extra: named[extra] for extra in unknown} == {}
