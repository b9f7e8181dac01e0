"""The benchmarks that need no peer but TorchRL run to their end: a change of the library does not leave them behind."""

from __future__ import annotations

import collections
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.policies.new_model import new_model

HERE = Path(__file__).parents[1] / "benchmarks"


COMMANDS = {
    "bench_replay": ["bench_replay.py", "--quick"],
    "bench_write_path": ["bench_write_path.py", "--quick"],
    "bench_memory": ["bench_memory.py", "--quick"],
    "fit_layout_costs": ["fit_layout_costs.py", "--of", str(HERE / "results" / "gpu_check_h200.json")],
    "bench_learner_h200": ["bench_learner_h200.py", "--tiny", "--sections", "grpo"],
}

SHORT = ("bench_replay", "fit_layout_costs", "bench_learner_h200")
"""The rest runs at night."""


@pytest.fixture
def sums(monkeypatch):
    """Return the module of the experiment with a chat model."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("experiment_sums")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.nightly]) for name in COMMANDS]
)
def test_a_benchmark_prints_its_figures(name, tmp_path):
    """Each prints a table; how fast the machine is does not matter here. Those for a GPU run a tiny model."""
    file, *options = COMMANDS[name]
    command = [sys.executable, str(HERE / file), *(str(tmp_path) if one == "FOLDER" else one for one in options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sum(any(map(str.isdigit, line)) for line in ended.stdout.splitlines()) > 2, ended.stdout


def gpu_check(folder: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run `gpu_check.sh --tiny`; return its exit code, what each section found, and what was printed."""
    command = ["bash", str(HERE / "gpu_check.sh"), "--tiny", "--out", str(folder), *options]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    found = json.loads((folder / "gpu_check.json").read_text(encoding="utf-8"))
    return ended.returncode, {name: one for name, one in found.items() if name in GPU_SECTIONS}, ended.stdout


GPU_SECTIONS = ("kernels", "runs", "step", "decode", "sums")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", GPU_SECTIONS)
def test_each_section_of_the_gpu_check_runs_at_a_tiny_size(tmp_path, section):
    """It finds what its table promises, and leaves it in a file."""
    code, found, printed = gpu_check(tmp_path, "--only", section)
    assert code == 0, printed
    assert "failed" not in found[section]
    figures = found[section]
    if section == "kernels":
        assert "skipped" in figures["tests"] or "passed" in figures["tests"]
    if section == "runs":
        assert max(figures[name]["sampler_gap"] for name in ("copy_digits", "frozen_lake")) < 1e-5  # in float32
    if section == "decode":
        assert figures["ours: slots, equal, 4"] > 0
    if section == "step":
        assert max(row["loss_off"] for row in figures.values() if isinstance(row, dict) and "loss_off" in row) < 1e-4
    if section == "sums":
        assert list(figures["held-out accuracy"]) == ["step 0", "step 2", "step 4"]
    if section in ("step", "decode", "sums"):
        assert (tmp_path / f"{section}.json").is_file()


@pytest.mark.slow
def test_each_section_of_the_gpu_check_reports_that_it_failed(tmp_path):
    """Out of time after a second, each leaves one line, the next ones run, and the exit code is 1."""
    code, found, printed = gpu_check(tmp_path, "--seconds", "1")
    assert code == 1, printed
    assert tuple(found) == GPU_SECTIONS
    for name, one in found.items():
        assert "\n" not in one["failed"], name
        assert "TimeoutError" in one["failed"], (name, one)
        assert any(line.split()[:2] == [name, "failed"] for line in printed.splitlines()), printed
    assert "Traceback" not in printed


def test_the_sections_of_the_gpu_check_fit_in_eight_minutes(monkeypatch):
    """Their limits leave half a minute."""
    monkeypatch.syspath_prepend(str(HERE))
    check = importlib.import_module("gpu_check")
    assert tuple(check.LIMITS) == tuple(check.SECTIONS) == GPU_SECTIONS
    assert sum(check.LIMITS.values()) <= 450


def test_a_peer_that_does_not_run_is_one_line_and_no_failure(monkeypatch, tmp_path, capsys):
    """A peer that raises while it compiles is named; a path of ours that raises has failed; the rest is measured."""
    monkeypatch.syspath_prepend(str(HERE))
    bench = importlib.import_module("bench_learner_h200")
    run_variant, written = bench._run_variant, []

    def run(variant: str, *rest: object) -> dict[str, object]:
        if variant in ("Liger loss", "ours, packed"):
            raise AssertionError("LoweringException: no kernel\nTraceback of many lines")
        return run_variant(variant, *rest)

    monkeypatch.setattr(bench, "_run_variant", run)
    sizes = bench.Sizes(prompts=1, group=2, prompt_median=5, completion_median=5, completion_most=8, reps=1)
    variants = ["ours, padded", "Liger loss", "ours, packed", "full logits"]
    found = bench.step_section(
        "tiny", sizes, bench.torch.device("cpu"), 1e12, variants, lambda found: written.append(dict(found))
    )
    assert found["Liger loss"] == {"does not run here": "AssertionError: LoweringException: no kernel"}
    assert found["ours, packed"] == {"failed": "AssertionError: LoweringException: no kernel"}
    assert "seconds" in found["full logits"]
    assert [len(one) for one in written] == [0, 1, 2, 3, 4]
    assert "Traceback" not in capsys.readouterr().out


