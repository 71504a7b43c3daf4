"""What deltas are measured against in `swarm bench codec`: the entropy they condition on, and another layout.

For: two sizes in bytes, computed from the weights alone and with nothing of `protocol.delta`. The bound
(`algorithms.md` section J): for each exponent e of the old values, the entropy of which of its n_e values
change, H(c_e / n_e) n_e bits, and that of the changed ones' signed distance in bf16 order, given e. Counts
are those of the whole update, and nothing is added for telling them to the receiver. The other layout is that
of PULSE: distance between changed positions, new values, zstandard. Not for: coding anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError

__all__ = ["bound_bytes", "need_zstandard", "pulse_like_bytes"]

U16 = NDArray[np.uint16]
Pairs = Iterable[tuple[U16, U16]]
"""Old and new bits of each tensor."""

ZSTD_LEVELS = (1, 3)
"""PULSE uses 1; the smaller result counts."""
MAX_GAP = 0xFFFF
"""A tensor with a larger one has 32-bit gaps."""


def need_zstandard() -> None:
    """Raises ConfigError when the library is missing."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            "swarm bench codec compares with zstandard, which is not installed: "
            "install murmuration with the extra 'bench'"
        ) from None


def bound_bytes(pairs: Pairs) -> float:
    """The conditional entropy of an update."""
    values = np.zeros(256, dtype=np.int64)
    exponents: list[NDArray[np.int64]] = []
    distances: list[NDArray[np.int64]] = []
    for old, new in pairs:
        values += np.bincount((old.ravel() >> 7) & 0xFF, minlength=256)
        changed = old != new
        before, after = old[changed].astype(np.int64), new[changed].astype(np.int64)
        exponents.append((before >> 7) & 0xFF)
        distances.append(_in_order(after) - _in_order(before))
    exponent = np.concatenate(exponents)
    changes = np.bincount(exponent, minlength=256)
    bits = sum(_entropy(np.array([c, n - c])) for c, n in zip(changes, values, strict=True))
    _, each = np.unique(exponent << 20 | np.concatenate(distances) + (1 << 17), return_counts=True)
    bits += float((changes[changes > 0] * np.log2(changes[changes > 0])).sum() - (each * np.log2(each)).sum())
    return bits / 8


def _in_order(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """bf16 bits as integers that grow with the value."""
    return np.where(bits < 0x8000, bits, 0x7FFF - bits)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of as many symbols, when only their counts are known."""
    some = counts[counts > 0].astype(np.float64)
    return float((some * np.log2(some.sum() / some)).sum()) if some.size else 0.0


def pulse_like_bytes(pairs: Pairs) -> int:
    """Gaps of 16 bits, in tensors with larger ones of 32, and raw new values, each compressed on its own,
    which is smaller than both in one."""
    import zstandard

    gaps: list[bytes] = []
    values: list[bytes] = []
    for old, new in pairs:
        positions = np.flatnonzero(old.ravel() != new.ravel())
        between = np.diff(positions, prepend=-1) - 1
        wide = between.size and int(between.max()) > MAX_GAP
        gaps.append(between.astype(np.uint32 if wide else np.uint16).tobytes())
        values.append(new.ravel()[positions].tobytes())
    sizes = [
        sum(len(zstandard.ZstdCompressor(level).compress(b"".join(part))) for part in (gaps, values))
        for level in ZSTD_LEVELS
    ]
    return min(sizes)
