"""What a user's functions may rely on: shared clients, the tokens they see, tasks that belong to a prompt."""

from __future__ import annotations

import asyncio
import http.server
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlhf_pipeline import (
    Collect,
    Evaluate,
    Learn,
    Pipeline,
    Prompt,
    Reward,
    SoftOverlong,
    Step,
    TinyPolicy,
    Tools,
    Turn,
)
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.inspect import grade
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.bound_rewards import bound_to_stored
from rlhf_pipeline.run.start import run
from trajectory_store import TrajectoryStore

CLIENT = httpx.AsyncClient(timeout=20.0)
GATE = asyncio.Semaphore(48)
ADDRESS = ""


class _Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(30.0 if self.path == "/hang" else 0.005)
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"1")

    def log_message(self, *_: Any) -> None:
        """Be silent."""


@pytest.fixture(scope="module", autouse=True)
def judge_server() -> Iterator[None]:
    global ADDRESS
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    server.daemon_threads = True
    ADDRESS = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


async def judge(completion: str) -> float:
    """Ask the server, as a module's judge does: one client and one semaphore for everybody."""
    async with GATE:
        answer = await CLIENT.get(f"{ADDRESS}/")
    return float(answer.text)


class Judged:
    """Asks the same server for each reply."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""

    async def step(self, turn: Turn) -> Step:
        """Wait for the judge."""
        score = await judge(turn.text)
        return Step("ok", done=turn.number == 3, rewards={"asked": score})


@dataclass(frozen=True)
class Digits:
    """Prompts of one digit."""

    as_chat: bool = False
    first: int = 0

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one."""
        return Prompt(text=f"{(self.first + cursor) % 10}")


def pipeline(environment: Any, **changes: Any) -> Pipeline:
    fields = {
        "name": "boundary",
        "policy": TinyPolicy(alphabet="0123456789ok +=", hidden_size=16, num_layers=1, num_heads=2),
        "prompts": Digits(),
        "environment": environment,
        "collect": Collect(prompts_per_rollout=4, group_size=4, max_new_tokens=3, max_turns=3),
        "learn": Learn(steps=2, lr=1e-2),
        **changes,
    }
    return Pipeline(**{name: value for name, value in fields.items() if value is not None})


def rows_of(path: Path) -> dict[str, Any]:
    with TrajectoryStore.open(path) as store:
        return store.read(store.ids())


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [rows_of(path) for path in sorted((folder / "evaluations").iterdir()) if path.is_dir()]


@pytest.mark.parametrize("environment", [None, Judged])
def test_judges_share_a_client_with_every_evaluation(environment: Any, tmp_path: Path):
    """64 at a time, in training, in two evaluation sets and in the environment: none of them fails."""
    sets = {name: Evaluate(prompts=Digits(first=5), num_prompts=8, every=1) for name in ("one", "two")}
    run(
        pipeline(
            environment,
            reward=(Reward(judge),) if environment is None else (Reward(judge), Reward("asked")),
            evaluate=sets,
            collect=Collect(prompts_per_rollout=16, group_size=4, max_new_tokens=3, max_turns=3, reward_concurrency=64),
        ),
        run_dir=tmp_path / "run",
    )
    found = [rows_of(tmp_path / "run" / "store"), *evaluations(tmp_path / "run")]
    assert [len(rows["task_reward"]) for rows in found] == [128, 24, 24]
    for rows in found:
        assert not any(rows["failure_reason"]), {*rows["failure_reason"]}
        assert {*rows["reward_judge"].tolist()} == {1.0}


def test_a_judge_that_hangs_delays_nothing_beyond_its_deadline(tmp_path: Path):
    """One call that never returns costs its row the reward, and the rollout one deadline."""
    first = threading.Lock()

    async def sometimes(completion: str) -> float:
        hangs = first.acquire(blocking=False)
        answer = await CLIENT.get(f"{ADDRESS}/{'hang' if hangs else ''}")
        return float(answer.text)

    collect = Collect(prompts_per_rollout=4, group_size=4, max_new_tokens=3, reward_timeout_s=6.0)
    started = time.monotonic()
    run(pipeline(None, reward=sometimes, collect=collect, learn=Learn(steps=1)), run_dir=tmp_path / "run")
    assert time.monotonic() - started < 25.0  # the server answers after 30
    reasons = rows_of(tmp_path / "run" / "store")["failure_reason"]
    assert sorted(reasons) == [""] * 15 + ["timeout"]


class Talk:
    """Three turns, in place."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""

    def step(self, turn: Turn) -> Step:
        """Reply, also to the last turn."""
        return Step("ok", done=turn.number == 3)


def sampled(token_ids: list[int]) -> float:
    return float(len(token_ids))


def sampled_trl(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("environment", [None, Talk])
def test_rewards_see_the_sampled_tokens_of_all_turns(environment: Any, tmp_path: Path):
    """In a run, and graded again from the store; a closing reply is stored and is no token of the row."""
    rewards = (Reward(sampled), Reward(sampled_trl), Reward(SoftOverlong(max_tokens=8, cache=4), name="overlong"))
    definition = pipeline(environment, reward=rewards, learn=Learn(steps=1))
    run(definition, run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "store")
    counts = [int(mask.sum()) for mask in rows["assistant_mask"]]
    assert rows["reward_sampled"].tolist() == rows["reward_sampled_trl"].tolist() == counts
    expected = [min(0.0, max(-1.0, (4 - count) / 4)) for count in counts]
    np.testing.assert_allclose(rows["reward_overlong"], expected)
    with closing(View(tmp_path / "run")) as view:
        graded = grade(view, lambda columns: bound_to_stored(definition, columns))
    assert graded is not None
    assert graded["agrees"]
    for meta in map(json.loads, rows["meta"] if environment else []):
        assert meta["closing"] == [{"role": "user", "content": "ok"}]
        assert meta["messages"][-1]["role"] == "assistant"


class Task:
    """Its task is the seed."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Ask nothing in particular."""
        self.seed = seed
        return "0"

    def step(self, turn: Turn) -> Step:
        """Note the seed."""
        return Step(done=True, rewards={"one": float("1" in turn.text)}, info={"seed": self.seed})


