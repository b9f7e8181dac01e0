"""Every Python block of every page is run as it is printed, in a folder with the files that the pages name.

A page's blocks are one file, as a reader would save them, with nothing given: what a block needs is on the page. What
it makes is then learned from for one step: definitions, sources of prompts, rewards, environments, evaluations and
functions of one's own.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from rlhf_pipeline import (
    Evaluate,
    Pipeline,
    PretrainedPolicy,
    Prompts,
    Replay,
    TinyPolicy,
    final_number_match,
    token_match,
)
from rlhf_pipeline.config_text import override_all
from rlhf_pipeline.data.rewards import no_reward
from rlhf_pipeline.definitions import load_module
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = [path for folder in (".", "docs", "storage", "benchmarks") for path in sorted((ROOT / folder).glob("*.md"))]
PAGES = [path for path in WRITTEN if "```py" in path.read_text(encoding="utf-8")]

ELSEWHERE = {
    ("docs/beside.md", "GRPOTrainer("): "trajectory_store/test_adapters.py::test_stored_rows_are_served",
    ("docs/coming_from.md", "Verifiers("): "peers/test_verifiers.py::test_the_port_of_an_environment",
    ("docs/environments.md", "Verifiers("): "peers/test_verifiers.py::test_the_page",
    ("docs/environments.md", "OpenEnv("): "peers/test_openenv.py::test_one_conversation",
    ("docs/exchange.md", "GRPOTrainer("): "rlhf_pipeline/exchange/test_trl.py::test_the_blocks_of_the_page",
    ("docs/learner.md", "init_process_group("): (
        "rlhf_pipeline/learner/test_distributed.py::test_the_program_of_the_page_runs_on_two_processes"
    ),
    ("docs/many_machines.md", "RayReplayBuffer("): "test_printed_commands.py::test_many_machines",
    ("docs/offline.md", "run(offline()"): "test_printed_commands.py::test_offline",
    ("docs/torchrl_collectors.md", "LLMCollector("): "peers/test_docs.py::test_python_blocks_of_the_page",
    ("docs/use_the_model.md", ""): "test_use_the_model.py::test_the_page_runs",
}
"""Blocks that need a server, other processes or a finished run, by a word in them: the test that runs them."""

SMALL = {
    "collect.prompts_per_rollout": "2",
    "collect.group_size": "2",
    "collect.max_new_tokens": "4",
    "collect.max_turns": "2",
    "collect.step_timeout_s": "none",
    "collect.alarm_failed": "1",
    "learn.steps": "1",
    "learn.checkpoint_every": "1",
}
CALLS = {
    "start_anchor": "assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
"""How the calls of the pages' model are read."""
OWN_FUNCTIONS = {"uncertain_tokens": "objective", "newest": "strategy", "longest": "metrics"}


def name_of(page: Path) -> str:
    """Return a page's path in the tree."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each Python block of a page, with the test that runs it if that is another one."""
    for block in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        yield (
            block,
            next((test for (name, word), test in ELSEWHERE.items() if name == name_of(page) and word in block), None),
        )


HERE = [page for page in PAGES if any(test is None for _, test in blocks(page))]


def test_no_block_is_run_nowhere():
    """Whatever is not run below is run by a test that is there, and each of those has a block."""
    found = {test for page in PAGES for _, test in blocks(page) if test is not None}
    assert found == set(ELSEWHERE.values())
    for test in found:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    assert len(HERE) >= 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, and the files of prompts."""
    pyarrow = pytest.importorskip("pyarrow", reason="the pages read Parquet files")
    from pyarrow import parquet

    root = tmp_path_factory.mktemp("pages")
    (root / "data").mkdir()
    for number, name in enumerate(("train", "test", "maths")):
        rows = [{"question": f"{number} + {n}?", "answer": f"#### {number + n}"} for n in range(4)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": "1 + 1?", "answer": "2", "reward_model": {"ground_truth": "2"}}]
    for name in ("code", "data/part-0"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), root / f"{name}.parquet")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    new_model(root / "model", text_file=root / "train.jsonl", **sizes)
    tokenizer = root / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "response_template": CALLS}))
    return root


def definitions(page: ModuleType) -> Iterator[Pipeline]:
    """Yield the definitions that a page makes, and one for each thing that belongs in a definition."""
    base = Pipeline(
        name="page", policy=PretrainedPolicy(path="model"), prompts=Prompts("train.jsonl"), reward=final_number_match
    )
    for name, made in list(vars(page).items()):
        if inspect.getmodule(made) not in (None, page) and inspect.isroutine(made) | inspect.isclass(made):
            continue  # what the page imports
        if inspect.isfunction(made) and made.__annotations__.get("return") is Pipeline:
            yield made()
        elif inspect.isclass(made) and hasattr(made, "prompt"):
            for policy in (base.policy, TinyPolicy(alphabet="0123456789 +?")):
                yield dataclasses.replace(base, policy=policy, prompts=cast(Any, made()), reward=token_match)
        elif inspect.isclass(made) and hasattr(made, "step"):
            yield dataclasses.replace(base, environment=made, reward=no_reward)
        elif name == "reward":
            yield dataclasses.replace(base, reward=made)
        elif isinstance(made, Evaluate):
            yield dataclasses.replace(base, evaluate=made)
        elif hasattr(made, "prompt"):
            yield dataclasses.replace(base, prompts=made)
        elif name == "interpreter":
            yield dataclasses.replace(base, environment=made)
    own = {field: vars(page)[name] for name, field in OWN_FUNCTIONS.items() if hasattr(page, name)}
    if own:
        yield dataclasses.replace(
            base,
            loss=dataclasses.replace(base.loss, objective=own["objective"]),
            sample=dataclasses.replace(base.sample, strategy=own["strategy"]),
            learn=dataclasses.replace(base.learn, metrics=(own["metrics"],)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=name_of)
def test_the_blocks_of_a_page(page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, as one file; one step is taken with what they make."""
    monkeypatch.chdir(folder)
    file = tmp_path / f"{page.stem.lower()}.py"
    file.write_text("\n\n".join(block for block, test in blocks(page) if test is None), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchRL's own imports
        made = list(definitions(load_module(file)))
    assert len(made) == RUNS[name_of(page)]
    for number, pipeline in enumerate(made):
        if isinstance(pipeline.replay, Replay):
            continue  # it needs runs: see `ELSEWHERE`
        run_dir = tmp_path / f"run-{number}"
        run(override_all(pipeline, list(SMALL.items())), run_dir=run_dir)
        assert len(StepRows(run_dir / "metrics.jsonl")) == 1


RUNS = {
    "docs/architecture.md": 0,
    "docs/beside.md": 0,
    "docs/tour.md": 1,
    "docs/coming_from.md": 3,
    "docs/environments.md": 7,
    "docs/evaluation.md": 2,
    "docs/exchange.md": 0,
    "docs/learner.md": 1,
    "docs/offline.md": 1,
    "docs/prompts.md": 6,
    "docs/rewards.md": 1,
    "storage/README.md": 0,
}
"""How many definitions each page makes."""
