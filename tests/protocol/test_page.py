"""`docs/protocol.md` says what the code does: its generated parts are made anew and compared."""

from __future__ import annotations

from tests.protocol.page import PAGE, written


def test_the_page_is_what_the_code_makes_of_it() -> None:
    """Run `python -m tests.protocol.page` after a change, and read what changed."""
    assert PAGE.read_text(encoding="utf-8") == written()
