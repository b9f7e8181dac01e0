"""What a resume may change, and what it reports."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from rlhf_pipeline import Prompt, Reward, Sample, token_match
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.errors import RunMismatchError
from rlhf_pipeline.run.config_diff import changes
from rlhf_pipeline.run.events import Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import tiny


def test_a_schedule_never_jumps_silently_and_the_change_is_recorded(tmp_path):
    """More steps under a cosine move the rate: both rates and the way to keep the old one are given, and recorded."""
    settings = {"learn__lr_schedule": "cosine", "learn__lr": "1e-3"}
    run(tiny(learn__steps="4", **settings), run_dir=tmp_path / "run")
    heard = []
    longer = tiny(learn__steps="8", **settings)
    run(longer, run_dir=tmp_path / "run", resume=True, on_event=heard.append)
    (notice,) = [event.message for event in heard if isinstance(event, Notice)]
    assert (
        "learn.steps was 4 and is now 8: the learning rate of step 5 is 0.0005 (the rate of step 4 was 0.000146"
        in notice
    )
    assert notice.endswith("add --set learn.lr_decay_steps=5")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["changes"] == [
        {"from_step": 5, "fields": [{"field": "learn.steps", "was": 4, "is": 8}]}
    ]
    rates = [row["lr"] for row in RunFolder(tmp_path / "run").metrics]
    assert rates[4:] == [longer.learn.learning_rate(step) for step in range(5, 9)]


def test_the_advice_keeps_the_schedule(tmp_path):
    """With the advised `lr_decay_steps`, the steps of the longer run keep the rates of the first schedule."""
    settings = {"learn__lr_schedule": "linear", "learn__lr": "1e-3"}
    short = tiny(learn__steps="2", **settings)
    run(short, run_dir=tmp_path / "run")
    run(tiny(learn__steps="3", learn__lr_decay_steps="3", **settings), run_dir=tmp_path / "run", resume=True)
    rates = [row["lr"] for row in RunFolder(tmp_path / "run").metrics]
    assert rates == [*(short.learn.learning_rate(step) for step in (1, 2)), 0.0]


def test_what_a_person_changes_while_watching_is_allowed_and_named(tmp_path):
    """Learning rate, clip and slots may change on a resume; each is one line with the first step that it affects."""
    run(tiny(learn__steps="2"), run_dir=tmp_path / "run")
    heard = []
    other = tiny(learn__steps="3", learn__lr="0.5", loss__clip_high="0.3", collect__num_slots="7")
    run(other, run_dir=tmp_path / "run", resume=True, on_event=heard.append)
    said = " ".join(event.message for event in heard if isinstance(event, Notice))
    assert "learn.lr was 0.01 and is now 0.5: the learning rate of step 3 is 0.5 (the rate of step 2 was 0.01" in said
    assert "loss.clip_high was 0.2 and is now 0.3, from step 3 on." in said
    assert "collect.num_slots was" in said


def test_a_record_without_a_field_ran_with_its_default():
    """A group of settings, or one setting, that a record lacks is the default of today: no difference is reported."""
    pipeline, record = tiny(), to_json(tiny())
    groups = {
        field.name
        for field in dataclasses.fields(pipeline)
        if field.default_factory is not dataclasses.MISSING and field.default_factory() == getattr(pipeline, field.name)
    }
    assert "sample" in groups
    for name in groups:
        assert changes({key: value for key, value in record.items() if key != name}, pipeline) == []
    sampled = dataclasses.replace(pipeline, sample=Sample(strategy="uniform", batch_size=4))
    (change,) = changes({key: value for key, value in record.items() if key != "sample"}, sampled)[:1]
    assert (change.field, change.was, change.now) == ("sample.batch_size", None, 4)


def test_a_change_of_one_of_several_rewards_names_it_by_its_place():
    """Not the whole list: the other reward is the same."""
    before, after = (
        tiny(reward=(Reward(token_match, name="a"), Reward(token_match, name="b", weight=weight)))
        for weight in (1.0, 2.0)
    )
    (change,) = changes(to_json(before), after)
    assert (change.field, change.was, change.now) == ("reward.1.weight", 1.0, 2.0)


class Digits:
    """A source of prompts as people write one: a plain class, without `as_chat`."""

    def __init__(self, offset: int, table: np.ndarray | None = None) -> None:
        self.offset, self.table, self._given = offset, table, 0
        self.own: object = self

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a digit to copy."""
        self._given += 1
        return Prompt(text=f"{(cursor + self.offset) % 10}=", answer=(cursor + self.offset) % 10)


def test_an_object_of_a_plain_class_is_recorded_and_distinguished_from_another(tmp_path):
    """A run with one goes on with an equal one; other attributes, arrays too, are named and refused."""
    table = np.arange(3)
    asked = dataclasses.replace(tiny(learn__steps="1"), prompts=Digits(1, table))
    run(asked, run_dir=tmp_path / "run")
    longer = dataclasses.replace(tiny(learn__steps="2"), prompts=Digits(1, table.copy()))
    run(longer, run_dir=tmp_path / "run", resume=True)
    assert len(list(RunFolder(tmp_path / "run").metrics)) == 2
    for other, named in (
        (Digits(2, table), "prompts.offset was 1 and is now 2"),
        (Digits(1, table + 1), "prompts.table.sha256"),
    ):
        with pytest.raises(RunMismatchError, match=named):
            run(dataclasses.replace(longer, prompts=other), run_dir=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["pipeline"]["prompts"] == to_json(
        Digits(1, table)
    )
    assert to_json(Digits(1))["own"] == {"type": "Digits"}
