"""Scattering patches into a model's tensors, without an engine: loaders that slice, transpose or compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.rollout.engine._vllm_patch import Mirror

PatchTransferEngine = pytest.importorskip(
    "node.rollout.engine._vllm_worker", reason="vLLM is not installed", exc_type=ImportError
).PatchTransferEngine

SHAPES = {"q": (4, 6), "k": (2, 6), "down": (6, 8), "scalar": (1,)}


class Model(torch.nn.Module):
    """The second of two shards: fused q and k, the right half of `down`'s columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.zeros(3, 6)
        self.down = torch.zeros(6, 4)
        self.scalar = torch.zeros(1)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk[:2].copy_(tensor.narrow(0, 2, 2))
            elif name == "k":
                self.qk[2:].copy_(tensor.narrow(0, 1, 1))
            elif name == "down":
                self.down.copy_(tensor.narrow(1, 4, 4))
            elif name == "computed":
                self.down.copy_(tensor + 1)
            elif name == "transposed":
                self.down.copy_(tensor.t())
            elif name == "scalar":
                self.scalar.copy_(tensor)


def receiver(model: Model) -> Any:
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    return PatchTransferEngine(config, config, torch.device("cpu"), model)  # type: ignore[arg-type]


def send(engine: Any, patches: list[Any], base: int, update: int) -> None:
    engine.start_weight_update()
    for patch in patches:  # one call each, as a large update has
        engine.update_weights({"base": base, "update": update, "dtype": "float32", "tensors": [vars(patch)]})
    engine.finish_weight_update()


def expected(state: dict[str, Tensor]) -> Model:
    model = Model()
    model.load_weights(list(state.items()))
    return model


def test_shards_of_every_kind() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    mirror = Mirror(SHAPES, torch.float32)
    model = Model()
    engine = receiver(model)
    for update in range(1, 6):
        fitted = mirror.fit(state)
        patches = mirror.changes(fitted)
        send(engine, patches, 0 if update == 1 else update - 1, update)
        mirror.commit(fitted, patches)
        right = expected(state)
        assert torch.equal(model.qk, right.qk)
        assert torch.equal(model.down, right.down)
        assert torch.equal(model.scalar, right.scalar)
        state = {
            name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.3, tensor + update, tensor)
            for name, tensor in state.items()
        }


def test_what_has_no_fixed_place_is_refused() -> None:
    for name, shape, words in (
        ("computed", (6, 4), "computes with computed"),
        ("transposed", (4, 6), "transposed is loaded as"),
        ("unknown", (2,), "no place for unknown"),
    ):
        mirror = Mirror({name: shape}, torch.float32)
        with pytest.raises(ValueError, match=words):
            send(receiver(Model()), mirror.changes(mirror.fit({name: torch.ones(shape)})), 0, 1)


def test_a_patch_needs_its_base() -> None:
    mirror = Mirror({"scalar": (1,)}, torch.float32)
    patches = mirror.changes(mirror.fit({"scalar": torch.ones(1)}))
    engine = receiver(Model())
    send(engine, patches, 0, 3)
    with pytest.raises(ValueError, match="update 5 builds upon 4, and 3 is here"):
        send(engine, patches, 4, 5)
    send(engine, patches, 3, 4)
    engine.start_weight_update()
    engine.update_weights({"base": 4, "update": 5, "dtype": "float32", "tensors": [vars(patches[0])]})
    engine.start_weight_update()  # the sender gave up half way
    with pytest.raises(ValueError, match="builds upon 4, and None is here"):
        engine.update_weights({"base": 4, "update": 5, "dtype": "float32", "tensors": []})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": 20}, "run of 24 values from 20 exceeds"),
        ({"start": -1}, "from -1 exceeds"),
        ({"indices": b"\x18\0\0\0", "index_bytes": 4, "values": b"\0" * 4}, "positions do not fit"),
        ({"indices": b"\xff\xff\xff\xff", "index_bytes": 4, "values": b"\0" * 4}, "positions do not fit"),
        ({"indices": b"\0\0\0\0", "index_bytes": 4}, "positions do not fit 24 values"),
        ({"shape": [6, 4]}, r"has shape|loaded as|computes|exceeds|start|narrow|length"),
    ],
)
def test_a_patch_of_wrong_size(changes: dict[str, Any], words: str) -> None:
    mirror = Mirror({"q": (4, 6)}, torch.float32)
    (patch,) = mirror.changes(mirror.fit({"q": torch.ones(4, 6)}))
    engine = receiver(Model())
    engine.start_weight_update()
    with pytest.raises((ValueError, RuntimeError), match=words):
        engine.update_weights(
            {"base": 0, "update": 1, "dtype": "float32", "tensors": [vars(patch) | changes]}
        )
