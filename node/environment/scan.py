"""Whether a reasoning-gym scorer may run an answer as code, read from its source.

Walks the source of all that `score_answer` can reach; what it cannot resolve counts as running the answer.
An `eval` of `entry[...]` reads our own oracle text, not the answer (number_sorting), and is let pass. Not a
wall: what may run answers is scored in the sandbox (`node/sandbox/`), and this only says which tasks may.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["evaluates_answers", "reaches_evaluator"]

_KNOWN_EVALUATORS = frozenset(
    {
        # Executed an answer that imports os and touches a file, when tried:
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        # Call eval or parse_expr on the answer, read in the source:
        "binary_matrix",
        "n_queens",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
        # Scores with whatever it is composed of:
        "composite",
    }
)

_SAFE_PACKAGES = frozenset({"numpy"})
"""Third-party packages a scorer may touch; sympy is not one, since even `subs` evaluates a string."""

_UNSAFE_STDLIB = frozenset(
    {"code", "codeop", "ctypes", "importlib", "marshal", "os", "pickle", "runpy", "shelve", "subprocess"}
)

_EVALUATORS = frozenset({"__import__", "compile", "eval", "exec", "getattr", "open", "setattr"})


@functools.cache
def evaluates_answers(task: str, dataset_class: type) -> bool:
    """Whether scoring this reasoning-gym task may run the answer: it is known to, or code that cannot be
    proved harmless is within reach."""
    return task in _KNOWN_EVALUATORS or reaches_evaluator(dataset_class)


def reaches_evaluator(dataset_class: type) -> bool:
    """Whether `score_answer` can reach code that may run its argument. Finds all known evaluators unaided."""
    return _Scan(dataset_class).member_is_unsafe(dataset_class, "score_answer")


class _Scan:
    """The functions seen on the way from one dataset class."""

    def __init__(self, dataset_class: type) -> None:
        self._class = dataset_class
        self._seen: set[object] = set()

    def member_is_unsafe(self, owner: type, name: str) -> bool:
        """Whether a method or property of this name, or what it reaches, may run the answer."""
        return any(self._function_is_unsafe(method) for method in self._methods(owner, name))

    @staticmethod
    def _methods(owner: type, name: str) -> Iterator[Callable[..., Any]]:
        for base in owner.__mro__:
            found = base.__dict__.get(name)
            found = getattr(found, "__func__", found)  # static and class methods
            found = getattr(found, "fget", found)  # properties
            if isinstance(found, types.FunctionType):
                yield found

    def _function_is_unsafe(self, function: Any) -> bool:
        if function in self._seen:
            return False
        self._seen.add(function)
        if function.__code__.co_filename == "<string>":  # written by dataclass: assigns fields
            return False
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return True
        nodes = list(ast.walk(tree))
        own_text = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _reads_entry(node)}
        return any(self._node_is_unsafe(node, function) for node in nodes if id(node) not in own_text)

    def _node_is_unsafe(self, node: ast.AST, function: Any) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            return any(_package_is_unsafe(name) for name in names)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                return self.member_is_unsafe(self._class, node.attr)
            # A method of some local value: a foreign scorer is a way out, the rest are str, list and dict.
            return node.attr == "score_answer" and not _is_super(node.value)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in function.__globals__:
                return self._object_is_unsafe(function.__globals__[node.id])
            return node.id in _EVALUATORS and hasattr(builtins, node.id)
        return False

    def _object_is_unsafe(self, value: Any) -> bool:
        if isinstance(value, types.ModuleType):
            return _package_is_unsafe(value.__name__) or any(
                self._function_is_unsafe(member)
                for member in vars(value).values()
                if value.__name__.startswith("reasoning_gym") and isinstance(member, types.FunctionType)
            )
        package = getattr(value, "__module__", None) or "builtins"
        if not package.startswith("reasoning_gym"):
            return (isinstance(value, type) or callable(value)) and _package_is_unsafe(package)
        if isinstance(value, types.FunctionType):
            return self._function_is_unsafe(value)
        if isinstance(value, type):
            return any(self.member_is_unsafe(value, name) for base in value.__mro__ for name in vars(base))
        return False


def _package_is_unsafe(module: str) -> bool:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return top in _UNSAFE_STDLIB
    return top not in _SAFE_PACKAGES | {"", "reasoning_gym"}


def _reads_entry(call: ast.Call) -> bool:
    """`eval(entry["answer"])`: every argument is a constant key of our own entry."""
    return bool(call.args) and all(
        isinstance(arg, ast.Subscript)
        and isinstance(arg.value, ast.Name)
        and arg.value.id == "entry"
        and isinstance(arg.slice, ast.Constant)
        for arg in call.args
    )


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
