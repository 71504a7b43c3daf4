"""`swarm serve` for real: asked over HTTP, following a run, closed to what it does not offer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file

from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.serve import Door
from node.train.checkpoint import CheckpointState
from protocol.messages import Sampling

ROOT = Path(__file__).parents[2]
STARLING = ROOT / "configs/models/starling"
QUESTIONS = ("spell abc backward", "sort 3 1 2")
KEY = "open sesame"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


class Endpoint:
    """A server process and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line.rstrip())
            if " answers at " in line:
                self.base = line.split(" answers at ")[1].split("/v1;")[0]
                return
        raise AssertionError("\n".join(self.said))

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.base + path, data, headers)) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def names(self) -> list[str]:
        return [model["id"] for model in self.ask("/v1/models")[1]["data"]]

    def answer(self, question: str, model: str = "robin") -> Any:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 8,
        }
        code, answer = self.ask("/v1/chat/completions", body)
        assert code == 200, answer
        return answer

    def next_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip()


@pytest.fixture(scope="module")
def endpoint(home: Path) -> Iterator[Endpoint]:
    command = [sys.executable, "-m", "swarm_cli", "serve", "--home", str(home), "--name", "robin"]
    command += ["--port", "0", "--set", "vllm.kv_cache_mib=64", "--set", f"policy.path={STARLING}"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "VLLM_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Endpoint(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def greedy(policy: Policy, state: dict[str, torch.Tensor] | None = None) -> list[str]:
    engine = TransformersEngine(policy)
    if state is not None:
        engine.update(state, 1)
    requests = [
        GenerationRequest(tuple(policy.encode_prompt(question)), 1, 0, Sampling(8)) for question in QUESTIONS
    ]
    return [rollout.text for (rollout,) in engine.generate(requests, greedy=True)]


def write_checkpoint(home: Path, policy: Policy, version: int, change: Callable[[torch.Tensor], None]) -> Any:
    """A checkpoint of the run, complete at once; returns its weights."""
    model = policy.load_model()
    with torch.no_grad():
        for parameter in model.parameters():
            change(parameter)
    folder = home / "runs/latest/checkpoints" / f"v{version}"
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.copytree(STARLING, writing)
    save_file({n: p.detach() for n, p in model.named_parameters()}, writing / "model.safetensors")
    state = CheckpointState(version, version, 0, policy.base_model, policy.tokenizer_digest)
    (writing / "trainer.json").write_bytes(msgspec.json.encode(state))
    writing.rename(folder)
    return model.state_dict()


async def test_a_stream_is_inside_until_its_last_byte_is_sent() -> None:
    """As FastAPI does it: when a dependency ends has changed between its versions."""
    from fastapi import Depends, FastAPI
    from fastapi.responses import StreamingResponse

    door, app = Door(), FastAPI()
    door.open()
    closed: list[bool] = []

    @app.post("/", dependencies=[Depends(door.enter)])
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter(["one", "two"]))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        closed.append(await door.close(0))

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)
    assert len(closed) == 4, "head, two parts, end"
    assert not any(closed)
    assert await door.close(0)


def test_greedy_answers_are_those_of_transformers(endpoint: Endpoint, policy: Policy) -> None:
    assert endpoint.names() == ["robin-v0", "robin"]
    answers = [endpoint.answer(question) for question in QUESTIONS]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == greedy(policy)
    assert {answer["model"] for answer in answers} == {"robin-v0"}


def test_only_what_is_offered_and_only_with_the_key(endpoint: Endpoint) -> None:
    assert endpoint.ask("/health")[0] == 200
    assert endpoint.ask("/v1/models", key="guess")[0] == 401
    assert endpoint.ask("/v1/chat/completions", {"messages": []}, key="guess")[0] == 401
    for path in (
        "/invocations",
        "/tokenize",
        "/scale_elastic_ep",
        "/collective_rpc",
        "/v1/responses",
        "/sleep",
    ):
        assert endpoint.ask(f"/{path}", {"model": "robin"})[0] == 404
    code, answer = endpoint.ask("/v1/completions", {"model": "nobody", "prompt": "1"})
    assert (code, answer["error"]["param"]) == (404, "model")
    code, answer = endpoint.ask("/v1/completions", {"model": "robin", "prompt": [5] * 5000})
    assert code == 400
    assert "maximum context length" in answer["error"]["message"]
    assert str(STARLING) not in json.dumps(endpoint.ask("/v1/models")[1])


def test_it_listens_on_loopback_only(endpoint: Endpoint) -> None:
    assert endpoint.base.startswith("http://127.0.0.1:")


def test_it_follows_the_run(endpoint: Endpoint, home: Path, policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)

    def noise(parameter: torch.Tensor) -> None:
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)

    before = greedy(policy)
    for version in (3, 4):  # all weights first, then what differs
        after = greedy(policy, write_checkpoint(home, policy, version, noise))
        assert endpoint.next_line() == f"robin-v{version} answers from now on"
        assert endpoint.names() == [f"robin-v{version}", "robin"]
        answers = [endpoint.answer(question) for question in QUESTIONS]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == after != before
        assert {answer["model"] for answer in answers} == {f"robin-v{version}"}
        before = after


def test_a_broken_checkpoint_is_left_out(endpoint: Endpoint, home: Path, policy: Policy) -> None:
    folder = home / "runs/latest/checkpoints/v4"
    broken = Path(shutil.copytree(folder, folder.with_name(".v5.writing")))
    (broken / "model.safetensors").write_bytes(b"nothing")
    state = json.loads((broken / "trainer.json").read_text())
    (broken / "trainer.json").write_text(json.dumps(state | {"policy_version": 5}))
    broken.rename(folder.with_name("v5"))
    line = endpoint.next_line()
    assert "v5 is left out, robin-v4 stays: its weights cannot be read" in line
    assert endpoint.names() == ["robin-v4", "robin"]


def test_seeds_of_many_clients_at_once_end_nothing(endpoint: Endpoint) -> None:
    """Prompts that fill more than one batch are computed in pieces, where a seed would end the engine."""

    def ask(number: int) -> int:
        prompt = [5 + (number * 7 + place) % 90 for place in range(100)]
        body = {"model": "robin", "prompt": prompt, "max_tokens": 4, "seed": number}
        return endpoint.ask("/v1/completions", body)[0]

    with ThreadPoolExecutor(24) as clients:
        assert set(clients.map(ask, range(24))) == {200}
    assert "requests have a seed" in endpoint.next_line()


def test_an_engine_that_dies_is_started_again(endpoint: Endpoint) -> None:
    (core,) = (
        child
        for child in psutil.Process(endpoint.process.pid).children(recursive=True)
        if "EngineCore" in child.name() + " ".join(child.cmdline())
    )
    core.kill()
    assert "it is started again in 1 s" in endpoint.next_line()
    codes = set()
    while (code := endpoint.ask("/v1/models")[0]) != 200:
        codes.add(code)
        time.sleep(0.2)
    assert codes == {503}
    while " answers at " not in endpoint.next_line():
        pass
    assert endpoint.names() == ["robin-v4", "robin"]
    endpoint.answer(QUESTIONS[0])


def test_ctrl_c_ends_it(endpoint: Endpoint) -> None:
    began_s = time.monotonic()
    os.killpg(endpoint.process.pid, signal.SIGINT)  # as a terminal sends it: to all of its processes
    _, said = endpoint.process.communicate(timeout=30)
    assert endpoint.process.returncode == 130
    assert "swarm: interrupted" in said.splitlines()
    assert "Traceback" not in said
    assert time.monotonic() - began_s < 20
