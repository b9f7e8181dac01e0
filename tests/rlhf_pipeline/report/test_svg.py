"""The SVG writer."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from rlhf_pipeline.report.svg import line_chart

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ElementTree.Element:
    """Return the document; raises if it is not well-formed."""
    return ElementTree.fromstring(text)


def curve(text: str, kind: str = "raw") -> list[tuple[float, float]]:
    """Return the points of a polyline, in picture units."""
    line = next(item for item in parse(text).iter(f"{SVG}polyline") if item.get("class") == kind)
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", line.get("points") or "")]


def test_well_formed_with_any_title():
    """Markup in a title is text."""
    root = parse(line_chart([(1, 0.5), (2, 0.7)], title='a < b & "c"', y_label="<y>"))
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title") == 'a < b & "c"'


def test_points_are_where_they_belong():
    """With an axis from 0 to 1 the curve starts at the lower left corner and ends at the upper right one."""
    points = curve(line_chart([(0, 0.0), (10, 1.0)], title="t"))
    assert points == [(62.0, 312.0), (696.0, 48.0)]


def test_ticks_enclose_the_values():
    """The y axis has round numbers, and the least range that was asked for."""
    root = parse(line_chart([(1, 0.2), (2, 0.4)], title="t", y_range=(0, 1), target=0.9))
    texts = [item.text for item in root.iter(f"{SVG}text")]
    assert {"0", "0.2", "0.4", "0.6", "0.8", "1", "target 0.9"} <= set(texts)


def test_not_finite_values_are_left_out():
    """NaN and infinity are no points."""
    points = curve(line_chart([(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)], title="t"))
    assert len(points) == 2


def test_one_point_none_and_equal_values():
    """Degenerate curves are pictures too."""
    assert len(curve(line_chart([(3, 5.0)], title="t"))) == 1
    assert len(curve(line_chart([(1, -2.0), (2, -2.0)], title="t"))) == 2
    assert "no values yet" in line_chart([], title="t")
    parse(line_chart([], title="t"))


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 1.0 - 1e-7, 1.0 + 2e-7],  # an effective sample size of one, up to rounding
        [0.999, 1.0, 0.9995],
        [0.5],
        [0.0, 0.0],
        [1e-7, 3e-7],
        [120.0, 480.0],
        [2.1e9, 2.4e9],
        [-0.003, 0.002],
    ],
)
def test_labels_of_the_axis_differ(values: list[float]):
    """No two ticks of an axis have one label, and the labels are the numbers that they stand at, in order."""
    root = parse(line_chart(list(enumerate(values)), title="t"))
    texts = [item.text or "" for item in root.iter(f"{SVG}text") if item.get("text-anchor") == "end"]
    numbers = [float(text) for text in texts]
    assert len(set(texts)) == len(texts) >= 3
    assert numbers == sorted(numbers)
    assert numbers[0] <= min(values) + 1e-6
    assert numbers[-1] >= max(values) - 1e-6


def test_the_bold_line_averages_what_alternates():
    """Values that alternate between 0 and 1 give a bold line at one half, away from the ends."""
    text = line_chart([(step, float(step % 2)) for step in range(120)], title="t")
    middle = [y for _, y in curve(text, "curve")[10:-10]]
    assert all(math.isclose(y, (48 + 312) / 2, abs_tol=0.1) for y in middle)


def test_reads_on_light_and_dark_pages():
    """The picture brings its own colours for both."""
    assert "prefers-color-scheme: dark" in line_chart([(1, 1.0)], title="t")
