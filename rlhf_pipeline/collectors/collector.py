"""The in-process collector: rollout `r` is a pure function of the weights, the seed and `r`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.stored_groups import StoredGroups
from rlhf_pipeline.collectors.grading import BROKEN, Grade, Grader, check_all_failed
from rlhf_pipeline.collectors.rollout_figures import Figures, rollout_figures, stored_figures
from rlhf_pipeline.config import Collect
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.keys import Key
from rlhf_pipeline.data.prompts import Prompt, PromptSource, prompt_at, template_options
from rlhf_pipeline.data.reward_forms import Sampled
from rlhf_pipeline.data.rewards import Reward, RewardFunction, has_columns
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories
from rlhf_pipeline.errors import DefinitionError, EngineError
from rlhf_pipeline.policies.adapters import Policy, policy_of
from rlhf_pipeline.policies.chat import decode_completion, encode_any
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions, WeightRefresh, Weights
from rlhf_pipeline.policies.engines.sampling import Truncation
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.transforms.kl_reward import KLRewardTransform
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb, ScoringBeside


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The result of one rollout."""

    index: int
    num_trajectories: int
    num_tokens: int
    """Completion tokens sampled; 0 if the rollout was in the store already."""
    task_reward: float | None
    """Mean over the rollout's graded trajectories, unshaped; None if it is no longer known."""
    num_failed: int
    """Trajectories whose reward call failed."""
    first_error: str | None
    seconds: float
    from_store: bool
    """True if the rollout was in the store already, from a run that was killed, so nothing was sampled."""
    figures: Figures = field(default_factory=dict[str, "float | int | None"])
    """Of `rollout_figures`; empty if part of the rollout is no longer known."""


