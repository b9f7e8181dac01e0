"""Every field of a definition, changed when a run goes on: it acts from there on, or it is refused with a way to go."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline import CopyDigits, Evaluate, Pipeline, Replay, override
from rlhf_pipeline.cli import main
from rlhf_pipeline.config_text import flat_fields, override_all
from rlhf_pipeline.definitions import apply_overrides
from rlhf_pipeline.errors import DefinitionError, MissingPathError, RunMismatchError
from rlhf_pipeline.learner import learner as learners
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run import build
from rlhf_pipeline.run.branch import begin_from, checkpoint_named
from rlhf_pipeline.run.config_diff import carries_over, is_allowed
from rlhf_pipeline.run.continuation import check_unchanged
from rlhf_pipeline.run.events import Event, Notice, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.start import run
from rlhf_pipeline.settings import paths_of
from tests.rlhf_pipeline.small import changed, newest, tiny, weights
from trajectory_store import TrajectoryStore

BEFORE = tiny(learn__steps="2", learn__weight_decay="0.1", learn__lr_decay_steps="8", learn__keep_checkpoints="9")

LEARNING = {
    "learn.lr": ({}, {"learn__lr": "3e-3"}),
    "learn.lr_schedule": ({}, {"learn__lr_schedule": "cosine"}),
    "learn.lr_decay_steps": ({"learn__lr_schedule": "linear"}, {"learn__lr_decay_steps": "5"}),
    "learn.warmup_steps": ({}, {"learn__warmup_steps": "7"}),
    "learn.warmup_ratio": ({}, {"learn__warmup_ratio": "0.9"}),
    "learn.min_lr": ({"learn__lr_schedule": "linear"}, {"learn__min_lr": "5e-3"}),
    "learn.steps": ({"learn__lr_schedule": "linear", "learn__lr_decay_steps": "none"}, {}),
    "learn.max_grad_norm": ({}, {"learn__max_grad_norm": "0.01"}),
    "learn.weight_decay": ({}, {"learn__weight_decay": "50"}),
    "learn.weight_decay from 0": ({"learn__weight_decay": "0"}, {"learn__weight_decay": "50"}),
    "learn.weight_decay to 0": ({"learn__weight_decay": "50"}, {"learn__weight_decay": "0"}),
    "loss.clip_low": ({}, {"loss__clip_low": "1e-5"}),
    "loss.clip_high": ({}, {"loss__clip_high": "1e-5"}),
    "loss.entropy_coeff": ({}, {"loss__entropy_coeff": "0.5"}),
    "loss.entropy_coeff to 0": ({}, {"loss__entropy_coeff": "0"}),
}
"""What the weights depend on: settings of the first two steps, and those of the last two."""

SAME_WEIGHTS = {
    "learn.token_budget": ({}, {"learn__token_budget": "16"}),
    "learn.layout": ({}, {"learn__layout": "packed"}),
    "learn.activation_checkpointing": ({}, {"learn__activation_checkpointing": "true"}),
}
"""What moves last bits at most; the weights are still those of a run that had it from there on."""

ELSEWHERE = {
    "description": "seen",
    "needs": "a GPU",
    "buffer.max_bytes": "1000000000000",
    "collect.engine_memory": "0.25",
    "collect.num_slots": "3",
    "collect.reward_concurrency": "1",
    "collect.reward_timeout_s": "9",
    "collect.step_timeout_s": "9",
    "collect.retries": "2",
    "collect.alarm_failed": "0.5",
    "collect.call_threads": "9",
    "collect.reply_after": "5",
    "collect.live_conversations": "9",
    "learn.peak_flops": "1e9",
    "learn.offload_optimizer": "true",
    "learn.logger": "csv",
    "learn.checkpoint_every": "1",
    "learn.keep_checkpoints": "7",
    "learn.keep_token_figures": "true",
    "learn.stop_at_reward": "-1",
    "learn.stop_window": "2",
}
"""What is seen elsewhere; see `test_what_is_no_matter_of_the_weights_acts_where_it_shows`."""

LOGGED = {f"learn.logger_{name}" for name in ("project", "name", "tags", "samples")}
BY_ITSELF = {"collect.engine", "learn.metrics", "learn.compile"} | LOGGED
"""Tested below, each alone; what a logger is told, in `learner/test_metrics.py`."""


@pytest.fixture
def learner_made(monkeypatch) -> Callable[[], Learner]:
    """Return a function that returns the learner that was built last."""
    made: list[Learner] = []
    whole = build.build_learner

    def kept(*args: Any, **options: Any) -> Learner:
        made.append(whole(*args, **options))
        return made[-1]

    monkeypatch.setattr(build, "build_learner", kept)  # the settings of a learner at work are set by hand
    return lambda: made[-1]


def set_by_hand(learner: Learner, pipeline: Pipeline) -> None:
    """Give a learner at work other settings, without its code for that."""
    learner.config, learner.loss = pipeline.learn, build.build_loss(pipeline, learner.policy)
    learner.policy.scoring_layout = pipeline.learn.layout
    for group in learner.optimizer.inner.param_groups:
        group["betas"] = (pipeline.learn.beta1, pipeline.learn.beta2)
        group["weight_decay"] = pipeline.learn.weight_decay if group["params"][0].ndim > 1 else 0.0


def four_steps_in_one_go(before: Pipeline, after: Pipeline, folder: Path, made: Callable[[], Learner]) -> bytes:
    """Return the weights of a run that nothing interrupts, with other settings from step 3 on."""

    def watch(event: Event) -> None:
        if isinstance(event, RunStarted):
            set_by_hand(made(), before)
        elif isinstance(event, StepDone) and event.step == 2:
            set_by_hand(made(), after)

    run(changed(before, learn__steps="4"), run_dir=folder, on_event=watch)
    return weights(folder)


@pytest.mark.parametrize("name", [*LEARNING, *SAME_WEIGHTS])
def test_an_allowed_change_acts_from_there_on(name, tmp_path, learner_made):
    """After two steps more the weights are those of a run that was never stopped and had the new value from step 3 on.

    Where the field is one that changes what is learned, they are not those of the run left alone.
    """
    first, then = (LEARNING | SAME_WEIGHTS)[name]
    before = changed(BEFORE, **first)
    after = changed(before, learn__steps="4", **then)
    wanted = four_steps_in_one_go(before, after, tmp_path / "straight", learner_made)
    run(before, run_dir=tmp_path / "run")
    heard: list[Event] = []
    run(after, run_dir=tmp_path / "run", resume=True, on_event=heard.append)
    assert weights(tmp_path / "run") == wanted
    if name in LEARNING:
        alone = run_alone(before, tmp_path / "alone", learner_made)
        assert wanted != alone
        assert any("step 3" in event.message for event in heard if isinstance(event, Notice))


def run_alone(before: Pipeline, folder: Path, made: Callable[[], Learner]) -> bytes:
    """Return the weights of four steps with the settings of the first two."""
    return four_steps_in_one_go(before, before, folder, made)


def test_every_field_that_may_change_is_in_a_table():
    """A new field is refused on a resume, or it is tested here."""
    named = {name.split(" ")[0] for name in (*LEARNING, *SAME_WEIGHTS, *ELSEWHERE)} | BY_ITSELF
    fields = {path for path, item in paths_of(Pipeline) if not item.groups}
    assert {path for path in fields if is_allowed(path) and not path.startswith("evaluate")} == named


def figure_of_mine(seen: Any) -> dict[str, float]:
    """A figure of one's own."""
    return {"mine": 1.0}


