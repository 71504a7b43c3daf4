"""Environments of verifiers: found, pinned, opened behind the walls, scored by their rubrics, or refused."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.environment.host import Answers, ScoredGroup
from node.environment.installed import package_paths, pin, verifiers_environments
from node.environment.records import Completion
from node.environment.verifiers_task import VerifiersTask
from node.open.draft import environment_of
from node.sandbox.host import SandboxedHost
from protocol.errors import ConfigError, SandboxError
from protocol.messages import EnvironmentSpec

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

HEAD = "import verifiers as vf\nfrom datasets import Dataset\n"
SUMS = """
ROWS = Dataset.from_list([{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)])
"""
EXACT = """
async def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)

def load_environment(first=0, **kwargs):
    rows = ROWS.select(range(first, 20))
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]), **kwargs)
"""
TAGGED = """
def load_environment():
    parser = vf.XMLParser(["think", "answer"])

    def right(parser, completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric([right, parser.get_format_reward_func()], weights=[1.0, 0.25], parser=parser)
    few = [{"role": "user", "content": "0 + 0 ="}, {"role": "assistant", "content": "0"}]
    return vf.SingleTurnEnv(
        dataset=lambda: ROWS, system_prompt="Use tags.", few_shot=few, parser=parser, rubric=rubric
    )
"""
INFO = """
def near(completion, info, state):
    if completion[-1]["content"] == "fail":
        raise KeyError("nothing")
    missed = abs(float(completion[-1]["content"]) - info["target"])
    return 1.0 / (1.0 + missed) + state["is_truncated"]

def load_environment():
    rows = [{"prompt": [{"role": "user", "content": f"near {n}"}], "info": {"target": n}} for n in range(5)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[near]))
"""
SINGLE = (
    "def load_environment():\n    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right]){})\n"
)
REFUSED = {
    "more than one turn": """
class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return []

def load_environment():
    return Guess(dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
""",
    "more than one turn, or tools": """
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

def load_environment():
    return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
""",
    "asks a model over the network": """
def load_environment():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.JudgeRubric())
""",
    "asks a model over the network to judge": """
from openai import AsyncOpenAI
client = AsyncOpenAI(api_key="none")

async def right(completion):
    return float(str(await client.chat.completions.create(model="m", messages=completion)) == "yes")
"""
    + SINGLE.format(""),
    "compares the answers of a group": """
def right(completions):
    return [1.0 for each in completions]
"""
    + SINGLE.format(""),
    "what waits": """
import asyncio

async def right(completion):
    await asyncio.sleep(0.01)
    return 1.0
"""
    + SINGLE.format(""),
    "threads": """
def load_environment():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.MathRubric())
""",
    "has no dataset here": """
from datasets import load_dataset

def load_environment():
    rubric = vf.Rubric(funcs=[lambda completion: 1.0])
    return vf.SingleTurnEnv(dataset=lambda: load_dataset("x/y"), rubric=rubric)
