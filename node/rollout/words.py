"""Rows of an output head that stand for no word: never sampled, and no part of any probability.

Models have more rows than their tokenizers have words (Qwen2.5: 152,064 and some 151,700), some with holes
between them, and a policy that drifts begins to sample those; peers refuse such a group. So their logits are
set to `REFUSED` wherever logits are made: in the models that `Policy.load_model` gives to trainer and
embedded engine, and in vLLM's processes (`engine/_vllm_plugin.py`). What is left is one distribution over
words, the same in sampling, training and scoring. Not for tokens that a charter knows and a policy does not
like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["REFUSED", "refuse_rows", "with_words_only"]

REFUSED = -8192.0
"""A logit whose probability is 0 at every temperature, the same in every dtype, and not infinite, since 0
times infinity is no number where entropies are summed."""


def refuse_rows(logits: Tensor, words: int, holes: Sequence[int] = ()) -> Tensor:
    """`logits` [..., rows], those of `holes` and of rows from `words` on refused, in place. No gradient
    reaches them."""
    if logits.shape[-1] > words:
        logits[..., words:] = REFUSED
    if holes:
        logits[..., list(holes)] = REFUSED
    return logits


def with_words_only(model: PreTrainedModel, words: int, holes: Sequence[int] = ()) -> PreTrainedModel:
    """The same model; what it computes from now on has no probability beyond `words` and in `holes`."""

    def refuse(_: Any, __: Any, output: Any) -> Any:
        output.logits = refuse_rows(output.logits, words, holes)
        return output

    model.register_forward_hook(refuse)
    return model