class Collector:
    """Turns prompts into completed trajectories and writes them through the buffer's write path.

    Rollout `r` takes the prompts from cursor `r * prompts_per_rollout` on. The prompt's cursor is its `group_id` and
    seeds its completions, so a rollout that a crash interrupts is sampled again token for token, and a rollout that is
    in the store already is not sampled again: no prompt is lost or repeated.

    Args:
        policy: samples the completions. A TorchRL wrapper works too, see `interop.torchrl.wrappers`; with an external
            engine (vLLM) a rollout is not a pure function of the seed.
        prompts: a pure source of prompts.
        reward: one function or several, see `rlhf_pipeline.data.reward_forms`; a call that raises fails its trajectory
            only.
        buffer: its `extend` runs the write path and commits.
        config: sizes and temperature.
        seed: the run's seed.
        kl_reward: the write path's KL penalty; rollouts already in the store are reported to it.
        hand_over: maps a version to the policy's weights, for an engine with its own copy; None if the engine samples
            with the policy's modules, or gets its weights elsewhere.
        retrieve: the write path's `RetrieveLogProb`, to score completions as they end, while others are being sampled;
            only with a `CausalLMPolicy`, and a reference that is a model of its own. None scores on the write path.
        temperature: in place of the config's; 0 takes the most probable token.
        marks: columns that are the same for every trajectory, such as `evaluation`.

    Raises:
        DefinitionError: the write path takes batches of another size than a rollout.

    >>> import tempfile
    >>> from rlhf_pipeline import CopyDigits, MCAdvantage, token_match
    >>> from rlhf_pipeline import scratch_policy
    >>> policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    >>> buffer = TrajectoryReplayBuffer(storage=tempfile.mkdtemp() + "/store", transform=MCAdvantage(4))
    >>> collector = Collector(
    ...     policy=policy, prompts=CopyDigits(num_digits=2), reward=token_match, buffer=buffer, seed=0,
    ...     config=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
    ... )
    >>> collector.collect(0, policy_version=0).num_trajectories, len(buffer.store)
    (8, 8)
    >>> collector.collect(0, policy_version=0).from_store, len(buffer.store)
    (True, 8)
    >>> buffer.trajectories.close()
    """

    def __init__(
        self,
        *,
        policy: Policy | nn.Module,
        prompts: PromptSource,
        reward: RewardFunction | Reward | Sequence[RewardFunction | Reward],
        buffer: TrajectoryReplayBuffer,
        config: Collect,
        seed: int,
        kl_reward: KLRewardTransform | None = None,
        hand_over: Callable[[int], Weights] | None = None,
        retrieve: RetrieveLogProb | None = None,
        temperature: float | None = None,
        marks: Mapping[str, bool] | None = None,
    ) -> None:
        self.policy: TokenPolicy = policy_of(policy, "Collector")
        self.prompts = prompts
        self.grader = Grader(reward, concurrency=config.reward_concurrency, timeout_s=config.reward_timeout_s)
        self._names = [one.label for one in self.grader.rewards] if has_columns(reward) else []
        self.buffer = buffer
        self.config = config
        self.seed = seed
        self.kl_reward = kl_reward
        self.hand_over = hand_over
        self.retrieve = retrieve
        self.temperature = config.temperature if temperature is None else temperature
        self.marks = dict(marks or {})
        self.stored = StoredGroups(buffer.store)
        """Finds groups that are in the store already."""
        if buffer.batch_groups not in (None, config.prompts_per_rollout):
            raise DefinitionError(
                f"MCAdvantage has batch_groups={buffer.batch_groups} and a rollout {config.prompts_per_rollout} "
                "groups. A batch is a rollout: give both the same number."
            )

    def collect(
        self,
        rollout: int,
        policy_version: int,
        *,
        refresh: WeightRefresh | None = None,
        digests: Mapping[int, int] | None = None,
        is_first: bool = False,
        stop: Callable[[], bool] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Rollout:
        """Ensure that the whole of rollout number `rollout` is in the store.

        Args:
            rollout: 0, 1, 2, ...
            policy_version: optimizer steps behind the policy's weights.
            refresh: loads newer weights during sampling; only with a `CausalLMPolicy`.
            digests: of the published weights by version, read after sampling; None if none are published.
            is_first: this is the first attempt at the rollout, so the store is not searched for it.
            stop: whether a signal has asked to stop; reward calls are then not waited for.
            say: takes a sentence that names a reward call which takes long.

        Returns:
            The summary of the rollout, read from the store if it was there already.

        Raises:
            RewardError: every reward call failed. Nothing was stored.
            StopAskedError: there was a request to stop while reward calls were running. Nothing was stored.
            EngineError: the engine is out of reach, or aborted a completion. Nothing was stored.
            StoreError: the store could not take the rollout; none of it was acknowledged.
        """
        started = time.perf_counter()
        first = rollout * self.config.prompts_per_rollout
        cursors = np.arange(first, first + self.config.prompts_per_rollout)
        # Looked up each time: a ring may have evicted part of what a resumed run replays.
        store, size = self.buffer.store, len(cursors) * self.config.group_size
        rows = np.empty(0, np.int64) if is_first else self._rows_of(cursors)
        # A rollout is one commit. A stored rollout lacks rows if the write path dropped groups, or if a ring is
        # evicting it: then its remaining rows are the oldest in the store, and are evicted next.
        cut = 0 < len(rows) < size and len(store) < store.watermark and rows[0] == store.ids()[0]
        if len(rows) >= size or (
            len(rows) and not cut and (refresh is not None or not self._by_these_weights(rows, policy_version, digests))
        ):
            self.observe(cursors)
            figures = stored_figures(store, rows, self._names)
            rewards = store.read_scalars("task_reward", rows)
            found = self._summary(rollout, rewards, 0, None, started, figures=figures, from_store=True)
            # The rewards of dropped groups are not stored, and other weights would sample other groups.
            lost = {} if len(rows) >= size else {"num_trajectories": size, "task_reward": None, "figures": {}}
            return replace(found, **lost)

        prompts = [prompt_at(self.prompts, int(cursor), self.seed) for cursor in cursors]
        as_chat, options = self.prompts.as_chat, template_options(self.prompts)
        prompt_ids = [
            encode_any(self.policy.tokenizer, prompt, as_chat=as_chat, template=options) for prompt in prompts
        ]
        if self.hand_over is not None and self.policy.engine.version != policy_version:
            self.policy.engine.load_weights(self.hand_over(policy_version), policy_version)
        how: dict[str, Any] = {} if refresh is None else {"refresh": refresh}
        if self.config.stop:
            how["stop"] = self.config.stop
        if self.config.is_truncated:
            how["truncation"] = Truncation(top_k=self.config.top_k, top_p=self.config.top_p, min_p=self.config.min_p)
        beside, grading = None, self.grader.begin(self.config.group_size)
        texts: dict[int, str] = {}
        if self.retrieve is not None:
            beside = ScoringBeside(self.retrieve, prompt_ids, self.config.group_size)

        def ended(place: int, tokens: Sequence[int]) -> None:
            texts[place] = self._text(tokens)
            prompt = prompts[place // self.config.group_size]
            grading.add(place, Sampled(prompt=prompt, completion=texts[place], token_ids=tokens))
            if beside is not None:
                beside.ended(place, tokens)

        if isinstance(self.policy, TokenPolicy):  # a TorchRL wrapper passes nothing on
            how["ended"] = ended
        with grading:
            completions = self._sampled(prompt_ids, cursors, how)
            reasons = np.where(completions.stopped, "stop", "length").tolist()
            ids = np.split(completions.token_ids, np.cumsum(completions.lengths)[:-1])
            for place, (tokens, reason) in enumerate(zip(ids, reasons, strict=True)):
                given, prompt = tokens.tolist(), prompts[completions.prompt_index[place]]
                texts[place] = texts[place] if place in texts else self._text(given)
                one = Sampled(prompt=prompt, completion=texts[place], token_ids=given, finish_reason=reason)
                grading.add(place, one, ended=True)
            grades = grading.results(stop, say)
        check_all_failed(grades, self.grader.rewards)
        batch = trajectories(
            prompts,
            prompt_ids,
            completions,
            [texts[place] for place in range(len(completions))],
            grades,
            cursors=cursors,
            group_size=self.config.group_size,
            policy_version=policy_version,
            digests=digests,
            sampled_by=self._sampled_by(),
        )
        batch |= self._graded(grades)
        batch |= {name: Flat(torch.full((batch.n,), mark)) for name, mark in self.marks.items()}
        if beside is not None:
            batch |= beside.columns(batch)
        # Otherwise the write path dropped part of it, and would again.
        self.buffer.extend(batch, write=len(rows) == 0 or cut)
        rewards = np.array([item.reward for item in grades], dtype=np.float32)
        error = next((item.error for item in grades if item.error is not None), None)
        figures = rollout_figures(
            lengths=completions.lengths,
            cut_off=np.array(
                [reason == "length" and not item.broken for reason, item in zip(reasons, grades, strict=True)]
            ),
            rewards=rewards,
            groups=cursors[completions.prompt_index],
            kinds=[item.kind for item in grades],
            values={
                name: np.array([item.values[i] for item in grades], np.float32) for i, name in enumerate(self._names)
            },
        )
        return self._summary(
            rollout, rewards, len(completions.token_ids), error, started, figures=figures, from_store=False
        )

    def _sampled(
        self, prompt_ids: Sequence[Sequence[int]], cursors: np.ndarray, how: Mapping[str, Any]
    ) -> RaggedCompletions:
        """Sample a rollout."""
        completions = self.policy.generate_ragged(
            prompt_ids,
            group_size=self.config.group_size,
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stream_ids=cursors.tolist(),
            **how,
        )
        if completions.aborted is not None:
            raise EngineError(
                f"the engine {self.policy.engine.name} aborted {int(completions.aborted.sum())} of {len(completions)} "
                "completions of this rollout; none of it was stored. Did another client of the engine stop them? Type "
                "the same command with --resume: the rollout is sampled again."
            )
        return completions

    def _text(self, tokens: Sequence[int]) -> str:
        """Return a completion as rewards see it and the store keeps it."""
        keep, ends = not self.config.skip_special_tokens, self.policy.eos_token_ids
        text = decode_completion(self.policy.tokenizer, tokens, keep_special=keep, end_token_ids=ends)
        if self.config.stop and not self.config.keep_stop:
            text = StopStrings(self.policy.tokenizer, self.config.stop).without(text)
        return text

    def _graded(self, grades: Sequence[Grade]) -> dict[Key, Flat | Text]:
        """Return the columns of failures and of each reward, as far as the store has them."""
        found: dict[Key, Flat | Text] = {}
        if any(item.kind for item in grades):
            found[keys.FAILURE_REASON] = Text([item.kind for item in grades])
            found[keys.REWARD_TRUSTED] = Flat(torch.tensor([not item.kind for item in grades]))
        for number, reward in enumerate(self.grader.rewards):
            values = [item.values[number] for item in grades]
            found[reward.column] = Flat(torch.tensor(values, dtype=torch.float32))
        return {key: column for key, column in found.items() if key in self.buffer.store.schema}

    def observe(self, cursors: np.ndarray) -> None:
        """Advance the KL controller over stored groups as the write path did when it wrote them.

        Args:
            cursors: int64 [n], the groups' ids, consecutive.
        """
        if self.kl_reward is None:
            return
        store, rows = self.buffer.store, self._rows_of(cursors)
        log_probs, ref_log_probs, mask = (
            store.read_ragged(name, rows) for name in ("log_probs", "ref_log_probs", "assistant_mask")
        )
        self.kl_reward.observe(
            torch.from_numpy(log_probs.values),
            torch.from_numpy(ref_log_probs.values),
            torch.from_numpy(mask.values.astype(bool)),
            torch.from_numpy(np.asarray(mask.lengths, dtype=np.int64)),
        )

    def _sampled_by(self) -> dict[Key, str | float]:
        """Return how completions are sampled, as far as the store has columns for it."""
        engine = getattr(self.policy, "engine", None)  # a TorchRL wrapper has none
        facts: dict[Key, str | float] = {
            keys.ENGINE: "" if engine is None else engine.name,
            keys.TEMPERATURE: self.temperature,
            keys.LOG_PROB_MODE: "processed",
        }
        return {key: fact for key, fact in facts.items() if key in self.buffer.store.schema}

    def _by_these_weights(self, rows: np.ndarray, version: int, digests: Mapping[int, int] | None) -> bool:
        """Return whether the weights of this version sampled the rows, so that they would sample the same rollout."""
        read = self.buffer.store.read_scalars
        same = read("policy_version", rows) == version
        return bool(same.all() and (digests is None or (read("policy_digest", rows) == digests.get(version, 0)).all()))

    def _rows_of(self, cursors: np.ndarray) -> np.ndarray:
        """Return the row ids of the groups from the first to the last cursor, int64, in the order of arrival."""
        return self.stored.rows(int(cursors[0]), int(cursors[-1]))

    @staticmethod
    def _summary(
        index: int,
        rewards: np.ndarray,
        num_tokens: int,
        error: str | None,
        started: float,
        *,
        figures: Figures,
        from_store: bool,
    ) -> Rollout:
        failed = sum(int(figures.get(f"failed/{kind}") or 0) for kind in BROKEN)
        graded = np.isfinite(rewards)
        return Rollout(
            index=index,
            num_trajectories=len(rewards),
            num_tokens=num_tokens,
            task_reward=float(rewards[graded].mean(dtype=np.float64)) if graded.any() else None,
            num_failed=failed,
            first_error=error,
            seconds=time.perf_counter() - started,
            from_store=from_store,
            figures=figures,
        )


def trajectories(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    completions: RaggedCompletions,
    texts: Sequence[str],
    grades: Sequence[Grade],
    *,
    cursors: np.ndarray,
    group_size: int,
    policy_version: int,
    digests: Mapping[int, int] | None = None,
    sampled_by: Mapping[Key, str | float] | None = None,
) -> Trajectories:
    """Return `n` completed trajectories.

    Token ids are the sampler's own, prompt first; text is never re-encoded. Log-probs are NaN on prompt tokens, which
    no behaviour policy produced.

    Args:
        prompts: the prompts that were sampled from, [P].
        prompt_ids: their token ids.
        completions: `n` completions with behaviour log-probs, each naming its prompt.
        texts: the completions as text, [n].
        grades: the rewards, [n].
        cursors: int64 [P], the cursor of each prompt; it is the group's id.
        group_size: members of a whole group; makes `trajectory_id` unique.
        policy_version: optimizer steps behind the behaviour policy's weights, if the completions do not record it.
        digests: of the published weights, by version; a missing digest is unknown.
        sampled_by: further facts about the sampling, the same for all.
    """
    owner = completions.prompt_index
    prompt_lengths = np.array([len(ids) for ids in prompt_ids])[owner]
    lengths = prompt_lengths + completions.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    assistant = position >= np.repeat(prompt_lengths, lengths)

    tokens = np.empty(offsets[-1], dtype=np.int64)
    tokens[~assistant] = np.concatenate([prompt_ids[index] for index in owner])
    tokens[assistant] = completions.token_ids
    log_probs = np.full(offsets[-1], np.nan, dtype=np.float32)
    log_probs[assistant] = completions.log_probs
    if completions.support_log_mass is not None:
        log_mass = np.zeros_like(log_probs)
        log_mass[assistant] = completions.support_log_mass
        log_probs += log_mass  # under the whole distribution, as a policy scores them
        support = Flat(torch.from_numpy(log_mass), torch.from_numpy(lengths))
    else:
        support = None

    # A prompt's own, the same for each member without an error.
    own: list[dict[str, Any]] = [
        {"answer": prompt.answer, "prompt": prompt.meta}
        | ({} if prompt.messages is None else {"messages": prompt.messages})
        for prompt in prompts
    ]
    shared = [json.dumps(meta, ensure_ascii=False) for meta in own]
    spans = completions.spans
    reasons = np.where(completions.stopped, "stop", "length").tolist()
    beside = [_beside(item) for item in grades]
    out = Trajectories.completed(
        lengths,
        tokens=tokens,
        assistant=assistant,
        log_probs=log_probs,
        num_prompt_tokens=prompt_lengths,
        rewards=[item.reward for item in grades],
        group_ids=cursors[owner],
        trajectory_ids=cursors[owner] * group_size + completions.member,
        policy_versions=np.full(len(lengths), policy_version),
        version_spans=None
        if spans is None
        else Flat(torch.from_numpy(spans.placed(prompt_lengths)), torch.from_numpy(spans.counts)),
        finish_reasons=["failed" if item.broken else reason for reason, item in zip(reasons, grades, strict=True)],
        prompts=[prompts[index].text for index in owner],
        completions=texts,
        metas=[
            shared[index] if not more else json.dumps({**own[index], **more}, ensure_ascii=False)
            for index, more in zip(owner, beside, strict=True)
        ],
    )
    if support is not None:
        out[keys.SUPPORT_LOG_MASS] = support
    for key, fact in (sampled_by or {}).items():
        number = isinstance(fact, float)
        out[key] = Flat(torch.full((out.n,), fact)) if number else Text([fact] * out.n)
    if digests is not None:
        oldest: Any = out[keys.POLICY_VERSION]
        out[keys.POLICY_DIGEST] = Flat(torch.tensor([digests.get(version, 0) for version in oldest.values.tolist()]))
    return out


def _beside(item: Grade) -> dict[str, Any]:
    """Return what `meta` holds of a grade."""
    return ({"error": item.error} if item.error is not None else {}) | ({"rewards": item.parts} if item.parts else {})
