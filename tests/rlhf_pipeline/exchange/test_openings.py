"""What `import` and `view` open besides plain files: folders, patterns, archives, conversations, ATIF, Inspect."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.cli import view
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.exchange import export_store, follow_folder, import_files
from trajectory_store import TrajectoryStore
from trajectory_store.recorder.standard import TURN_REWARDS

from .conftest import Write

DATA = Path(__file__).parent / "data"


def columns(store: Path) -> dict[str, Any]:
    """Return all columns of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids())


def rows(first: int, num: int = 2) -> list[dict[str, Any]]:
    return [{"prompt_ids": [first], "completion_ids": [i], "reward": float(i % 2)} for i in range(num)]


def lines(given: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in given)


def test_folders_patterns_and_archives(tmp_path: Path, jsonl: Write):
    """Files in folders below, in a zip and in gzip are read; what holds no rollouts is left out and said."""
    jsonl(rows(10), "out/step_10/a.jsonl")
    jsonl(rows(2), "out/step_2/a.jsonl")
    jsonl([{"step": 1, "loss": 0.5}], "out/metrics.jsonl")
    with gzip.open(tmp_path / "out" / "z.jsonl.gz", "wt") as file:
        file.write(lines(rows(3)))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("step_10/a.jsonl", "step_2/a.jsonl", "z.jsonl.gz", "metrics.jsonl"):
            archive.write(tmp_path / "out" / name, name)
        archive.writestr("../../evil.jsonl", lines(rows(9)))
    folder = import_files([tmp_path / "out"], tmp_path / "folder")
    assert [path.name for path in folder.other_files] == ["metrics.jsonl"]
    assert [ids[0] for ids in columns(tmp_path / "folder")["input_ids"]] == [2, 2, 10, 10, 3, 3]
    packed = import_files([tmp_path / "all.zip"], tmp_path / "zip")
    assert sorted(ids[0] for ids in columns(tmp_path / "zip")["input_ids"]) == [2, 2, 3, 3, 10, 10]
    assert import_files([tmp_path / "all.zip"], tmp_path / "zip").num_imported == 0
    assert json.loads(columns(tmp_path / "zip")["meta"][0])["source"]["file"].startswith(f"{tmp_path}/all.zip/")
    assert packed.num_imported == 6
    assert not (tmp_path.parent / "evil.jsonl").exists()
    import_files([tmp_path / "out" / "**" / "a.jsonl"], tmp_path / "pattern")
    assert len(columns(tmp_path / "pattern")["input_ids"]) == 4
    with pytest.raises(MissingPathError, match="no file matches the pattern"):
        import_files([tmp_path / "out" / "*.csv"], tmp_path / "none")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "all.zip").read_bytes()[:99])
    with pytest.raises(DataError, match=r"cut\.zip is not a complete zip archive"):
        import_files([tmp_path / "cut.zip"], tmp_path / "none")
    with pytest.raises(DefinitionError, match=r"metrics\.jsonl: there is no field for prompt or completion or reward"):
        import_files([tmp_path / "out" / "metrics.jsonl"], tmp_path / "none")


TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def test_conversations(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """The last message is the completion; an assistant's message before it may be the policy's: it is asked about."""
    row = {"messages": TALK, "reward": 1.0}
    import_files([jsonl([row, row | {"reward": 0.0}])], tmp_path / "one", tokenizer=chat_tokenizer)
    found = columns(tmp_path / "one")
    assert found["input_ids"][0].tolist() == [*map(ord, "U:1+1A:2")]
    assert (found["completion"], found["num_prompt_tokens"].tolist()) == (["2", "2"], [7, 7])
    more = {
        "turns": [*TALK, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}],
        "reward": 1,
    }
    file, named = jsonl([more], "more.jsonl"), {"messages": "turns"}
    with pytest.raises(DefinitionError, match=r"more\.jsonl: the completions are text.*--one-turn"):
        import_files([file], tmp_path / "more", tokenizer=chat_tokenizer, fields=named)
    import_files([file], tmp_path / "more", tokenizer=chat_tokenizer, fields=named, one_turn=True)
    assert columns(tmp_path / "more")["completion"] == ["yes"]
    import_files([file], tmp_path / "shown", tokenizer=chat_tokenizer, fields=named, for_display=True)
    shown = columns(tmp_path / "shown")
    assert shown["completion"][0].startswith("[assistant]\n2\n\n[user]\nsure?")
    assert not shown["assistant_mask"][0].any()


