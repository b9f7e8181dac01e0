"""Training curves per source and per environment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rlhf_pipeline import (
    Collect,
    Collector,
    CopyDigits,
    Curriculum,
    MCAdvantage,
    Mix,
    Prompts,
    TinyPolicy,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    scratch_policy,
)
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, PlainCalculator, changed, tiny
from trajectory_store import TrajectoryStore


def lines_of(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curves(line: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in line.items() if name.startswith("reward/")}


def test_each_source_of_a_mixture_has_a_curve(tmp_path):
    """The mean over its rows, by the file's name or the class; a rollout that is read from the store has the same."""
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"{n}=", "answer": str(n)}) for n in range(30, 40)))
    mix = Mix((CopyDigits(num_digits=3), Prompts(str(file), as_chat=False)), weights=(2, 1))

    def length(prompt: str, completion: str) -> float:
        return len(completion) + 10.0 * (len(prompt) == 3)  # questions of the file have two digits

    for name, prompts in (("plain", mix), ("followed", dataclasses.replace(mix, curriculum=Curriculum(every=1)))):
        pipeline = dataclasses.replace(tiny(reward=length, learn__steps="4"), prompts=prompts)
        run(pipeline, run_dir=tmp_path / name)
        with TrajectoryStore.open(tmp_path / name / "store", mode="r") as store:
            rows = store.read(store.ids(), ["prompt", "task_reward"])
        rewards = {kind: [] for kind in ("CopyDigits", "sums")}
        for prompt, reward in zip(rows["prompt"][:12], rows["task_reward"][:12].tolist(), strict=True):
            rewards["sums" if len(prompt) == 3 else "CopyDigits"].append(reward)
        first = lines_of(tmp_path / name)[0]
        assert curves(first) == {f"reward/{kind}": sum(some) / len(some) for kind, some in rewards.items()}
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    buffer = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store"), transform=MCAdvantage(4), seed=0)
    config = Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=3)
    collector = Collector(policy=policy, prompts=mix, reward=length, buffer=buffer, config=config, seed=0)
    sampled, stored = (collector.collect(0, policy_version=0) for _ in range(2))
    assert (sampled.from_store, stored.from_store) == (False, True)
    assert curves(sampled.figures) == curves(stored.figures)
    buffer.trajectories.close()


def test_each_environment_has_a_curve(tmp_path):
    """Of several by name: the mean over the conversations of each; a reward of that name keeps its own curve."""

    class Kinder(PlainCalculator):
        """Another environment."""

    rows = [{"question": f"{n}", "environment": name} for n, name in enumerate(("plain", "kinder", "plain"))]
    pipeline = dataclasses.replace(
        changed(tiny(learn__steps="1"), collect__max_turns="2"),
        policy=TinyPolicy(alphabet="0123456789UAT:\n+", hidden_size=16, num_layers=1, chat_template=CHAT_TEMPLATE),
        prompts=Prompts(rows=rows, answer_field=None),
        environment={"plain": PlainCalculator, "kinder": Kinder},
        reward=lambda turns, prompt: float(turns) + 5.0 * (prompt == "1"),
    )
    run(pipeline, run_dir=tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert set(curves(line)) == {"reward/plain", "reward/kinder"}
    assert line["reward/kinder"] > 5.0 >= line["reward/plain"]
