"""The unit and meaning of every figure of `metrics.jsonl`. The page docs/metrics.md is generated from this module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One field of a line of `metrics.jsonl`."""

    name: str
    unit: str
    meaning: str


GROUPS: tuple[tuple[str, tuple[Figure, ...]], ...] = (
    (
        "The step",
        (
            Figure("step", "", "number of optimizer steps, including this step"),
            Figure("time", "s since 1970", "end of the step"),
            Figure(
                "policy_version",
                "steps",
                "version of the weights at the start of the step: the number of optimizer steps that produced them",
            ),
            Figure("num_trajectories", "trajectories", "number of trajectories in the step's batch"),
            Figure("num_groups", "groups", "number of groups in the step's batch"),
            Figure(
                "num_taught",
                "trajectories",
                "number of trajectories in the batch that affect the weights because they have a gradient and a "
                "positive weight in the loss; the ledger lists the others",
            ),
            Figure("watermark", "trajectories", "number of trajectories in the store when the batch was selected"),
            Figure("lr", "", "learning rate of the step"),
            Figure("grad_norm", "", "norm of the gradient before clipping to `learn.max_grad_norm`"),
        ),
    ),
    (
        "Collected trajectories",
        (
            Figure("rollout", "", "number of the rollout that the step uses; the first is 0"),
            Figure(
                "task_reward",
                "reward",
                "mean reward, before shaping, of the trajectories collected since the previous step",
            ),
            Figure(
                "num_failed",
                "trajectories",
                "number of collected trajectories whose environment or reward function failed",
            ),
            Figure("completion_length", "tokens", "mean number of tokens after the prompt"),
            Figure("completion_length_max", "tokens", "maximum number of tokens after the prompt"),
            Figure("cut_off", "share", "share of completions that ended at `collect.max_new_tokens`"),
            Figure("turns", "turns", "mean number of the policy's turns; only with an environment"),
            Figure("reward_std_in_group", "reward", "mean over groups of the standard deviation of a group's rewards"),
            Figure("flat_groups", "share", "share of groups whose rewards are all equal"),
            Figure("rounds", "rounds", "with `collect.dynamic`: number of sampling rounds in the rollout"),
            Figure(
                "dropped_groups",
                "share",
                "with `collect.dynamic`: share of the sampled groups that were dropped; groups after the last one that "
                "the rollout needs are not counted",
            ),
            Figure(
                "source_weight/N",
                "share",
                "with a curriculum: weight of source N (the first is 0) in the selection of the rollout's prompts",
            ),
            Figure(
                "reward/NAME", "reward", "unweighted mean of the reward NAME, over the trajectories to which it applies"
            ),
            Figure(
                "reward/SOURCE",
                "reward",
                "mean reward of the trajectories from one source of a mixture or from one of several environments; a "
                "source is named after its file, or after its class if it has no file",
            ),
            Figure(
                "reward_failed/NAME",
                "trajectories",
                "number of failed trajectories without a value for the reward NAME",
            ),
            Figure(
                "failed/KIND",
                "trajectories",
                "number of trajectories that have no reward and whose `failure_reason` is KIND; omitted if 0",
            ),
            Figure("rollout_s", "s", "time for sampling, grading and storing the rollout"),
            Figure("tokens_per_s", "tokens/s", "number of sampled tokens divided by `rollout_s`"),
            Figure("kl_coef", "reward/nat", "weight of the KL penalty in the rewards of the step's trajectories"),
        ),
    ),
    (
        "Evaluation of the weights after the step",
        (
            Figure("evaluation/reward", "reward", "mean over prompts of the mean reward of their completions"),
            Figure(
                "evaluation/reward_low",
                "reward",
                "lower end of the 95 % confidence interval of `evaluation/reward` over prompts (normal approximation)",
            ),
            Figure("evaluation/reward_high", "reward", "upper end of the same confidence interval"),
            Figure(
                "evaluation/pass@K",
                "share",
                "unbiased estimate of the share of prompts that are solved by at least one of K completions",
            ),
            Figure("evaluation/reward/NAME", "reward", "unweighted mean over prompts of the reward or component NAME"),
            Figure("evaluation/completion_length", "tokens", "mean number of tokens after the prompt"),
            Figure("evaluation/cut_off", "share", "share of completions that ended at the maximum number of tokens"),
            Figure("evaluation/failed", "trajectories", "number of completions without a reward"),
            Figure(
                "evaluation/step",
                "",
                "step whose weights were evaluated; present if a collector evaluated them and "
                "this line is for a later step",
            ),
            Figure("evaluation/seconds", "s", "duration of the evaluation"),
        ),
    ),
    (
        "The step's trajectories",
        (
            Figure("advantage_std", "", "standard deviation of the advantages"),
            Figure(
                "staleness",
                "steps",
                "mean age of a trajectory: `policy_version` minus the oldest version that sampled the trajectory",
            ),
            Figure("staleness_max", "steps", "maximum age of a trajectory"),
            Figure("use_count", "steps", "mean number of steps that have used a trajectory, including this step"),
            Figure(
                "use_count_max", "steps", "maximum number of steps that have used a trajectory, including this step"
            ),
            Figure(
                "kl_k1",
                "nats/token",
                "KL divergence of the behaviour policy p from the reference q, estimated by the mean of "
                "`log p - log q`",
            ),
            Figure(
                "kl_k2", "nats/token", "the same divergence, estimated by half the squared difference of the log-probs"
            ),
            Figure(
                "kl_k3", "nats/token", "the same divergence, estimated by `q/p - 1 - log(q/p)`, which is never negative"
            ),
            Figure(
                "kl_per_trajectory",
                "nats",
                "mean over trajectories of the sum of `log p - log q` over the tokens of a trajectory",
            ),
        ),
    ),
    (
        "The loss, over all tokens that the policy produced",
        (
            Figure("loss", "", "the sum of the following loss terms"),
            Figure("loss_objective", "", "the policy loss"),
            Figure("loss_entropy", "", "the entropy bonus, with a negative sign"),
            Figure("loss_kl_to_ref", "", "the term for the KL divergence from the reference"),
            Figure("loss_kl_to_inference", "", "the term for the KL divergence from the behaviour policy"),
            Figure("clip_fraction", "share", "share of tokens for which the clip is active"),
            Figure("clip_fraction_low", "share", "share of tokens clipped at the lower bound"),
            Figure("clip_fraction_high", "share", "share of tokens clipped at the upper bound"),
            Figure("entropy", "nats/token", "entropy of the policy at the sampling temperature"),
            Figure("ess", "share", "effective sample size of the token ratios; 1 if on-policy"),
            Figure(
                "ess_sequence",
                "share",
                "effective sample size of the sequence ratios, each the product of one completion's token ratios",
            ),
            Figure(
                "ess_weight", "share", "mean weight that `sample.min_ess` assigns; absent if this setting is `none`"
            ),
            Figure(
                "kl_approx",
                "nats/token",
                "mean difference between the `proximal` log-probs (see docs/learner.md) and the policy's "
                "log-probs (KL estimate k1)",
            ),
            Figure(
                "kl_to_ref",
                "nats/token",
                "KL divergence of the policy from the reference, estimated by `loss.kl_estimator`",
            ),
            Figure("kl_to_inference", "nats/token", "KL divergence of the behaviour policy from the policy"),
            Figure(
                "sampler_gap",
                "nats/token",
                "mean absolute difference between the policy's log-probs and the behaviour log-probs",
            ),
        ),
    ),
    (
        "Time and memory of the update",
        (
            Figure("processes", "processes", "number of processes that share the step"),
            Figure("num_tokens", "tokens", "number of tokens in the step's trajectories, including prompts"),
            Figure("num_scored_tokens", "tokens", "number of tokens included in the loss"),
            Figure(
                "num_unscored_tokens",
                "tokens",
                "number of tokens that are excluded from the loss because a log-prob is not finite",
            ),
            Figure(
                "padding_efficiency",
                "share",
                "number of tokens divided by the number of positions processed; above 1 if prompts are shared",
            ),
            Figure("update_s", "s", "duration of the step, excluding the rollout"),
            Figure("update_tokens_per_s", "tokens/s", "`num_tokens` divided by `update_s`"),
            Figure(
                "peak_memory_mb",
                "MB",
                "peak GPU memory of the step; on a CPU, peak resident memory of the process since its start",
            ),
            Figure(
                "mfu",
                "share",
                "useful operations per second, divided by `learn.peak_flops` or by the data-sheet peak of the GPU",
            ),
        ),
    ),
    (
        "Requests to an object store, for a run at a URL",
        (
            Figure("requests", "requests", "number of requests that the learner has sent since its previous step"),
            Figure("bytes_sent", "bytes", "bytes sent in these requests"),
            Figure("bytes_received", "bytes", "bytes received in the responses"),
            Figure(
                "rollout_requests",
                "requests",
                "number of requests that the rollout's collector has sent since its previous rollout",
            ),
            Figure("rollout_bytes_sent", "bytes", "bytes sent in these requests"),
            Figure("rollout_bytes_received", "bytes", "bytes received in the responses"),
        ),
    ),
)


