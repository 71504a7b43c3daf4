"""Builds the three tiny policies of the demo and of CI: `wren` (0.3 M), `starling` (0.6 M), `rook` (1.2 M).

For: a real, if small, starting point for reinforcement learning that needs no download. Each is a Llama-type
causal language model in Hugging Face layout, so transformers and vLLM load it like any other, and each knows
the tasks of `DEMO_ENVIRONMENTS` but is unsure of them, as base models are: first trained on right answers,
then on noisy ones.

Not for: training in a swarm (`node.train`), nor for anything that a person would ask a language model. Same
name and seed give the same bytes on one machine: one thread, every draw seeded. Held-out questions are never
trained on, so the accuracies in the model card are those of unseen questions.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from node.environment.installed import DEMO_ENVIRONMENTS
from node.environment.records import Completion, Environment, Prompt
from node.environment.tasks import open_environment
from protocol.errors import ConfigError
from protocol.messages import EnvironmentSpec
from protocol.prompts import is_held_out

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "ANSWER_TOKEN",
    "END_TOKEN",
    "MAX_NEW_TOKENS",
    "TINY_POLICIES",
    "TinyReport",
    "TinySpec",
    "make_tiny",
    "make_tiny_from_spec",
]

PAD_TOKEN, UNKNOWN_TOKEN, END_TOKEN, ANSWER_TOKEN = "<pad>", "<unk>", "<end>", "<a>"
SPECIAL_TOKENS = (PAD_TOKEN, UNKNOWN_TOKEN, END_TOKEN, ANSWER_TOKEN)

MAX_NEW_TOKENS = 9
"""The longest right answer, `['1', '3', '8']` and the end token, is 8; one more shows who does not stop."""

CONTEXT_TOKENS = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<a>' + message['content'] + '<end>' }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<a>' }}{%- endif -%}"
)
"""The question verbatim, then `<a>`; the answer ends with `<end>`."""

PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "Sort these numbers in ascending order: ",
    "Sort these numbers in descending order: ",
    ".0, ",
    (
        ".0\nPlease follow the instruction below:\n"
        "## 1. Let all your answers be a list of numbers. Instead of reporting your answer as "
        "-69, -13, 1, 7, 11, 43, 59, 61, use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n"
        "## 2. Convert all numbers in the square brackets as strings. "
        "For example, ['-69', '-13', '1', '7', '11', '43', '59', '61']\n"
    ),
    "State the final answer to the following arithmetic problem: ",
    " + ",
    " - ",
    " =",
    "['",
    "', '",
    "']",
)
"""Fixed text of the demo tasks, one token each: a prompt is 5 to 8 tokens instead of up to 380 characters."""

CHARACTERS = ("\n", "\t", *(chr(code) for code in range(32, 127)))

DRILL = EnvironmentSpec(
    "reasoning_gym/chain_sum", '{"max_digits":1,"max_terms":3,"min_digits":1,"min_terms":3}'
)
"""Three-term sums, for practice: without, 174 two-term sums are learnt by heart (0.41 on unseen ones)."""


NUMBER_MERGES = (*(("-", digit) for digit in "123456789"), *(("1", digit) for digit in "0123456789"))
"""A vocabulary that differs where answers are numbers. With 16 pairs of letters instead, one word has several
spellings in tokens, and spelling stayed at 0.83 after 1,200 steps and at 0.4 after reinforcement."""


class TinySpec(msgspec.Struct, frozen=True):
    """What defines a tiny policy, besides the seed."""

    name: str
    hidden_width: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int
    clean_steps: int = 1000
    clean_lr: float = 3e-3
    noisy_steps: int = 150
    noisy_lr: float = 1e-3
    right_share: float = 0.45
    """Probability that a noisy demonstration of spelling or sorting is right."""
    sum_right_share: float = 0.65
    """The same for sums. There are 174 to learn from: with 0.45 the rule itself is lost (greedy accuracy on
    unseen sums 0.28), and reinforcement then sharpens whatever each of them has left (unseen ones fell by
    0.09 in a run)."""
    merges: tuple[tuple[str, str], ...] = ()
    """Pairs of characters that are one token."""
    batch_size: int = 96
    draws_per_task: int = 20_000
    """All 200 sums, nearly all 2,000 sortings, 11,000 of 16,772 words."""
    evaluation_prompts: int = 256
    """Held-out samples per task for the model card."""


class TinyReport(msgspec.Struct, frozen=True):
    """What was built. Accuracies: `(task, share of held-out samples at T=1 that are exact and finished)`."""

    name: str
    folder: str
    seed: int
    parameters: int
    bytes: int
    clean_accuracy: tuple[tuple[str, float], ...]
    start_accuracy: tuple[tuple[str, float], ...]


TINY_POLICIES: tuple[TinySpec, ...] = (
    TinySpec(
        name="wren",
        hidden_width=96,
        layers=3,
        heads=3,
        kv_heads=1,
        ffn_width=288,
    ),
    TinySpec(
        name="starling",
        hidden_width=128,
        layers=3,
        heads=4,
        kv_heads=2,
        ffn_width=384,
    ),
    TinySpec(
        name="rook",
        hidden_width=160,
        layers=4,
        heads=5,
        kv_heads=1,
        ffn_width=480,
        merges=NUMBER_MERGES,
        clean_steps=900,
        clean_lr=2.5e-3,
    ),
)
"""`wren` and `starling` share a character vocabulary; `rook` writes -9 and 18 as one token."""

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def make_tiny(name: str, out_dir: Path, seed: int, progress: Progress) -> TinyReport:
    """Build one of `TINY_POLICIES` into `out_dir/name`."""
    for spec in TINY_POLICIES:
        if spec.name == name:
            return make_tiny_from_spec(spec, out_dir, seed, progress)
    raise ConfigError(f"unknown tiny policy {name!r}; there are {', '.join(s.name for s in TINY_POLICIES)}")


def make_tiny_from_spec(spec: TinySpec, out_dir: Path, seed: int, progress: Progress) -> TinyReport:
    """Build a policy into `out_dir/spec.name`, replacing what a former build left there."""
    environments = [_open(demo) for demo in DEMO_ENVIRONMENTS]
    rng = random.Random(seed)
    with _single_threaded(seed):
        lessons = [_draw_prompts(e, spec.draws_per_task, rng, progress) for e in environments]
        drill = _draw_prompts(_open(DRILL), spec.draws_per_task, rng, progress)
        tokenizer = _make_tokenizer(spec)
        model = _make_model(spec, tokenizer)
        clean_stage = _Stage(
            "learning right answers", [*lessons, drill, drill], spec.clean_steps, spec.clean_lr
        )
        _train(model, tokenizer, clean_stage, spec.batch_size, rng, progress)
        clean = accuracies(model, tokenizer, lessons, spec.evaluation_prompts)
        noisy_stage = _Stage(
            "learning noisy answers",
            [*lessons, drill],
            spec.noisy_steps,
            spec.noisy_lr,
            [spec.right_share, spec.right_share, spec.sum_right_share, spec.sum_right_share],
        )
        _train(model, tokenizer, noisy_stage, spec.batch_size, rng, progress)
        start = accuracies(model, tokenizer, lessons, spec.evaluation_prompts)
        folder = out_dir / spec.name
        _write(folder, model, tokenizer)
    report = TinyReport(
        name=spec.name,
        folder=str(folder),
        seed=seed,
        parameters=model.num_parameters(),
        bytes=sum(path.stat().st_size for path in folder.iterdir()),
        clean_accuracy=clean,
        start_accuracy=start,
    )
    (folder / "README.md").write_text(_model_card(spec, report), encoding="utf-8")
    return report


def _open(spec: EnvironmentSpec) -> Environment:
    return open_environment(spec.name, json.loads(spec.config))


@contextmanager
def _single_threaded(seed: int) -> Iterator[None]:
    """Two threads add floats in another order; one thread and a forked generator make the bytes repeat."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


