from __future__ import annotations

import json

import pytest

from rlhf_pipeline import final_number, final_number_match, token_match


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