def test_a_peer_that_is_not_ready_in_time_costs_its_own_line(monkeypatch, tmp_path):
    """The section has not failed: what the slots reached is there. Without a peer at work, its end is a failure."""
    monkeypatch.syspath_prepend(str(HERE))
    check, bench = importlib.import_module("gpu_check"), importlib.import_module("bench_learner_h200")
    ours = {"ours: slots, equal, 64": 20_000.0}
    waiting = {"transformers generate_batch, 64": {bench.NOT_RUN: bench.NOT_DONE}}

    def ends(found: dict[str, object]) -> dict[str, object]:
        monkeypatch.setattr(check, "_figures", lambda file, section: found)
        limit = check.Limit(0.05)
        monkeypatch.setattr(check, "HERE", tmp_path)
        (tmp_path / "bench_learner_h200.py").write_text("import time; time.sleep(60)")
        return check.decode(tmp_path, limit, tiny=True, device="cpu")

    assert ends(ours | waiting) == ours | waiting
    with pytest.raises(check.SectionError, match=r"not done after 0.05 s"):
        ends(ours)


def test_the_wheels_for_a_gpu_machine_are_those_of_the_metadata(monkeypatch):
    """What a requirement needs is there too (zarr: msgspec), what torch brings is not, nor another platform's."""
    monkeypatch.syspath_prepend(str(HERE))
    wheels = importlib.import_module("_gpu_wheels")
    needs = {
        "zarr": ["msgspec>=0.18", "numpy>=2", 'colorama; sys_platform == "win32"', 'rich; extra == "cli"'],
        "torchrl": ["torch>=2.11", "orjson"],
        "torch": ["numpy", "jinja2"],
    }
    found = wheels.lacking(lambda name: needs.get(name, []))
    assert {"zarr", "msgspec", "torchrl", "orjson", "google-crc32c", "starlette", "pytest-timeout"} <= set(found)
    assert not {"numpy", "torch", "transformers", "colorama", "trajectory-store", "rlhf-pipeline"} & set(found)


def test_the_tables_of_replay_are_those_of_the_committed_runs(monkeypatch):
    """docs/offline.md prints what the results say; if not, `experiment_replay.py --markdown` prints it again."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    page = (HERE.parent / "docs" / "offline.md").read_text(encoding="utf-8")
    tasks = [name for name in experiment.TASKS if experiment.results_of(name).exists()]
    assert len(tasks) >= 2
    for name in tasks:
        runs = experiment.committed(name)
        assert "\n".join(experiment.markdown(name, runs)) in page, name
        per_arm = collections.Counter(run["arm"] for run in runs)
        assert min(per_arm.values()) >= 4, per_arm


@pytest.mark.parametrize(
    ("task", "arm", "others"),
    [
        (
            "frozen_lake",
            "uniform",
            {
                "fresh x3, lr/3": "differs from that of three steps at a third of the learning rate by {}",
                "fresh x3, min_ess": "from that of three steps with the guard by {}",
            },
        ),
        (
            "sokoban",
            "freshness-weighted",
            {
                "fresh x3": "difference from three steps on each rollout is {}",
                "fresh x3, lr/3": "from three steps at a third of the learning rate {}",
                "fresh x3, min_ess": "from three steps with the guard {}",
                "uniform": "difference from uniform replay ({})",
            },
        ),
    ],
)
def test_what_replay_is_compared_with_is_computed_from_the_committed_runs(monkeypatch, task, arm, others):
    """docs/offline.md gives a replay arm minus each of its controls, per seed."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    by_arm = experiment.by_arm_and_seed(experiment.committed(task), experiment.TASKS[task])
    page = (HERE.parent / "docs" / "offline.md").read_text(encoding="utf-8")
    for other, text in others.items():
        difference = "{:+.2f} ± {:.2f}".format(*experiment.paired(by_arm, arm, other, "last"))
        assert text.format(difference) in page, other


