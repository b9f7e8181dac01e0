"""The pages in a real browser."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Evaluate
from rlhf_pipeline.report.one_file import write_report
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.report.conftest import COLUMNS, write_run
from tests.rlhf_pipeline.report.view.conftest import go, opened, served, serving
from tests.rlhf_pipeline.small import tiny
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

pytestmark = pytest.mark.slow

AXE = Path(__file__).with_name("axe-core-4.14.1.min.js.gz")  # MPL-2.0, unchanged, from the npm package axe-core
EVIL = "<img src=x onerror='window.pwned=1'></script><script>window.pwned=1</script>\x1b[31mred\u202egnp.exe\0${1}"
PAGES = (
    "runs",
    "0/trajectories",
    "0/trajectories?text=1&where=reward>=0",
    "0/t/{id}",
    "0/t/{id}?as=markdown",
    "0/prompt/{id}",
    "0/group/3",
    "0/step/4",
    "0/lists/failed",
    "0/lists/failed?cause=without%20a%20reason",
    "0/lists/drift",
    "0/lists/mismatch",
    "0/health",
    "0/definition",
)


def figures(page: Any) -> dict[str, str]:
    """Return the numbers beside the chosen token."""
    return dict(
        zip(page.locator("aside dt").all_inner_texts(), page.locator("aside dd").all_inner_texts(), strict=True)
    )


def numbers_of(store: TrajectoryStore, shown: str, place: int) -> dict[str, str]:
    """Return what a token's numbers should be."""
    segment, _, row = shown.rpartition(":")
    stored = store.read([(int(segment) << 32 if segment else 0) + int(row)])
    value = float(stored["log_probs"][0][place])
    return {
        "id": str(stored["input_ids"][0][place]),
        "log-prob": f"{value:.4f}",
        "probability": f"{math.exp(value):.4f}",
    }


@pytest.mark.parametrize("is_report", [False, True], ids=["server", "report"])
def test_from_an_evaluation_to_its_rows(browser: Any, is_report: bool, tmp_path: Path):
    """The curve of evaluations has the step-0 point; a step shows them, and links lead to rows, groups and tokens."""
    folder = tmp_path / "run"
    held_out = Evaluate(prompts=CopyDigits(num_digits=3), every=2, num_prompts=5, group_size=4)
    run(dataclasses.replace(tiny(), evaluate=held_out), run_dir=folder)
    view = View(folder)
    (shown,) = view.evaluations()
    view.close()
    page_file = str(write_report(RunFolder(folder))) if is_report else ""
    with serving(folder) as url, opened(browser, f"file://{page_file}" if is_report else url) as (page, wrong):
        table = page.locator("section:has([data-name='evaluation/reward']) details.values")
        table.locator("summary").click()
        rows = [row.split() for row in table.locator("tbody tr").all_inner_texts()]
        assert [int(row[0]) for row in rows] == shown["step"] == [0, 2, 4, 6]
        means = shown["values"]["evaluation/reward"]
        assert [float(row[1]) for row in rows] == [pytest.approx(mean, abs=6e-4) for mean in means]
        page.goto(f"{page.url.split('#')[0]}#/0/step/6")
        page.wait_for_selector("h2:has-text('Evaluation of the weights')")
        assert f"reward {means[-1]:.3f} (" in page.locator("p.facts").last.inner_text()
        page.locator(f"a[href='#/0~{shown['store']}/trajectories?where=version%3D%3D6']").click()
        page.wait_for_selector("h1:has-text('Trajectories')")  # the step's page has rows, too
        page.wait_for_selector("a.row")
        assert page.locator("a.row").count() == 20
        page.locator("a.row").first.click()
        page.wait_for_selector(".tokens")
        assert page.url.split("#")[1].startswith(f"/0~{shown['store']}/t/")
    assert not wrong


def test_from_the_curve_to_the_token(browser: Any, run_dir: Path):
    """A click on the curve opens its step, a click on a member its tokens, and their numbers are the store's."""
    with serving(run_dir) as url, opened(browser, url) as (page, wrong):
        box = page.locator(".plot[data-name=task_reward] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 20)
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 20)
        page.wait_for_selector(".cell")
        assert page.inner_text("h1") == "Step 12"
        page.locator(".cell").nth(2).click()
        page.wait_for_selector(".tokens")
        shown = page.inner_text("h1").removeprefix("Trajectory ")
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        with TrajectoryStore.open(run_dir / "store") as store:
            place = int(figures(page)["place"])
            assert place == 6
            assert figures(page).items() >= numbers_of(store, shown, place).items()
        page.get_by_role("link", name="step 12").click()
        page.wait_for_selector(".cell")
        assert wrong == []


