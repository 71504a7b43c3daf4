"""Published methods by name: importing this registers them all."""

from node.train.objectives.presets import decoupled, direct, foreign, proximal, sequence

__all__ = ["decoupled", "direct", "foreign", "proximal", "sequence"]
