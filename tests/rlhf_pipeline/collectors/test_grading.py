"""Reward calls side by side: order, deadlines, signals, and what a failed call leaves of its trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import threading
import time

import numpy as np
import pytest
import torch

from rlhf_pipeline import (
    Collect,
    Collector,
    CopyDigits,
    MCAdvantage,
    Reward,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    exact_match,
    mask_truncated,
    scratch_policy,
    token_match,
)
from rlhf_pipeline.buffer.trajectory_schema import FAILURES
from rlhf_pipeline.collectors.grading import Grader
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import LeftOut
from rlhf_pipeline.errors import StopAskedError
from rlhf_pipeline.run.build import build_learner
from rlhf_pipeline.user_code.arguments import Sampled, bind
from tests.rlhf_pipeline.small import tiny
from trajectory_store import Column


def several(count: int) -> list[Sampled]:
    return [Sampled(prompt=Prompt(text=f"prompt {i}"), completion=str(i)) for i in range(count)]


def test_calls_run_side_by_side_within_the_bound_and_in_order():
    """Of 256 calls no more than 16 run at a time, and 16 do: each waits for 15 others. Each result is at its place."""
    now, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(16, timeout=30)

    def waits(completion):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1
        return float(completion)

    grades = Grader(bind(waits), concurrency=16).grade(several(256))
    assert [grade.reward for grade in grades] == list(range(256))
    assert most == 16


class Timed(BaseException):
    """As `func_timeout.FunctionTimedOut`."""


@pytest.mark.parametrize("error", [Timed, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_whatever_a_call_raises_fails_its_own_trajectory(error, kind):
    """Also what is no `Exception`, in a thread and in the event loop, which goes on."""

    def plain(completion):
        if completion == "1":
            raise error("out of time")
        return 1.0

    async def coroutine(completion):
        await asyncio.sleep(0)
        return plain(completion)

    grader = Grader(bind(plain if kind == "plain" else coroutine))
    for _ in range(2):
        grades = grader.grade(several(3))
        assert [grade.kind for grade in grades] == ["", "grader_error", ""]
        assert str(grades[1].error).startswith(f"{error.__name__}: out of time")


@pytest.mark.parametrize("kind", ["plain", "async", "batched", "hangs"])
def test_a_failed_call_is_made_again(kind):
    """As often as `retries` says, and its failures are noted; what is left out is not asked for again."""
    calls, lock = dict[str, int](), threading.Lock()

    def graded(completion: str) -> float:
        with lock:
            calls[completion] = calls.get(completion, 0) + 1
        if completion == "3":
            raise LeftOut("three")
        if calls[completion] <= int(completion):
            if kind == "hangs":
                time.sleep(1.0)
            raise OSError(f"try {calls[completion]}")
        return float(completion)

    async def later(completion: str) -> float:
        return graded(completion)

    def together(completions: list[str]) -> list[float]:
        return [graded(completion) for completion in completions]

    function = {"async": later, "batched": together}.get(kind, graded)
    grader = Grader(bind(function), timeout_s=0.2 if kind == "hangs" else None, retries=1)
    grades = grader.grade(several(4), groups=range(4))
    assert [grade.kind for grade in grades][::3] == ["", "three"]
    assert [len(grade.retried) for grade in grades] == [0, 1, 1, 0]
    assert all("no result after" in one or "OSError: try 1" in one for one in grades[1].retried)
    if kind != "hangs":  # a call that was left behind counts as one of those
        assert [grade.reward for grade in grades][:2] == [0.0, 1.0]
        assert grades[2].kind == "grader_error"
        assert calls == {"0": 1, "1": 2, "2": 2, "3": 1}


def test_a_call_that_never_returns_is_a_timeout():
    """It costs its trajectory the reward, and neither the others nor later calls their thread."""
    held = threading.Event()

    def hangs(completion):
        if completion == "0":
            held.wait()
        return 1.0

    async def sleeps(completion):
        if completion == "0":
            await asyncio.sleep(1000)
        return 1.0

    for reward in (hangs, sleeps):
        grader = Grader(bind(reward), concurrency=1, timeout_s=0.2)
        for _ in range(2):
            grades = grader.grade(several(4))
            assert [grade.kind for grade in grades] == ["timeout", "", "", ""]
            assert "no result after 0.2 s (collect.reward_timeout_s)" in str(grades[0].error)
    held.set()


def test_a_request_to_stop_names_the_call_and_gives_up():
    """The rollout is given up after a moment; the message says which call was waited for."""
    held = threading.Event()
    with Grader(bind(lambda completion: held.wait(20.0))).begin(1) as grading:
        grading.add(0, several(1)[0], ended=True)
        with pytest.raises(StopAskedError, match=r"the reward function function on completion 0 \(prompt 'prompt 0'\)"):
            grading.results(stop=lambda: True)
    held.set()


def test_a_function_with_a_time_limit_by_signals_is_called_in_the_main_thread():
    """Signal handlers can be set there only; such functions work as before."""

    def limited(completion):
        def ring(*_):
            raise TimeoutError("slow")

        old = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            time.sleep(1.0 if completion == "1" else 0)
            return 1.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)

    grades = Grader(bind([limited, lambda completion: 2.0])).grade(several(3))
    assert [grade.kind for grade in grades] == ["", "timeout", ""]
    assert grades[0].reward == 3.0


def collected(folder, reward, *, extra=(), **options):
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    storage = TrajectoryStorage(folder / "store", extra=[*FAILURES, *extra])
    buffer = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(4, zero_variance="keep"))
    config = Collect(prompts_per_rollout=4, group_size=4, max_new_tokens=4, **options)
    found = Collector(
        policy=policy, prompts=CopyDigits(num_digits=3), reward=reward, buffer=buffer, seed=0, config=config
    )
    return found, found.collect(0, policy_version=0)


def unlucky(prompt: str, completion: str) -> bool:
    return hashlib.sha256(f"{prompt}{completion}".encode()).digest()[0] < 51


def test_a_failed_trajectory_is_stored_and_counts_for_nothing(tmp_path):
    """Its columns say so, and the advantages of the others are those of groups without it."""

    def fails(prompt, completion, answer, meta):
        if unlucky(prompt, completion):
            raise Timed
        return token_match(prompt, completion, answer, meta)

    straight, _ = collected(tmp_path / "straight", token_match)
    found, rollout = collected(tmp_path / "failing", fails)
    whole = straight.buffer.store.read(straight.buffer.store.ids(), ["task_reward", "prompt", "completion"])
    rows = found.buffer.store.read(
        found.buffer.store.ids(),
        ["task_reward", "advantage", "failure_reason", "reward_trusted", "finish_reason", "completion", "group_id"],
    )
    bad = np.array([unlucky(p, c) for p, c in zip(whole["prompt"], whole["completion"], strict=True)])
    assert 0 < bad.sum() < 8
    assert rollout.num_failed == bad.sum() == rollout.figures["failed/grader_error"]
    assert np.isnan(rows["task_reward"]).tolist() == bad.tolist()
    assert rows["failure_reason"] == ["grader_error" if one else "" for one in bad]
    assert (~np.asarray(rows["reward_trusted"])).tolist() == bad.tolist()
    for group in np.unique(rows["group_id"]):
        good = (np.asarray(rows["group_id"]) == group) & ~bad
        rewards = np.asarray(whole["task_reward"], np.float64)[good]
        spread = rewards.std(ddof=1)
        expected = (rewards - rewards.mean()) / spread if spread > 0 else np.zeros(len(rewards))
        assert np.asarray(rows["advantage"])[good] == pytest.approx(expected, abs=1e-4)
    for one in (straight, found):
        one.buffer.trajectories.close()


def test_weights_are_those_of_a_store_without_the_failed_trajectories(tmp_path):
    """Two steps on a store with failed calls, and on one that never had these rows: equal bit for bit."""

    def fails(prompt, completion, answer, meta):
        if unlucky(prompt, completion):
            raise Timed
        return token_match(prompt, completion, answer, meta)

    found, _ = collected(tmp_path / "failing", fails)
    store = found.buffer.store
    storage = TrajectoryStorage(tmp_path / "without" / "store", extra=FAILURES)
    good = store.ids()[np.isfinite(store.read_scalars("task_reward"))]
    assert 0 < len(good) < len(store)
    storage.store.append_batch(store.read_batch(good, storage.store.schema).fitted(storage.store.schema))
    storage.refresh()
    learned = []
    for buffer in (found.buffer, TrajectoryReplayBuffer(storage=storage)):
        policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
        learner = build_learner(tiny(), policy, buffer, ledger=None, seed=0)
        assert [learner.step(step)["num_trajectories"] for step in (1, 2)] == [len(good)] * 2
        learned.append(torch.cat([weight.detach().flatten() for weight in policy.parameters()]))
        buffer.trajectories.close()
    assert torch.equal(*learned)


def test_each_reward_has_a_column_and_figures_that_the_store_gives_again(tmp_path):
    """Means over the trajectories to which a reward applies; a rollout found in the store has the same figures."""

    def early(completion, token_ids, finish_reason):
        return None if finish_reason == "length" else 1.0 / len(token_ids)

    rewards = [Reward(token_match, weight=2, name="digits"), early, Reward(mask_truncated, weight=0)]
    extra = [Column(f"reward_{name}", "float32", fill=math.nan) for name in ("digits", "early", "mask_truncated")]
    found, rollout = collected(tmp_path, rewards, extra=extra)
    again = found.collect(0, policy_version=0)
    assert again.from_store
    assert again.figures == rollout.figures
    store = found.buffer.store
    rows = store.read(store.ids(), ["reward_digits", "reward_early", "task_reward", "failure_reason", "finish_reason"])
    cut = np.array([reason == "length" for reason in rows["finish_reason"]])
    assert 0 < cut.sum() < len(cut)
    assert rows["failure_reason"] == ["truncated" if one else "" for one in cut]
    digits, early_ones = np.asarray(rows["reward_digits"]), np.asarray(rows["reward_early"])
    assert np.asarray(rows["task_reward"])[~cut] == pytest.approx((2 * digits + early_ones)[~cut])
    assert np.isnan(early_ones).tolist() == cut.tolist()
    assert rollout.figures["reward/digits"] == pytest.approx(digits.mean(dtype=np.float64))
    assert rollout.figures["cut_off"] == cut.mean()
    assert (rollout.num_failed, rollout.figures["failed/truncated"]) == (0, int(cut.sum()))
    found.buffer.trajectories.close()


def test_special_tokens_are_in_the_text_but_not_the_end(tmp_path):
    """A reward may look for `<think>`; the token that ends a completion does not stand in its way."""
    for skips, text in ((False, "1<think>2"), (True, "12")):
        found, _ = collected(tmp_path / str(skips), exact_match, skip_special_tokens=skips)
        tokenizer = found.policy.tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
        think = tokenizer.convert_tokens_to_ids("<think>")
        ids = tokenizer.encode("12", add_special_tokens=False)
        assert found._text([ids[0], think, ids[1], tokenizer.eos_token_id]) == text
        found.buffer.trajectories.close()
    assert torch.is_grad_enabled()
