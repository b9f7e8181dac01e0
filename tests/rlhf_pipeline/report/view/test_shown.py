"""Pages say what is so: a test for each thing that one once said wrongly or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Evaluate
from rlhf_pipeline.report.one_file import write_report
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.report.conftest import write_run
from tests.rlhf_pipeline.report.view.conftest import GROUPS, SIZE, go, opened, scalars, served, serving
from tests.rlhf_pipeline.small import tiny
from trajectory_store import Column, Schema, TrajectoryStore

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_report", [False, True], ids=["server", "report"])
def test_a_step_counts_all_of_it(browser: Any, wide: tuple[Path, Path], wide_url: str, is_report: bool):
    """Numbers of trajectories and groups, means, and what taught nothing are of the whole step."""
    rewards, advantages, groups = scalars(wide[0], "task_reward", "advantage", "group_id")
    graded = np.isfinite(rewards)
    address = wide[1].as_uri() if is_report else wide_url
    with opened(browser, address) as (page, wrong):
        go(page, address, "0/step/1")
        said = page.inner_text(".bar .facts")
        assert f"took {graded.sum():,} trajectories of {GROUPS} groups" in said
        assert f"learned from {(graded & (advantages != 0)).sum():,}; {SIZE} have no gradient" in said
        assert f"excluded: {(~graded).sum()} without a reward" in said
        rows = page.locator("table.groups tbody tr")
        assert rows.count() == (48 if is_report else GROUPS)
        for at in (0, 1, 7, 47):
            mine = graded & (groups == at)
            cells = rows.nth(at).locator("td").all_inner_texts()
            assert float(cells[2]) == pytest.approx(rewards[mine].mean(), abs=0.0051)
            assert cells[4] == f"{0 if at == 1 else mine.sum()} of {mine.sum()}"
            assert rows.nth(at).locator(".cell").count() == mine.sum()
        assert wrong == []


def test_what_taught_nothing_is_the_ledgers_word(browser: Any, wide: tuple[Path, Path], wide_url: str):
    """A group of equal rewards that has advantages was learned from; one without a gradient taught nothing."""
    for address in (wide_url, wide[1].as_uri()):
        with opened(browser, address) as (page, wrong):
            go(page, address, "0/group/0")
            said = page.inner_text("main p.facts")
            assert f"step 1: learned from {SIZE} of {SIZE}" in said
            assert "nothing" not in said
            assert "no spread" not in said
            if address == wide_url:
                go(page, address, "0/group/1")
                said = page.inner_text("main p.facts")
                assert "not learned from: no member has a gradient" in said
                assert "no spread in its returns" in said
                go(page, address, f"0/t/{SIZE}")
                assert "no gradient in step 1" in page.inner_text("main p.facts")
            assert wrong == []


def test_a_search_runs_to_its_end(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A text in the oldest row is found without a click; Esc stops and says how far it looked, and it can continue."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # so each answer comes after one block
    schema = Schema([Column("completion", "str"), Column("task_reward", "float32")])
    with TrajectoryStore.create(tmp_path / "store", schema) as store:
        for part in range(12):
            texts = ["x" * 4000] * 1000
            texts[0] = "needle" if part == 0 else texts[0]
            store.append({"completion": texts, "task_reward": np.zeros(1000, np.float32)})
    with serving(tmp_path / "store") as url, opened(browser, url) as (page, wrong):
        go(page, url, "0/trajectories?text=needle")
        page.wait_for_selector("a.row")
        assert page.locator("main [role=status]").inner_text().startswith("1 of 12,000")
        asked = list[str]()

        def slowly(route: Any) -> None:
            asked.append(route.request.url)
            time.sleep(0.3)
            route.continue_()

        page.route("**/trajectories?*all=1*", slowly)
        go_on = f"{url.split('?')[0]}#/0/trajectories?text=nowhere"
        page.goto(go_on)
        page.wait_for_selector("button:has-text('stop (Esc)')")
        page.keyboard.press("Escape")
        page.wait_for_selector("button:has-text('continue')")
        found = re.search(r"stopped: searched the newest ([\d,]+) of 12,000", page.inner_text("main [role=status]"))
        assert found
        assert 0 < int(found[1].replace(",", "")) < 12_000
        page.wait_for_timeout(700)
        before = len(asked)
        page.get_by_role("button", name="continue").click()
        page.wait_for_selector("text=None of 12,000 trajectories")
        assert len(asked) > before
        assert all("snapshot=12000" in one for one in asked)
        assert wrong == []


def test_all_that_a_report_shows_can_be_clicked(browser: Any, wide: tuple[Path, Path], tmp_path: Path):
    """Ten clicks open ten steps; chips have the rows that they count; an unknown filter is refused in words."""
    report = write_report(RunFolder.open(write_run(tmp_path / "long", num_rollouts=30)))
    assert isinstance(report, Path)
    with opened(browser, report.as_uri(), viewport={"width": 1440, "height": 900}) as (page, wrong):
        opened_steps = set[str]()
        for place in range(10):
            go(page, report.as_uri(), "runs")
            curve = page.locator(".plot[data-name=loss] .u-over")
            curve.scroll_into_view_if_needed()
            box = curve.bounding_box()
            at = box["x"] + 2 + (box["width"] - 4) * place / 9
            page.mouse.move(at, box["y"] + 20)
            page.mouse.click(at, box["y"] + 20)
            page.wait_for_selector("h1:has-text('Step')")
            assert page.locator(".figures .card").count() > 5
            opened_steps.add(page.inner_text("h1"))
        assert len(opened_steps) == 10
        links = page.eval_on_selector_all("main a[href^='#/']", "all => all.map(one => one.getAttribute('href'))")
        for href in links[:30]:
            page.goto(f"{report.as_uri()}{href}")
            assert page.locator("h1:text-is('Error')").count() == 0, href
        assert wrong == []
    with opened(browser, wide[1].as_uri()) as (page, wrong):
        go(page, wide[1].as_uri(), "0/trajectories")
        chips = page.locator(".chips .chip:has(b)")
        assert chips.count() >= 3
        for at in range(chips.count()):
            num, where = int(chips.nth(at).locator("b").inner_text()), chips.nth(at).get_attribute("href")
            page.goto(f"{wide[1].as_uri()}{where}")
            page.wait_for_selector("a.row")
            assert page.locator("main [role=status]").inner_text().startswith(f"{num} of "), where
            go(page, wide[1].as_uri(), "0/trajectories")
        go(page, wide[1].as_uri(), "0/trajectories?where=colour==1")
        assert "This report has no column colour" in page.inner_text("[role=alert]")
        assert page.locator("input.filter").input_value() == "colour==1"
        assert wrong == []


def test_rows_have_what_was_stored(browser: Any, wide: tuple[Path, Path], wide_url: str, tmp_path: Path):
    """Named rewards and the return are columns; any is shown, ordered and filtered by, and the choice is exported."""
    rewards, returns, formats = scalars(wide[0], "task_reward", "return", "reward_format")
    with opened(browser, wide_url, accept_downloads=True) as (page, wrong):
        go(page, wide_url, "0/trajectories")
        page.wait_for_selector(".chips b")
        heads = [text.strip() for text in page.locator("thead th").all_inner_texts()]
        assert heads[:5] == ["id ▼", "reward", "answer", "format", "return"]
        page.get_by_role("button", name="return").click()
        page.wait_for_url("**sort=-return**")
        page.wait_for_selector("th[aria-sort=descending]:has-text('return')")
        best = page.locator("td[data-l=return]").all_inner_texts()
        assert best == [f"{value:.3f}" for value in np.sort(returns[np.isfinite(returns)])[::-1][:50]]
        status = page.locator("main [role=status]")
        early = int(((np.arange(len(rewards)) % 3 > 0) & np.isfinite(rewards)).sum())
        for condition, num in (
            ("reward==null", np.isnan(rewards).sum()),
            ("reward_format==1, reward==0.4..0.6", ((formats == 1) & (rewards == 0.5)).sum()),
            ('finish_reason=="stop, early"', early),
        ):
            page.locator("input.filter").fill(condition)
            page.keyboard.press("Enter")
            status.filter(has_text=f"{num} of 1,056").wait_for()
            page.wait_for_selector(".chips b")
        assert set(page.locator("td[data-l=finish]").all_inner_texts()) == {"stop, early"}
        page.locator("summary:text-is('columns')").click()
        page.get_by_label("kl_coef").check()
        page.wait_for_selector("th:has-text('kl_coef')")
        assert set(page.locator("td[data-l=kl_coef]").all_inner_texts()) == {"0.100"}
        page.locator("summary:text-is('export')").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="JSONL").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert {json.loads(line)["finish_reason"] for line in lines} == {"stop, early"}
        assert len(lines) == early
        assert wrong == []


def test_a_prompt_over_time_and_runs(browser: Any, run_dir: Path):
    """The same prompt is followed over the versions of the policy, in every run that has it."""
    other = run_dir.parent / "other"
    shutil.copytree(run_dir, other)
    (prompt,) = (row["prompt"] for row in View(run_dir).rows(np.array([5])))
    versions, rewards = scalars(run_dir, "policy_version", "task_reward")
    with TrajectoryStore.open(run_dir / "store") as store:
        mine = np.array(store.read(store.ids(), ["prompt"])["prompt"]) == prompt
    with serving(run_dir, other) as url, opened(browser, url) as (page, wrong):
        go(page, url, "0/t/5")
        page.get_by_role("link", name="this prompt over time").click()
        page.wait_for_selector("h1:has-text('A prompt over time')")
        assert page.locator("main h2").all_inner_texts() == [
            f"{name}: {mine.sum()} trajectories" for name in (run_dir.name, "other")
        ]
        rows = [row.split() for row in page.locator("table").first.locator("tbody tr").all_inner_texts()]
        each = {version: rewards[mine & (versions == version)] for version in np.unique(versions[mine])}
        assert [row[:2] for row in rows] == [[str(version), str(len(of))] for version, of in each.items()]
        assert [float(row[2]) for row in rows] == [pytest.approx(of.mean(), abs=6e-4) for of in each.values()]
        assert wrong == []


def test_failures_are_counted_by_cause(browser: Any, wide: tuple[Path, Path], wide_url: str):
    """Two causes whose messages differ in numbers and quoted text have two lines, which sum to all failures."""
    (rewards,) = scalars(wide[0], "task_reward")
    failed = int(np.isnan(rewards).sum())
    with opened(browser, wide_url) as (page, wrong):
        go(page, wide_url, "0/lists/failed")
        nums = [int(text) for text in page.locator("table.causes td.num").all_inner_texts()]
        assert (len(nums), sum(nums)) == (2, failed)
        page.get_by_role("link", name="TimeoutError: no result after # s").click()
        page.wait_for_selector("text=of one cause")
        assert (
            page.locator("table.rows tbody tr:has-text('TimeoutError')").count()
            == page.locator("table.rows tbody tr").count()
        )
        go(page, wide_url, "0/trajectories")
        page.locator("input.filter").fill("colour==1")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        assert "no column 'colour'" in page.inner_text("[role=alert]")
        assert page.locator("input.filter").input_value() == "colour==1"
        assert [text for text in wrong if "400" not in text] == []


def test_health_and_logs_are_live(browser: Any, run_dir: Path):
    """What is appended to a log is shown without a reload; the supervisor's log too."""
    (run_dir / "log.txt").write_text("first line\n")
    (run_dir / "supervisor.log").write_text("supervised\n")
    with serving(run_dir) as url, opened(browser, url) as (page, wrong):
        go(page, url, "0/health")
        assert page.locator("pre[data-log]").all_inner_texts() == ["first line\n", "supervised\n"]
        with (run_dir / "supervisor.log").open("a") as log:
            log.write("a collector was started again\n")
        page.wait_for_selector("pre:has-text('started again')")
        assert wrong == []