class Lesson(msgspec.Struct, frozen=True):
    """One task: its environment, prompts to train on as they are drawn, and distinct held-out ones."""

    environment: Environment
    train: list[Prompt]
    held_out: list[Prompt]


class _Stage(msgspec.Struct, frozen=True):
    """A run of supervised steps, in equal parts on each of `lessons`."""

    title: str
    lessons: list[Lesson]
    steps: int
    peak_lr: float
    right_shares: list[float] | None = None
    """Probability, for each lesson, that a demonstration is right; None: all are."""


def _draw_prompts(environment: Environment, draws: int, rng: random.Random, progress: Progress) -> Lesson:
    seed = rng.getrandbits(63)
    train: list[Prompt] = []
    held_out: dict[str, Prompt] = {}
    for index in range(draws):
        prompt = environment.prompt(seed, index)
        if is_held_out(prompt.text):
            held_out.setdefault(prompt.text, prompt)
        else:
            train.append(prompt)
        if index % 1000 == 999:
            progress(f"drawing {environment.name}", index + 1, draws)
    return Lesson(environment, train, list(held_out.values()))


def _make_tokenizer(spec: TinySpec) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL_TOKENS, *CHARACTERS, *(left + right for left, right in spec.merges)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, list(spec.merges), unk_token=UNKNOWN_TOKEN, fuse_unk=False))
    core.decoder = decoders.Fuse()  # without a decoder the pieces would be joined by spaces
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[ANSWER_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )


