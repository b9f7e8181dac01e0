"""Every field of a definition is checked when it is made, and the reference page is printed from the declarations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import GRPO, Buffer, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match
from rlhf_pipeline.config import PretrainedPolicy, Replay, Sample
from rlhf_pipeline.data.prompts import Prompts
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.settings import paths_of

from .cli.conftest import Cli, cli  # noqa: F401 - a fixture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def base(**changes: Any) -> Pipeline:
    """Return a definition with other fields."""
    return Pipeline(
        **{"name": "t", "policy": TinyPolicy(), "prompts": CopyDigits(), "reward": token_match} | changes  # type: ignore
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Collect(group_size=2.5), "Collect.group_size is 2.5; it must be a whole number, at least 1."),
        (lambda: Collect(group_size=True), "Collect.group_size is True; it must be a whole number, at least 1."),
        (lambda: Collect(max_new_tokens=4.0), "Collect.max_new_tokens is 4.0; it must be a whole number, at least 1."),
        (lambda: Collect(temperature=None), "Collect.temperature is None; it must be a number, above 0."),
        (lambda: Learn(steps="10"), "Learn.steps is '10'; it must be a whole number, at least 1."),
        (lambda: Learn(lr="1e-3"), "Learn.lr is '1e-3'; it must be a number, above 0."),
        (lambda: Learn(lr=float("nan")), "Learn.lr is nan; it must be above 0 and finite."),
        (lambda: Learn(stop_at_reward="0.9"), "Learn.stop_at_reward is '0.9'; it must be a number, or none."),
        (lambda: Learn(checkpoint_every=2.5), "Learn.checkpoint_every is 2.5; it must be a whole number, at least 1."),
        (lambda: Learn(offload_optimizer=1), "Learn.offload_optimizer is 1; it must be true or false."),
        (lambda: Learn(layout="paded"), "Learn.layout is 'paded'. Did you mean 'padded'?"),
        (lambda: Buffer(max_staleness=1.5), "Buffer.max_staleness is 1.5; it must be a whole number, at least 0."),
        (lambda: Buffer(max_trajectories=0), "Buffer.max_trajectories is 0; it must be at least 1."),
        (lambda: WritePath(kl_coef=True), "WritePath.kl_coef is True; it must be a number, at least 0."),
        (lambda: WritePath(kl_coef=-0.5), "WritePath.kl_coef is -0.5; it must be at least 0 and finite."),
        (lambda: GRPO(clip_high="0.28"), "GRPO.clip_high is '0.28'; it must be a number, above 0."),
        (lambda: GRPO(clip_low=1.0), "GRPO.clip_low is 1.0; it must be above 0 and below 1"),
        (lambda: Sample(fresh_fraction=1.5), "Sample.fresh_fraction is 1.5; it must be between 0 and 1."),
        (lambda: Replay(weights=(1.0, 0.0)), "weights is (1.0, 0.0); it must be a tuple of numbers, each above 0."),
        (lambda: Replay(stores="runs/a"), "Replay.stores is 'runs/a'; it must be a tuple of strings."),
        (lambda: TinyPolicy(alphabet=123), "TinyPolicy.alphabet is 123; it must be a string."),
        (lambda: PretrainedPolicy(path=Path("model")), "path is PosixPath('model'); it must be a string."),
        (lambda: Prompts(path="x", limit=0), "Prompts.limit is 0; it must be at least 1."),
        (lambda: base(name=7), "Pipeline.name is 7; it must be a string."),
        (lambda: base(sample=None), "Pipeline.sample is None; it must be a Sample."),
        (lambda: base(learn=Collect()), "it must be a Learn."),
        (lambda: base(learn={"steps": 3}), "Pipeline.learn is {'steps': 3}; it must be a Learn."),
        (lambda: base(policy="model"), "Pipeline.policy is 'model'; it must be a TinyPolicy or a PretrainedPolicy."),
        (
            lambda: base(reward="token_match"),
            "Pipeline.reward is 'token_match'; it must be a function, a Reward, or a tuple of functions or Rewards.",
        ),
        (lambda: base(prompts="train.jsonl"), "it must be an object with a `prompt` method."),
        (lambda: base(prompts=CopyDigits), "it must be an object with a `prompt` method."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(make: Callable[[], Any], message: str):
    """A value of another type or out of bounds is refused where it is written, not when it is used."""
    with pytest.raises(DefinitionError) as caught:
        make()
    assert message in str(caught.value)


def test_numbers_are_what_the_field_is():
    """A whole number is taken for a float, and NumPy's numbers and lists are taken for Python's."""
    learn = Learn(lr=1, steps=np.int64(3))  # type: ignore[arg-type]
    assert (type(learn.lr), type(learn.steps)) == (float, int)
    assert learn == Learn(lr=1.0, steps=3)
    assert Replay(stores=["a", "b"], weights=[1, 2]) == Replay(stores=("a", "b"), weights=(1.0, 2.0))  # type: ignore


def test_every_setting_has_a_description():
    """Each has a help text that is a sentence, and bounds wherever a number has them."""
    for path, item in paths_of(Pipeline):
        assert re.search(r"[.`]$", item.help), path
        assert item.kind(), path


def test_the_page_is_printed_from_the_declarations(cli: Cli):  # noqa: F811
    """docs/settings.md is what the command prints; if not, print it again."""
    assert PAGE.read_text(encoding="utf-8") == cli("config", "--markdown").out, (
        "docs/settings.md is old: rlhf-pipeline config --markdown > docs/settings.md"
    )
    named = set(re.findall(r"^\| `([\w.]+)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    groups = {path for path, item in paths_of(Pipeline) if item.groups}
    assert {path for path, _ in paths_of(Pipeline)} - groups <= named


def test_the_command(cli: Cli, tmp_path: Path):  # noqa: F811
    """One field, a group, a pipeline with what it sets, a file of the user's; slips get a hint."""
    assert cli("config", "learn.lr").out.startswith("learn.lr: a number, above 0\ndefault: 0.001\n")
    assert "  sample.tau " in cli("config", "sample").out
    shown = cli("config", "copy_digits").out
    assert re.search(r"^ \*learn.lr +0.002 ", shown, flags=re.MULTILINE)
    assert re.search(r"^  learn.beta1 +0.9 ", shown, flags=re.MULTILINE)
    assert "prompts.num_digits" in shown
    assert "policy.path" not in shown
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlhf_pipeline import *\n\ndef mine() -> Pipeline:\n    return Pipeline(name='m', policy=TinyPolicy(), "
        "prompts=CopyDigits(), reward=token_match, learn=Learn(lr=0.5))\n"
    )
    assert "here:    0.5" in cli("config", file, "learn.lr").out
    assert "Did you mean 'learn.lr'?" in cli("config", "lern.lr").err
    assert "Did you mean 'learn.lr'?" in cli("config", "copy_digits", "lern.lr").err
    assert "Did you mean 'copy_digits'?" in cli("config", "copy_digit").err
    assert "Did you mean 'learn.lr'?" in cli("run", "copy_digits", "--set", "lr=1e-3", "--out", tmp_path / "run").err
