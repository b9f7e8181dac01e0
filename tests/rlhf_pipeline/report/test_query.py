"""What is shown, against NumPy on the store."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Evaluate
from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import MissingKeyError, MissingPathError
from rlhf_pipeline.report.diff_steps import compare_figures
from rlhf_pipeline.report.query import View, search
from rlhf_pipeline.report.status import status
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows, without_nulls
from tests.rlhf_pipeline.small import tiny
from trajectory_store import Column, Schema, TrajectoryStore

from .conftest import write_run

SCALARS = {"reward": "task_reward", "advantage": "advantage", "group": "group_id", "version": "policy_version"}


def real_run(folder: Path, *words: str) -> Path:
    """Make a run with the command itself."""
    assert main([*words, "--out", str(folder)]) == 0
    return folder


def make(kind: str, folder: Path) -> Path:
    """Return a run of a kind."""
    small = ("--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4")
    if kind == "evaluated":
        from rlhf_pipeline.run.start import run

        held_out = Evaluate(prompts=CopyDigits(num_digits=3), every=2, num_prompts=5, group_size=4, success_at=0.3)
        run(dataclasses.replace(tiny(), evaluate=held_out), run_dir=folder / "run")
        return folder / "run"
    if kind == "plain":
        return write_run(folder / "run", failed=3)
    kl = real_run(folder / "kl", "run", "copy_digits", "--steps", "3", "--set", "write.kl_coef=0.1", *small)
    return kl if kind == "kl" else real_run(folder / "replay", "replay", str(kl), "--steps", "2")


def same(shown: Any, stored: float) -> bool:
    """Return whether a figure is the stored one; null stands for NaN."""
    return math.isnan(stored) if shown is None else shown == stored


@pytest.mark.parametrize(
    "kind", ["plain", "evaluated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kl", "replay"))]
)
def test_every_figure_is_the_stores(kind: str, tmp_path: Path):
    """Rows, groups, steps, tokens, counts and curves equal those computed from the store and the files."""
    run = make(kind, tmp_path)
    view, store = View(run), TrajectoryStore.open(run / "store")
    ids, about = store.ids(), view.about()
    rewards = store.read_scalars("task_reward").astype(np.float64)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    known = [line["task_reward"] for line in lines if line.get("task_reward") is not None]
    assert (about["stored"], about["failed"], about["step"]) == (len(ids), np.isnan(rewards).sum(), lines[-1]["step"])
    assert (about["reward_first"], about["reward_last"]) == ((known[0], known[-1]) if known else (None, None))
    stored = {name: store.read_scalars(column) for name, column in SCALARS.items()}
    texts = store.read(ids, ["prompt", "completion", "finish_reason"])
    page = view.trajectories(limit=500, sort="id")
    assert (page["total"], page["matched"], page["complete"]) == (len(ids), len(ids), True)
    for at, row in enumerate(page["rows"]):
        assert row["id"] == str(ids[at])
        assert all(same(row[name], values[at]) for name, values in stored.items())
        assert row["prompt"] == texts["prompt"][at][:200]
        assert row["completion"] == texts["completion"][at][:300]
        assert row["finish"] == texts["finish_reason"][at]
    columns = {"log_probs": "log_probs", "ref": "ref_log_probs"}
    for id in (ids[0], ids[len(ids) // 2], ids[-1]):
        shown, row = view.trajectory(int(id)), store.read([id])
        assert shown["ids"] == row["input_ids"][0].tolist()
        assert shown["mask"] == row["assistant_mask"][0].astype(int).tolist()
        assert shown["tokens"] == row["assistant_mask"][0].sum()
        for name, column in columns.items():
            values = row[column][0].tolist() if column in row else []
            if any(math.isfinite(value) for value in values):
                assert all(map(same, shown[name], values))
            else:
                assert not shown[name]
        assert shown["steps"] == [line["step"] for line in ledger if int(id) in line["row_ids"]]
    for group in np.unique(stored["group"])[:3].tolist():
        of = rewards[stored["group"] == group]
        shown = view.group(group)
        assert shown["num"] == len(of)
        assert shown["reward_mean"] == pytest.approx(np.nanmean(of), abs=1e-12)
    for line, entry in zip(lines, ledger, strict=True):
        shown = view.step(line["step"])
        assert sorted(id for group in shown["groups"] for id in group["ids"]) == sorted(map(str, entry["row_ids"]))
        assert shown["num"] == sum(group["num"] for group in shown["groups"]) == len(entry["row_ids"])
        assert shown["num_taught"] == len(entry["row_ids"]) - len(entry["no_gradient"])
        assert shown["metrics"] == {
            name: value for name, value in line.items() if value is not None and name != "crc32c"
        }
    curves = view.metrics()
    assert curves["step"] == [line["step"] for line in lines]
    assert all(values == [line.get(name) for line in lines] for name, values in curves["values"].items())
    stats, graded = view.stats(), rewards[np.isfinite(rewards)]
    mask = store.read_ragged("assistant_mask").values
    assert stats["trajectories"] == len(ids)
    assert stats["groups"] == len(np.unique(stored["group"]))
    assert stats["no_reward"] == len(rewards) - len(graded)
    assert stats["reward_mean"] == pytest.approx(graded.mean(), abs=1e-12)
    assert stats["reward_quantiles"] == np.quantile(graded, [0, 0.25, 0.5, 0.75, 1]).tolist()
    assert stats["completion_tokens"] == mask.sum()
    reasons = texts["finish_reason"]
    assert stats["finish"] == {name: reasons.count(name) for name in set(reasons)}
    for kind_of in view.facets()["kinds"]:
        assert kind_of["num"] == len(select(store, [kind_of["where"]]))
    failed = view.list("failed")
    assert failed["num"] == np.isnan(rewards).sum()
    assert sorted(row["id"] for row in failed["rows"]) == sorted(str(id) for id in ids[np.isnan(rewards)])
    assert view.list("drift")["num_versions"] == len(np.unique(stored["version"]))
    for version in view.list("drift")["versions"]:
        mine = stored["version"] == version["version"]
        assert version["num"] == mine.sum()
        assert version["reward"] == pytest.approx(np.nanmean(rewards[mine]), abs=1e-9)
    shown = view.evaluations()
    assert [one["step"] for one in shown] == ([[0, 2, 4, 6]] if kind == "evaluated" else [])
    assert about["evaluation"] == (shown[0]["values"]["evaluation/reward"][-1] if shown else None)
    for one in shown:
        evaluations_are_the_stores(view, one)
    view.close()


def evaluations_are_the_stores(view: View, shown: dict[str, Any]) -> None:
    """Compare the figures of a store of evaluations, and the rows beside each step, with NumPy on the store."""
    with TrajectoryStore.open(shown["address"]) as store:
        ids, versions = store.ids(), store.read_scalars("policy_version")
        rewards = store.read_scalars("task_reward").astype(np.float64)
        rows = store.read(ids, ["completion", "finish_reason", "assistant_mask", "evaluation"])
    assert shown["num"] == len(ids)
    for at, step in enumerate(shown["step"]):
        mine = np.flatnonzero(versions == step)
        each, lengths = rewards[mine].reshape(5, 4), [int(rows["assistant_mask"][row].sum()) for row in mine]
        half = 1.959963984540054 * each.mean(1).std(ddof=1) / math.sqrt(5)
        expected = {
            "reward": each.mean(),
            "reward_low": each.mean() - half,
            "reward_high": each.mean() + half,
            "pass@1": (each >= 0.3).mean(),
            "pass@4": (each >= 0.3).any(1).mean(),
            "completion_length": np.mean(lengths),
            "cut_off": np.mean([rows["finish_reason"][row] == "length" for row in mine]),
            "failed": 0,
        }
        for name, value in expected.items():
            assert shown["values"][f"evaluation/{name}"][at] == pytest.approx(value, abs=1e-12), name
        if step:
            (beside,) = view.step(step)["evaluations"]
            assert beside["figures"] == {name: values[at] for name, values in shown["values"].items()}
            assert [row["id"] for row in beside["rows"]] == [str(ids[row]) for row in mine]
            assert [row["completion"] for row in beside["rows"]] == [rows["completion"][row] for row in mine]
            assert all(row["evaluation"] for row in beside["rows"])
            assert view.step(step)["metrics"]["evaluation/reward"] == beside["figures"]["evaluation/reward"]
    held = view.evaluation(shown["store"])
    item = held.trajectory(int(ids[-1]))
    assert "".join(item["pieces"][item["prompt_tokens"] :]).startswith(item["completion"])  # by the run's tokenizer
    assert item["steps"] == []  # the ledger's rows are others


def texts_store(folder: Path, texts: list[str], batch: int = 700) -> TrajectoryStore:
    """Return a store of texts, in several commits."""
    store = TrajectoryStore.create(folder, Schema([Column("completion", "str"), Column("task_reward", "float32")]))
    for first in range(0, len(texts), batch):
        some = texts[first : first + batch]
        store.append({"completion": some, "task_reward": np.arange(len(some), dtype=np.float32) % 5})
    return store


@pytest.mark.parametrize("wanted", ["b", "ab", "a b", "Ä", "ÄB", "zz", "\0", "x" * 400])
def test_search_finds_what_python_finds(wanted: str, tmp_path: Path):
    """A search of stored bytes finds the rows that contain the text, ASCII letters in either case, none across rows."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("aAbB Äx\0"), rng.integers(0, 12))) for _ in range(3000)] + ["", "x" * 400, "z"]
    with texts_store(tmp_path / "store", texts) as store:
        found = np.concatenate([places for places, _ in search(store, "completion", wanted, store.ids())])
    fold = str.maketrans({chr(letter): chr(letter + 32) for letter in range(65, 91)})
    expected = [at for at, text in enumerate(texts) if wanted.translate(fold) in text.translate(fold)]
    assert sorted(found.tolist()) == expected


