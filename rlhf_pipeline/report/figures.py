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
                "number of optimizer steps that produced the weights at the start of the step",
            ),
            Figure("num_trajectories", "trajectories", "trajectories in the step's batch"),
            Figure("num_groups", "groups", "groups of these trajectories"),
            Figure(
                "num_taught",
                "trajectories",
                "trajectories of the batch that affect the weights (those with a gradient and a weight in the loss); "
                "the ledger lists the others",
            ),
            Figure("watermark", "trajectories", "trajectories in the store when the batch was selected"),
            Figure("lr", "", "learning rate of the step"),
            Figure("grad_norm", "", "norm of the gradient before clipping to `learn.max_grad_norm`"),
        ),
    ),
    (
        "Collected trajectories",
        (
            Figure("rollout", "", "number of the rollout that the step learns from; the first is 0"),
            Figure(
                "task_reward",
                "reward",
                "mean reward, before shaping, of the trajectories collected since the previous step",
            ),
            Figure(
                "num_failed", "trajectories", "number of these trajectories whose environment or reward function failed"
            ),
            Figure("completion_length", "tokens", "mean number of tokens after the prompt"),
            Figure("completion_length_max", "tokens", "largest number of tokens after a prompt"),
            Figure("cut_off", "share", "share of completions that ended at `collect.max_new_tokens`"),
            Figure("turns", "turns", "mean number of the policy's turns; only with an environment"),
            Figure("reward_std_in_group", "reward", "mean over groups of the standard deviation of a group's rewards"),
            Figure("flat_groups", "share", "share of groups whose rewards are all equal"),
            Figure("rounds", "rounds", "with `collect.dynamic`: number of rounds of the rollout"),
            Figure(
                "dropped_groups",
                "share",
                "with `collect.dynamic`: share of dropped groups among all groups up to the last required one",
            ),
            Figure(
                "source_weight/N",
                "share",
                "with a curriculum: weight of source N (the first is 0) for the rollout's prompts",
            ),
            Figure("reward/NAME", "reward", "mean of the reward NAME where it applies, unweighted"),
            Figure(
                "reward/SOURCE",
                "reward",
                "mean reward of the trajectories of one source of a mixture (named after its file, otherwise after its "
                "class), or of one of several environments",
            ),
            Figure("reward_failed/NAME", "trajectories", "failed trajectories without a value for the reward NAME"),
            Figure("failed/KIND", "trajectories", "trajectories without a reward, by `failure_reason`; omitted if 0"),
            Figure("rollout_s", "s", "time for sampling, grading and storing the rollout"),
            Figure("tokens_per_s", "tokens/s", "sampling speed during that time"),
            Figure("kl_coef", "reward/nat", "weight of the KL penalty in the rewards of the step's trajectories"),
        ),
    ),
    (
        "Evaluations of the weights after the step (for a named set: evaluation/SET/...)",
        (
            Figure("evaluation/reward", "reward", "mean over prompts of the mean reward of their completions"),
            Figure(
                "evaluation/reward_low",
                "reward",
                "lower end of its 95 % confidence interval over prompts (normal approximation)",
            ),
            Figure("evaluation/reward_high", "reward", "upper end of this interval"),
            Figure(
                "evaluation/pass@K",
                "share",
                "unbiased estimate of the share of prompts that one of K completions solves",
            ),
            Figure("evaluation/reward/NAME", "reward", "mean over prompts of the reward or component NAME, unweighted"),
            Figure("evaluation/completion_length", "tokens", "mean number of tokens after the prompt"),
            Figure("evaluation/cut_off", "share", "share of completions that ended at the limit"),
            Figure("evaluation/failed", "trajectories", "completions without a reward"),
            Figure(
                "evaluation/step",
                "",
                "step of the evaluated weights, if a collector evaluated them and the line is for a later step",
            ),
            Figure("evaluation/seconds", "s", "duration of the evaluation"),
        ),
    ),
    (
        "The step's trajectories",
        (
            Figure("advantage_std", "", "standard deviation of the advantages"),
            Figure(
                "staleness", "steps", "mean age: `policy_version` minus the oldest version that sampled the trajectory"
            ),
            Figure("staleness_max", "steps", "largest age"),
            Figure("use_count", "steps", "mean number of steps that have used a trajectory, including this step"),
            Figure("use_count_max", "steps", "maximum of this number"),
            Figure(
                "kl_k1",
                "nats/token",
                "KL of the behaviour policy against the reference, estimated by the mean of `log p - log q`",
            ),
            Figure("kl_k2", "nats/token", "the same, estimated by half the squared difference"),
            Figure("kl_k3", "nats/token", "the same, estimated by `q/p - 1 - log(q/p)`, which is never negative"),
            Figure("kl_per_trajectory", "nats", "`kl_k1` summed over a trajectory, mean over trajectories"),
        ),
    ),
    (
        "The loss, over all tokens that the policy produced",
        (
            Figure("loss", "", "the sum of the parts below"),
            Figure("loss_objective", "", "the policy loss"),
            Figure("loss_entropy", "", "the negative entropy bonus"),
            Figure("loss_kl_to_ref", "", "the KL term against the reference"),
            Figure("loss_kl_to_inference", "", "the KL term against the behaviour policy"),
            Figure("clip_fraction", "share", "share of tokens for which the clip is active"),
            Figure("clip_fraction_low", "share", "share of tokens clipped at the lower bound"),
            Figure("clip_fraction_high", "share", "share of tokens clipped at the upper bound"),
            Figure("entropy", "nats/token", "entropy of the policy at the sampling temperature"),
            Figure("ess", "share", "effective sample size of the token ratios; 1 if on-policy"),
            Figure("ess_sequence", "share", "effective sample size of the ratios of complete completions"),
            Figure("ess_weight", "share", "mean weight from the guard `sample.min_ess`; absent without the guard"),
            Figure("kl_approx", "nats/token", "KL of the clip's reference log-probs against the policy, by k1"),
            Figure("kl_to_ref", "nats/token", "KL of the policy against the reference, by `loss.kl_estimator`"),
            Figure("kl_to_inference", "nats/token", "KL of the behaviour policy against the policy"),
            Figure(
                "sampler_gap", "nats/token", "mean absolute difference between the policy's and the sampler's log-probs"
            ),
        ),
    ),
    (
        "Time and memory of the update",
        (
            Figure("processes", "processes", "processes that share the step"),
            Figure("num_tokens", "tokens", "tokens of the step's trajectories, including prompts"),
            Figure("num_scored_tokens", "tokens", "tokens with a loss"),
            Figure("num_unscored_tokens", "tokens", "tokens excluded because a log-prob is not finite"),
            Figure(
                "padding_efficiency", "share", "tokens divided by computed positions; above 1 if prompts are shared"
            ),
            Figure("update_s", "s", "duration of the step, excluding the rollout"),
            Figure("update_tokens_per_s", "tokens/s", "`num_tokens` divided by `update_s`"),
            Figure("peak_memory_mb", "MB", "peak memory so far: of the GPU, or resident memory of the process"),
            Figure(
                "mfu",
                "share",
                "useful operations per second, divided by `learn.peak_flops` or by the data-sheet peak of a known GPU",
            ),
        ),
    ),
    (
        "Requests to an object store, for a run at a URL",
        (
            Figure("requests", "requests", "requests of the learner since its previous step"),
            Figure("bytes_sent", "bytes", "bytes sent by these requests"),
            Figure("bytes_received", "bytes", "bytes received by these requests"),
            Figure("rollout_requests", "requests", "requests of the rollout's collector since its previous rollout"),
            Figure("rollout_bytes_sent", "bytes", "bytes sent by these requests"),
            Figure("rollout_bytes_received", "bytes", "bytes received by these requests"),
        ),
    ),
)


def figures() -> dict[str, Figure]:
    """Return all figures by name."""
    return {figure.name: figure for _, group in GROUPS for figure in group}


def figure_of(name: str) -> Figure | None:
    """Return the unit and meaning of a field, including fields whose names contain a variable; None for a custom field.

    >>> figure_of("reward/format").meaning, figure_of("evaluation/pass@4").unit, figure_of("mine")
    ('mean of the reward NAME where it applies, unweighted', 'share', None)
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
    yield "`metrics.jsonl` has one line per optimizer step. A figure without a value in a step is absent from the line"
    yield "of that step; earlier versions wrote null. This page is generated by"
    yield "`rlhf-pipeline config metrics --markdown > docs/metrics.md`."
    for title, group in GROUPS:
        yield from ("", f"## {title}", "", "| name | unit | meaning |", "|---|---|---|")
        for figure in group:
            yield f"| `{figure.name}` | {figure.unit or '-'} | {figure.meaning} |"