def test_a_click_in_a_comparison_opens_the_run_under_it(browser: Any, run_dir: Path):
    """Of two curves, the click means the nearer one."""
    other = write_run(run_dir.parent / "other", num_rollouts=6)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").unlink()
    for line in lines:
        line.pop("crc32c")
        StepRows(other / "metrics.jsonl").append(line | {"loss": line["loss"] + 1})
    with serving(run_dir, other) as url, opened(browser, url, viewport={"width": 1440, "height": 900}) as (page, wrong):
        for share, number in ((0.05, "1"), (0.95, "0")):
            go(page, url, "runs")
            curve = page.locator(".plot[data-name=loss] .u-over")
            curve.scroll_into_view_if_needed()
            box = curve.bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + share * box["height"])
            page.mouse.click(box["x"] + box["width"] / 2, box["y"] + share * box["height"])
            page.wait_for_selector("h1:has-text('Step')")
            assert page.url.split("#/")[1].split("/")[0] == number
        assert wrong == []


def test_chat_without_a_tokenizer_is_text(browser: Any, tmp_path: Path):
    """A file of messages without token ids shows characters, and no code points in brackets."""
    file = tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 it is"}]
    file.write_text(json.dumps({"messages": said, "reward": 1.0}) + "\n")
    with served(file) as (url, _), opened(browser, url) as (page, wrong):
        go(page, url, "0/trajectories")
        page.locator("a.row").first.click()
        page.wait_for_selector(".tokens")
        text = page.inner_text(".tokens")
        assert "2+2?" in text
        assert not re.search(r"\[\d+\]", text)
        assert wrong == []


