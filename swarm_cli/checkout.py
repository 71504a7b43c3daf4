"""What only a source checkout has: benches and builders that users never run are not part of the wheel.

`pyproject.toml` names them (`[tool.hatch.build.targets.wheel] exclude`). A command that needs one of them
asks here first, so that its absence is one sentence and no traceback.
"""

from __future__ import annotations

import importlib.util

from protocol.errors import ConfigError

__all__ = ["require_checkout"]


def require_checkout(command: str, module: str) -> None:
    """Raise ConfigError when `module`, which `swarm <command>` needs, is not part of this installation."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"swarm {command} needs a source checkout: this installation has no {module}")
