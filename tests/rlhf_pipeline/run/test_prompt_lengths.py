"""Prompts without room in the context: left out and counted, or refused; a long check is remembered."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rlhf_pipeline import Collect, Mix, Pipeline, Prompts, TinyPolicy, scratch_policy, token_match
from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.prompt_lengths import check_prompts, fitting, skipped_notices
from rlhf_pipeline.run.start import run
from trajectory_store import TrajectoryStore

POLICY = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)


def source(*lengths: int, **options: object) -> Prompts:
    rows = [{"question": "1" * length, "answer": str(length)} for length in lengths]
    return Prompts(rows=rows, as_chat=False, **options)  # pyright: ignore[reportArgumentType]


def pipeline(prompts: Prompts | Mix) -> Pipeline:
    return Pipeline(
        name="lengths",
        policy=TinyPolicy(alphabet="0123456789=", hidden_size=16, num_layers=1, num_heads=2),
        prompts=prompts,
        reward=token_match,
        collect=Collect(prompts_per_rollout=3, group_size=2, max_new_tokens=3),
        learn=Learn(steps=1),
    )


def test_what_is_too_long_is_left_out_of_the_run_and_counted(tmp_path: Path) -> None:
    """Three of five prompts fit in four tokens; one epoch samples these three, and a notice tells the rest."""
    events: list[Event] = []
    asked = source(2, 700, 4, 5, 1, skip="too_long", max_prompt_tokens=4)
    run(pipeline(asked), run_dir=tmp_path / "run", on_event=events.append)
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        assert {len(text) for text in store.read(store.ids(), ["prompt"])["prompt"]} == {1, 2, 4}
    said = [event.message for event in events if isinstance(event, Notice)]
    assert any("rows: of 5 prompts were skipped: too_long 2" in message for message in said)


def test_what_is_too_long_is_refused_without_the_rule() -> None:
    """The row, its tokens and the limit are named, in a mixture, too; nothing left is a sentence of its own."""
    check_prompts(pipeline(source(2, 4)), POLICY, 0)
    mixed = Mix((source(2), source(2, 5, max_prompt_tokens=4)))
    with pytest.raises(DataError, match=r"line 1 of rows .* has at least 5 tokens, and prompts.max_prompt_tokens is 4"):
        check_prompts(pipeline(mixed), POLICY, 0)
    with pytest.raises(DataError, match="every prompt is too long: the limit is 511 tokens"):
        fitting(source(700, 800, skip="too_long"), POLICY)
    assert [*skipped_notices(source(2), POLICY)] == []


def test_a_long_check_is_remembered_by_everything_that_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second check reads what the first one found; another limit checks again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = source(*range(500, 512), *[512] * 1188, skip="too_long")
    kept = fitting(asked, POLICY)
    [file] = tmp_path.rglob("*.json")
    assert len(kept) == 12  # pyright: ignore[reportArgumentType] - 500 to 511 of 512 positions
    found = json.loads(file.read_text())
    assert len(found) == 1188
    file.write_text(json.dumps(found[1:]))  # what is remembered counts
    assert len(fitting(asked, POLICY)) == 13  # pyright: ignore[reportArgumentType]
    assert len(fitting(dataclasses.replace(asked, max_prompt_tokens=505), POLICY)) == 6  # pyright: ignore[reportArgumentType]
    file.write_text("torn")
    assert len(fitting(asked, POLICY)) == 12  # pyright: ignore[reportArgumentType]