def test_what_is_only_looked_at_is_not_asked_for(tmp_path: Path, jsonl: Write, capsys: pytest.CaptureFixture[str]):
    """`view` opens a table of two rewards, text of unknown turns and rows without a reward, and says so."""
    table = [{"step": 1, "prompt": "a", "completion": "b", "right": i, "brief": 0.5, "advantage": 0} for i in (0, 1)]
    verl = json.loads((DATA / "verl" / "ray" / "5.jsonl").read_text().splitlines()[0])
    for name, given, reward in (
        ("trl", table, [0.5, 1.5]),
        ("verl", [verl], [1.0]),
        ("chat", [{"messages": TALK}], [math.nan]),
    ):
        (tmp_path / f"{name}-store").mkdir()
        store, _ = view._imported(jsonl(given, f"{name}.jsonl"), tmp_path / f"{name}-store", False, None, {})
        assert np.array_equal(columns(store)["task_reward"], reward, equal_nan=True)
    said = capsys.readouterr().out
    assert "several rewards, shown as their sum" in said
    assert "verl.jsonl: for 1 text, the file does not record which parts the policy sampled" in said
    asked = jsonl([{"question": "a", "reply": "b"}], "other.jsonl")
    (tmp_path / "other-store").mkdir()
    with pytest.raises(DefinitionError, match=r"no field for prompt or completion.*--field prompt=NAME"):
        view._imported(asked, tmp_path / "other-store", False, None, {})
    store, _ = view._imported(
        asked, tmp_path / "other-store", False, None, {"prompt": "question", "completion": "reply"}
    )
    assert columns(store)["completion"] == ["b"]


def test_logs_of_inspect(tmp_path: Path, chat_tokenizer: Any):
    """An archive and its JSON hold the same: samples of one id are a group, grades are numbers, errors are failures."""

    def sample(name: int, epoch: int, said: str, grade: str, **more: Any) -> dict[str, Any]:
        talk = [TALK[0], {"role": "assistant", "content": said}]
        output = {"choices": [{"message": talk[-1], "stop_reason": "stop"}]}
        scores = {"match": {"value": grade, "answer": said}}
        about = {"id": name, "epoch": epoch, "input": "1+1", "target": "2", "messages": talk, "output": output}
        return {**about, "scores": scores, "metadata": {}, **more}

    samples = [
        sample(1, 1, "2", "C"),
        sample(2, 1, "4", "P"),
        sample(1, 2, "3", "I"),
        sample(2, 2, "", "I", error={"message": "TimeoutError: sandbox", "traceback": ""}, scores=None),
    ]
    about = {"task": "sums", "model_generate_config": {"temperature": 0.5}}
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": about}))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
    log = {"version": 2, "status": "success", "eval": about, "samples": samples}
    (tmp_path / "log.json").write_text(json.dumps(log, indent=2))
    for name, order in (("log.eval", [0, 2, 1, 3]), ("log.json", [0, 1, 2, 3])):
        report = import_files([tmp_path / name], tmp_path / f"{name}-store", tokenizer=chat_tokenizer)
        assert report.files[0].format == "inspect"
        found = columns(tmp_path / f"{name}-store")
        rewards, failures, groups = [1.0, 0.5, 0.0, math.nan], ["", "", "", "timeout"], [1, 2, 1, 2]
        assert np.array_equal(found["task_reward"], [rewards[i] for i in order], equal_nan=True)
        assert found["failure_reason"] == [failures[i] for i in order]
        first = found["group_id"][0]
        assert [g == first for g in found["group_id"]] == [groups[i] == 1 for i in order]
        assert found["temperature"].tolist() == [0.5] * 4
    for one in samples[:3]:
        one["scores"]["length"] = {"value": 0.25}
    samples[0]["uuid"] = "u1"
    log["plan"] = {"name": "plan", "config": {"temperature": 0.75}}  # in force, over the model's own
    (tmp_path / "two.json").write_text(json.dumps(log, indent=2))
    with pytest.raises(DefinitionError, match=r"the log has several scores: scores.match.value, scores.len"):
        import_files([tmp_path / "two.json"], tmp_path / "two", tokenizer=chat_tokenizer)
    options: dict[str, Any] = {
        "tokenizer": chat_tokenizer,
        "fields": {"reward": "scores.match.value+scores.length.value"},
    }
    import_files([tmp_path / "two.json"], tmp_path / "two", **options)
    found = columns(tmp_path / "two")
    assert np.array_equal(found["task_reward"], [1.25, 0.75, 0.25, math.nan], equal_nan=True)
    assert (found["temperature"].tolist(), found["failure_reason"][3]) == ([0.75] * 4, "timeout")
    log["samples"] = [samples[0] | {"scores": {"match": {"value": "I"}, "length": {"value": 0.25}}}]
    (tmp_path / "again.json").write_text(json.dumps(log, indent=2))  # a sample that was scored again
    report = import_files([tmp_path / "again.json"], tmp_path / "two", **options)
    assert (report.num_imported, report.files[0].num_superseded) == (1, 1)