def test_markdown_and_maths_on_request(browser: Any, wide_url: str):
    """Bold is bold and a fraction a fraction once that is asked for; before, the text is as it is."""
    with opened(browser, wide_url) as (page, wrong):
        go(page, wide_url, "0/t/3")
        assert page.locator("math").count() == 0
        page.get_by_label("Markdown and maths").check()
        assert page.locator(".markup strong:text-is('So')").count() == 1
        assert page.locator(".markup math mfrac").count() == 1
        assert wrong == []


def test_cells_axes_and_numbers_tell_apart(browser: Any, wide_url: str):
    """A step with only 0 looks unlike one with only 1; ticks differ; what is only rounding is 0."""
    look, colors = "e => getComputedStyle(e).backgroundColor", []
    with opened(browser, wide_url) as (page, wrong):
        for step, value in ((2, "0"), (3, "1")):
            go(page, wide_url, f"0/step/{step}")
            cells = page.locator(".cell")
            assert {cell.get_attribute("data-reward") for cell in cells.all()[:5]} == {value}
            colors.append(cells.first.evaluate(look))
        assert colors[0] != colors[1]
        given = [[-1e-17, 0, 1e-17], [0.0001, 0.0002], [0.025, 0.05, 0.075], [1e6, 2e6]]
        labels = page.evaluate("all => import('view/chart.js').then(m => all.map(m.ticks))", given)
        assert all(len(set(one)) == len(one) for one in labels)
        assert labels[2] == ["0.025", "0.050", "0.075"]
        numbers = page.evaluate(
            "all => import('view/api.js').then(m => all.map(x => m.fmt(x, 2)))", [-5.55e-17, 0.00032, 1.53e7, 0.25]
        )
        assert numbers == ["0", "320e-6", "15,300,000", "0.25"]
        assert wrong == []