def test_constant_figures_share_a_card(browser: Any, run_dir: Path):
    """A line of text each: an axis would have values that they never have; one that changes has a plot."""
    with serving(run_dir) as url, opened(browser, url) as (page, wrong):
        learning = page.locator("details:has(> summary h2:text-is('Learning')) .constants")
        assert learning.locator("dt").all_inner_texts() == ["Gradient norm", "Learning rate"]
        assert learning.locator("dd").all_inner_texts()[0].strip() == "0.500"
        assert page.locator(".plot[data-name=grad_norm]").count() == 0
        assert page.locator(".plot[data-name=loss]").count() == 1
        assert wrong == []


def test_from_a_search_to_the_token_by_keyboard(browser: Any, run_dir: Path):
    """Search, row and token are reached by keys alone; back returns to the search."""
    with serving(run_dir) as url, opened(browser, url) as (page, wrong):
        go(page, url, "0/trajectories")
        page.keyboard.press("/")
        page.keyboard.type("7")
        page.keyboard.press("Enter")
        page.wait_for_selector("mark")
        num = page.locator("a.row").count()
        assert page.locator("mark").count() == num > 0
        page.locator("h1").click()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        shown = page.evaluate("document.activeElement.textContent")
        page.keyboard.press("Enter")
        page.wait_for_selector(".tokens")
        for _ in range(20):
            if page.evaluate("document.activeElement.getAttribute('role')") == "listbox":
                break
            page.keyboard.press("Tab")
        page.keyboard.press("End")
        with TrajectoryStore.open(run_dir / "store") as store:
            assert figures(page).items() >= numbers_of(store, shown, int(figures(page)["place"])).items()
        page.go_back()
        page.wait_for_selector("mark")
        assert "text=7" in page.url
        assert page.locator("a.row").count() == num
        assert wrong == []


def test_from_a_search_to_the_token_by_touch(browser: Any, run_dir: Path):
    """On a phone a tap opens a row and chooses a token; its numbers cover at most 35 % of the screen."""
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with serving(run_dir) as url, opened(browser, url, **phone) as (page, wrong):
        go(page, url, "0/trajectories?text=7")
        shown = page.locator("a.row").first.inner_text()
        page.locator("a.row").first.tap()
        page.wait_for_selector(".tokens")
        page.locator(".tokens [role=option]").nth(7).tap()
        assert figures(page)["place"] == "7"
        with TrajectoryStore.open(run_dir / "store") as store:
            assert figures(page).items() >= numbers_of(store, shown, 7).items()
        assert page.locator("aside").bounding_box()["height"] <= 0.35 * 740 + 1
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_every_page_in_every_size(browser: Any, width: int, scheme: str, tmp_path: Path):
    """No error, no sideways scroll, no request elsewhere, and nothing serious that axe finds."""
    run, axe = write_run(tmp_path / "demo", failed=3), gzip.decompress(AXE.read_bytes()).decode()
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with serving(run) as url, opened(browser, url, **options) as (page, wrong):
        for place in PAGES:
            go(page, url, place.format(id=0))
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
            cut = "[...document.querySelectorAll('h1')].some(e => e.scrollWidth > e.clientWidth)"
            assert not page.evaluate(cut), place
            page.evaluate(axe)
            found = page.evaluate("axe.run()")["violations"]
            assert [(rule["id"], place) for rule in found if rule["impact"] in ("serious", "critical")] == []
        assert wrong == []
        go(page, url, "0/trajectories?where=colour==1")  # a filter that is refused
        page.wait_for_selector("[role=alert]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("ids", [True, False])
def test_other_tools_files(browser: Any, ids: bool, tmp_path: Path):
    """A file of rollouts is shown without a store being left; text without ids is shown by its characters."""
    file = tmp_path / "rollouts.jsonl"
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3, 4]} if ids else {}
    rows = [{"prompt": "2+2?", "completion": text, "reward": float(text == "4"), **tokens} for text in ("4", "5")]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with served(file) as (url, _), opened(browser, url) as (page, wrong):
        go(page, url, "0/trajectories?sort=-reward")
        assert page.locator("a.row").count() == 2
        page.locator("a.row").first.click()
        page.wait_for_selector(".tokens")
        assert page.locator(".tokens [role=option]").count() == (4 if ids else 5)
        assert wrong == []
    assert list(tmp_path.iterdir()) == [file]


def evil_run(folder: Path) -> Path:
    """Return a run whose texts are an attack."""
    run = write_run(folder, num_rollouts=1)
    (run / "store").rename(folder.parent / "old")
    columns = [column for column in COLUMNS if column.name != "trajectory_id"]
    with TrajectoryStore.create(run / "store", Schema([*columns, Column("failure_reason", "str", fill="")])) as store:
        tokens, mask = np.arange(6, dtype=np.int32), np.arange(6) >= 2
        for group in range(3):
            text = {name: [EVIL] for name in ("prompt", "completion", "finish_reason", "failure_reason")}
            meta = {"answer": EVIL, "error": EVIL, "messages": [{"role": EVIL, "content": EVIL}]}
            ragged = {"input_ids": [tokens], "assistant_mask": [mask], "log_probs": [np.full(6, -1, np.float32)]}
            numbers = {"group_id": [group], "policy_version": [0], "num_prompt_tokens": [2], "advantage": [0.0]}
            rest = {"task_reward": [np.nan], "meta": [json.dumps(meta)]}
            store.append({**text, **ragged, **numbers, **rest})
    (run / "log.txt").write_text(EVIL)
    return run


