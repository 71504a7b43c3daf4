"""A policy folder: what is read from it, what is refused, how text becomes tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.environment.framing import Framing
from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from protocol.errors import ModelError
from protocol.messages import FinishReason, Sampling
from protocol.rollouts import parse_tokens


def test_facts_of_a_folder(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    weights = (tiny_policy_path / "model.safetensors").read_bytes()
    config = (tiny_policy_path / "config.json").read_bytes()
    assert policy.base_model == hashlib.sha256(weights + config).hexdigest()
    assert (
        policy.tokenizer_digest
        == hashlib.sha256((tiny_policy_path / "tokenizer.json").read_bytes()).hexdigest()
    )
    assert policy.vocab_size == 46
    assert policy.eos_token_id == 1
    assert policy.max_positions == 128
    # embedding 46 x 32, per layer q, o 32 x 32, k, v 32 x 16, three MLP 32 x 64, two norms 32; one last norm
    assert policy.params == 46 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 2048 + 64) + 32
    assert policy.params == sum(parameter.numel() for parameter in policy.load_model().parameters())


def test_prompt_is_framed_by_the_template(tiny_policy_path: Path) -> None:
    assert Policy.open(tiny_policy_path).encode_prompt("1+2") == [2, 6, 42, 7, 3]


def test_completion_ends_only_if_finished(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    assert policy.encode_completion("42", True) == [9, 7, 1]
    assert policy.encode_completion("42", False) == [9, 7]
    assert policy.decode([9, 7, 1]) == "42"


def test_text_cannot_smuggle_in_an_end_token(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    ids = policy.encode_completion("1<end>2", False)
    assert policy.eos_token_id not in ids
    assert ids[0] == 6
    assert ids[-1] == 7


def test_every_model_is_a_fresh_copy(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    first, second = policy.load_model(), policy.load_model()
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_one_sentence(make_tiny_policy: Callable[[], Path], name: str) -> None:
    folder = make_tiny_policy()
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
        Policy.open(folder)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No policy folder"):
        Policy.open(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_auto_map_is_refused(make_tiny_policy: Callable[[], Path], name: str) -> None:
    folder = make_tiny_policy()
    content = json.loads((folder / name).read_text())
    content["nested"] = [{"auto_map": {"AutoModel": "evil.Model"}}]
    (folder / name).write_text(json.dumps(content).replace("auto_map", "auto\\u005fmap"))
    with pytest.raises(ModelError, match="auto_map"):
        Policy.open(folder)


def test_programs_are_refused(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "deep").mkdir()
    (folder / "deep" / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(ModelError, match="program"):
        Policy.open(folder)


def test_pickled_weights_do_not_count(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        Policy.open(folder)


def test_broken_weights(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="safetensors"):
        Policy.open(folder)


def test_lost_tensors(make_tiny_policy: Callable[[], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_policy()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Policy.open(folder).load_model()


def test_index_cannot_leave_the_folder(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no file of that folder"):
        Policy.open(folder)


def with_added_token(folder: Path) -> Path:
    """As Gemma 3's text models have it: one word beyond the last row."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    word = {"id": rows, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(word | {"normalized": False, "special": True})
    file.write_text(json.dumps(tokenizer))
    return folder


def test_a_word_without_a_row_matters_only_where_it_occurs(make_tiny_policy: Callable[[], Path]) -> None:
    policy = Policy.open(with_added_token(make_tiny_policy()))
    rows = policy.vocab_size
    assert policy.encode_prompt("spell abc")
    assert max(policy.encode_completion("a <image> b", finished=True)) < rows
    with pytest.raises(ModelError, match=f"a prompt has token {rows}, beyond the {rows} of"):
        policy.encode_prompt("what is in <image>")


def test_a_template_that_leaves_the_question_out(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "chat_template.jinja").write_text("<q>{% for m in messages %}{{ m.text }}{% endfor %}<a>")
    with pytest.raises(ModelError, match="leaves the question out: two questions give one prompt; mend"):
        Policy.open(folder)


