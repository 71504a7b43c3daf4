"""Who answered which prompt."""

from __future__ import annotations

from node.weight.answered import MAX_AGENTS, AnsweredPrompts


def test_the_newest_rewards_of_each_agent_are_kept() -> None:
    book = AnsweredPrompts()
    assert book.of(7) == {}
    book.add(7, "own", [0.0, 1.0])
    book.add(7, "peer", (1.0, 1.0))
    book.add(7, "own", (0.0, 0.0))
    book.add(8, "own", (1.0,))
    assert book.of(7) == {"own": (0.0, 0.0), "peer": (1.0, 1.0)}


def test_what_is_given_out_is_a_copy() -> None:
    book = AnsweredPrompts()
    book.add(7, "own", (1.0,))
    book.of(7).clear()
    assert book.of(7) == {"own": (1.0,)}


def test_prompts_touched_last_are_kept() -> None:
    book = AnsweredPrompts(max_prompts=2)
    book.add(1, "own", (1.0,))
    book.add(2, "own", (1.0,))
    book.add(1, "peer", (0.0,))
    book.add(3, "own", (1.0,))
    assert (set(book.of(1)), set(book.of(2)), set(book.of(3))) == ({"own", "peer"}, set(), {"own"})


def test_many_agents_on_one_prompt_cannot_keep_a_newer_one_out() -> None:
    book = AnsweredPrompts()
    for number in range(MAX_AGENTS + 5):
        book.add(1, f"peer{number}", (1.0,))
    book.add(1, "own", (0.0,))
    found = book.of(1)
    assert len(found) == MAX_AGENTS
    assert "own" in found
    assert "peer0" not in found
