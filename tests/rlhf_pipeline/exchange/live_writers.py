"""Writers that change their files at random, as a running tool and its surroundings do, and know what is current.

A `Stream` appends rows to numbered files. `Steps` writes one file per step, and writes it again after a restart. Both
compress, rename and move the files that they have ended, and leave lines or files incomplete for a while.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
Row = dict[str, Any]


def first_row(name: str) -> Row:
    """Return the first row of a recorded dump."""
    return json.loads((DATA / name).read_text().splitlines()[0])


EPISODE = first_row("prime_rl/rollouts/step_9/train/all/traces.jsonl")
EVALUATED = first_row("verifiers/traces.jsonl")


@dataclass(frozen=True)
class Sample:
    """What a tool sampled: a number that no other sample has, its step, its reward, and its advantage."""

    step: int
    number: int
    reward: float
    advantage: float

    @property
    def tokens(self) -> list[int]:
        """The prompt's two tokens and the completion's."""
        return [1, 2, self.number + 10]


# -- rows, in the shape of each tool's writer --------------------------------------------------------------------------


def verl(sample: Sample) -> Row:
    about = {"gts": "2", "step": sample.step, "request_id": f"r{sample.number}"}
    return {"input": f"q{sample.step}?", "output": f"n{sample.number}", "score": sample.reward, **about}


def slime(sample: Sample) -> Row:
    about = {"group_index": sample.step, "index": sample.number, "tokens": sample.tokens, "response_length": 1}
    return first_row("slime/samples.jsonl") | about | {
        **{"response": f"n{sample.number}", "reward": sample.reward, "loss_mask": [1], "rollout_log_probs": [-0.5]}
    }  # fmt: skip


def nemo_rl(sample: Sample) -> Row:
    row = first_row("nemo_rl/train_data_step4.jsonl")
    row |= {"content": [["q", f"n{sample.number}"]], "rewards": [sample.reward], "input_lengths": [3]}
    row |= {"token_ids": [[*sample.tokens, 0]], "token_loss_mask": [[0, 0, 1, 0]], "idx": sample.number}
    per_token = {"advantages": [[sample.advantage] * 4]}
    return row | per_token | {name: [[0.0, 0.0, -0.5, 0.0]] for name in ("generation_logprobs", "prev_logprobs")}


def nemo_rl_validation(sample: Sample) -> Row:
    talk = [{"role": "user", "content": f"q{sample.step}"}, {"role": "assistant", "content": f"n{sample.number}"}]
    return {"content": [talk], "rewards": [sample.reward], "idx": sample.number}


def skyrl(sample: Sample) -> Row:
    row = first_row("skyrl/global_step_20_evals/openai_gsm8k.jsonl")
    return row | {"output_response": f"n{sample.number}", "score": sample.reward}


def trl(sample: Sample) -> Row:
    row = {"step": sample.step, "prompt": f"q{sample.step}", "completion": f"n{sample.number}"}
    return row | {"accuracy": sample.reward, "advantage": sample.advantage}


def token_export(sample: Sample) -> Row:
    row = first_row("prime_rl/token_exports/step_2/rank_0.jsonl") | {"step": sample.step, "token_ids": sample.tokens}
    return row | {"loss_mask": [False, False, True], "advantages": [0.0, 0.0, sample.reward]} | {
        name: [0.0, 0.0, -0.5] for name in ("inference_logprobs", "trainer_logprobs")
    }  # fmt: skip


def inspect(sample: Sample) -> Row:
    talk = [{"role": "user", "content": f"q{sample.step}"}, {"role": "assistant", "content": f"n{sample.number}"}]
    output = {"choices": [{"message": talk[-1], "stop_reason": "stop"}]}
    row = {"id": sample.step, "epoch": sample.number, "input": talk[0]["content"], "target": "2", "messages": talk}
    return row | {"output": output, "scores": {"match": {"value": sample.reward}}, "metadata": {}}


def episode(template: Row, sample: Sample) -> Row:
    row = copy.deepcopy(template)
    row["id"] = f"e{sample.number}"
    if "group" in row:
        row["group"] = {"id": f"g{sample.number // 3}"}
    row["traces"][0]["id"] = f"t{sample.number}"
    row["traces"][0]["rewards"] = {"right": {"score": sample.reward, "weight": 1.0}}
    return row


def prime_rl(sample: Sample) -> Row:
    return episode(EPISODE, sample)


def verifiers(sample: Sample) -> Row:
    return episode(EVALUATED, sample)


def open_instruct(sample: Sample) -> Row:
    row = first_row("open_instruct/run_rollouts_000000.jsonl") | {"step": sample.step, "sample_idx": sample.number}
    row |= {"prompt_tokens": sample.tokens[:2], "response_tokens": sample.tokens[2:], "logprobs": [-0.5]}
    return row | {"reward": sample.reward, "advantage": sample.advantage}


def tinker(sample: Sample) -> Row:
    scope = {"run_id": "r", "iteration": sample.step, "group_idx": 0, "traj_idx": sample.number, "split": "train"}
    row = {"kind": "sample", "scope": scope, "created_at": 12.5, "prompt_tokens": sample.tokens[:2], "status": "ok"}
    return row | {"samples": [{"tokens": sample.tokens[2:], "logprobs": [-0.5], "stop_reason": "stop"}]}


def plain(sample: Sample) -> Row:
    row = {"prompt_ids": sample.tokens[:2], "completion_ids": sample.tokens[2:], "reward": sample.reward}
    return row | {"group": sample.step}


def atif(sample: Sample, num_steps: int) -> Row:
    """Return the document of an episode after some steps: each prompt has what was sampled before it."""
    tokens, steps = sample.tokens[:2], [{"source": "user", "message": f"q{sample.step}"}]
    for number in range(num_steps):
        new = [sample.number + 10, number + 5]
        metrics = {"prompt_token_ids": tokens, "completion_token_ids": new, "logprobs": [-0.5, -0.25]}
        steps.append({"source": "agent", "message": f"n{number}", "metrics": metrics})
        tokens = [*tokens, *new, 3]
    session = f"s{sample.number // 3}"  # of several episodes
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": session,
        "agent": {"name": "a", "version": "1"},
        "steps": steps,
    }


def atif_tokens(sample: Sample, num_steps: int) -> list[int]:
    """Return the tokens of an episode after some steps."""
    last = atif(sample, num_steps)["steps"][-1]["metrics"]
    return [*last["prompt_token_ids"], *last["completion_token_ids"]]


# -- files -------------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: Sequence[Row]) -> bytes:
    pandas = pytest.importorskip("pandas", reason="TRL writes its tables with pandas")
    return pandas.DataFrame(rows).to_parquet()


def torch_file(rows: Sequence[Row]) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save({"rollout_id": 3, "samples": list(rows)}, file)
    return file.getvalue()


def evaluation_log(rows: Sequence[Row]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {"task": "sums"}}))
        for row in rows:
            archive.writestr(f"samples/{row['id']}_epoch_{row['epoch']}.json", json.dumps(row))
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Tool:
    """The files of one tool."""

    row: Callable[[Sample], Row]
    path: str
    """Of the file of one step, or of one chunk of a stream."""
    encode: Callable[[Sequence[Row]], bytes] = lines
    column: str = "completion"
    """What identifies a sample in the store: `completion`, `input_ids`, or `task_reward`."""
    graded: bool = True
    restarts: bool = True
    """A restarted trainer writes a step again, with other samples or other rewards."""
    compresses: bool = True


TOOLS: dict[str, Tool] = {
    "verl": Tool(row=verl, path="rollouts/{}.jsonl"),
    "slime": Tool(row=slime, path="rollout_data/{}.pt", encode=torch_file, column="input_ids", compresses=False),
    "nemo-rl": Tool(row=nemo_rl, path="exp/train_data_step{}.jsonl", column="input_ids"),
    "nemo-rl-validation": Tool(row=nemo_rl_validation, path="exp/val_data_step{}.jsonl"),
    "skyrl": Tool(row=skyrl, path="dumped_evals/global_step_{}_evals/gsm8k.jsonl"),
    "trl": Tool(row=trl, path="completions/completions_{:05d}.parquet", encode=table),
    "token-exports": Tool(
        row=token_export, path="token_exports/step_{}/rank_0.jsonl", column="input_ids", graded=False
    ),
    "inspect": Tool(
        row=inspect, path="logs/{}_sums.eval", encode=evaluation_log, restarts=False, compresses=False
    ),
}  # fmt: skip
STREAMS: dict[str, Tool] = {
    "prime-rl": Tool(row=prime_rl, path="traces/stream/{:05d}.jsonl", column="task_reward"),
    "verifiers": Tool(row=verifiers, path="outputs/{:05d}/traces.jsonl", column="task_reward"),
    "open-instruct": Tool(row=open_instruct, path="traces/run_rollouts_{:06d}.jsonl", column="input_ids"),
    "tinker": Tool(row=tinker, path="{}/capture/sample.jsonl", column="input_ids", graded=False),
    "rows": Tool(row=plain, path="{}.jsonl", column="input_ids"),
}


def packed(data: bytes, suffix: str) -> bytes:
    """Return data compressed as its file's name tells."""
    return gzip.compress(data) if suffix == ".gz" else pytest.importorskip("zstandard").compress(data)


