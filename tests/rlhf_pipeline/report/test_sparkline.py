"""The curve in one line of text."""

from __future__ import annotations

from rlhf_pipeline.report.sparkline import sparkline


def test_levels():
    """The least value is the lowest character, the greatest the highest."""
    assert sparkline([0, 0.5, 1], ascii_only=True) == "_+#"
    assert sparkline([0, 1]) == "\u2581\u2588"


def test_averages_what_does_not_fit():
    """Forty values in ten characters: each is the mean of four."""
    assert sparkline([0, 0, 0, 0, 1, 1, 1, 1] * 5, width=10, ascii_only=True) == "_#" * 5


def test_equal_values():
    """A flat curve is flat, and no curve is blank."""
    assert sparkline([2, 2, 2], ascii_only=True) == "___"
    assert sparkline([]) == ""