def test_pages_follow_each_other_without_gaps(tmp_path: Path):
    """In every order the pages together have each row once, NaN last, and a snapshot holds them still."""
    with texts_store(tmp_path / "store", ["t"] * 900) as store:
        view = View(tmp_path / "store")
        first = view.trajectories(sort="-reward", limit=100)
        store.append({"completion": ["new"], "task_reward": [float("nan")]})
        view.refresh()
        pages = [
            view.trajectories(sort="-reward", offset=at, limit=100, snapshot=first["snapshot"])["rows"]
            for at in range(0, 900, 100)
        ]
        rows = [row for page in pages for row in page]
        assert pages[0] == first["rows"]
        assert len({row["id"] for row in rows}) == 900
        rewards = [row["reward"] for row in rows]
        assert rewards == sorted(rewards, reverse=True)
        assert view.trajectories(sort="-reward", offset=900)["rows"][0]["reward"] is None
        assert view.trajectories(sort="reward", offset=900)["rows"][0]["completion"] == "new"


def test_filters_on_text_compare_bytes(tmp_path: Path):
    """A text of the same length is another text, and an empty one is found."""
    with texts_store(tmp_path / "store", ["length", "failed", "", "stop", "length"]) as store:
        assert len(select(store, ["completion==length"])) == 2
        assert len(select(store, ["completion!=failed"])) == 4
        assert len(select(store, ["completion==''"])) == 1