class Writer:
    """Changes the files of a folder at random."""

    def __init__(self, tool: Tool, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self.tool, self.folder, self.random, self.num = tool, folder, random.Random(seed), 0
        self.torn: set[int] = set()
        """The numbers of files that are incomplete."""

    def change(self) -> None:
        """Take one random action."""
        actions: list[Callable[[], None]] = [self.append, self.append, self.compress, self.rename, self.other]
        self.random.choice(actions)()

    def path(self, number: int) -> Path:
        return self.folder / self.tool.path.format(number)

    def finished(self) -> list[Path]:
        """Return the uncompressed files that the tool has ended."""
        numbers = range(self.newest()) if self.newest() else ()
        found = [[*self.folder.glob(f"**/{self.tool.path.format(i)}")] for i in numbers if i not in self.torn]
        return [file for files in found for file in files]

    def compress(self) -> None:
        """Replace a finished file by its compressed form, which appears complete."""
        for file in self.finished()[:1] if self.tool.compresses else ():
            suffix = self.random.choice([".gz", ".zst"])
            part = file.with_name(f"{file.name}{suffix}.tmp")
            part.write_bytes(packed(file.read_bytes(), suffix))
            part.rename(file.with_name(f"{file.name}{suffix}"))
            file.unlink()

    def rename(self) -> None:
        """Move a finished file to another folder."""
        for file in self.finished()[:1]:
            target = self.folder / f"archive{self.num}" / file.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)

    def newest(self) -> int: ...
    def append(self) -> None: ...
    def other(self) -> None: ...
    def finish(self) -> None: ...
    def samples(self) -> list[Sample]: ...

    def expected(self) -> Counter[str]:
        """Return what identifies each current sample, and its reward."""
        values = {
            "completion": lambda sample: f"n{sample.number}",
            "input_ids": lambda sample: str(sample.tokens),
            "task_reward": lambda sample: "",
        }
        identify = values[self.tool.column]
        return Counter(f"{identify(s)} {s.reward if self.tool.graded else ''}" for s in self.samples())


