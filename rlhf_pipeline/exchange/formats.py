"""The formats that `import` reads: one table of what each tool calls its fields, and how a file is recognised."""

from __future__ import annotations

from functools import partial

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import ONE_ROW, Row
from rlhf_pipeline.exchange._fields import Format
from rlhf_pipeline.exchange._flat import FlatReader, OpenInstructReader, SkyRLBatchReader, TRLReader
from rlhf_pipeline.exchange._nested import EpisodeReader, MaskedReader, SolutionsReader, TinkerReader, is_solution
from rlhf_pipeline.exchange._tables import Container


def is_tinker_summary(row: Row) -> bool:
    """Return True for a rollout summary of tinker-cookbook: rewards, and no tokens."""
    return all(name in row for name in ("total_reward", "group_idx", "traj_idx"))


def _is_tinker(row: Row) -> bool:
    return ("prompt_tokens" in row and "samples" in row) or row.get("kind") == "sample" or is_tinker_summary(row)


def _is_trl(row: Row) -> bool:
    return "advantage" in row or isinstance(row["step"], str)


def _is_batch(row: Row) -> bool:
    tokens = [row[name] for name in ("prompt_token_ids", "response_ids")]
    return all(isinstance(rows, list) and rows and isinstance(rows[0], list) for rows in tokens)


def is_store_row(row: Row) -> bool:
    """Return True for a row that `rlhf-pipeline export` wrote."""
    return "input_ids" in row and any(name in row for name in ("assistant_mask", "num_prompt_tokens", "trajectory_id"))


FORMATS: tuple[Format, ...] = (
    Format(
        name="gsm8k-solutions",
        summary="graded solutions in the form of GSM8K's example_model_solutions.jsonl",
        source="openai/grade-school-math, the file itself",
        also=lambda row: any(is_solution(value) for value in row.values()),
        make=SolutionsReader,
    ),
    *(
        Format(
            name="prime-rl",
            summary="episodes of prime-rl (traces.jsonl), or traces of verifiers",
            source="prime-rl 559b447 FileMonitor.log_episodes; verifiers a60a606 Episode.to_record",
            needs=needs,
            make=EpisodeReader,
        )
        for needs in (("traces", "task"), ("nodes", "rewards"))
    ),
    Format(
        name="prime-rl",
        summary="token exports of prime-rl",
        source="prime-rl 559b447 trainer/rl/token_export.py TokenExporter",
        needs=("token_ids", "loss_mask", "inference_logprobs"),
        fields={
            "tokens": ("token_ids",),
            "completion_mask": ("loss_mask",),
            "log_probs": ("inference_logprobs",),
            "advantage": ("advantages",),
            "policy_version": ("step",),
            "meta": ("env_name", "rank"),
        },
        make=partial(MaskedReader, group=ONE_ROW),
    ),
    Format(
        name="verifiers",
        summary="results of verifiers' evaluations",
        source="verifiers, results.jsonl",
        needs=("example_id", "prompt", "completion", "reward"),
        fields={"group": (), "reward": ("reward",)},
        group_of=("example_id",),
        make=FlatReader,
    ),
    Format(
        name="tinker",
        summary="captured samples of tinker-cookbook, with its rollout summaries",
        source="tinker-cookbook 9dfcc3a capture/instrument.py, rl/rollout_logging.py",
        also=_is_tinker,
        make=TinkerReader,
    ),
    Format(
        name="open-instruct",
        summary="rollout shards of open-instruct's --save_traces",
        # The mask of tool output is not in the file, so all response tokens count as the policy's.
        source="open-instruct e6c3044 open_instruct/rl_utils.py RolloutRecord",
        needs=("prompt_tokens", "response_tokens", "reward"),
        fields={
            "prompt_ids": ("prompt_tokens",),
            "completion_ids": ("response_tokens",),
            "reward": ("reward",),
            "log_probs": ("logprobs",),
            "policy_version": ("step",),
            "answer": ("ground_truth",),
            "group": (),
        },
        group_of=("step", "prompt_idx"),
        make=OpenInstructReader,
    ),
    Format(
        name="nemo-rl",
        summary="NeMo-RL's train_data_step*.jsonl",
        source="NeMo-RL 7ea279a nemo_rl/algorithms/grpo.py, log_batched_dict_as_jsonl",
        needs=("token_ids", "token_loss_mask", "rewards"),
        fields={
            "tokens": ("token_ids",),
            "length": ("input_lengths",),
            "completion_mask": ("token_loss_mask",),
            "log_probs": ("generation_logprobs",),  # of the engine that sampled
            "reward": ("rewards",),
            "advantage": ("advantages",),
            "counts": ("sample_loss_mask",),
            "texts": ("content",),
            "meta": ("idx", "agent_ref"),
        },
        version_in_path=(r"train_data_step(\d+)", -1),  # step N is sampled from the weights of N - 1 updates
        make=MaskedReader,
    ),
    Format(
        name="skyrl",
        summary="SkyRL's dumps of evaluations",
        source="SkyRL a956457 dump_per_dataset_eval_results",
        needs=("input_prompt", "output_response", "score"),
        fields={
            "prompt": ("input_prompt",),
            "completion": ("output_response",),
            "reward": ("score",),
            "finish_reason": ("stop_reason",),
        },
        as_chat=False,
        per_token=True,
        version_in_path=(r"global_step_(\d+)", 0),
        make=FlatReader,
    ),
    Format(
        name="skyrl",
        summary="batches of SkyRL's generator",
        source="SkyRL a956457 generators/base.py GeneratorOutput",
        needs=("prompt_token_ids", "response_ids", "rewards"),
        also=_is_batch,
        fields={
            "prompt_ids": ("prompt_token_ids",),
            "completion_ids": ("response_ids",),
            "reward": ("rewards",),
            "completion_mask": ("loss_masks",),
            "log_probs": ("rollout_logprobs",),
            "finish_reason": ("stop_reasons",),
        },
        per_token=True,
        version_in_path=(r"global_step_(\d+)", 0),
        make=SkyRLBatchReader,
    ),
    Format(
        name="trl",
        summary="the completions table of TRL's trainers",
        # The columns of rewards are called after the reward functions, see `TRLReader`.
        source="TRL 1.16 GRPOTrainer.log; before 0.18 with `reward`, without `advantage`, and with `step` as text",
        needs=("step", "prompt", "completion"),
        also=_is_trl,
        fields={
            "prompt": ("prompt",),
            "completion": ("completion",),
            "reward": ("reward",),
            "advantage": ("advantage",),
            "policy_version": ("step",),
            "group": (),  # the instances of one prompt have no name; their place in the table tells them apart
            "answer": (),
        },
        as_chat=False,
        make=TRLReader,
    ),
    Format(
        name="verl",
        summary="verl's rollout_data_dir dumps",
        # `input` is the whole prompt as text. verl reorders a step's rows to balance its workers.
        source="verl 1dda039 RayPPOTrainer._dump_generations",
        needs=("input", "output", "score", "step"),
        fields={
            "prompt": ("input",),
            "completion": ("output",),
            "reward": ("score",),
            "answer": ("gts",),
            "policy_version": ("step",),
            "group": ("uid",),
        },
        group_of=("step", "input"),
        as_chat=False,
        make=FlatReader,
    ),
    Format(
        name="openrlhf",
        summary="OpenRLHF's generations with rewards",
        source="OpenRLHF cli/batch_inference.py",
        needs=("input", "output", "reward"),
        fields={"prompt": ("input",), "completion": ("output",), "reward": ("reward",)},
        as_chat=False,
        make=FlatReader,
    ),
    Format(
        name="groups",
        summary="prompts, completions and rewards by their field names",
        source="any tool",
        make=FlatReader,
    ),
)
"""In the order in which they are tried; the last takes any row that has a prompt, a completion and a reward."""

