"""A policy folder on this machine: tokenizer, facts and digests, and fresh copies of its weights.

For: opening a Hugging Face folder (config.json, model.safetensors, tokenizer.json, a chat template) from a
local path, offline, without ever running code that came with it; the text <-> token rules that rollouts,
verification and training share. Not for: sampling (`engine`), training (`node.train`) or fetching a model.
Everything a folder can do wrong ends as a `ModelError` of one sentence. The tokenizer is used through its
Rust core, which many threads may call at once; completions never produce special tokens from text, so a
stranger's text cannot smuggle in an end token.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.environment.framing import Framing
from node.rollout.words import with_words_only
from protocol.errors import ModelError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Policy", "weight_facts"]

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_DAY = datetime(2026, 1, 1, tzinfo=UTC)
"""Today, in every prompt."""
_REQUIRED = ("config.json", "tokenizer.json")
_BARE = Framing()
_TEMPLATE_VARIABLES = ("date_string", "messages", "raise_exception", "strftime_now")
_PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""The template of a base model that has none: what is said, line by line."""


@dataclass(frozen=True, eq=False)
class Policy:
    """What everybody needs to know about a policy, without its weights. Made by `Policy.open`."""

    path: Path
    base_model: str
    """SHA-256 over the weight files in name order, then config.json; hex."""
    tokenizer_digest: str
    """SHA-256 of tokenizer.json; hex."""
    model_type: str
    vocab_size: int
    """Token ids lie in [0, vocab_size), of as many rows at least."""
    holes: tuple[int, ...]
    """Ids in there that stand for no word, ascending."""
    eos_token_id: int
    """The end token of a text that was not sampled here."""
    end_token_ids: tuple[int, ...]
    """Each of them ends a rollout, ascending: all that tokenizer, config and generation config declare."""
    pad_token_id: int
    params: int
    max_positions: int
    _tokenizer: PreTrainedTokenizerBase = field(repr=False)
    _template_encoder: Tokenizer = field(repr=False)
    _text_encoder: Tokenizer = field(repr=False)
    _framings: Mapping[str, Framing] = field(default_factory=dict, repr=False)
    """What stands around the questions of a task, by the task's name."""

    @classmethod
    def open(cls, path: str | Path) -> Policy:
        """Check the folder, load its tokenizer, read its facts. Raises ModelError."""
        folder = Path(path).expanduser()
        _weight_files(folder)
        _refuse_code(folder)
        config = _read_config(folder)
        tokenizer = _load_tokenizer(folder)
        rows = config.get("vocab_size")
        if not isinstance(rows, int) or rows < 2:
            raise ModelError(f"{folder}/config.json has vocab_size {rows!r}; it must be an integer above 1.")
        template_encoder = tokenizer.backend_tokenizer
        ids = set(template_encoder.get_vocab(with_added_tokens=True).values())
        words = min(rows, 1 + max(ids, default=0))
        eos = (
            tokenizer.eos_token_id
            if tokenizer.eos_token_id is not None
            else next(iter(_listed(config.get("eos_token_id"))), None)
        )
        if eos is None:
            raise ModelError(f"{folder} names no end token; set eos_token in tokenizer_config.json.")
        params, base_model = weight_facts(folder)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
        policy = cls(
            path=folder,
            base_model=base_model,
            tokenizer_digest=_digest([folder / "tokenizer.json"]),
            model_type=str(config.get("model_type")),
            vocab_size=rows,
            holes=tuple(sorted(set(range(words)) - ids)),
            eos_token_id=eos,
            end_token_ids=_end_tokens(folder, config, eos, words),
            pad_token_id=pad,
            params=params,
            max_positions=_positions(folder),
            _tokenizer=tokenizer,
            _template_encoder=template_encoder,
            _text_encoder=template_encoder,
        ).limited_to(words)
        # a template may refuse what every task gives it, or leave it out
        if policy.encode_prompt("What is 3 + 4?") == policy.encode_prompt("Sort these words: tree, sun"):
            raise ModelError(
                f"the chat template of {folder} leaves the question out: two questions give one prompt; mend "
                "chat_template.jinja"
            )
        return policy

    def limited_to(self, words: int) -> Policy:
        """The same policy where at most the first `words` rows stand for one: no engine samples another, and
        no text is encoded as one. Raises ModelError where the tokenizer cannot do without those beyond."""
        words = min(words, self.vocab_size)
        base = self._template_encoder.get_vocab(with_added_tokens=False)
        largest = max(base, key=base.__getitem__, default="")
        if base.get(largest, 0) >= words:
            raise ModelError(
                f"{self.path} can use {words} rows, and its tokenizer has the word {largest!r} with id "
                f"{base[largest]}: any text may hold it; take the tokenizer that belongs to the weights, and "
                "a charter that knows all its words"
            )
        return replace(
            self,
            vocab_size=words,
            holes=tuple(each for each in self.holes if each < words),
            _text_encoder=_text_encoder(self._template_encoder, words),
        )

    def framed(self, framings: Mapping[str, Framing]) -> Policy:
        """The same policy, which frames the questions of these tasks so. Raises ModelError for an argument of
        the template that is none."""
        own = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, *_TEMPLATE_VARIABLES}
        for task, framing in framings.items():
            if taken := sorted(own & framing.template.keys()):
                raise ModelError(f"the charter may not set {taken[0]!r} of the chat template for {task}")
        return replace(self, _framings=dict(framings))

    def encode_prompt(self, question: str, task: str = "") -> list[int]:
        """Token ids of the chat template around a `question` of `task`, up to where the answer begins.
        Templates that write today's date get the same day everywhere: a prompt must be the same when it is
        verified. Raises ModelError for a template that refuses, and for a word that the model has no row
        for."""
        framing = self._framings.get(task, _BARE)
        try:
            variables: dict[str, Any] = dict(framing.template)
            text = self._tokenizer.apply_chat_template(
                framing.messages(question),
                add_generation_prompt=True,
                tokenize=False,
                strftime_now=_DAY.strftime,
                date_string=_DAY.strftime("%d %b %Y"),
                **variables,
            )
        except Exception as error:  # whatever a template raises
            raise ModelError(
                f"the chat template of {self.path} refuses a question: {_one_line(error)}; mend "
                "chat_template.jinja"
            ) from error
        ids = list(self._template_encoder.encode(str(text), add_special_tokens=False).ids)
        largest = max(ids, default=0)
        if largest >= self.vocab_size:
            raise ModelError(f"a prompt has token {largest}, beyond the {self.vocab_size} of {self.path}")
        return ids

    def encode_completion(self, text: str, finished: bool) -> list[int]:
        """Token ids of a completion, with the end token exactly if the author's generation `finished`."""
        ids = list(self._text_encoder.encode(text, add_special_tokens=False).ids)
        return [*ids, self.eos_token_id] if finished else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, special tokens removed."""
        return str(self._template_encoder.decode(list(token_ids), skip_special_tokens=True))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in the weight files, by name. Raises ModelError."""
        return _tensor_shapes(_weight_files(self.path))

    def require_names_of_files(self) -> None:
        """Raise ModelError for a family whose tensors have other names in memory than in its files, as those
        have whose experts transformers joins: an engine that reads files takes updates by their names."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config)
        tied: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            tied.setdefault(id(tensor), []).append(name)
        files = self.tensor_shapes()
        renamed = [names[0] for names in tied.values() if not any(name in files for name in names)]
        if len(renamed) == len(tied):
            raise ModelError(
                f"{self.path} holds no tensor of a {self.model_type} model: config.json and weights do not "
                "belong together"
            )
        if renamed:
            raise ModelError(
                f"vLLM cannot take updates of {self.path}: {renamed[0]} in memory has another name in its "
                f"files ({self.model_type} models are changed when they are loaded); set rollout.engine to "
                "'transformers'"
            )

    def load_model(self, device: str | torch.device = "cpu", dtype: str = "float32") -> PreTrainedModel:
        """A fresh copy of the weights in evaluation mode, as engine and trainer must not share tensors."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ModelError(f"dtype {dtype!r} is unknown; use float32, bfloat16 or float16.")
        transformers_logging.disable_progress_bar()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=kind,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (
            Exception
        ) as error:  # whatever a malformed folder makes transformers raise is one fault of ours
            raise ModelError(f"{self.path} cannot be loaded: {_one_line(error)}") from error
        model, report = loaded
        lost = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        if lost:
            raise ModelError(
                f"{self.path}: the weights lack or misshape {len(lost)} tensors, the first is {lost[0]}."
            )
        chosen: PreTrainedModel = model.to(device).eval()
        return with_words_only(chosen, self.vocab_size, self.holes)