def test_the_shares_of_tokens_are_those_of_the_committed_runs(monkeypatch):
    """docs/learner.md gives the median tokens to the target of three arms in those of one fresh step per rollout."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    by_arm = experiment.by_arm_and_seed(experiment.committed("copy_digits"), experiment.TASKS["copy_digits"])
    there = {arm: statistics.median(one["there"] for one in found.values()) for arm, found in by_arm.items()}
    page = " ".join((HERE.parent / "docs" / "learner.md").read_text(encoding="utf-8").split())
    for arm, text in (
        ("freshness-weighted", "reaches a reward of 0.5 with {:.2f} times as many generated tokens"),
        ("uniform", "The factor is {:.2f} for uniform replay"),
        ("fresh x3", "{:.2f} for three steps on the newest rollout"),
    ):
        assert text.format(there[arm] / there["fresh"]) in page, arm


def test_the_table_of_stores_is_that_of_the_committed_run(monkeypatch):
    """benchmarks/README.md prints what bench_store_peers.py makes of its results."""
    monkeypatch.syspath_prepend(str(HERE))
    found = json.loads((HERE / "results" / "store_peers.json").read_text(encoding="utf-8"))
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert importlib.import_module("bench_store_peers").table(found["results"]) in page
    assert f"{found['rows']} trajectories, {found['payload_mb']:.0f} MB" in " ".join(page.split())


def test_what_the_readme_says_of_the_chat_model_is_what_its_runs_showed(sums):
    """Its tables are those of the committed runs, and these show what they must; `--markdown` prints them again."""
    found = json.loads(sums.RESULTS.read_text(encoding="utf-8"))
    page = (HERE.parent / "docs" / "tour.md").read_text(encoding="utf-8")
    assert "\n".join(sums.markdown(found)) in page
    *first, last = found["seed 0 killed"]["after steps"]
    assert f"after steps {', '.join(map(str, first))} and {last}" in " ".join(page.split())
    assert {"0", "1", "2"} <= found["seeds"].keys()
    for one in found["seeds"].values():
        assert one["steps"] <= 40
        assert one["accuracy"][str(one["steps"])] - one["accuracy"]["0"] >= 0.35
    assert len(found["seed 0 killed"]["after steps"]) == 5
    assert found["seed 0 killed"]["weights"] == found["seeds"]["0"]["weights"]


def test_the_table_of_gsm8k_is_that_of_the_committed_run(monkeypatch):
    """benchmarks/README.md prints what `experiment_gsm8k.py --markdown` makes of its results."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_gsm8k")
    found = json.loads(experiment.RESULTS.read_text(encoding="utf-8"))
    page = " ".join((HERE / "README.md").read_text(encoding="utf-8").split())
    assert " ".join(" ".join(experiment.markdown(found)).split()) in page
    assert f"{found['steps']} steps" in page
    rollout, update = (found[f"median seconds of {name}"] for name in ("a rollout", "an update"))
    assert f"{rollout:.0f} s per rollout and {update:.0f} s per update" in page
    first, *_, last = (round(one["reward/answer"] * found["held-out questions"]) for one in found["held out"].values())
    assert f"correct for {first} and later for {last} of the {found['held-out questions']}" in page


def test_the_tables_of_frozen_lake_are_those_of_the_committed_runs(monkeypatch):
    """benchmarks/README.md prints what `experiment_frozen_lake.py --markdown` makes of its results; they are enough."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_frozen_lake")
    found = json.loads(experiment.RESULTS.read_text(encoding="utf-8"))
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for kind in ("seeds", "fresh"):
        assert "\n".join(experiment.markdown(found[kind])) in page
        assert experiment.reached(found[kind]) in " ".join(page.split())
    best = [max(one["pass@1"].values()) for one in found["seeds"].values()]
    assert len(best) >= 8
    assert sum(one >= experiment.GOAL for one in best) >= 7 / 8 * len(best)


def test_a_paired_difference_is_taken_seed_by_seed(monkeypatch):
    """Gains of 0.1 and 0.3 of two seeds: a mean of 0.2, and the half width of Student's t with one degree."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    arms = {"a": {0: {"last": 0.6}, 1: {"last": 0.9}}, "b": {0: {"last": 0.5}, 1: {"last": 0.6}, 2: {"last": 0.0}}}
    assert experiment.paired(arms, "a", "b", "last") == pytest.approx((0.2, 12.706 * 0.1), abs=1e-9)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_run_that_is_killed_is_compared_with_the_one_that_is_not(sums, tmp_path, monkeypatch):
    """A model made here takes the place of the chat model; what was run is read back, the kill included."""
    text = tmp_path / "train.jsonl"
    rows = [{"question": f"What is {number} + 1? Reply with the number only.", "answer": ""} for number in range(64)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    new_model(tmp_path / "model", text_file=text, vocab_size=300, hidden_size=16, num_layers=1)
    more = [
        f"policy.path={tmp_path / 'model'}",
        "collect.group_size=2",
        "collect.max_new_tokens=2",
        "evaluate.every=8",
        "loss.entropy_coeff=0.1",
    ]
    more = [word for one in more for word in ("--set", one)] + ["--steps", "8"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), str(HERE.parent / "storage")]))
    subprocess.run(sums.command_of(tmp_path / "sums-0", 0, more), check=True, capture_output=True)
    (step,) = sums.kill_and_resume(tmp_path / "sums-0-killed", 0, steps=8, kills=1, more=more)
    assert 1 <= step < 8
    found = sums.found_by(tmp_path)
    assert found["seed 0 killed"]["equal"]
    assert list(found["seeds"]["0"]["accuracy"]) == ["0", "8"]
    assert sums.markdown(found)[2] == "| seed 0 | 0.00 | 0.00 |"
    assert len(found["completions of seed 0"]) == 8