def test_what_is_no_matter_of_the_weights_acts_where_it_shows(tmp_path):
    """Stops, saves, loggers and figures follow the definition with which the run goes on."""
    pytest.importorskip("torchrl.record.loggers.csv")
    before = tiny(learn__steps="2")
    run(before, run_dir=tmp_path)
    after = before
    for path, text in (ELSEWHERE | {"learn.steps": "9"}).items():
        after = override(after, path, text)
    after = changed_metrics(after)
    finished = run(after, run_dir=tmp_path, resume=True)
    assert (finished.reason, finished.steps) == ("target", 4)  # at the next rollout
    recorded = json.loads((tmp_path / "config.json").read_text())["pipeline"]
    assert (recorded["description"], recorded["needs"]) == ("seen", "a GPU")
    assert recorded["collect"]["engine_memory"] == 0.25
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        f"step-{step:08d}" for step in (0, 2, 3, 4)
    ]
    line = RunFolder(tmp_path).metrics.required(4)
    assert "mfu" in line
    assert line["mine"] == 1.0
    assert any((tmp_path / "logs").iterdir())
    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids()[-3:], columns=["entropy", "input_ids"])
    assert all(len(entropy) == len(ids) for entropy, ids in zip(rows["entropy"], rows["input_ids"], strict=True))