def test_stored_text_stays_text(browser: Any, tmp_path: Path):
    """Markup, escape codes, direction marks and NUL are shown as text on every page, and in a report."""
    run = evil_run(tmp_path / "evil" / "<b>run")
    report = write_report(RunFolder.open(run), tmp_path / "report.html")
    assert isinstance(report, Path)
    with serving(run) as url:
        for address in (url, report.as_uri()):
            with opened(browser, address) as (page, wrong):
                for place in ("0/trajectories", "0/t/0", "0/group/0", "0/lists/failed", "0/health"):
                    go(page, address, place)
                    text = page.inner_text("main")
                    assert page.evaluate("window.pwned") is None
                    assert "\u202e" not in text
                    assert ("onerror" in text and "\\u202e" in text and "␛[31m" in text) or place == "0/t/0"
                assert page.locator("main img").count() == 0
                assert wrong == []


def test_the_report_is_one_small_file(browser: Any, run_dir: Path):
    """It opens from the disk, asks for nothing, and has curves, steps, members and tokens."""
    report = write_report(RunFolder.open(run_dir))
    assert isinstance(report, Path)
    assert report.stat().st_size < 2_000_000
    with opened(browser, report.as_uri()) as (page, wrong):
        assert page.locator(".plot canvas").count() > 3
        go(page, report.as_uri(), "0/step/12")
        page.locator(".cell").first.click()
        page.wait_for_selector(".tokens")
        go(page, report.as_uri(), "0/trajectories?where=reward>=1&sort=-reward")
        assert page.locator("a.row").count() > 0
        assert wrong == []


def until(done: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_live_run_of_three_processes(browser: Any, tmp_path: Path):
    """The header follows the run and ends with the store's number; its processes are shown."""
    run = tmp_path / "live"
    sizes = ("--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4", "--steps", "120")
    command = [
        sys.executable,
        "-m",
        "rlhf_pipeline",
        "run",
        "copy_digits",
        "--out",
        str(run),
        "--collectors",
        "2",
        *sizes,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: (run / "store" / "zarr.json").is_file() or process.poll() is not None, 200)
        with serving(run) as url, opened(browser, url) as (page, wrong):
            seen = set[str]()
            while process.poll() is None:
                seen.add(page.inner_text("#live").split(" traj")[0])
                page.wait_for_timeout(500)
            assert process.returncode == 0
            with TrajectoryStore.open(run / "store") as store:
                until(lambda: page.inner_text("#live").strip().startswith(f"{len(store):,} trajectories, step 120"))
            assert len(seen) > 1
            go(page, url, "0/health")
            assert {"collector-0", "collector-1", "learner"} <= set(
                page.locator("tbody td:first-child").all_inner_texts()
            )
            assert wrong == []


def test_a_million_trajectories(browser: Any, tmp_path: Path):
    """The first page comes within a second, also of a search, and the server stays below 300 MB."""
    rows, rng = 16_384, np.random.default_rng(0)
    words = ["the", "answer", "is", "therefore", "we", "add", "carry", "timeout", "both", "sides"]
    texts = [" ".join(rng.choice(words, rng.integers(20, 55))) for _ in range(2000)]
    names = (
        "input_ids",
        "task_reward",
        "group_id",
        "policy_version",
        "num_prompt_tokens",
        "finish_reason",
        "completion",
    )
    schema = Schema([column for column in COLUMNS if column.name in names])
    with TrajectoryStore.create(tmp_path / "store", schema) as store:
        for batch in range(61):
            tokens = RaggedArray(np.zeros(4 * rows, np.int32), np.full(rows, 4))
            numbers = {
                "task_reward": rng.random(rows),
                "group_id": np.arange(rows) // 8,
                "policy_version": np.full(rows, batch),
            }
            said = [texts[at] for at in rng.integers(0, 2000, rows)]
            rest = {"num_prompt_tokens": np.ones(rows, np.int64), "finish_reason": ["stop"] * rows, "completion": said}
            store.append({"input_ids": tokens, **numbers, **rest})
    with served(tmp_path / "store") as (url, server), opened(browser, url) as (page, wrong):
        for place in ("0/trajectories", "0/trajectories?text=timeout", "0/trajectories?sort=-reward"):
            began = time.perf_counter()
            reply = page.request.get(f"{url.split('/?')[0]}/api/runs/{place}")
            assert len(reply.json()["rows"]) == 50
            assert time.perf_counter() - began < 1.0, place
            go(page, url, place)
            assert page.locator("a.row").count() == 50
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
        assert peak
        assert int(peak[1]) < 300_000
        assert wrong == []