def test_a_template_that_refuses_a_question(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "chat_template.jinja").write_text("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(ModelError, match="refuses a question: Conversation roles must alternate; mend"):
        Policy.open(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}",
        "{% set day = date_string or strftime_now('%d %b %Y') %}{{ day }} {{ messages[0]['content'] }}",
    ],
)
def test_prompts_do_not_depend_on_the_day(make_tiny_policy: Callable[[], Path], template: str) -> None:
    """Else a prompt is another one when its group is verified, across midnight or in another time zone."""
    folder = make_tiny_policy()
    (folder / "chat_template.jinja").write_text(template)
    policy = Policy.open(folder)
    (folder / "chat_template.jinja").write_text("01 Jan 2026 {{ messages[0]['content'] }}")
    assert policy.encode_prompt("1 + 1") == Policy.open(folder).encode_prompt("1 + 1")


def test_positions_have_many_names(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    config = {"model_type": "gpt2", "vocab_size": 113, "n_embd": 32, "n_layer": 2, "n_head": 4}
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 16}))
    assert Policy.open(folder).max_positions == 16


def test_a_quantised_folder(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(config | quantised))
    with pytest.raises(ModelError, match=r"is quantised \(bitsandbytes\).*take the model that it"):
        Policy.open(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "lfm2", "full_attn_idxs": [1], "num_attention_heads": 4, "num_key_value_heads": 2},
        {"model_type": "mamba", "state_size": 4},
    ],
)
def test_models_that_keep_more_than_keys_and_values(
    make_tiny_policy: Callable[[], Path], config: dict[str, object]
) -> None:
    folder = make_tiny_policy()
    sizes = {"vocab_size": 113, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    made = AutoConfig.for_model(**config, **sizes, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    policy = Policy.open(folder)
    with pytest.raises(ModelError, match=f"is a {config['model_type']} model.*set rollout.engine = 'vllm'"):
        TransformersEngine(policy).require_cache()


def test_a_base_model_without_a_template_has_a_plain_one(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    policy = Policy.open(folder).framed({"sums": Framing(examples=(("1+1", "2"),))})
    line = 4  # this tokenizer has no word for the end of a line
    assert policy.encode_prompt("1+2") == [6, 42, 7, line]
    assert policy.encode_prompt("1+2", "sums") == [6, 42, 6, line, 7, line, 6, 42, 7, line]


def test_the_charter_frames_the_questions_of_a_task(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.role[0] }}{{ each.content }}{% endfor %}"
        "{{ 'a' if thinking else 'b' }}{{ words }}"
    )
    bare = Policy.open(folder)
    policy = bare.framed({"sums": Framing("x", (("1", "2"),), {"thinking": True, "words": 7})})
    assert bare.decode(policy.encode_prompt("3", "sums")) == "sxu1a2u3a7"
    assert policy.encode_prompt("3") == policy.encode_prompt("3", "other") == bare.encode_prompt("3")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "strftime_now"])
def test_a_charter_does_not_reach_around_the_template(tiny_policy_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"may not set '{name}' of the chat template for sums"):
        Policy.open(tiny_policy_path).framed({"sums": Framing(template={name: "x"})})


def test_unknown_dtype(tiny_policy_path: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        Policy.open(tiny_policy_path).load_model(dtype="int8")


def test_a_rollout_ends_at_any_id_that_a_file_declares_an_end(
    make_tiny_policy: Callable[[], Path],
) -> None:
    folder = make_tiny_policy()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 10**6]}))
    policy = Policy.open(folder)
    assert policy.end_token_ids == tuple(sorted({policy.eos_token_id, 5, 7}))
    request = GenerationRequest(tuple(policy.encode_prompt("12")), 32, 0, Sampling(40))
    (rollouts,) = TransformersEngine(policy).generate([request])
    ends = [int(token) for rollout in rollouts for token in parse_tokens(rollout).token_ids_T[-1:]]
    assert len(set(ends) & set(policy.end_token_ids)) > 1  # not always the same
    for rollout in rollouts:
        ids = parse_tokens(rollout).token_ids_T.tolist()
        assert not set(ids[:-1]) & set(policy.end_token_ids)
        assert (rollout.finish is FinishReason.STOP) == (ids[-1] in policy.end_token_ids)
