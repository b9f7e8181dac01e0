"""A browser, servers, and a run that has all that pages show."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
import uvicorn

from rlhf_pipeline.report.one_file import write_report
from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.view.server import listen, make_app
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from tests.rlhf_pipeline.report.conftest import COLUMNS, write_run
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system, without a window."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """Serve runs from this process; yield the URL."""
    views = [View(path) for path in paths]
    with listen(None) as bound:
        port = bound.getsockname()[1]
        app = make_app(views, port=port, key="secret")
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/?key=secret"
        finally:
            server.should_exit = True
            thread.join()
            for view in views:
                view.close()


@contextmanager
def served(*paths: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve runs with the command; yield the URL that it prints, and its process."""
    command = [sys.executable, "-m", "rlhf_pipeline", "view", *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            match = re.search(r"http://\S+", server.stdout.readline())
            assert match
            yield match[0], server
        finally:
            server.terminate()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page; yield it, and what went wrong: console errors, exceptions, requests to other places."""
    context = browser.new_context(**options)
    page, wrong = context.new_page(), []
    page.set_default_timeout(20_000)
    base = url.split("?")[0]
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((base, "data:")) else wrong.append(request.url))
    page.goto(url)
    page.wait_for_selector("h1")
    yield page, wrong
    context.close()


def go(page: Any, url: str, place: str) -> None:
    """Go to a page of the server."""
    page.goto(f"{url.split('?')[0]}#/{place}")
    path, _, question = place.partition("?")
    at = path + (f"?{urlencode(parse_qsl(question, keep_blank_values=True))}" if question else "")
    page.wait_for_selector(f'#app[data-at="{at}"]')
    page.wait_for_selector("[aria-busy=true]", state="detached")
    page.wait_for_load_state("networkidle")


GROUPS, SIZE = 66, 16
ERRORS = ("ValueError: could not convert '{0}' to float", "TimeoutError: no result after {0} s")


def wide_run(folder: Path) -> Path:
    """Write a run whose first step takes 66 groups of 16: named rewards, a KL penalty, failures of two causes.

    In group 0 all rewards are equal and the returns are not; in group 1 neither has a spread, so it teaches nothing.
    Step 2 takes the trajectories with the reward 0, and step 3 those with 1.
    """
    run = write_run(folder, num_rollouts=1)
    for part in ("store", "ledger.jsonl", "metrics.jsonl"):
        shutil.move(run / part, folder.parent / f"old-{part}")
    reward_columns = [Column(f"reward_{name}", "float32", fill=math.nan) for name in ("format", "answer")]
    more = [Column("return", "float64"), Column("degenerate", "bool", fill=False), Column("kl_coef", "float32")]
    more += [Column("failure_reason", "str", fill=""), Column("created_at", "float64", fill=math.nan)]
    rng, num = np.random.default_rng(0), GROUPS * SIZE
    group = np.repeat(np.arange(GROUPS), SIZE)
    parts = rng.integers(0, 2, (num, 2)).astype(np.float32)
    parts[group <= 1] = 1
    failed = (group > 1) & (rng.random(num) < 0.1)
    rewards = np.where(failed, np.nan, parts.sum(1) / 2)
    penalty = np.where(group == 1, 0.0, rng.normal(size=num) / 4)
    advantage = np.where(failed | (group == 1), 0.0, rewards - 0.5 + penalty)
    advantage[group == 1] = 0
    errors = [ERRORS[at % 2].format(at) for at in range(num)]
    meta = [
        {
            "answer": "1, 2",
            "rewards": {"format": {"braces": float(at)}},
            **({"error": errors[at]} if failed[at] else {}),
        }
        for at in range(num)
    ]
    texts = [r"**So** \(\frac{1}{2}\), done" + f" {at}" for at in range(num)]
    columns = [column for column in COLUMNS if column.name != "trajectory_id"]
    with TrajectoryStore.create(run / "store", Schema([*columns, *reward_columns, *more])) as store:
        ids = store.append(
            {
                "input_ids": RaggedArray(np.tile(np.arange(6, dtype=np.int32), num), np.full(num, 6)),
                "assistant_mask": RaggedArray(np.tile(np.arange(6) >= 2, num), np.full(num, 6)),
                "log_probs": RaggedArray(np.full(6 * num, -1, np.float32), np.full(num, 6)),
                "advantage": advantage.astype(np.float32),
                "task_reward": rewards.astype(np.float32),
                "reward_format": np.where(failed, np.nan, parts[:, 0]),
                "reward_answer": np.where(failed, np.nan, parts[:, 1]),
                "return": np.where(failed, np.nan, rewards + penalty),
                "degenerate": group == 1,
                "kl_coef": np.full(num, 0.1),
                "group_id": group,
                "policy_version": np.zeros(num, np.int64),
                "num_prompt_tokens": np.full(num, 2),
                "finish_reason": [
                    "failed" if has_failed else "stop, early" if at % 3 else "length"
                    for at, has_failed in enumerate(failed)
                ],
                "failure_reason": ["grader_error" if has_failed else "" for has_failed in failed],
                "prompt": [f"prompt {at}" for at in group // 2],
                "completion": texts,
                "meta": [json.dumps(entry) for entry in meta],
                "priority": np.ones(num, np.float32),
            }
        )
    metrics, ledger = StepRows(run / "metrics.jsonl"), StepRows(run / "ledger.jsonl")
    for step, chosen in enumerate((~failed, rewards == 0, rewards == 1), start=1):
        learned, idle = np.asarray(ids)[chosen], np.asarray(ids)[chosen & (advantage == 0)]
        figures = {
            "num_groups": len(np.unique(group[chosen])),
            "num_taught": len(learned) - len(idle),
            "loss": 1 / step,
        }
        metrics.append({"step": step, "time": float(step), "task_reward": float(rewards[chosen].mean()), **figures})
        row = {"step": step, "row_ids": learned.tolist(), "ages": [step - 1] * len(learned), "watermark": num}
        left_out = {"failed": int(failed.sum())} if step == 1 else {}
        ledger.append(row | {"no_gradient": idle.tolist(), "left_out": left_out})
    return run


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run of `wide_run`, and its report."""
    run = wide_run(tmp_path_factory.mktemp("wide") / "wide")
    report = write_report(RunFolder.open(run))
    assert isinstance(report, Path)
    return run, report


@pytest.fixture(scope="module")
def wide_url(wide: tuple[Path, Path]) -> Iterator[str]:
    """A server of that run, one for many tests."""
    with serving(wide[0]) as url:
        yield url


def scalars(run: Path, *names: str) -> list[Any]:
    """Return columns of a run's store."""
    with TrajectoryStore.open(run / "store") as store:
        return [np.asarray(store.read_scalars(name)) for name in names]
