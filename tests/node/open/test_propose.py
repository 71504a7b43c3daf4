"""Rules proposed from hand-made figures."""

from __future__ import annotations

from node.open.propose import Sample, TaskSample, propose, warnings


def task(
    lengths: tuple[int, ...], *, mixed: int = 4, reward: float = 0.4, paid: int = 0, lost: int = 0
) -> TaskSample:
    return TaskSample("sums", 80, lengths, 10 - lost, mixed, reward, (20, paid, 90) if paid else (), lost)


def sample(*tasks: TaskSample, cap: int = 256, tokens_per_s: float = 100.0) -> Sample:
    return Sample("ada", tasks, cap, tokens_per_s)


def test_the_figures_become_rules_with_their_reasons() -> None:
    """Of 80 answers all end, with 1 to 80 tokens: 95 % have at most 76, and a quarter more is 95. A group has
    8 x 40.5 tokens of them, so 100 tokens a second are 0.309 groups, 32 of which take 103.7 s."""
    choices = propose([sample(task(tuple(range(1, 81)), paid=30))])
    assert {key: choice.value for key, choice in choices.items()} == {
        "group_size": 8,
        "max_new_tokens": 95,
        "window_ms": 110_000,
        "pool_size": 256,
        "slots_per_window": 128,  # 3 x 0.309 x 110 = 102, in whole 32s
        "max_skip_share": 0.5,
    }
    assert choices["max_new_tokens"].why == (
        "answers need 4 to 76 tokens, end token included; half of those that were paid at most 30"
    )
    assert choices["group_size"].why.startswith("4 of 10 questions are mixed with 8 answers")
    assert choices["window_ms"].why.startswith("this machine makes 0.309 groups a second")


def test_groups_get_large_where_few_are_mixed() -> None:
    few, enough = (propose([sample(task((5,) * 80, mixed=mixed), task((5,) * 80))]) for mixed in (0, 1))
    assert (few["group_size"].value, enough["group_size"].value) == (16, 8)  # 4 and 5 of 20 are mixed


def test_the_longest_task_says_how_many_tokens_and_no_answer_gets_more_than_it_had_room_for() -> None:
    both = propose([sample(task((4,) * 80)), sample(task((30,) * 80), cap=35)])
    assert both["max_new_tokens"].value == 35
    assert propose([sample(task((4,) * 80), task((8,) * 80))])["max_new_tokens"].value == 10


def test_windows_are_for_the_slowest_and_slots_for_the_fastest() -> None:
    """Groups of 8 x 10 tokens: 0.1 and 10 a second."""
    choices = propose([sample(task((10,) * 80), tokens_per_s=each) for each in (8.0, 800.0)])
    assert choices["window_ms"].value == 320_000
    assert choices["slots_per_window"].value == 256  # 3 x 10 x 320 is above what a window may have
    assert "0.1 to 10 groups a second" in choices["window_ms"].why
    fast = propose([sample(task((10,) * 80), tokens_per_s=80_000.0)])
    assert fast["window_ms"].value == 8_000


def test_what_was_lost_may_be_skipped() -> None:
    assert propose([sample(task((5,) * 80, lost=2))])["max_skip_share"].value == 0.7
    assert propose([sample(task((5,) * 80, lost=9))])["max_skip_share"].value == 0.9


def test_without_figures_the_rules_say_so() -> None:
    choices = propose([], 64)
    assert (choices["max_new_tokens"].value, choices["group_size"].value) == (64, 8)
    assert all("not measured" in choices[key].why for key in ("max_new_tokens", "group_size", "window_ms"))


def test_the_few_answers_that_ended_say_nothing_about_the_others() -> None:
    few = propose([sample(task((5,) * 39), task((5,) * 80), cap=48)])["max_new_tokens"]
    assert (few.value, few.why) == (48, "only 39 of 80 answers to sums ended by themselves")
    assert propose([sample(task((5,) * 40), cap=48)])["max_new_tokens"].value == 7
    (said,) = warnings([Sample("ada", (task((5,) * 40),), 48, 10.0, late=40)])
    assert said.startswith("time was up with 40 of 80 answers of ada under way")


def test_what_would_teach_nothing_is_told() -> None:
    assert warnings([sample(task((5,) * 80))]) == []
    for figures, says in (
        (task((), mixed=0, reward=0.0), "none of the answers of ada to sums ended within 256 tokens"),
        (task((5,) * 80, mixed=0, reward=0.0), "is worth anything"),
        (task((5,) * 80, mixed=0, reward=1.0), "are worth 1.00, all of a group alike"),
    ):
        (said,) = warnings([sample(figures)])
        assert says in said
