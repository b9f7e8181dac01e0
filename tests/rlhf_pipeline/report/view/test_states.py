"""The states that a page can be in, in a real browser: followed, gone, unknown, compared, odd texts."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.cli.view import distinct_names
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.notes import Notes
from rlhf_pipeline.report.query import View
from tests.rlhf_pipeline.report.conftest import write_run
from tests.rlhf_pipeline.report.view.conftest import go, opened, served, serving
from tests.rlhf_pipeline.report.view.test_browser import AXE
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

ODD: Final = ("3", "<|im_end|>", "a and b", 'say "x"', "it's", "nan", "True", "1e3", "a, b", "x" * 400)
"""Finish reasons that mean something else where they are not quoted."""
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
MESSAGES: Final = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "assistant", "content": '<tool_call>{"name": "check", "arguments": {"x": 5}}</tool_call>'},
]
COLUMNS: Final = (
    Column("input_ids", "int32", ragged=True),
    Column("assistant_mask", "bool", ragged=True, fill=False),
    Column("task_reward", "float32"),
    Column("group_id", "int64"),
    Column("policy_version", "int64"),
    Column("num_prompt_tokens", "int64"),
    *(Column(name, "str") for name in ("finish_reason", "prompt", "completion", "meta")),
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of groups of two in ten versions: odd finish reasons, tool calls, and no mask for the first group."""
    folder = tmp_path_factory.mktemp("odd") / "store"
    num = 2 * len(ODD)
    rows: dict[str, Any] = {
        "input_ids": RaggedArray(np.tile(np.arange(4, dtype=np.int32), num), np.full(num, 4)),
        "task_reward": [float(at % 2) if at > 3 else 1.0 for at in range(num)],
        "group_id": np.arange(num) // 2,
        "policy_version": np.arange(num) // 2,
        "num_prompt_tokens": np.full(num, 1),
        "finish_reason": [ODD[at // 2] for at in range(num)],
        "prompt": ["2+3?"] * num,
        "completion": [
            f"the sum of two and three is {'five' if at % 2 else 'six'} as far as I know" for at in range(num)
        ],
        "meta": [json.dumps({"messages": MESSAGES})] * num,
    }
    with TrajectoryStore.create(folder, Schema(COLUMNS)) as store:
        store.append(
            {name: values[:2] for name, values in rows.items() if name != "input_ids"}
            | {"input_ids": [[0, 1, 2, 3]] * 2}
        )
        rest = {name: values[2:] for name, values in rows.items() if name != "input_ids"}
        mask = RaggedArray(np.tile(np.arange(4) > 0, num - 2), np.full(num - 2, 4))
        store.append(rest | {"input_ids": [[0, 1, 2, 3]] * (num - 2), "assistant_mask": mask})
    return folder


def test_every_chip_selects_what_it_counts(odd: Path):
    """A condition on a text is quoted, so that the API reads it as that text."""
    with closing(View(odd)) as view:
        kinds = view.facets()["kinds"]
        assert {kind["name"] for kind in kinds} >= set(ODD)
        for kind in kinds:
            assert len(select(view.stored.store, [kind["where"]])) == kind["num"], kind
        assert view.trajectories(where=view.matching([], text='say "x"', column="prompt"))["matched"] == 0


def test_notes_are_conditions(odd: Path, tmp_path: Path):
    """Each label, and any note, has a chip; pages, exports and figures have the rows; a column of the name wins."""
    shutil.copytree(odd, store := tmp_path / "store")
    notes = Notes(store)
    with TrajectoryStore.open(store, mode="r") as opened:
        first, second, third = map(str, opened.ids()[[1, 2, 7]].tolist())
    notes.write(first, {"text": "", "labels": ['say "x", twice', "bad"]})
    notes.write(second, {"text": "look", "labels": ["bad"]})
    notes.write(third, {"text": "only a text", "labels": []})
    with closing(View(store)) as view:
        kinds = {
            kind["name"]: kind for kind in view.facets()["kinds"] if "note" in kind["name"] or "label" in kind["name"]
        }
        expected = {"noted": [third, second, first], "label bad": [second, first], 'label say "x", twice': [first]}
        assert kinds.keys() == expected.keys()
        for name, rows in expected.items():
            kind = kinds[name]
            found = view.trajectories(where=[kind["where"]])
            assert [row["id"] for row in found["rows"]] == rows
            assert kind["num"] == found["matched"] == len(rows)
            conditions = view.matching([kind["where"]])
            assert sorted(select(view.stored.store, conditions).tolist()) == sorted(map(int, rows))
        others = view.trajectories(where=["label != bad", "noted=true"])
        assert [row["id"] for row in others["rows"]] == [third]
        assert view.trajectories(where=["label==unknown"])["matched"] == 0
        assert view.facets(["label==bad"])["kinds"][-2] == {"name": "label bad", "where": 'label=="bad"', "num": 2}
        with pytest.raises(
            DefinitionError, match="noted can only be true or false; the condition compares it with '3'"
        ):
            view.trajectories(where=["noted==3"])
        notes.write(second, {"text": "", "labels": []})
        assert view.trajectories(where=["label==bad"])["matched"] == 1  # as the file is now
    with TrajectoryStore.open(store, mode="a", add_columns=[Column("label", "str", fill="")]):
        pass
    with closing(View(store)) as view:
        assert view.trajectories(where=["label==bad"])["matched"] == 0


def test_names_tell_runs_apart():
    """Equal names have as many of their folders as they need."""
    assert distinct_names(["a/demo", "b/demo", "c"]) == ["a/demo", "b/demo", "c"]
    assert distinct_names(["demo", "x/demo"]) == ["demo", "x/demo"]
    assert distinct_names(["same", "same"]) == ["same", "same (2)"]


def test_a_store_alone_has_curves_of_its_rows(odd: Path):
    """An imported dump shows reward, length, failures and flat groups by version on the first page."""
    with closing(View(odd)) as view:
        figures = view.metrics()
    assert figures["step"] == list(range(len(ODD)))
    assert figures["values"]["task_reward"] == [1.0, 1.0, *[0.5] * 8]
    assert figures["values"]["flat_groups"] == [1.0, 1.0, *[0.0] * 8]
    assert figures["values"]["completion_length"] == [3.0] * 10
    assert figures["values"]["num_failed"] == [0.0] * 10


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.3)


def row(step: int, member: int) -> dict[str, Any]:
    """Return a rollout as a tool writes it."""
    return {"prompt": f"{step}+1", "completion": str(member), "reward": float(member == 0), "step": step, "group": step}


@pytest.mark.slow
def test_a_folder_is_followed_while_it_grows(browser: Any, tmp_path: Path):
    """What a trainer adds to a folder arrives on the open page; the folder itself is not changed."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    file = folder / "1.jsonl"
    file.write_text("".join(f"{json.dumps(row(1, member))}\n" for member in range(2)))
    with served(folder) as (url, _), opened(browser, url) as (page, wrong):
        assert page.inner_text("#live").startswith("2 trajectories")
        (folder / "2.jsonl").write_text("".join(f"{json.dumps(row(2, member))}\n" for member in range(2)))
        until(lambda: page.inner_text("#live").startswith("4 trajectories"))
        with file.open("a") as more:
            more.write(f"{json.dumps(row(1, 2))}\n")
        until(lambda: page.inner_text("#live").startswith("5 trajectories"))
        assert wrong == []
    assert sorted(path.name for path in folder.iterdir()) == ["1.jsonl", "2.jsonl"]


def test_a_removed_run_is_reported(tmp_path: Path):
    """A run that is deleted while it is looked at has an error in place of its last state."""
    run = write_run(tmp_path / "run")
    with closing(View(run)) as view:
        assert not view.changes().get("gone")
        shutil.rmtree(run)
        assert view.changes()["gone"]
        with pytest.raises(Exception, match="no longer exists"):
            view.about()


STATES: Final = {
    "curves of a store": ("runs", ".plot[data-name=task_reward]"),
    "curves over smoothing": ("runs?smooth=.9", ".plot[data-name=task_reward]"),
    "odd finish reasons": ("0/trajectories", "a.row"),
    "a chip": (f"0/trajectories?where=finish_reason%3D%3D%22{'x' * 400}%22", "a.row"),
    "an empty sort": ("0/trajectories?sort=", "a.row"),
    "nothing matches": ("0/trajectories?where=reward>=7", ".card"),
    "an unknown mask": ("0/t/0", "[role=note]"),
    "tool calls": ("0/t/4294967298", ".tool.call"),
    "two members": ("0/group/3?a=4294967300&b=4294967301", ".diff ins"),
    "no such page": ("0/nothing", "[role=alert]"),
    "no such run": ("7/trajectories", "[role=alert]"),
    "a list without rows": ("0/lists/untrusted", "h1"),
    "drift": ("0/lists/drift", "tbody tr"),
    "health of a store": ("0/health", "h1"),
    "definition of a store": ("0/definition", "h1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_every_state_of_a_page(browser: Any, odd: Path, width: int):
    """No error, no sideways scroll, nothing serious that axe finds, and what the state is about is drawn."""
    axe, pictures = gzip.decompress(AXE.read_bytes()).decode(), os.environ.get("PICTURES")
    with TrajectoryStore.open(odd) as store:
        ids = store.ids().tolist()
    with serving(odd) as url, opened(browser, url, viewport={"width": width, "height": 800}) as (page, wrong):
        for name, (place, selector) in STATES.items():
            place = (
                place.replace("4294967298", str(ids[4]))
                .replace("4294967300", str(ids[6]))
                .replace("4294967301", str(ids[7]))
            )
            page.goto(f"{url.split('?')[0]}#/{place.replace('t/0', f't/{ids[0]}')}")
            page.wait_for_selector(selector, state="attached", timeout=15_000)
            page.wait_for_timeout(200)
            if pictures:
                page.screenshot(path=f"{pictures}/{name.replace(' ', '-')}-{width}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            page.evaluate(axe)
            found = page.evaluate("axe.run()")["violations"]
            assert [(rule["id"], name) for rule in found if rule["impact"] in ("serious", "critical")] == []
        assert [text for text in wrong if "404" not in text] == []


@pytest.mark.slow
def test_a_difference_is_word_by_word(browser: Any, odd: Path):
    """One word of two completions differs; the others are in both."""
    with TrajectoryStore.open(odd) as store:
        ids = store.ids().tolist()
    with serving(odd) as url, opened(browser, url) as (page, wrong):
        go(page, url, f"0/group/3?a={ids[6]}&b={ids[7]}")
        assert page.locator(".diff del").all_inner_texts() == ["six"]
        assert page.locator(".diff ins").all_inner_texts() == ["five"]
        go(page, url, f"0/t/{ids[4]}")
        calls = page.locator(".tool.call").all_inner_texts()
        assert [text.split("\n")[0].lower() for text in calls] == ["calls add", "calls check"]
        assert '"a": 2' in calls[0]
        assert page.locator(".tool.result").first.inner_text().lower().startswith("result of add")
        go(page, url, f"0/t/{ids[0]}")
        assert page.locator(".tokens [role=group]").evaluate_all("all => all.map(one => one.ariaLabel)") == [
            "prompt",
            "unknown",
        ]
        assert wrong == []


@pytest.mark.slow
def test_a_note_is_kept_beside_the_run(browser: Any, tmp_path: Path):
    """A note and its labels are there after a reload, in a file beside the run, whose own files are as before."""
    run = write_run(tmp_path / "run", num_rollouts=1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with serving(run) as url, opened(browser, url) as (page, wrong):
        go(page, url, "0/t/3")
        page.locator("summary:has-text('Note')").click()
        page.fill("[name=labels]", "loops, <b>odd</b>")
        page.fill("[name=text]", "says the same twice")
        page.click("form.note button")
        page.wait_for_selector("form.note [role=status]:has-text('saved')")
        page.reload()
        page.wait_for_selector("form.note", state="attached")
        assert page.input_value("[name=text]") == "says the same twice"
        assert page.locator("summary .chip").all_inner_texts() == ["loops", "<b>odd</b>"]
        go(page, url, "0/trajectories")
        page.click(".chips a:has-text('label <b>odd</b>')")
        page.wait_for_selector("[role=status]:has-text('1 of')")
        assert page.locator("a.row").all_inner_texts() == ["3"]
        assert wrong == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    last = json.loads((tmp_path / "run.notes.jsonl").read_text().splitlines()[-1])
    assert last == {"id": "3", "text": "says the same twice", "labels": ["loops", "<b>odd</b>"]}