def seeds_of(rows: dict[str, Any]) -> list[int]:
    return [json.loads(meta)["info"]["seed"] for meta in rows["meta"]]


@pytest.mark.parametrize("prompts", [Digits(), None])
def test_every_evaluation_has_the_same_tasks(prompts: Any, tmp_path: Path):
    """Of one run and of runs with other seeds, one per group, none of them learned from; also without prompts."""
    held_out = {"prompts": Digits(first=5)} if prompts else {}
    definition = pipeline(Task, prompts=prompts, evaluate=Evaluate(num_prompts=4, every=1, group_size=2, **held_out))
    tasks = list[list[int]]()
    for seed in (0, 1):
        run(definition, run_dir=tmp_path / str(seed), seed=seed)
        (rows,) = evaluations(tmp_path / str(seed))
        tasks += np.reshape(seeds_of(rows), (3, 8)).tolist()
        assert not {*seeds_of(rows)} & {*seeds_of(rows_of(tmp_path / str(seed) / "store"))}
    assert [one == tasks[0] for one in tasks] == [True] * 6
    assert tasks[0][::2] == tasks[0][1::2]
    assert len({*tasks[0]}) == 4


class Drawn:
    """TRL's form: the task is drawn while others draw, and is not shown."""

    targets: list[tuple[str, int]] = []  # noqa: RUF012

    async def reset(self, prompt: str, **columns: Any) -> str:
        """Draw."""
        await asyncio.sleep(0.001 * random.random())
        self.target = random.randint(1, 1000)
        Drawn.targets.append((str(prompt), self.target))
        return "guess"

    def guess(self, number: int) -> int:
        """Guess.

        Args:
            number: which
        """
        return number

    def get_reward(self) -> float:
        """Return a constant."""
        return 1.0


class Named(Drawn):
    """The same with an argument for the seed."""

    async def reset(self, prompt: str, seed: int) -> str:  # type: ignore[override]
        """Take the seed."""
        Drawn.targets.append((str(prompt), seed))
        return "guess"


@pytest.mark.parametrize("environment", [Drawn, Named])
def test_a_group_has_one_task_that_a_coroutine_draws(environment: Any, tmp_path: Path):
    """Members of a group draw the same, and the process's generators are left as they were."""
    Drawn.targets.clear()
    policy = _caller({"name": "guess", "arguments": {"number": "{content}"}})
    run(pipeline(environment, policy=policy, learn=Learn(steps=1)), run_dir=tmp_path / "run")
    assert len(Drawn.targets) == 16
    by_prompt = {prompt: {target for asked, target in Drawn.targets if asked == prompt} for prompt, _ in Drawn.targets}
    assert [len(targets) for targets in by_prompt.values()] == [1] * 4
    assert len({*map(frozenset, by_prompt.values())}) == 4


def _caller(call: dict[str, Any]) -> TinyPolicy:
    """Return a policy whose turns with a plus are such calls."""
    chat = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    transform = {"type": "function", "function": call}
    calls = {"open": "+", "close": "<|im_end|>", "repeats": True, "transform": transform}
    return TinyPolicy(
        alphabet="0123456789ok +=gues",
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        chat_template=chat,
        response_template={"start_anchor": "s", "fields": {"content": {}, "tool_calls": calls}},
    )


def wrong_calls(call_errors: int) -> float:
    return float(call_errors)


def test_a_cut_reply_has_only_characters_that_the_model_knows(tmp_path: Path):
    """The message about an unknown tool is cut and read by the policy, and rewards see that it was called."""
    definition = pipeline(
        Tools(Drawn().guess),
        policy=_caller({"name": "{content}", "arguments": {}}),
        reward=(Reward(wrong_calls),),
        collect=Collect(prompts_per_rollout=8, group_size=4, max_new_tokens=4, max_turns=3, max_reply_tokens=6),
        learn=Learn(steps=1),
    )
    run(definition, run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "store")
    assert not any(rows["failure_reason"]), {*rows["failure_reason"]}
    assert rows["reward_wrong_calls"].max() > 0
    assert any(json.loads(meta).get("cut_replies") for meta in rows["meta"])


class GoalNamedEnd(Talk):
    """Has an attribute `end` that is no method."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Note where it ends."""
        self.end = (4, 4)


class ToolsMethod(Talk):
    """Computes its tools."""

    def tools(self) -> list[Any]:
        """Return none."""
        return []


def test_attributes_that_are_not_what_they_are_named_for(tmp_path: Path):
    """An `end` that cannot be called is no end; `tools` that is a method is one sentence."""
    run(pipeline(GoalNamedEnd, learn=Learn(steps=1)), run_dir=tmp_path / "run")
    assert not any(rows_of(tmp_path / "run" / "store")["failure_reason"])
    with pytest.raises(
        DefinitionError, match="an environment's `tools` is of type function; it must be a list of functions"
    ):
        run(pipeline(ToolsMethod, learn=Learn(steps=1)), run_dir=tmp_path / "other")