""",
}


def install(folder: Path, name: str, code: str) -> str:
    """As pip would: a module and what says of which package it is."""
    (folder / f"{name.replace('-', '_')}.py").write_text(HEAD + SUMS + code)
    said = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    said.mkdir()
    requires = "Requires-Dist: verifiers>=0.1.5\n"
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n{requires}")
    return f"verifiers/{name}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_found_and_pinned_by_its_files_and_the_version_of_verifiers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = install(folder, "murm-exact", EXACT)
    importlib.invalidate_caches()
    assert verifiers_environments()[name] == "0.1.0"
    assert package_paths([name]) == [folder / "murm_exact.py", Path(os.devnull)]
    assert environment_of(f'{name}:{{"first": 2}}') == {"name": name, "config": {"first": 2}}
    first = pin(name)
    assert pin(name) == first
    monkeypatch.setattr("node.environment.installed.metadata.version", lambda package: "0.1.99")
    assert pin(name) != first
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(folder))
    (folder / "murm_exact.py").write_text(HEAD + SUMS + EXACT + "\n")
    assert pin(name) != first


@pytest.mark.parametrize(
    "name", ["verifiers/antigravity", "verifiers/os.path", "verifiers/", "verifiers/msgspec"]
)
def test_a_charter_cannot_name_a_module_that_is_no_environment(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no installed environment of verifiers|names no environment"):
        package_paths([name])


def scores(
    host: SandboxedHost, name: str, seed: int, texts: Sequence[str], finished: bool = True
) -> ScoredGroup:
    group = Answers(name, seed, tuple(Completion(text, finished) for text in texts))
    (result,) = host.score([group])
    assert isinstance(result, ScoredGroup), result
    return result


@linux_only
@pytest.mark.slow
def test_three_environments_ask_and_score_behind_the_walls(folder: Path) -> None:
    exact, tagged, info = (
        install(folder, name, code)
        for name, code in (("murm-exact", EXACT), ("murm-tagged", TAGGED), ("murm-info", INFO))
    )
    specs = [EnvironmentSpec(exact, '{"first": 10}'), EnvironmentSpec(tagged), EnvironmentSpec(info)]
    with SandboxedHost(specs) as host:
        assert set(host.evaluating) == {exact, tagged, info}
        asked = {str(text) for text in host.questions(exact, range(200))}
        assert asked == {f"{number} + 1 =" for number in range(10, 20)}
        number = int(str(host.questions(exact, [7])[0]).split()[0])
        paid = scores(host, exact, 7, [f" {number + 1}\n", "no"]).scores
        assert [each.reward for each in paid] == [1.0, 0.0]
        assert dict(paid[0].components)["right"] == 1.0

        question = str(host.questions(tagged, [7])[0])
        *before, last = question.split("\n\n")
        assert before == ["Use tags.", "0 + 0 =", "0"]
        right = int(last.split()[0]) + 1
        texts = [f"<think>\na\n</think>\n<answer>\n{right}\n</answer>", "<answer>7000</answer>", str(right)]
        good, wrong, bare = (dict(each.components) for each in scores(host, tagged, 7, texts).scores)
        assert (good["right"], good["format_reward_func"], good["score"]) == (1.0, 1.0, 1.25)
        assert (wrong["right"], bare["right"]) == (0.0, 0.0)
        assert bare["format_reward_func"] == 0.2  # no spacing is wrong
        assert wrong["score"] == 0.25 * wrong["format_reward_func"]

        target = int(str(host.questions(info, [7])[0]).split()[1])
        group = scores(host, info, 7, [str(target), str(target + 3), "fail"])
        assert [each.reward for each in group.scores] == [1.0, 0.25, 0.0]
        assert "KeyError" in str(group)
        assert scores(host, info, 7, [str(target)], finished=False).scores[0].reward == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_refused_in_one_sentence(why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    name = install(folder, f"murm-refused-{list(REFUSED).index(why)}", REFUSED[why])
    with pytest.raises(ConfigError, match=why):
        VerifiersTask(name, {})


@linux_only
@pytest.mark.slow
def test_a_refusal_comes_out_of_the_sandbox(folder: Path) -> None:
    name = install(folder, "murm-judge", REFUSED["asks a model over the network"])
    with pytest.raises(SandboxError, match="murm-judge asks a model over the network; only"):
        SandboxedHost([EnvironmentSpec(name)]).start()


@pytest.mark.slow
def test_a_config_of_other_values_is_refused(folder: Path) -> None:
    name = install(folder, "murm-plain", EXACT)
    with pytest.raises(ConfigError, match="first must be text"):
        VerifiersTask(name, {"first": [1]})
    with pytest.raises(ConfigError, match="cannot be opened: TypeError"):
        VerifiersTask(install(folder, "murm-none", INFO), {"rows": 3})