def figures() -> dict[str, Figure]:
    """Return all figures by name."""
    return {figure.name: figure for _, group in GROUPS for figure in group}


def figure_of(name: str) -> Figure | None:
    """Return the unit and meaning of a field, including fields whose names contain a variable; None for a custom field.

    >>> figure_of("reward/format").meaning, figure_of("evaluation/pass@4").unit, figure_of("mine")
    ('unweighted mean of the reward NAME, over the trajectories to which it applies', 'share', None)
    >>> [figure_of(f"evaluation/{name}").unit for name in ("hard/pass@4", "hard/reward/format", "reward/format")]
    ['share', 'reward', 'reward']
    """
    by_name = figures()
    parts = name.split("/")
    if parts[0] == "evaluation" and name not in by_name and len(parts) > 2 and parts[1] != "reward":
        return figure_of("/".join(["evaluation", *parts[2:]]))  # of a set with a name
    head, mark, _ = name.rpartition("/") if "@" not in name else name.partition("@")
    tails = ("NAME", "KIND", "N", "K")
    return by_name.get(name) or next(
        (by_name[key] for tail in tails if (key := f"{head}{mark}{tail}") in by_name), None
    )


def page() -> Iterator[str]:
    """Yield docs/metrics.md."""
    yield "# Metrics"
    yield ""
    yield "`metrics.jsonl` has one line per optimizer step. If a metric has no value in a step, the line for that step"
    yield "omits the metric; earlier versions wrote null. The metric names of a named evaluation contain its name:"
    yield "for example, `evaluation/hard/reward` instead of `evaluation/reward`. This page is generated by"
    yield "`rlhf-pipeline config metrics --markdown > docs/metrics.md`."
    for title, group in GROUPS:
        yield from ("", f"## {title}", "", "| name | unit | meaning |", "|---|---|---|")
        for figure in group:
            yield f"| `{figure.name}` | {figure.unit or '-'} | {figure.meaning} |"