def step(place: int, source: str, message: str, **more: Any) -> dict[str, Any]:
    return {"step_id": place, "source": source, "message": message, **more}


def metrics(prompt: list[int], said: list[int], scores: list[float] | None) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "completion_token_ids": said,
        **({} if scores is None else {"logprobs": scores}),
    }


def trajectory(**more: Any) -> dict[str, Any]:
    """Two calls of which the second prompt goes on from the first, and a third after the context was summarised."""
    steps = [
        step(1, "user", "do it"),
        step(2, "agent", "ls", metrics=metrics([1, 2], [3, 4], [-0.5, -0.25])),
        step(3, "agent", "done", metrics=metrics([1, 2, 3, 4, 8, 8], [5], [-1.0])),
        step(4, "agent", "a tool's own", llm_call_count=0),
        step(5, "agent", "ls", is_copied_context=True),
        step(6, "agent", "again", metrics=metrics([1, 9], [6], None)),
    ]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": steps, **more}


def test_agent_trajectories(tmp_path: Path):
    """What was sampled follows from the prompts; a trial's verifier, error and task are reward, failure and group."""
    for trial, reward, error in (("a", 1.0, None), ("b", 0.0, None), ("c", 0.0, "AgentTimeoutError")):
        folder = tmp_path / "job" / trial
        (folder / "agent").mkdir(parents=True)
        (folder / "agent" / "trajectory.json").write_text(json.dumps(trajectory(), indent=2))
        result = {"trial_name": trial, "task_name": "t", "verifier_result": {"rewards": {"reward": reward}}}
        result |= {"exception_info": None if error is None else {"exception_type": error}}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "config.json").write_text("{}")
    report = import_files([tmp_path / "job"], tmp_path / "store")
    assert [file.format for file in report.files] == ["atif"] * 3
    found = columns(tmp_path / "store")
    assert [ids.tolist() for ids in found["input_ids"][:2]] == [[1, 2, 3, 4, 8, 8, 5], [1, 9, 6]]
    assert [mask.astype(int).tolist() for mask in found["assistant_mask"][:2]] == [[0, 0, 1, 1, 0, 0, 1], [0, 0, 1]]
    scores = np.array([math.nan, math.nan, -0.5, -0.25, math.nan, math.nan, -1.0], np.float32)
    assert np.array_equal(found["log_probs"][0], scores, equal_nan=True)
    assert np.isnan(found["log_probs"][1]).all()
    assert np.array_equal(found["task_reward"], [1, 1, 0, 0, math.nan, math.nan], equal_nan=True)
    assert found["failure_reason"] == [""] * 4 + ["timeout"] * 2
    assert len(set(found["group_id"].tolist())) == 1
    assert not np.any(found["superseded"])  # trials with equal tokens are different episodes
    (tmp_path / "job" / "d" / "agent").mkdir(parents=True)
    late = trajectory(extra={"rl": {"reward": 0.5, "group": "t", "version": 3, "temperature": 0.7}})
    (tmp_path / "job" / "d" / "agent" / "trajectory.json").write_text(json.dumps(late))
    import_files([tmp_path / "job"], tmp_path / "store")
    found = columns(tmp_path / "store")
    assert len(set(found["group_id"].tolist())) == 1  # the task's, whenever its trials come
    assert (found["task_reward"][-1], found["policy_version"][-1]) == (0.5, 3)
    assert found["temperature"][-1] == np.float32(0.7)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (metrics([1], [2], [-1.0, -1.0]), r"steps\[0\] has 1 completion_token_ids but 2 logprobs"),
        ({"completion_token_ids": [2]}, r"steps\[0\] has completion_token_ids but no prompt_token_ids"),
    ],
)
def test_agent_trajectories_that_cannot_be_right(tmp_path: Path, jsonl: Write, change: dict[str, Any], wanted: str):
    """Of tokens that do not fit together nothing is guessed."""
    document = trajectory() | {"steps": [step(1, "agent", "x", metrics=change)]}
    with pytest.raises(DataError, match=wanted):
        import_files([jsonl([document], "a.atif.jsonl")], tmp_path / "store")


