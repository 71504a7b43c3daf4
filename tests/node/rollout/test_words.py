"""Rows without a word: in no engine's samples, in no probability, and without a gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.rollout.engine.base import GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train.forward import completion_logprobs
from protocol.errors import ModelError
from protocol.messages import Sampling

ROWS, WORDS, HOLE = 46, 40, 20
"""Of the tiny policy; WORDS and HOLE once its tokenizer has lost some words."""
LEFT = [each for each in range(WORDS) if each != HOLE]


def without_words(folder: Path, lost: Callable[[int], bool]) -> Path:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: each for word, each in words.items() if not lost(each)}
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def policy(make_tiny_policy: Callable[[], Path]) -> Policy:
    return Policy.open(without_words(make_tiny_policy(), lambda each: each >= WORDS or each == HOLE))


def test_they_are_found_at_the_end_and_in_between(policy: Policy) -> None:
    assert (policy.vocab_size, policy.holes) == (WORDS, (HOLE,))


def test_they_are_not_sampled_and_the_rest_is_one_distribution(policy: Policy) -> None:
    engine = TransformersEngine(policy)
    prompt = tuple(policy.encode_prompt("abc"))
    (rollouts,) = engine.generate([GenerationRequest(prompt, 64, 1, Sampling(max_new_tokens=8))])
    sampled = np.concatenate([np.frombuffer(each.answer.token_ids, "<u4") for each in rollouts])
    assert set(sampled.tolist()) <= set(LEFT)
    each_word = [TokenSequence(prompt, (word,), temperature=0.7) for word in LEFT]
    total = sum(float(np.exp(np.float64(logprobs[0]))) for logprobs in engine.logprobs(each_word))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_the_trainer_computes_the_same_and_gives_them_no_gradient(policy: Policy) -> None:
    """Against a softmax over the logits of the words, of the same weights, made by hand."""
    model = policy.load_model()
    whole = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.float32)
    tokens_BL = torch.tensor([[5, 7, 9, 11, 13]])
    logits_LV = whole(input_ids=tokens_BL).logits[0].detach()
    assert logits_LV.shape == (5, ROWS)
    logits_LV = logits_LV[:, LEFT]
    expected_T = logits_LV.log_softmax(-1)[torch.arange(2, 4), tokens_BL[0, 3:]]  # both lie below the hole
    logprobs_BT, entropy_BT = completion_logprobs(
        model, tokens_BL, torch.tensor([3]), torch.ones(1, 2, dtype=torch.bool), torch.ones(1)
    )
    torch.testing.assert_close(logprobs_BT[0], expected_T)
    entropy = torch.distributions.Categorical(logits=logits_LV[2:4]).entropy()
    torch.testing.assert_close(entropy_BT[0], entropy)
    logprobs_BT.sum().backward()
    gradient = model.get_output_embeddings().weight.grad
    assert bool(gradient[LEFT].any())
    assert not bool(gradient[[HOLE, *range(WORDS, ROWS)]].any())


def test_a_word_of_the_tokenizer_itself_beyond_the_rows_is_named(
    make_tiny_policy: Callable[[], Path],
) -> None:
    folder = make_tiny_policy()
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["zebra"] = 46
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"can use 46 rows, .* the word 'zebra' with id 46"):
        Policy.open(folder)


def test_a_charter_that_knows_fewer_words_than_the_tokenizer_has_is_refused(policy: Policy) -> None:
    with pytest.raises(ModelError, match=r"can use 30 rows, and its tokenizer has the word .* with id 39"):
        policy.limited_to(30)