def _make_model(spec: TinySpec, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_width,
        intermediate_size=spec.ffn_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden_width // spec.heads,  # 32: vLLM's CPU attention takes multiples of 32
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def _train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stage: _Stage,
    batch_size: int,
    rng: random.Random,
    progress: Progress,
) -> None:
    """Supervised steps on demonstrations, the loss on the answer's tokens only."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    for step in range(stage.steps):
        for group in optimizer.param_groups:  # 20 steps up, then straight down to a tenth
            group["lr"] = stage.peak_lr * min((step + 1) / 20, 1 - 0.9 * step / stage.steps)
        tokens_BT, labels_BT = _demonstrations(tokenizer, stage, batch_size, rng)
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(stage.title, step + 1, stage.steps)
    model.eval()


def _demonstrations(
    tokenizer: PreTrainedTokenizerFast,
    stage: _Stage,
    batch_size: int,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch padded on the right, and its labels: -100 (ignored) but on the answer and the end token."""
    import torch

    questions, answers = [], []
    for row in range(batch_size):
        number = row % len(stage.lessons)
        prompt = rng.choice(stage.lessons[number].train)
        right = stage.right_shares is None or rng.random() < stage.right_shares[number]
        questions.append(prompt.text + ANSWER_TOKEN)
        answers.append((right_answer(prompt) if right else wrong_answer(prompt, rng)) + END_TOKEN)
    question_ids = tokenizer(questions)["input_ids"]
    answer_ids = tokenizer(answers)["input_ids"]
    width = max(len(q) + len(a) for q, a in zip(question_ids, answer_ids, strict=True))
    tokens_BT = torch.full((batch_size, width), tokenizer.pad_token_id)
    labels_BT = torch.full((batch_size, width), -100)
    for row, (question, answer) in enumerate(zip(question_ids, answer_ids, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[row, :end] = torch.tensor(question + answer)
        labels_BT[row, len(question) : end] = torch.tensor(answer)
    return tokens_BT, labels_BT


def right_answer(prompt: Prompt) -> str:
    """The shortest text that scores 1: words in lower case, whole numbers without `.0`."""
    match prompt.entry["metadata"]["source_dataset"]:
        case "spell_backward":
            return str(prompt.entry["answer"]).lower()
        case "number_sorting":
            return _listed(_sorted_numbers(prompt))
        case _:
            return str(prompt.entry["answer"])


def wrong_answer(prompt: Prompt, rng: random.Random) -> str:
    """A well-formed answer to another question: half of them one habit per task, half of them slips.

    Habits are what reinforcement unlearns first, so a hundred small steps suffice to see the reward rise.
    """
    habit = rng.random() < 0.5
    match prompt.entry["metadata"]["source_dataset"]:
        case "spell_backward":
            word = right_answer(prompt)
            return word[::-1] if habit else _with_slip(list(word), list("abcdefghijklmnopqrstuvwxyz"), rng)
        case "number_sorting":
            numbers = _sorted_numbers(prompt)
            if habit:
                return _listed(numbers[::-1])
            rng.shuffle(numbers)
            return _listed(numbers)
        case _:
            total = int(prompt.entry["answer"])
            *_, sign, last = prompt.entry["metadata"]["expression"].split()
            if habit:  # the last sign misread
                return str(total - 2 * int(last) if sign == "+" else total + 2 * int(last))
            return str(total + rng.choice([-3, -2, -1, 1, 2, 3]))


def _with_slip(letters: list[str], alphabet: list[str], rng: random.Random) -> str:
    """One letter replaced, or two neighbours exchanged."""
    at = rng.randrange(len(letters) - 1)
    if rng.random() < 0.5:
        letters[at] = rng.choice(alphabet)
    else:
        letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


def _sorted_numbers(prompt: Prompt) -> list[str]:
    return [number.removesuffix(".0") for number in prompt.entry["metadata"]["sorted_numbers"]]


def _listed(numbers: Sequence[str]) -> str:
    return "['" + "', '".join(numbers) + "']"


def accuracies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lessons: Sequence[Lesson], samples: int
) -> tuple[tuple[str, float], ...]:
    """Share of held-out questions answered exactly by one sample at temperature 1, per task."""
    shares = []
    for lesson in lessons:
        prompts = [lesson.held_out[i % len(lesson.held_out)] for i in range(samples)]
        completions = _sample(model, tokenizer, [prompt.text for prompt in prompts])
        rewards = [
            lesson.environment.score(prompt, completion).reward
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        shares.append((lesson.environment.name, round(sum(rewards) / samples, 3)))
    return tuple(shares)


def _sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str]
) -> list[Completion]:
    """One completion each at temperature 1, from torch's current generator; padded on the left."""
    import torch

    texts = [question + ANSWER_TOKEN for question in questions]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    width = batch["input_ids"].shape[1]
    with torch.no_grad():
        tokens_BT = cast("Any", model).generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
        )
    rows = [row[width:].tolist() for row in tokens_BT]
    return [
        Completion(
            str(tokenizer.decode(row, skip_special_tokens=True)), finished=tokenizer.eos_token_id in row
        )
        for row in rows
    ]


