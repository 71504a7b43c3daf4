"""A Llama-type policy as a pure function of its weights: rollouts and scores for the tiny policies.

For: speed, where the work of a general engine between two tokens is several times the arithmetic. Weights are
given with each call, so generating with an older version, or with damaged weights, costs nothing to set up.
The numbers are those of transformers' implementation up to rounding (there is a test). Not for: any policy
but the bundled kind (`Plain` refuses others), or sampling other than at temperature 1 over the whole
vocabulary. Shapes in comments: P prompts, R rollouts, L tokens, V vocabulary, D head width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, log_softmax, silu

from node.rollout.policy import Policy
from protocol.errors import ModelError

__all__ = ["Drawn", "Plain", "Scored"]

_MASKED = -1e9
"""Added to scores of attention; finite, so that a padded row gives numbers and not NaN."""

Scored = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and completion ids."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """One sampled completion, its end token included if it ended."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finished: bool


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, those that meet the same input side by side."""

    before_attention: Tensor
    query_key_value: Tensor
    output: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class Plain:
    """The forward pass of one policy's architecture. Raises ModelError for another kind than the bundled."""

    def __init__(self, policy: Policy) -> None:
        config = json.loads((policy.path / "config.json").read_bytes())
        rope = config.get("rope_parameters") or {}
        plain = (
            config.get("model_type") == "llama"
            and not config.get("attention_bias")
            and not config.get("mlp_bias")
            and config.get("tie_word_embeddings")
            and config.get("hidden_act") == "silu"
            and rope.get("rope_type", "default") == "default"
        )
        if not plain:
            raise ModelError(f"{policy.path}: the lab trains policies of the kind of `swarm model make-tiny`")
        self._layers = int(config["num_hidden_layers"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        self._head_width = int(config["head_dim"])
        self._epsilon = float(config["rms_norm_eps"])
        self._end = policy.eos_token_id
        self._pad = policy.pad_token_id
        theta = float(rope.get("rope_theta", 10_000.0))
        powers = torch.arange(0, self._head_width, 2, dtype=torch.float32) / self._head_width
        angles = torch.arange(policy.max_positions, dtype=torch.float32)[:, None] * theta**-powers
        angles = torch.cat([angles, angles], dim=-1)
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def draw(
        self, weights: Mapping[str, Tensor], prompts: Sequence[Sequence[int]], uniforms: NDArray[np.float64]
    ) -> list[list[Drawn]]:
        """A group of completions for every prompt. `uniforms` decides the tokens: prompts x group x the most
        tokens of a completion."""
        count, size, limit = uniforms.shape
        layers, embedding, last_norm = self._split(weights)
        width = max(len(prompt) for prompt in prompts)
        ids = np.full((count, width), self._pad, dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
        padding = torch.tensor([width - len(prompt) for prompt in prompts])  # P
        hidden, caches = self._prefill(layers, embedding, torch.from_numpy(ids), padding)
        hidden = hidden[:, -1].repeat_interleave(size, 0)  # R x W
        padding = padding.repeat_interleave(size, 0)
        caches = [
            (_grown(keys, size, limit), _grown(values, size, limit)) for keys, values in caches
        ]  # R x heads x L x D
        draws = torch.from_numpy(uniforms.reshape(count * size, limit))
        rows = torch.arange(count * size)
        tokens = torch.full((count * size, limit), self._end)
        logprobs = torch.zeros(count * size, limit)
        lengths = torch.full((count * size,), limit)
        for place in range(limit):
            scores = log_softmax(linear(self._norm(hidden, last_norm), embedding), dim=-1)
            newest, chosen = _sampled(scores, draws[:, place])
            tokens[rows, place], logprobs[rows, place] = newest, chosen
            ended = newest == self._end
            if place == limit - 1 or bool(ended.all()):
                lengths[rows[ended]] = place + 1
                break
            if bool(ended.any()):
                lengths[rows[ended]] = place + 1
                alive = (~ended).nonzero().squeeze(-1)
                rows, newest, draws, padding = rows[alive], newest[alive], draws[alive], padding[alive]
                caches = [(keys[alive], values[alive]) for keys, values in caches]
            hidden = self._next(layers, embedding[newest], caches, width + place, padding)
        return _collected(tokens.numpy(), logprobs.numpy(), lengths.numpy(), self._end, size)

    @torch.inference_mode()
    def logprobs(
        self, weights: Mapping[str, Tensor], sequences: Sequence[Scored]
    ) -> list[NDArray[np.float32]]:
        """log pi of each completion token."""
        layers, embedding, last_norm = self._split(weights)
        width = max(len(prompt) + len(tokens) for prompt, tokens in sequences)
        longest = max(len(tokens) for _, tokens in sequences)
        ids = np.full((len(sequences), width), self._pad, dtype=np.int64)
        places = np.zeros((len(sequences), longest), dtype=np.int64)
        targets = np.zeros((len(sequences), longest), dtype=np.int64)
        for row, (prompt, tokens) in enumerate(sequences):
            ids[row, : len(prompt)] = prompt
            ids[row, len(prompt) : len(prompt) + len(tokens)] = tokens
            places[row, : len(tokens)] = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
            targets[row, : len(tokens)] = tokens
        none = torch.zeros(len(sequences), dtype=torch.int64)
        hidden, _ = self._prefill(layers, embedding, torch.from_numpy(ids), none)
        rows = torch.arange(len(sequences))[:, None]
        hidden = self._norm(hidden[rows, torch.from_numpy(places)], last_norm)
        scores = log_softmax(linear(hidden, embedding), dim=-1)
        chosen = scores.gather(-1, torch.from_numpy(targets)[..., None]).squeeze(-1).numpy()
        return [chosen[row, : len(tokens)].copy() for row, (_, tokens) in enumerate(sequences)]

    # --- one pass ------------------------------------------------------------------------------------------

    def _split(self, weights: Mapping[str, Tensor]) -> tuple[list[_Layer], Tensor, Tensor]:
        def layer(number: int) -> _Layer:
            prefix = f"model.layers.{number}."

            def of(name: str) -> Tensor:
                return weights[f"{prefix}{name}.weight"].detach()

            attention = [of(f"self_attn.{each}_proj") for each in ("q", "k", "v")]
            return _Layer(
                of("input_layernorm"),
                torch.cat(attention),
                of("self_attn.o_proj"),
                of("post_attention_layernorm"),
                torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")]),
                of("mlp.down_proj"),
            )

        layers = [layer(number) for number in range(self._layers)]
        return layers, weights["model.embed_tokens.weight"].detach(), weights["model.norm.weight"].detach()

    def _prefill(
        self, layers: Sequence[_Layer], embedding: Tensor, ids: Tensor, padding: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states (P x L x W) and the keys and values of each layer; `padding` tokens on the left are
        not looked at."""
        columns = torch.arange(ids.shape[1])
        visible = (columns[None, :] <= columns[:, None]) & (columns >= padding[:, None])[:, None, :]
        bias = torch.where(visible, 0.0, _MASKED)[:, None, None]  # P x 1 x 1 x L x L
        positions = (columns - padding[:, None]).clamp_(min=0)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden, caches = embedding[ids], []
        for layer in layers:
            query, keys, values = self._projected(layer, hidden, cos, sin)
            caches.append((keys, values))
            hidden = self._finished(layer, hidden, query, keys, values, bias)
        return hidden, caches

    def _next(
        self,
        layers: Sequence[_Layer],
        hidden: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
        column: int,
        padding: Tensor,
    ) -> Tensor:
        """Hidden states (R x W) of one more token at `column`, whose keys and values enter the caches."""
        bias = torch.where(torch.arange(column + 1) >= padding[:, None], 0.0, _MASKED)[:, None, None, None]
        positions = column - padding
        cos, sin = self._cos[positions][:, None, None], self._sin[positions][:, None, None]
        hidden = hidden[:, None]
        for layer, (keys, values) in zip(layers, caches, strict=True):
            query, keys[:, :, column : column + 1], values[:, :, column : column + 1] = self._projected(
                layer, hidden, cos, sin
            )
            seen = slice(column + 1)
            hidden = self._finished(layer, hidden, query, keys[:, :, seen], values[:, :, seen], bias)
        return hidden[:, 0]

    def _projected(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = hidden.shape
        mixed = linear(self._norm(hidden, layer.before_attention), layer.query_key_value)
        heads = mixed.view(rows, length, -1, self._head_width).transpose(1, 2)  # R x heads x L x D
        turned = heads[:, : self._heads + self._kv_heads]
        half = self._head_width // 2
        rotated = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        turned = turned * cos + rotated * sin
        return turned[:, : self._heads], turned[:, self._heads :], heads[:, self._heads + self._kv_heads :]

    def _finished(
        self, layer: _Layer, hidden: Tensor, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        rows, _, length, width = query.shape
        grouped = query.reshape(rows, self._kv_heads, -1, length, width)
        scores = grouped @ keys[:, :, None].transpose(-1, -2) / width**0.5 + bias
        mixed = (scores.softmax(-1) @ values[:, :, None]).view(rows, self._heads, length, width)
        hidden = hidden + linear(mixed.transpose(1, 2).reshape(rows, length, -1), layer.output)
        gate, up = linear(self._norm(hidden, layer.before_mlp), layer.gate_up).chunk(2, dim=-1)
        return hidden + linear(silu(gate) * up, layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(hidden, weight.shape, weight, self._epsilon)


def _grown(cache: Tensor, size: int, more: int) -> Tensor:
    """Each row `size` times, with room for `more` columns."""
    return torch.nn.functional.pad(cache.repeat_interleave(size, 0), (0, 0, 0, more))


def _sampled(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The token where the cumulated probability passes the uniform number, and its log-probability. Scores
    that are no numbers, of a policy that has been trained to pieces, give the first token."""
    cumulated = scores.double().exp().cumsum(-1)
    tokens = (cumulated < uniforms[:, None] * cumulated[:, -1:]).sum(-1).clamp_(max=scores.shape[-1] - 1)
    return tokens, scores.gather(-1, tokens[:, None]).squeeze(-1)


def _collected(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    lengths: NDArray[np.int64],
    end: int,
    size: int,
) -> list[list[Drawn]]:
    drawn = [
        Drawn(row[:length].copy(), chosen[:length].copy(), bool(row[length - 1] == end))
        for row, chosen, length in zip(tokens, logprobs, lengths.tolist(), strict=True)
    ]
    return [drawn[first : first + size] for first in range(0, len(drawn), size)]
