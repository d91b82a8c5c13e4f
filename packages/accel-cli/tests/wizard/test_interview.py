"""Forward and back through the questions."""

from accel_cli.wizard.answers import Situation
from accel_cli.wizard.interview import BACK, Interview
from accel_cli.wizard.table import QUESTIONS


def scripted(*script):
    """Answers in turn; the rest with the default. Also returns what was asked, with its default."""
    asked, waiting = [], list(script)

    def ask(question):
        asked.append((question.name, question.default))
        return waiting.pop(0) if waiting else question.default

    return ask, asked


def test_going_back_keeps_answers_of_a_branch_that_was_left():
    ask, asked = scripted("several", 5, BACK, BACK, "here", BACK, "several")
    answers = Interview(QUESTIONS[:4], Situation(), ask).run()
    assert asked[:3] == [("place", "here"), ("num_machines", 2), ("devices", "cpu")]
    assert asked[3:5] == [("num_machines", 5), ("place", "several")]
    assert asked[-3:] == [("place", "here"), ("num_machines", 5), ("devices", "cpu")]
    assert answers.given == {"place": "several", "num_machines": 5, "devices": "cpu"}


def test_answers_of_a_branch_that_was_left_do_not_count():
    ask, _ = scripted("several", 5, BACK, BACK, "here")
    assert "num_machines" not in Interview(QUESTIONS[:4], Situation(), ask).run().given


def test_back_at_the_first_question_changes_nothing():
    ask, asked = scripted(BACK, BACK)
    Interview(QUESTIONS[:1], Situation(), ask).run()
    assert [name for name, _ in asked] == ["place"] * 3


def test_a_default_follows_the_limits_of_new_answers():
    names = ("place", "num_machines", "machine_rank", "main_process_ip")
    ask, asked = scripted("several", 4, 3, BACK, BACK, 2)
    Interview([row for row in QUESTIONS if row.name in names], Situation(), ask).run()
    assert asked[-2] == ("machine_rank", 1), "rank 3 of 4 machines became rank 1 of 2"