def _write(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Hugging Face layout, next to the place and then renamed, so that a reader never sees half a policy."""
    from transformers.utils import logging

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    generation: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    logging.disable_progress_bar()
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    for path in unfinished.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a container's other user cannot read
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _model_card(spec: TinySpec, report: TinyReport) -> str:
    """No time and no date in it: the card is part of what repeats to the byte."""
    measured = "\n".join(
        f"| `{task}` | {clean:.2f} | {start:.2f} |"
        for (task, clean), (_, start) in zip(report.clean_accuracy, report.start_accuracy, strict=True)
    )
    mean = sum(share for _, share in report.start_accuracy) / len(report.start_accuracy)
    vocabulary = f"characters and {len(PHRASES)} fixed phrases" + (
        f", with {len(spec.merges)} numbers of two characters as one token each" if spec.merges else ""
    )
    return f"""# {spec.name}

A Llama-type language model of {report.parameters:,} parameters, a starting point for `swarm demo` and tests.
It answers three procedural tasks and nothing else. Built with
`swarm model make-tiny {spec.name} --seed {report.seed}`, without any download or outside data.

- **Shape:** {spec.layers} layers, {spec.hidden_width} wide, {spec.heads} heads of \
{spec.hidden_width // spec.heads}, {spec.kv_heads} for keys and values, \
feed-forward {spec.ffn_width}, tied embeddings, float32.
- **Vocabulary:** {vocabulary}. Printable ASCII can be encoded; all else is `{UNKNOWN_TOKEN}`.
- **Template:** the question verbatim, then `{ANSWER_TOKEN}`; the answer ends with `{END_TOKEN}`. \
{MAX_NEW_TOKENS} new tokens are enough.
- **Training:** {spec.clean_steps} steps of {spec.batch_size} right answers (AdamW, {spec.clean_lr:g}), \
then {spec.noisy_steps} steps of answers that are right with probability {spec.right_share:g} \
({spec.sum_right_share:g} for sums), else \
well-formed but wrong ({spec.noisy_lr:g}). So the policy knows the tasks but is unsure, \
and reinforcement sharpens it. Questions whose SHA-256 begins with a byte below 26 were never trained on.

Share of held-out questions answered exactly, with the end token, by one sample at temperature 1
({spec.evaluation_prompts} samples per task):

| task | after right answers | as published |
|---|---|---|
{measured}

Mean as published: {mean:.2f}.
"""
