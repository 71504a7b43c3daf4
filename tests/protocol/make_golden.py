"""Prints the golden bytes of this protocol version: `python -m tests.protocol.make_golden`.

Run it once when PROTOCOL_VERSION changes, and commit the result beside the older versions; never to make a
failing test pass, because nodes in the field read the old bytes.
"""

from __future__ import annotations

import sys
import textwrap

from protocol.codec import encode
from tests.protocol.samples import RECORDS, envelope_bytes


def golden() -> dict[str, str]:
    """Hex of one record of every kind, and of a signed envelope."""
    return {
        **{type(record).__name__: encode(record).hex() for record in RECORDS},
        "Envelope": envelope_bytes().hex(),
    }


if __name__ == "__main__":
    for name, text in golden().items():
        lines = "\n".join(f'        "{line}"' for line in textwrap.wrap(text, 96))
        sys.stdout.write(f'    "{name}": (\n{lines}\n    ),\n')