def weight_facts(folder: Path) -> tuple[int, str]:
    """Parameters and digest (`Policy.base_model`) of a folder, without its tokenizer, which takes seconds to
    load. Raises ModelError."""
    weights = _weight_files(folder)
    params = sum(math.prod(shape) for shape in _tensor_shapes(weights).values())
    return params, _digest([*weights, folder / "config.json"])


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ModelError(
            f"No policy folder at {folder}; give the path of a folder with config.json and weights."
        )
    missing = [name for name in _REQUIRED if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {missing[0]}; a policy folder is a complete Hugging Face model folder."
        )
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _WEIGHTS_INDEX).is_file():
        index = _read_json(folder / _WEIGHTS_INDEX)
        table = index.get("weight_map") if isinstance(index, dict) else None
        names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(
                    f"{folder}/{_WEIGHTS_INDEX} names {name!r}, which is no file of that folder."
                )
        if names:
            return [folder / name for name in names]
    raise ModelError(f"{folder} lacks {_WEIGHTS}; only weights in the safetensors format are loaded.")


def _refuse_code(folder: Path) -> None:
    code = next(folder.rglob("*.py"), None)
    if code is not None:
        raise ModelError(
            f"{folder} contains the program {code.relative_to(folder)}; models that bring code are refused."
        )
    for file in sorted(folder.glob("*config*.json")):
        if _has_key(_read_json(file), "auto_map"):
            raise ModelError(f"{file} has an auto_map entry; models that bring code are refused.")


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder}/config.json has no model_type; it is not a Hugging Face model config.")
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(
            f"{folder} is quantised ({method}), and its packed weights cannot be trained; take the model "
            "that it was made from."
        )
    return config


