"""The codec bench: updates are those of a trainer, yardsticks are what they say, the report is whole."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.rollout.policy import Policy
from protocol.errors import ConfigError
from swarm_cli.bench import _codec_updates
from swarm_cli.bench._codec_updates import UpdateKind, make_update
from swarm_cli.bench._codec_yardsticks import bound_bytes, need_zstandard, pulse_like_bytes

zstandard = pytest.importorskip("zstandard")

FIELDS = {
    "params",
    "density",
    "full_bytes",
    "bytes",
    "bound_bytes",
    "pulse_like_bytes",
    "ratio_full",
    "ratio_pulse",
    "ratio_bound",
    "encode_gb_s",
    "decode_gb_s",
    "lossless",
}


def silent(_: str) -> None:
    pass


def entropy_bits(*counts: int) -> float:
    return sum(count * math.log2(sum(counts) / count) for count in counts)


def test_bound_is_the_entropy_given_the_exponent() -> None:
    """Two exponents: 1 of 4 changes by one step; 3 of 4 change, two of them by +1 and one by -2."""
    old = np.array([0x3F80] * 4 + [0x4000] * 4, dtype=np.uint16)
    new = old + np.array([1, 0, 0, 0, 1, 1, -2, 0]).astype(np.uint16)
    bits = entropy_bits(1, 3) + entropy_bits(3, 1) + entropy_bits(2, 1)
    halves = [(old[:3], new[:3]), (old[3:], new[3:])]
    assert bound_bytes([(old, new)]) == pytest.approx(bits / 8)
    assert bound_bytes(halves) == pytest.approx(bits / 8), "counts are those of all tensors"
    assert bound_bytes([(old, old)]) == 0


def test_bound_orders_values_by_size_across_zero() -> None:
    """From -0.0 to 0.0 is one step, as from 0.0 to the next: two alike, and nothing to tell apart."""
    old = np.array([0x8000, 0x0000], dtype=np.uint16)
    assert bound_bytes([(old, np.array([0x0000, 0x0001], dtype=np.uint16))]) == 0
    assert bound_bytes([(old, np.array([0x8001, 0x0001], dtype=np.uint16))]) == pytest.approx(2 / 8)


def test_pulse_like_layout_is_gaps_and_values() -> None:
    old = np.zeros(200_000, dtype=np.uint16)
    new = old.copy()
    new[[0, 10, 11]] = (7, 8, 9)
    narrow = pulse_like_bytes([(old[:100], new[:100])])
    parts = (np.array([0, 9, 0], np.uint16), np.array([7, 8, 9], np.uint16))
    one, three = (
        sum(len(zstandard.ZstdCompressor(level).compress(part.tobytes())) for part in parts)
        for level in (1, 3)
    )
    assert narrow == min(one, three)
    new[150_000] = 1
    assert pulse_like_bytes([(old, new)]) >= narrow + 2 + 4, "a gap above 16 bits makes gaps of 32"


def test_missing_zstandard_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="extra 'bench'"):
        need_zstandard()


@pytest.mark.slow
def test_updates_are_made_once(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.open(tiny_policy_path)
    kind = UpdateKind(spread=False, learning_rate=1e-3, steps=2)
    update = make_update(policy, kind, tmp_path, silent)
    assert {name: array.shape for name, array in update.base.items()} == {
        name: tuple(parameter.shape) for name, parameter in policy.load_model().named_parameters()
    }
    assert any((update.base[name] != update.new[name]).any() for name in update.base)
    monkeypatch.setattr(_codec_updates, "_train", lambda *_: pytest.fail("made again"))
    again = make_update(policy, kind, tmp_path, silent)
    for name in update.new:
        np.testing.assert_array_equal(update.base[name], again.base[name])
        np.testing.assert_array_equal(update.new[name], again.new[name])
    with pytest.raises(pytest.fail.Exception):
        make_update(policy, UpdateKind(spread=True, learning_rate=1e-3, steps=2), tmp_path, silent)


def test_spread_masters_round_to_the_same_weights() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(50, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.to(torch.bfloat16))
        layer.weight[0] = 0.0
        layer.weight[1] = -0.0
        layer.weight[2] = 1.0
    before = layer.weight.detach().clone()
    _codec_updates.spread(layer)
    after = layer.weight.detach()
    assert (after != before).float().mean() > 0.99
    bits = [each.to(torch.bfloat16).view(torch.int16) for each in (before, after)]
    assert torch.equal(*bits)
    # one step of 1.0 upwards is 2^-7, half of it to either side belongs to its cell, below it a quarter
    assert -(2**-9) <= float(after[2].min() - 1) < -(2**-11)
    assert 2**-10 < float(after[2].max() - 1) <= 2**-8


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_delta")
def test_quick_bench_reports_everything(swarm: Callable[..., Any], tmp_path: Path) -> None:
    ended = swarm("bench", "codec", "--quick", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["bench"] == "codec"
    assert report["states"].keys() == {"fresh", "late"}
    assert report["learning_rates"].keys() == {"1e-05"}
    for state in (*report["states"].values(), *report["learning_rates"].values()):
        assert state.keys() >= FIELDS | {"apply_s", "engine_s", "extra_bytes", "parallel"}
        assert state["lossless"] is True
        assert state["full_bytes"] == 2 * state["params"]
        assert state["ratio_full"] == pytest.approx(state["full_bytes"] / state["bytes"], rel=1e-3)
        assert state["ratio_pulse"] == pytest.approx(state["pulse_like_bytes"] / state["bytes"], rel=1e-3)
        assert state["ratio_bound"] == pytest.approx(state["bytes"] / state["bound_bytes"], rel=1e-3)
        assert 1.0 < state["ratio_bound"] < 1.6, "tables weigh more in a tiny policy"
        assert min(state["encode_gb_s"], state["decode_gb_s"], state["engine_s"], state["apply_s"]) > 0
    assert (tmp_path / "home" / "bench" / "codec").is_dir()
    assert "step 1 of 3" in ended.err