def test_exported_trajectories_come_back(tmp_path: Path, jsonl: Write):
    """ATIF holds what was sampled, in turns, and in `extra` what it does not know; an import makes the same rows."""
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 8, 4, 8], "completion_mask": [1, 0, 1, 0], "prompt": "p"}
    row |= {"log_probs": [-0.5, None, -1.0, None], "temperature": 0.5, "policy_version": 7, "completion": "c d"}
    row |= {"ref_log_probs": [-0.25, None, -2.0, None], "created_at": 1.7e9 + 1e-7}
    given = [row | {"reward": 1.0, "advantage": 0.5, "answer": "d"}, row | {"reward": 0.0, "finish_reason": "stop"}]
    given.append({"prompt_ids": [1, 2], "completion_ids": [5], "error": "x", "reward": 0.0, "policy_version": 7})
    given.append(
        row | {"completion_mask": [1, 1, 0, 1], "log_probs": [-0.5, None, None, -1.0], "reward": 0.5, "level": "hard"}
    )
    import_files([jsonl(given)], tmp_path / "store")
    with TrajectoryStore.open(tmp_path / "store", mode="a", add_columns=[TURN_REWARDS]) as store:
        rows = store.read(store.ids()[:1], ["input_ids"])
        store.append(
            {"input_ids": rows["input_ids"], "assistant_mask": [np.array([0, 0, 1, 0, 1, 0], bool)], "group_id": [5]}
            | {"turn_rewards": [np.array([0.5, np.nan], np.float32)], "return": [2.5], "num_prompt_tokens": [2]}
        )
    wanted = columns(tmp_path / "store")
    for name in ("one.atif.jsonl", "many.atif"):
        report = export_store(tmp_path / "store", tmp_path / name)
        assert (report.kind, report.num_trajectories) == ("atif", 5)
        import_files([tmp_path / name], tmp_path / f"{name}-store")
        found = columns(tmp_path / f"{name}-store")
        for column in ("input_ids", "assistant_mask", "log_probs", "ref_log_probs"):
            for mine, theirs in zip(found[column], wanted[column], strict=True):
                assert np.array_equal(mine, theirs, equal_nan=column.endswith("log_probs")), column
        for column in ("task_reward", "advantage", "temperature", "created_at"):
            assert np.array_equal(found[column], wanted[column], equal_nan=True), column
        for column in ("policy_version", "completion", "finish_reason", "failure_reason", "num_prompt_tokens"):
            assert list(found[column]) == list(wanted[column]), column
        assert len(set(found["group_id"].tolist())) == 2
        assert json.loads(found["meta"][3])["prompt"]["level"] == "hard"
        others = json.loads(found["meta"][4])["prompt"]["columns"]
        assert (others["turn_rewards"], others["return"]) == ([0.5, None], 2.5)
    document = json.loads((tmp_path / "one.atif.jsonl").read_text().splitlines()[0])
    assert {"reward", "group", "version", "temperature", "advantage"} <= document["extra"].keys()
    if importlib.util.find_spec("atif") is None:
        pytest.skip("the package atif is not installed, whose types would check the documents")
    from atif import Trajectory

    for line in (tmp_path / "one.atif.jsonl").read_text().splitlines():
        Trajectory.model_validate_json(line)


class Writer:
    """Writes rounds of files, one each time that the follower waits."""

    def __init__(self, rounds: Iterator[None]) -> None:
        self.rounds, self.done = rounds, False

    def wait(self, _seconds: float) -> None:
        self.done = next(self.rounds, "end") == "end"


def test_what_a_trainer_writes_is_followed(tmp_path: Path, jsonl: Write):
    """Files that grow and appear, half a line, evaluations, and episodes written twice: each row is there once."""
    episodes = (DATA / "prime_rl/rollouts/step_9/train/all/traces.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out").mkdir()
    reads: list[Path] = []

    def rounds() -> Iterator[None]:
        place = tmp_path / "out/rollouts/step_9"
        for kind in ("train/all", "train/effective", "eval/all"):
            (place / kind).mkdir(parents=True)
        file = place / "train/all/traces.jsonl"
        file.write_text(episodes[0] + episodes[1][:40])
        yield
        file.write_text(episodes[0] + episodes[1] + episodes[2])
        yield
        (place / "train/effective/traces.jsonl").write_text(episodes[0] + episodes[2])
        yield
        (place / "eval/all/traces.jsonl").write_text(episodes[0])
        jsonl([{"step": 1, "loss": 0.1}], "out/metrics.jsonl")
        yield

    writer = Writer(rounds())
    found: list[int] = []
    total = follow_folder(
        tmp_path / "out",
        tmp_path / "store",
        stop=lambda: writer.done,
        wait=writer.wait,
        on_round=lambda report: found.append(report.num_imported),
        on_file=lambda file: reads.append(file.path),
    )
    rows = columns(tmp_path / "store")
    assert (found, total) == ([1, 2, 1], 4)
    assert rows["evaluation"].tolist() == [False] * 3 + [True]
    assert len(reads) == len(set(reads)) == 3
    again = Writer(iter(()))
    assert follow_folder(tmp_path / "out", tmp_path / "store", stop=lambda: again.done, wait=again.wait) == 0
    with pytest.raises(MissingPathError, match="there is no folder"):
        follow_folder(tmp_path / "gone", tmp_path / "store", stop=lambda: True)
