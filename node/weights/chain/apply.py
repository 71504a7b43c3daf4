"""One link applied to weights: the step by which a version becomes the next, the same for whoever follows and
for an owner that starts again.

For: checking that a delta is the one that its link names, before and after. Weights that hold an infinity or
NaN are refused, whoever signed them. Not for where blobs come from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from node.weights.chain.bf16 import U16
from protocol.delta import apply, decode, read_header
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import LinkKind, WeightsLink

__all__ = ["THREADS", "apply_link"]

THREADS = min(4, len(os.sched_getaffinity(0)))
"""For coding one version, of the cores that this process may use; the result is the same for any number."""


def apply_link(
    link: WeightsLink, data: memoryview, weights: dict[str, U16] | None, base: Mapping[str, U16]
) -> dict[str, U16]:
    """The weights of the link's version. A delta changes `weights`, which have the hash `link.base`, in place
    and returns them; an anchor makes new ones from `base`. Raises DecodeError (delta_link: another delta than
    the link names; delta_not_finite; or as `protocol.delta` says), and then nothing has changed."""
    header = read_header(data)
    if (header.base, header.result) != (link.base, link.result):
        raise DecodeError(
            f"the blob of version {link.policy_version} leads from {header.base[:12]} to "
            f"{header.result[:12]}, its link from {link.base[:12]} to {link.result[:12]}",
            reason="delta_link",
        )
    if link.kind is LinkKind.ANCHOR:
        return decode(base, data, base_digest=link.base, finite=True, threads=THREADS)
    if weights is None:
        raise LocalProtocolError(f"the delta of version {link.policy_version} needs weights to start from")
    apply(weights, data, base_digest=link.base, finite=True, threads=THREADS)
    return weights
