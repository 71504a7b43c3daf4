"""`python -m swarm_cli`: the `swarm` command without its script, as the demo starts its nodes."""

from __future__ import annotations

from swarm_cli.app import main

main()
