"""A real data set through the whole write path, killed on the way: the same groups, the same advantages, bit for bit.

GSM8K questions with four model solutions each, in an order that keeps three quarters of the groups incomplete at any
time: 150 by default, all 1,319 with `--full-sweep`. Each process asks the store what is there and goes on with what
is missing.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
import warnings

import numpy as np
import pytest

from rlhf_pipeline.policies.new_model import new_model
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]

FULL_GROUPS, GROUPS, MEMBERS, BATCH, KILLS = 1319, 150, 4, 16, 3

IMPORT = """
import json, os, random, sys
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose
from rlhf_pipeline import CausalLMPolicy, KLRewardTransform, MCAdvantage, RetrieveLogProb, TrajectoryReplayBuffer

torch.set_num_threads(1)
store, model, data, progress = sys.argv[1:5]
policy, reference = CausalLMPolicy.from_pretrained(model), CausalLMPolicy.from_pretrained(model)
with torch.no_grad():
    for i, weight in enumerate(reference.parameters()):
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
models = ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"]
with open(data) as file:
    lines = [json.loads(line) for line in file]
encode = lambda texts: policy.tokenizer(texts, add_special_tokens=False)["input_ids"]
questions = encode([line["question"] for line in lines])
solutions = [encode([line[name]["solution"] for line in lines]) for name in models]

def trajectory(number):
    group, member = divmod(number, 4)
    prompt, completion = questions[group], solutions[member][group]
    ids = torch.tensor(prompt + completion)
    return TensorDict({
        "tokens": {"full": ids},
        "masks": {"all_assistant_mask": torch.arange(len(ids)) >= len(prompt)},
        "group_id": torch.tensor(group),
        "trajectory_id": torch.tensor(number),
        "num_prompt_tokens": torch.tensor(len(prompt)),
        "task_reward": torch.tensor(float(lines[group][models[member]]["is_correct"])),
        "prompt": lines[group]["question"],
        "completion": lines[group][models[member]]["solution"],
    })

retrieve = RetrieveLogProb(reference, behaviour_model=policy)
rb = TrajectoryReplayBuffer(storage=store, transform=Compose(MCAdvantage(4), KLRewardTransform(coef=0.05), retrieve))
there = set(rb.store.read_scalars("trajectory_id").tolist())
order = list(range(4 * len(lines)))
random.Random(0).shuffle(order)
done = os.open(progress, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for start in range(0, len(order), 16):
    numbers = order[start : start + 16]
    missing = [i for i, number in enumerate(numbers) if number not in there]
    if missing:
        batch = lazy_stack([trajectory(number) for number in numbers])
        if len(missing) < len(numbers):
            # Who shares a forward pass moves the last bits of a log-prob: score the batch that was scored before.
            batch = retrieve.inv(batch)[torch.tensor(missing)]
        rb.extend(batch)
    os.write(done, b".")
rb.storage.close()
"""


def play(*arguments):
    """In a process of its own: import."""
    warnings.simplefilter("ignore")
    sys.argv = ["import", *arguments]
    exec(IMPORT, {"__name__": "__main__"})


def kill_at(process, progress, count):
    """Kill a process a moment after it has reported so many batches."""
    process.until(lambda: progress.exists() and progress.stat().st_size >= count, every=0.002)
    time.sleep(random.random() * 0.03)
    assert process.killed(), process.output()


def rows(path):
    """Everything that was computed, by trajectory id, as raw bytes; and the group of each."""
    with TrajectoryStore.open(path) as store:
        report = store.verify()
        assert report.ok, str(report)
        ids = store.ids()
        numbers = store.read_scalars("trajectory_id", ids)
        found = store.read(ids, ["advantage", "return", "degenerate", "kl_coef", "group_id"])
        found |= {name: [row.tobytes() for row in store.read(ids, [name])[name]] for name in ("log_probs", "input_ids")}
    table = {
        int(number): tuple(v if isinstance(v, bytes) else v.tobytes() for v in values)
        for number, *values in zip(numbers, *found.values(), strict=True)
    }
    assert len(table) == len(numbers), "a trajectory was written twice"
    return table, dict(zip(numbers.tolist(), found["group_id"].tolist(), strict=True))


def num_waiting(path):
    """How many rows wait for the rest of their group."""
    with TrajectoryStore.open(path) as store:
        return int(np.count_nonzero(store.read_scalars("waiting") >= 0))


def test_killed_three_times_equals_undisturbed(gsm8k_dir, tmp_path, request, children):
    """Groups of four, SIGKILL at three random points: nothing lost or repeated, advantages bit-equal."""
    num_groups = FULL_GROUPS if request.config.getoption("--full-sweep") else GROUPS
    data = tmp_path / "solutions.jsonl"
    with (gsm8k_dir / "example_model_solutions.jsonl").open() as lines:
        data.write_text("".join(itertools.islice(lines, num_groups)))
    new_model(tmp_path / "model", text_file=data, vocab_size=1024, hidden_size=32, num_layers=1, num_heads=2)

    def start(store, progress):
        return children.call(play, *map(str, (store, tmp_path / "model", data, progress)), name=progress.name)

    straight = start(tmp_path / "straight", tmp_path / "straight.progress")
    killed, batches, found = tmp_path / "killed", num_groups * MEMBERS // BATCH, []
    for kill in range(KILLS):
        progress = tmp_path / f"killed.{kill}"
        process = start(killed, progress)
        low = batches * (kill + 1) // (KILLS + 2)
        kill_at(process, progress, random.randint(low, low + batches // (KILLS + 2) // 2))
        found.append(sorted(rows(killed)[0]))
        assert len(found[-1]) >= BATCH * progress.stat().st_size, "a batch that was acknowledged is not there"
        assert num_waiting(killed), "no group was waiting when the process was killed"
    assert set(found[0]) < set(found[1]) < set(found[2])
    start(killed, tmp_path / "killed.last").succeed(600)
    straight.succeed(600)
    (left, groups), (right, _) = rows(killed), rows(tmp_path / "straight")
    assert sorted(left) == list(range(num_groups * MEMBERS))
    assert np.bincount(list(groups.values())).tolist() == [MEMBERS] * num_groups
    assert left == right
    assert not num_waiting(killed)
