"""Running tasks, a third party's code, and strangers' answers where nothing can happen to the node.

Several scorers of procedural tasks evaluate the answer text, so scoring a stranger's answer is running a
stranger's code. `SandboxedHost` (in `host.py`) is what the node uses: it starts one long-lived worker
process, which locks itself in (`isolation.py`), opens the environments once (`worker.py`) and forks fresh
children for each request (`serve.py`, `forks.py`); what they wrote is read in `replies.py`.

Nothing here decides what a score is worth; it only computes it, or says with a typed reason why it could not.
"""
