from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

from rlhf_pipeline import exact_match, final_number, final_number_match, token_match
from rlhf_pipeline.collectors.grading import Grade, Grader, check_all_failed
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import RewardError
from rlhf_pipeline.user_code.arguments import Sampled, bind


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("1234", 1.0), ("1235", 0.75), ("4321", 0.0), ("12", 0.5), ("", 0.0), ("12345", 0.8)],
)
def test_token_match_counts_places(completion, expected):
    """Each right digit at its place counts; missing and extra ones count as wrong."""
    assert token_match("1234=", completion, "1234", {}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("3 + 4 = 7\n#### 1,234", "1234"),
        ("so she pays $5.50 in all", "5.5"),
        ("A: 18.00", "18"),
        ("-3 degrees", "-3"),
        ("#### no number after 12", "12"),
        ("12 then #### nothing", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    """The number after the last marker wins; separators and trailing zeros do not matter."""
    assert final_number(text) == number


def test_final_number_match_agrees_with_gsm8k_labels(gsm8k_dir):
    """On 5,276 real graded solutions our reward agrees with the recorded label."""
    agree = total = 0
    with (gsm8k_dir / "example_model_solutions.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            for name in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
                ours = final_number_match("", row[name]["solution"], row["ground_truth"], {})
                agree += bool(ours) == row[name]["is_correct"]
                total += 1
    assert total == 5276
    assert agree / total > 0.995


def test_rewards_take_one_of_several_answers():
    """A list of reference answers is each of them, for all that compare text; a null among them is none."""
    for function in (exact_match, final_number_match, token_match):
        assert [bind(function).forms[0].call([one]) for one in SEVERAL] == [1.0, 0.0]


SEVERAL = [Sampled(prompt=Prompt(text="?", answer=["7", None, "18"]), completion=text) for text in ("18", "x")]


def grade(reward: Any, prompts: list[Prompt], completions: list[str]) -> list[Grade]:
    """Grade completions, each with its prompt, as a rollout does."""
    grader = Grader(bind(reward))
    pairs = zip(prompts, completions, strict=True)
    grades = grader.grade([Sampled(prompt=prompt, completion=text) for prompt, text in pairs])
    check_all_failed(grades, grader.rewards)
    return grades


PROMPTS = [Prompt(text="a", answer="1"), Prompt(text="b", meta={"weight": 2})]


def test_rewards_come_in_order_with_answer_and_meta():
    """The function sees prompt, completion, answer and meta of its own trajectory."""
    grades = grade(lambda p, c, a, m: len(c) + (a == "1") * 10 + m.get("weight", 0) * 100, PROMPTS, ["xx", "y"])
    assert [item.reward for item in grades] == [12.0, 201.0]
    assert [item.error for item in grades] == [None, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300, "many", None])
def test_a_reward_that_is_no_finite_number_fails_its_trajectory(bad):
    """NaN, infinity and things that are no number are failures of that call only."""
    grades = grade(lambda p, c, a, m: bad if p == "b" else 0.5, PROMPTS, ["x", "y"])
    assert grades[0].reward == 0.5
    assert math.isnan(grades[1].reward)
    assert grades[1].error


def test_an_exception_is_recorded_with_its_place():
    """The record says what was raised and on which line."""

    def reward(prompt, completion, answer, meta):
        return 1.0 / (prompt != "b")

    grades = grade(reward, PROMPTS, ["x", "y"])
    assert grades[1].error.startswith("ZeroDivisionError: ")
    assert "test_rewards.py:" in grades[1].error


def test_an_exception_that_cannot_be_shown_or_stored_is_recorded_all_the_same():
    """Half a surrogate pair, line breaks and a failing `__str__` do not reach the store or stop the run."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def reward(prompt, completion, answer, meta):
        if completion == "ok":
            return 1.0
        raise Silent if completion == "silent" else ValueError("half \ud800\nof it")

    prompts = [PROMPTS[0]] * 3
    errors = [item.error for item in grade(reward, prompts, ["ok", "silent", "other"])]
    assert errors[1].startswith("Silent: (its message cannot be read)")
    assert errors[2].startswith("ValueError: half ? of it")
    assert all(error.encode() for error in errors[1:])


def test_all_calls_failing_is_an_error_with_the_next_step():
    """If no call works the function is wrong, and the message says where and what to type."""
    with pytest.raises(RewardError, match=r"all 2 calls .*ZeroDivisionError.*--resume"):
        grade(lambda p, c, a, m: 1 / 0, PROMPTS, ["x", "y"])


def test_of_several_rewards_the_one_that_failed_is_named():
    """The first of two reward functions works, and the message names the second."""

    def number_of_letters(prompt, completion, answer, meta):
        return len(completion)

    def from_a_judge(prompt, completion, answer, meta):
        raise ConnectionError("the judge does not answer")

    with pytest.raises(RewardError, match=r"all 2 calls to the reward function \S*from_a_judge failed"):
        grade([number_of_letters, from_a_judge], PROMPTS, ["x", "y"])


def test_a_reward_that_exits_fails_its_trajectory():
    """`sys.exit` in a reward function is a failed call like any other, not the silent end of the run."""

    def leaving(prompt, completion, answer, meta):
        if completion == "b":
            sys.exit("no licence")
        return 1.0

    first, second = grade(leaving, [Prompt(text="p")] * 2, ["a", "b"])
    assert first.reward == 1.0
    assert math.isnan(second.reward)
    assert second.error is not None
    assert second.error.startswith("SystemExit: no licence")