def _end_tokens(folder: Path, config: dict[str, Any], eos: int, rows: int) -> tuple[int, ...]:
    """Every id that some file of the folder declares as an end, `eos` first among them, those with a row."""
    declared = [eos, *_listed(config.get("eos_token_id"))]
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json")
        declared += _listed(generation.get("eos_token_id") if isinstance(generation, dict) else None)
    return tuple(sorted({each for each in declared if 0 <= each < rows}))


def _positions(folder: Path) -> int:
    """How many tokens the model has places for, under whatever name its own config class has it; very many
    where it has no limit. Raises ModelError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise ModelError(f"{folder}/config.json cannot be used: {_one_line(error)}") from error
    return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)


def _text_encoder(encoder: Tokenizer, rows: int) -> Tokenizer:
    """For completions: without added words that the model has no row for, so that no text becomes one, and
    with special words taken for text."""
    values = json.loads(encoder.to_str())
    values["added_tokens"] = [each for each in values.get("added_tokens", ()) if each["id"] < rows]
    found: Tokenizer = type(encoder).from_str(json.dumps(values))
    found.encode_special_tokens = True
    return found


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise ModelError(f"The tokenizer of {folder} cannot be loaded: {_one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"The tokenizer of {folder} has no Rust core; convert it to a tokenizer.json.")
    tokenizer.chat_template = tokenizer.chat_template or _PLAIN
    return tokenizer


def _tensor_shapes(weights: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in weights:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a mapping
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {_one_line(error)}") from error
    return shapes


def _digest(files: Sequence[Path]) -> str:
    state = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                state.update(chunk)
    return state.hexdigest()


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{file} is not readable JSON: {_one_line(error)}") from error


def _has_key(value: Any, key: str) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if key in item:
                return True
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return False


def _listed(value: Any) -> list[int]:
    """A config's id, or list of ids."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