def test_evaluations_have_one_curve_with_a_band_and_fold_their_rows(browser: Any, tmp_path: Path):
    """The interval is no chart of its own; the rows below a step are folded and lead to all of them."""
    held_out = Evaluate(prompts=CopyDigits(num_digits=3), every=3, num_prompts=10, group_size=8)
    run(dataclasses.replace(tiny(), evaluate=held_out), run_dir=tmp_path / "run")
    with serving(tmp_path / "run") as url, opened(browser, url) as (page, wrong):
        names = [plot.get_attribute("data-name") for plot in page.locator(".plot").all()]
        assert [name for name in names if name.startswith("evaluation/reward")] == ["evaluation/reward"]
        table = page.locator("section:has([data-name='evaluation/reward']) details.values")
        table.locator("summary").click()
        assert "…" in table.inner_text()
        go(page, url, "0/step/3")
        folded = page.locator("details:has(> summary:has-text('the first 32 of 80 rows'))")
        assert folded.locator("a.row").first.is_visible() is False
        assert page.evaluate("document.documentElement.scrollHeight") < 6000
        assert wrong == []


def test_a_group_has_the_expected_answer(browser: Any, wide_url: str):
    """It is beside the prompt, and the named rewards beside each member's reward."""
    with opened(browser, wide_url) as (page, wrong):
        go(page, wide_url, "0/group/0")
        assert "expected answer 1, 2" in page.inner_text("main")
        assert "answer 1\nformat 1" in page.locator("article p.facts").first.inner_text()
        assert wrong == []
