"""Bare vLLM: what a user gets from `vllm.LLM` with its own defaults, the yardstick of our rollout stage.

For: generating the same workload without anything of ours - no plugin, no versions, no log-probabilities, no
change of vLLM's environment - in a process of its own, since vLLM is set up through environment variables
once per process. Its workers go on spinning for a moment after a turn, so a turn ends with a wait. Not for:
anything but `swarm bench`. Data: one JSON line per question and answer on the child's standard streams; what
vLLM prints goes to standard error, of which the last error is kept for the message.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, cast

import psutil

from node.config import VllmConfig
from node.rollout.engine.base import EngineError

__all__ = ["BareVllm"]

PARK_S = 1.5
"""After which an idle worker sleeps; it spins for about one second."""
TURN_S = 600.0
"""For one workload."""
END_S = 10.0
"""For a child that has closed its answers to end."""
_COMMAND = (sys.executable, "-m", __name__)
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Offline and silent; nothing of it bears on speed."""


class BareVllm:
    """Blocks in the constructor until the model is loaded. Make it before the first engine of ours, which
    changes this process's environment. Raises EngineError when vLLM cannot start, is not ready within
    `settings.start_timeout_s`, or gives no answer within TURN_S."""

    def __init__(self, model: Path, settings: VllmConfig, *, max_model_len: int) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": settings.dtype,
            "max_num_seqs": settings.max_concurrent,
            "max_model_len": max_model_len,
        }
        if _on_cpu():
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": settings.kv_cache_mib * 2**20}
        else:
            arguments |= {"gpu_memory_utilization": settings.gpu_memory_share}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | _QUIET,
            start_new_session=True,
        )
        try:
            self._ask(arguments, settings.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
        """Seconds for one completion of `lengths[i]` tokens for every `prompts[i]`, all given at once."""
        work = {"prompts": [list(ids) for ids in prompts], "lengths": list(lengths)}
        took_s = float(self._ask(work, TURN_S))
        time.sleep(PARK_S)
        return took_s

    def close(self) -> None:
        """End it; may be called twice."""
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                cast("IO[bytes]", stream).close()

    def _ask(self, question: dict[str, Any], deadline_s: float) -> Any:
        questions, answers = cast("IO[bytes]", self._child.stdin), cast("IO[bytes]", self._child.stdout)
        with contextlib.suppress(BrokenPipeError):
            questions.write(json.dumps(question).encode() + b"\n")
            questions.flush()
        if not wait([answers.fileno()], deadline_s):
            raise EngineError(f"bare vLLM gave no answer within {deadline_s:g} s: {self._last_error()}")
        answer = answers.readline()  # the child writes whole lines
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
            raise EngineError(f"bare vLLM ended with code {self._child.returncode}: {self._last_error()}")
        return json.loads(answer)

    def _tree(self) -> list[psutil.Process]:
        try:
            child = psutil.Process(self._child.pid)
            return [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if "Error" in line), "it gave no reason")


def _on_cpu() -> bool:
    """vLLM would compute on the CPU here."""
    import torch

    return not torch.cuda.is_available()


def _serve() -> None:
    """The child: the first line opens the model, every other one is a workload."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(**json.loads(sys.stdin.readline()))
    answer(True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]]
        params = [
            SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=length) for length in work["lengths"]
        ]
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        for output, length in zip(outputs, work["lengths"], strict=True):
            if len(output.outputs[0].token_ids) != length:
                raise RuntimeError(f"vLLM gave {len(output.outputs[0].token_ids)} tokens, not {length}")
        answer(took_s)


if __name__ == "__main__":
    _serve()