def test_compilation_is_chosen_again_when_a_run_continues(tmp_path, monkeypatch):
    """By the definition alone; the weights are those of the eager run up to rounding, and the notice says so."""
    made: list[TokenPolicy] = []
    choose = TokenPolicy.set_scoring

    def quickly(policy: TokenPolicy, **options: Any) -> str | None:
        made.append(policy)
        return choose(policy, backend="aot_eager", **options)

    monkeypatch.setattr(TokenPolicy, "set_scoring", quickly)  # the backend of a run is the one that takes a minute
    run(changed(BEFORE, learn__steps="4"), run_dir=tmp_path / "eager")
    run(BEFORE, run_dir=tmp_path / "run")
    heard: list[Event] = []
    fused = changed(BEFORE, learn__steps="3", learn__compile="on")
    run(fused, run_dir=tmp_path / "run", resume=True, on_event=heard.append)
    assert made[-1].take_computed()["compiled"] == "norms+mlps"
    assert any(
        "learn.compile was 'auto' and is now 'on'" in event.message for event in heard if isinstance(event, Notice)
    )
    run(changed(fused, learn__steps="4"), run_dir=tmp_path / "run", resume=True)
    assert made[-1].take_computed()["compiled"] == "norms+mlps"
    one, other = (load_file(newest(tmp_path / name) / "model.safetensors") for name in ("run", "eager"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


class Flaky:
    """A judge whose every third call fails."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completion: str) -> float:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("busy")
        return float(len(completion))


def test_a_flaky_judge_gets_retries_when_the_run_continues(tmp_path):
    """Concurrency, retries, timeouts and alarms change from the next step on; each with an effect has one notice."""
    judge = Flaky()
    before = tiny(reward=judge, learn__steps="2", learn__epochs="1", collect__reward_concurrency="1")
    events: list[Event] = []
    run(before, run_dir=tmp_path, on_event=events.append)
    assert [row["num_failed"] for row in RunFolder(tmp_path).metrics] == [4, 4]
    warned = [event.message for event in events if isinstance(event, Notice) and "trajectories failed" in event.message]
    assert [text.split(" and are")[0] for text in warned] == [
        f"rollout {number}: 4 of 12 trajectories failed" for number in range(2)
    ]  # one warning each
    events.clear()
    given = {
        "learn__steps": "4",
        "collect__retries": "3",
        "collect__reward_timeout_s": "60",
        "collect__alarm_failed": "1",
    }
    run(changed(before, **given), run_dir=tmp_path, resume=True, on_event=events.append)
    assert [row["num_failed"] for row in RunFolder(tmp_path).metrics] == [4, 4, 0, 0]
    notices = [event.message for event in events if isinstance(event, Notice) and event.message.startswith("collect.")]
    assert notices == [
        "collect.retries was 0 and is now 3: from now on, failed calls and conversations are retried at most this many "
        "times.",
        "collect.reward_timeout_s was 300.0 and is now 60.0: from now on, reward calls fail after this time.",
    ]


def test_evaluation_can_be_switched_off_when_a_run_continues(tmp_path):
    """`--set evaluate=none`, also where a field of it was set before: nothing is evaluated from there on."""
    evaluated = dataclasses.replace(tiny(), evaluate=Evaluate(prompts=CopyDigits(num_digits=3)))
    assert override(evaluated, "evaluate", "none").evaluate is None
    assert override(dataclasses.replace(evaluated, replay=Replay()), "replay", "None").replay is None
    with pytest.raises(DefinitionError, match="'learn' consists of several fields"):
        override(evaluated, "learn", "none")
    run(evaluated, run_dir=tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run" / "evaluations").iterdir())
    longer = changed(evaluated, learn__steps="8")
    run(override(longer, "evaluate", "none"), run_dir=tmp_path / "run", resume=True)
    assert sorted(path.name for path in (tmp_path / "run" / "evaluations").iterdir()) == before
    assert RunFolder(tmp_path / "run").metrics.last_step == 8
    assert apply_overrides(evaluated, [("evaluate.every", "3"), ("evaluate", "none")]).evaluate is None


def changed_metrics(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with a figure of one's own."""
    return dataclasses.replace(pipeline, learn=dataclasses.replace(pipeline.learn, metrics=(figure_of_mine,)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    run(BEFORE, run_dir=folder)
    return folder


def test_every_other_field_is_refused_with_the_way_to_go(finished, tmp_path):
    """One sentence names the field and `--from RUN@STEP`, or a new run where a checkpoint has another model."""
    copy = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((copy / "config.json").read_text())
    del config["crc32c"]
    refused = 0
    for path, value in flat_fields(config["pipeline"]):
        if is_allowed(path):
            continue
        other = json.loads(json.dumps(config))
        *groups, last = path.split(".")
        inner = other["pipeline"]
        for group in groups:
            inner = inner[group]
        inner[last] = "another"
        (copy / "config.json").write_text(json.dumps(other))
        with pytest.raises(RunMismatchError) as error:
            check_unchanged(RunFolder(copy), BEFORE, 0, overrides=[(path, "text")])
        said = str(error.value)
        assert f"{path} was 'another' and is now {value!r}" in said
        new = f"rlhf-pipeline run --from {copy}@2 --set {path}=text --out OTHER_FOLDER"
        assert (new in said) is carries_over(path)
        assert ("start a new run with --out" in said) is not carries_over(path)
        refused += 1
    assert refused > 80
    with pytest.raises(RunMismatchError, match=r"seed was 0 and is now 3.*--from .*@2 --seed 3 --out"):
        check_unchanged(RunFolder(finished), BEFORE, 3)


def weights_and_moments_by_hand(folder: Path, *, policy: Any, optimizer: Any) -> None:
    """Load what a checkpoint carries, without the code for that: weights, moments, random generator."""
    policy.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    saved = load_file(folder / "optimizer.safetensors")
    for name, tensor in optimizer.stepped.items():
        found = {key.rpartition("/")[2]: value for key, value in saved.items() if key.startswith(f"{name}/")}
        if found:
            optimizer.inner.state[tensor] = found
    torch.set_rng_state(saved["rng/torch"])


def branched(source: Path, pipeline: Pipeline, out: Path, *, by_hand: bool = False) -> bytes:
    """Return the weights of a run that begins with a checkpoint of another one."""
    begin_from(*checkpoint_named(f"{source}@2"), RunFolder(out), Setup(pipeline=pipeline))
    with pytest.MonkeyPatch.context() as patches:
        if by_hand:
            # What is compared with: the reading of a checkpoint without the code for it.
            patches.setattr(learners, "read_state", weights_and_moments_by_hand)
        run(pipeline, run_dir=out, resume=True)
    return weights(out)


@pytest.mark.parametrize("change", [{"learn__beta1": "0.5"}, {"learn__beta2": "0.5"}, {"learn__weight_decay": "50"}])
def test_a_branch_learns_with_its_own_optimizer_settings(finished, change, tmp_path):
    """Betas and decay are those of the new definition, with the moments of the checkpoint."""
    found = branched(finished, changed(BEFORE, **change), tmp_path / "branch")
    assert found != branched(finished, BEFORE, tmp_path / "same")
    assert found == branched(finished, changed(BEFORE, **change), tmp_path / "by-hand", by_hand=True)


TEXTS = ("2", "3", "5", "1", "0.5", "0.25", "1.5", "12", "true", "false", "token", "k2", "sequence_mean", "cispo")
TEXTS = (
    *TEXTS,
    "rloo",
    "mean",
    "sequence",
    "drop",
    "power",
    "zarr",
    "uniform",
    "adamw_8bit",
    "0123456789=+",
    "all",
    "none",
    "x",
)


def other_value(path: str) -> Pipeline | None:
    """Return the pipeline with another value of a field, or None if it takes none of these alone."""
    companions = {
        "sample.strategy": {"sample.max_uses": "4"},
        "write.kl_target": {"write.kl_coef": "0.1"},
        "write.min_group_size": (closes := {"write.group_timeout_s": "9", "write.min_group_size": "2"}),
        "write.group_timeout_s": closes,
        "learn.epochs": {"buffer.max_staleness": "4"},
        "sample.batch_size": {"sample.strategy": "uniform"},
        "loss.tis_floor": {"loss.tis_cap": "2"},
    }
    base = override_all(BEFORE, list(companions.get(path, {}).items()))
    for text in TEXTS:
        try:
            other = override(base, path, text)
        except DefinitionError:
            continue
        if other != base:
            return other
    return None


OBJECTS = {
    "policy",
    "policy.chat_template",
    "prompts",
    "reward",
    "environment",
    "replay",
    "replay.stores",
    "replay.weights",
    "replay.filters",
}
"""Objects of Python, and what makes it a run of another kind."""


@pytest.mark.slow
@pytest.mark.nightly
def test_every_refused_field_may_differ_in_a_branch_and_acts(finished, tmp_path):
    """`--from` takes each, alone: its weights are those of a run whose weights and moments were put in by hand."""
    tried, without = 0, set()
    for path, item in paths_of(Pipeline):
        if item.groups or is_allowed(path) or path.startswith(("evaluate", "replay")) or path in OBJECTS:
            continue
        pipeline = other_value(path)
        if pipeline is None:
            without.add(path)
            continue
        if not carries_over(path):
            with pytest.raises(RunMismatchError, match="the model and the optimizer in the checkpoint"):
                branched(finished, pipeline, tmp_path / f"refused-{path}")
            continue
        found = branched(finished, pipeline, tmp_path / path)
        assert found == branched(finished, pipeline, tmp_path / f"{path}-by-hand", by_hand=True), path
        tried += 1
    assert tried > 60
    assert without <= {
        "name", "policy.path", "policy.dtype", "policy.lora_targets", "policy.response_template", "collect.dynamic_by",
        "loss.dppo.divergence", "loss.dppo.mask",  # they act with `loss.objective=dppo` alone
    }  # fmt: skip


def test_what_cannot_work_is_not_recorded(finished, tmp_path, monkeypatch):
    """An engine that is not installed fails the resume, which is as it was; a plain one goes on, bit for bit."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")
    before = Path("run/config.json").read_bytes()
    for broken in ({"collect__engine": "vllm"}, {"learn__optimizer": "adamw_8bit"}):
        with pytest.raises((DefinitionError, MissingPathError, RunMismatchError)):
            run(changed(BEFORE, learn__steps="4", **broken), run_dir=Path("run"), resume=True)
        assert Path("run/config.json").read_bytes() == before
    run(changed(BEFORE, learn__steps="4"), run_dir=Path("run"), resume=True)
    run(changed(BEFORE, learn__steps="4"), run_dir=Path("straight"))
    assert weights(Path("run")) == weights(Path("straight"))


def test_weight_decay_from_zero_on_the_command_line(tmp_path, monkeypatch, capsys):
    """The resume says from which step it acts, keeps the moments, and a plain resume goes on with it."""
    monkeypatch.chdir(tmp_path)
    small = ["--set", "collect.prompts_per_rollout=2", "--set", "collect.group_size=4"]
    assert main(["run", "copy_digits", "--out", "run", "--steps", "1", *small]) == 0
    moments = load_file(newest(Path("run")) / "optimizer.safetensors")
    assert main(["run", "--out", "run", "--resume", "--steps", "2", "--set", "learn.weight_decay=0.1"]) == 0
    assert "learn.weight_decay was 0.0 and is now 0.1, from step 2 on." in capsys.readouterr().out
    assert moments.keys() == load_file(newest(Path("run")) / "optimizer.safetensors").keys()
    assert main(["run", "--out", "run", "--resume", "--steps", "3"]) == 0
    assert RunFolder.open(tmp_path / "run").config.pipeline["learn"]["weight_decay"] == 0.1


def test_lines_and_record_tell_the_settings_of_steps_that_are_taken_again(finished, tmp_path):
    """Steps after the checkpoint are taken with the new rate: their lines are new, and the change begins with them."""
    copy = shutil.copytree(finished, tmp_path / "run")
    run(changed(BEFORE, learn__steps="4"), run_dir=copy, resume=True)
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    after = changed(BEFORE, learn__steps="4", learn__lr="3e-3")
    run(after, run_dir=copy, resume=True)
    assert [row["lr"] for row in RunFolder(copy).metrics] == [1e-2, 1e-2, 3e-3, 3e-3]
    assert RunFolder(copy).record.history[-1]["from_step"] == 3
    for step in (2, 4):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    run(after, run_dir=copy, resume=True)  # from step 0, with what was changed since
    assert [row["lr"] for row in RunFolder(copy).metrics] == [3e-3] * 4
    assert {change["from_step"] for change in RunFolder(copy).record.history} == {1}


def test_steps_of_a_changed_run_come_out_bit_for_bit(finished, tmp_path):
    """`replay --from-step` takes each step with the settings that the run had then."""
    copy = shutil.copytree(finished, tmp_path / "run")
    after = changed(BEFORE, learn__steps="4", learn__lr="3e-3", learn__weight_decay="0", loss__entropy_coeff="0")
    run(after, run_dir=copy, resume=True)
    found = list(rerun(after, plan_rerun(copy, from_step=1), seed=0, device="cpu"))
    assert [one.same_bits for one in found] == [True] * 4


def test_prompts_that_were_added_have_a_way(tmp_path, monkeypatch, capsys):
    """The refusal of a longer prompt file prints a command that begins a run with the weights and all prompts."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": text, "answer": text[:2]}) + "\n" for text in ("12=", "34=", "56=")]
    Path("prompts.jsonl").write_text("".join(rows[:2]))
    Path("mine.py").write_text(DEFINITION)
    assert main(["run", "mine.py", "--out", "first", "--steps", "1"]) == 0
    Path("prompts.jsonl").write_text("".join(rows))
    assert main(["run", "--out", "first", "--resume", "--steps", "2"]) == 2
    said = capsys.readouterr().err
    advised = "run --from first@1 --out OTHER_FOLDER"
    assert advised in said
    assert main([*advised.split(), "--steps", "1"]) == 0


DEFINITION = """
from rlhf_pipeline import Collect, Learn, Pipeline, Prompts, TinyPolicy, WritePath


def score(prompt, completion, answer, meta):
    return float(len(completion))


def mine() -> Pipeline:
    return Pipeline(
        name="mine",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=Prompts(path="prompts.jsonl"),
        reward=score,
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
        write=WritePath(estimator="dr_grpo"),
    )
"""
