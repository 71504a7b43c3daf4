"""Scoring strangers' answers where nothing can happen to the node.

Several scorers of procedural tasks evaluate the answer text, so scoring a stranger's answer is running a
stranger's code. `Scorer` (in `scorer.py`) is what the node uses: it starts one long-lived worker process,
which locks itself in (`isolation.py`), imports the environments once and forks a fresh child for each request
(`worker.py`).

Nothing here decides what a score is worth; it only computes it, or says with a typed reason why it could not.
"""