class Stream(Writer):
    """A tool that appends its rows to numbered files: lines are incomplete for a while, and chunks end."""

    def __init__(self, tool: Tool, folder: Path, seed: int) -> None:
        super().__init__(tool, folder, seed)
        self.chunk, self.rest = 0, b""

    def newest(self) -> int:
        return self.chunk

    def sample(self, number: int) -> Sample:
        return Sample(number // 3, number, float(number), float(number % 3 - 1))

    def append(self) -> None:
        line = self.rest + lines([self.tool.row(self.sample(self.num))])
        self.num += 1
        cut = self.random.choice([len(line), len(line), len(line) - 30])
        self.rest = line[cut:]
        self.write(line[:cut])

    def write(self, data: bytes) -> None:
        self.path(self.chunk).parent.mkdir(parents=True, exist_ok=True)
        with self.path(self.chunk).open("ab") as file:
            file.write(data)

    def other(self) -> None:
        """End the chunk, with the rest of its last line."""
        if self.rest:
            self.write(self.rest)
            self.rest = b""
        self.chunk += 1

    def finish(self) -> None:
        self.other()

    def samples(self) -> list[Sample]:
        return [self.sample(number) for number in range(self.num)]


class Steps(Writer):
    """A tool that writes one file per step: a restart writes a step again, at first in part; files are truncated."""

    def __init__(self, tool: Tool, folder: Path, seed: int) -> None:
        super().__init__(tool, folder, seed)
        self.steps: dict[int, list[Sample]] = {}

    def newest(self) -> int:
        return len(self.steps)

    def new(self, step: int, num: int) -> list[Sample]:
        self.num += num
        return [Sample(step, self.num - i, *((1.0, 0.5) if i % 2 else (0.0, -0.5))) for i in range(num)]

    def regraded(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with other rewards, at the same distances from their mean."""
        return [Sample(s.step, s.number, s.reward + 2.0, s.advantage) for s in samples]

    def write(self, step: int, *, cut: bool) -> None:
        for file in self.folder.glob(f"**/{self.tool.path.format(step)}*"):
            file.unlink()
        data = self.tool.encode([self.tool.row(sample) for sample in self.steps[step]])
        self.path(step).parent.mkdir(parents=True, exist_ok=True)
        self.path(step).write_bytes(data[: len(data) // 2] if cut else data)
        (self.torn.add if cut else self.torn.discard)(step)

    def append(self) -> None:
        step = len(self.steps) + 1
        self.steps[step] = self.new(step, self.random.choice([2, 4, 4]))
        self.write(step, cut=False)

    def other(self) -> None:
        """Write one of the last steps again: in part, completely, with other rewards, or with other samples."""
        if not self.steps:
            return
        step, kind = self.random.choice(sorted(self.steps)[-3:]), self.random.random()
        if self.tool.restarts and kind < 0.5:
            self.steps[step] = self.new(step, self.random.choice([2, 4, 6]))
        elif self.tool.restarts and kind < 0.7:
            self.steps[step] = self.regraded(self.steps[step])
        elif not self.tool.restarts:
            self.steps[step] += self.new(step, 2)
        self.write(step, cut=self.random.random() < 0.5)

    def finish(self) -> None:
        for step in self.steps:
            self.write(step, cut=False)

    def samples(self) -> list[Sample]:
        return [sample for samples in self.steps.values() for sample in samples]


class Trials(Writer):
    """Harbor: a document that its agent writes again after each step, and the trial's result when it has ended."""

    def __init__(self, tool: Tool, folder: Path, seed: int) -> None:
        super().__init__(tool, folder, seed)
        self.num_steps: list[int] = []
        """Of each episode."""
        self.ended: set[int] = set()

    def newest(self) -> int:
        return len(self.num_steps)

    def finished(self) -> list[Path]:
        return [file for file in super().finished() if (file.parents[1] / "result.json").is_file()]

    def rename(self) -> None:
        """Move the folder of a trial that has ended."""
        for file in self.finished()[:1]:
            target = self.folder / f"archive{self.random.random()}" / file.parents[1].name
            target.parent.mkdir()
            file.parents[1].rename(target)

    def sample(self, number: int) -> Sample:
        return Sample(number // 3, number, float(number % 2), 0.0)

    def append(self) -> None:
        self.num_steps.append(0)
        self.extend(len(self.num_steps) - 1)

    def extend(self, number: int) -> None:
        self.num_steps[number] += 1
        self.write(number, cut=self.random.random() < 0.3)

    def write(self, number: int, *, cut: bool) -> None:
        data = json.dumps(atif(self.sample(number), self.num_steps[number])).encode()
        self.path(number).parent.mkdir(parents=True, exist_ok=True)
        self.path(number).write_bytes(data[: len(data) // 2] if cut else data)
        (self.torn.add if cut else self.torn.discard)(number)

    def end(self, number: int, *, cut: bool) -> None:
        """Write the result of a trial, whose agent writes no more."""
        self.write(number, cut=False)
        sample = self.sample(number)
        result = {"trial_name": f"t{number}", "task_name": f"task{sample.step}", "exception_info": None}
        data = json.dumps(result | {"verifier_result": {"rewards": {"reward": sample.reward}}})
        (self.path(number).parents[1] / "result.json").write_text(data[: len(data) // 2] if cut else data)
        (self.torn.add if cut else self.ended.add)(number)

    def other(self) -> None:
        """Take one more step of an episode, or end its trial."""
        running = sorted(set(range(len(self.num_steps))) - self.ended)
        if running and self.random.random() < 0.6:
            self.extend(self.random.choice(running))
        elif running:
            self.end(running[0], cut=self.random.random() < 0.3)

    def finish(self) -> None:
        for number in set(range(len(self.num_steps))) - self.ended:
            self.end(number, cut=False)

    def samples(self) -> list[Sample]:
        return [self.sample(number) for number in range(len(self.num_steps))]

    def expected(self) -> Counter[str]:
        pairs = zip(self.samples(), self.num_steps, strict=True)
        return Counter(f"{atif_tokens(sample, num_steps)} {sample.reward}" for sample, num_steps in pairs)


TRIALS = {"atif": Tool(row=lambda sample: atif(sample, 1), path="t{}/agent/trajectory.json", column="input_ids")}


def writer_of(name: str, folder: Path, seed: int) -> Writer:
    """Return the writer of a tool."""
    if name in TRIALS:
        return Trials(TRIALS[name], folder, seed)
    return Stream(STREAMS[name], folder, seed) if name in STREAMS else Steps(TOOLS[name], folder, seed)