def test_what_is_not_there_is_reported(run_dir: Path):
    """Unknown ids, groups, steps, lists and orders name what was asked for."""
    view = View(run_dir)
    for ask in (
        lambda: view.trajectory(10**9),
        lambda: view.group(999),
        lambda: view.step(999),
        lambda: view.list("nothing"),
        lambda: view.trajectories(sort="colour"),
    ):
        with pytest.raises(MissingKeyError, match="there is no"):
            ask()


def test_a_line_with_nulls_is_read_as_one_without(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs of earlier versions have a null for each figure without a value; every reader prints the same for both."""
    newer = tmp_path / "newer" / run_dir.name
    shutil.copytree(run_dir, newer)
    (newer / "metrics.jsonl").unlink()
    for row in StepRows(run_dir / "metrics.jsonl"):
        StepRows(newer / "metrics.jsonl").append(without_nulls(row))
    assert "null" in (run_dir / "metrics.jsonl").read_text()
    assert "null" not in (newer / "metrics.jsonl").read_text()
    answers: list[Any] = []
    for run in (run_dir, newer):
        view = View(run)
        state = {name: status(view, 0.0)[name] for name in ("step", "reward_first", "reward_last", "alarms", "failed")}
        printed = [(main([command, str(run)]), capsys.readouterr().out) for command in ("tail", "stats", "inspect")]
        assert [code for code, _ in printed] == [0, 0, 0]
        answers.append((view.metrics(), str((state, printed)).replace(str(run.parent), "")))
        view.close()
    assert answers[0] == answers[1]
    difference = compare_figures(RunFolder(run_dir), RunFolder(newer))
    assert (difference.num_both, difference.differences) == (12, [])


def test_a_run_without_a_store_is_empty(run_dir: Path):
    """A run that has just started is shown as one that has stored nothing."""
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (run_dir / name).unlink()
    (run_dir / "store").rename(run_dir / "gone")
    view = View(run_dir)
    about = view.about()
    assert (about["stored"], about["step"], view.changes()["watermark"]) == (0, None, 0)
    with pytest.raises(MissingPathError, match=r"is gone|has not stored any trajectories yet"):
        view.trajectories()


def test_the_newest_groups_are_whole(tmp_path: Path):
    """Means are of all members, however large a group is."""
    with TrajectoryStore.create(
        tmp_path / "store", Schema([Column("group_id", "int64"), Column("task_reward", "float32")])
    ) as store:
        groups = np.repeat(np.arange(3), 700)
        rewards = np.arange(2100, dtype=np.float32)
        store.append({"group_id": groups, "task_reward": rewards})
    found = View(tmp_path / "store").groups(newest=2)
    assert [(one["group"], len(one["rewards"])) for one in found] == [(2, 700), (1, 700)]
    assert [one["reward_mean"] for one in found] == [rewards[groups == name].mean() for name in (2, 1)]


def test_an_unknown_mask_is_neither_sampled_nor_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A mask that was not stored is unknown in `show`, pages and counts; one of zeros is known."""
    columns = [
        Column("input_ids", "int32", ragged=True),
        Column("assistant_mask", "bool", ragged=True, fill=False),
        Column("num_prompt_tokens", "int64"),
    ]
    with TrajectoryStore.create(tmp_path / "store", Schema(columns)) as store:
        store.append({"input_ids": [[1, 2, 3]], "num_prompt_tokens": [1]})  # a tool's response, for all that is known
        store.append({"input_ids": [[1, 2, 3]], "num_prompt_tokens": [1], "assistant_mask": [[False] * 3]})
        store.append({"input_ids": [[1, 2, 3]], "num_prompt_tokens": [1], "assistant_mask": [[False, True, False]]})
        ids = store.ids().tolist()
    with closing(View(tmp_path / "store")) as view:
        items = [view.trajectory(id) for id in ids]
        assert [item["mask"] for item in items] == [[0, None, None], [0, 0, 0], [0, 1, 0]]
        assert [item["mask_known"] for item in items] == [False, True, True]
        assert [row["tokens"] for row in view.rows(np.array(ids))] == [2, 0, 1]
        assert view.stats()["unknown_masks"] == 1
        assert [mask for _, mask in view.stored.sampled(np.array(ids[1:]))] == [[False] * 3, [False, True, False]]
    assert main(["show", str(tmp_path / "store"), "--id", str(ids[0])]) == 0
    shown = capsys.readouterr().out
    assert "1 prompt token, 0 completion tokens, 2 tokens of unknown origin" in shown
    assert [line.split()[-3] for line in shown.splitlines()[-3:]] == ["prompt", "unknown", "unknown"]
    assert main(["stats", str(tmp_path / "store")]) == 0
    assert "unknown for 1 trajectory" in capsys.readouterr().out
