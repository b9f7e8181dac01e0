"""The report page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rlhf_pipeline.report.html import write_report
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import Column, Schema, TrajectoryStore

from .conftest import write_run

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Tags(HTMLParser):
    """Collects what the page loads, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close a tag."""
        assert self.open.pop() == tag


def page_of(folder: Path) -> str:
    """Write the report and return the page."""
    written = write_report(RunFolder.open(folder))
    assert [path.name for path in written] == ["reward.svg", "report.html"]
    return written[1].read_text()


def data_of(page: str) -> list[dict[str, Any]]:
    """Return the data that the page's browser shows."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_page_is_self_contained(run_dir: Path):
    """The page loads nothing and names no address; its tags are closed."""
    page = page_of(run_dir)
    assert "http" not in page
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.loads == []
    assert tags.open == []


def test_page_shows_the_run(run_dir: Path):
    """Curve, before and after, metrics and the changed fields of the definition are there."""
    page = page_of(run_dir)
    assert "12 optimizer steps, 48 trajectories stored" in page
    assert "First policy, version 0" in page
    assert "Last policy, version 10" in page
    assert "<td>collect.group_size</td><td>4 (--set)</td>" in page
    assert "target 0.98" in page


def test_browser_data(run_dir: Path):
    """A trajectory in the browser has its tokens as text, log-probs only where the policy scored, and its reward."""
    first = data_of(page_of(run_dir))[0]
    assert "".join(first["pieces"]).endswith("=" + first["completion"])
    assert first["mask"] == [False] * 5 + [True] * 4
    assert first["log_probs"][:5] == [None] * 5
    assert all(value <= 0 for value in first["log_probs"][5:])
    assert first["policy_version"] == 0


def test_browser_spans_the_run(tmp_path: Path):
    """Of many policy versions the first, the last and some between are shown."""
    run_dir = write_run(tmp_path / "run", num_rollouts=30, prompts=1, group_size=2)
    versions = {item["policy_version"] for item in data_of(page_of(run_dir))}
    assert len(versions) == 8
    assert {0, 58} <= versions


def test_flat_curves_are_shown(run_dir: Path):
    """A figure that never changes is a level line, and not left out."""
    page = page_of(run_dir)
    for title in ("effective sample size (share)", "gradient norm", "entropy (nats per token)"):
        assert f"<title>{title}</title>" in page
    assert "<title>KL to the reference" not in page  # null in every step


def test_text_in_pictures_is_as_large_on_a_phone(run_dir: Path):
    """Each picture on a narrow page is drawn about as wide as it is shown, so that its text is not scaled down."""
    page = page_of(run_dir)
    broad, rest = page.split('<div class="card narrow">')
    assert 'viewBox="0 0 720 360"' in broad
    widths = [int(width) for width in re.findall(r'viewBox="0 0 (\d+) ', rest)]
    assert widths
    assert all(13 * 340 / width >= 12 for width in widths)
    assert "@media (max-width: 600px) { .broad { display: none; } .narrow { display: block; }" in page


def test_the_browser_spans_each_version(tmp_path: Path):
    """Of a version with many groups whole ones are shown, from the first to the last that arrived; the page says so."""
    page = page_of(write_run(tmp_path / "run", num_rollouts=2, prompts=60, group_size=4))
    groups = [item["group_id"] for item in data_of(page) if item["policy_version"] == 0]
    assert {0, 59} <= set(groups)
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [4] * 6
    assert "48 trajectories of 480: whole groups" in page


def test_stored_text_is_never_markup(tmp_path: Path):
    """A completion that looks like markup neither ends the script nor becomes an element."""
    run_dir = write_run(tmp_path / "run", num_rollouts=1)
    (run_dir / "store").rename(tmp_path / "old")
    columns = [Column(name, "str") for name in ("prompt", "completion", "meta", "finish_reason")]
    numbers = [Column("task_reward", "float32"), Column("policy_version", "int64")]
    evil = "</script><script>alert(1)</script><b>&amp;\u2028\x1b[31m"
    with TrajectoryStore.create(run_dir / "store", Schema([*columns, *numbers])) as store:
        row = {"prompt": [evil], "completion": [evil], "finish_reason": ["stop"]}
        for version in (0, 1):
            meta = [json.dumps({"answer": evil, "prompt": {}})]
            store.append({**row, "meta": meta, "task_reward": [0.5], "policy_version": [version]})
    page = page_of(run_dir)
    assert page.count("<script") == 2
    assert "<b>" not in page
    assert data_of(page)[0]["completion"] == evil


def test_report_of_a_run_without_steps(run_dir: Path):
    """A run that took no step yet has a report too."""
    (run_dir / "metrics.jsonl").unlink()
    assert "no values yet" in page_of(run_dir)