CONTAINERS: tuple[Container, ...] = ("jsonl", "parquet", "hf")
NAMES: tuple[str, ...] = ("auto", *CONTAINERS, *dict.fromkeys(item.name for item in FORMATS[:-1]), "store")
"""What `--format` takes: a container name reads `groups` by field names; `store` is what `export` writes."""


def find_format(name: str, row: Row, *, is_export: bool = False) -> Format | None:
    """Return the format of a file from its first row; None for rows that `export` wrote.

    Args:
        name: one of `NAMES`.
        row: the first row.
        is_export: the columns of a store are written down with the file.

    Raises:
        DefinitionError: there is no format of that name, or the row lacks its fields.

    >>> find_format("auto", {"input": "1+1=", "output": "2", "score": 1.0, "step": 3}).name
    'verl'
    """
    if name not in NAMES:
        raise DefinitionError(f"there is no format '{name}'." + did_you_mean(name, NAMES))
    if name == "store" or (name in ("auto", *CONTAINERS) and (is_export or is_store_row(row))):
        return None
    if name == "auto":
        return next(item for item in FORMATS if item.matches(row))
    if name in CONTAINERS:
        return FORMATS[-1]
    named = [item for item in FORMATS if item.name == name]
    found = next((item for item in named if item.matches(row)), None)
    if found is None:
        looks = next(item for item in FORMATS if item.matches(row))
        summaries = " or ".join(dict.fromkeys(item.summary for item in named))
        raise DefinitionError(
            f"this is not {summaries}. It has the fields {', '.join(sorted(map(str, row)))} and looks like "
            f"--format {looks.name if looks is not FORMATS[-1] else 'jsonl'}."
        )
    return found
