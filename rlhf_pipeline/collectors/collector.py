"""The in-process collector: rollout `r` is a pure function of the weights, the seed and `r`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.stored_groups import StoredGroups
from rlhf_pipeline.buffer.trajectory_schema import CURSOR, EPISODE, EVALUATION, named_reward, reward_names, turn_reward
from rlhf_pipeline.collectors.conversations import Conversation, Conversations
from rlhf_pipeline.collectors.dynamic import Round, as_one, dynamic_figures, groups_to_store
from rlhf_pipeline.collectors.grading import Grade, Grader, Grading, check_all_failed, part_values
from rlhf_pipeline.collectors.rollout_figures import Figures, rollout_figures, stored_figures
from rlhf_pipeline.collectors.sampled_rows import (
    MEMBER,
    OWNER,
    episode_of,
    num_turns,
    sampled_completions,
    sampled_conversations,
    trajectories,
    turn_rewards,
)
from rlhf_pipeline.collectors.source_rewards import SourceRewards
from rlhf_pipeline.config import Collect
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.episodes import last_rows, stored_last_rows, totals
from rlhf_pipeline.data.keys import Key, reward_column, turn_reward_column
from rlhf_pipeline.data.prompts import (
    Prompt,
    PromptSource,
    columns_of,
    prompt_at,
    template_options,
    through_template,
)
from rlhf_pipeline.data.rewards import EnvironmentReward, Reward, RewardFunction, environment_reward
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories
from rlhf_pipeline.environments.environment import has_effects
from rlhf_pipeline.environments.outcomes import BROKEN
from rlhf_pipeline.errors import DefinitionError, EngineError
from rlhf_pipeline.policies.adapters import Policy, policy_of
from rlhf_pipeline.policies.chat import decode_completion, decode_prompt, encode_any, encode_text
from rlhf_pipeline.policies.engines.protocol import Engine, RaggedCompletions, WeightRefresh, Weights
from rlhf_pipeline.policies.engines.sampling import Truncation
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.transforms.kl_controllers import ConstantKLController
from rlhf_pipeline.transforms.kl_reward import KLReward
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb, ScoringBeside
from rlhf_pipeline.user_code.arguments import BoundRewards, Sampled, bind
from rlhf_pipeline.user_code.runtime import process_runtime

_MOST_NAMED: Final = 64
_REWARD: Final = reward_column("")
_TURN: Final = turn_reward_column("")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The result of one rollout."""

    index: int
    num_trajectories: int
    num_tokens: int
    """Completion tokens sampled; 0 if the rollout was already in the store."""
    task_reward: float | None
    """Mean over the rollout's graded trajectories, unshaped; None if it is no longer available."""
    num_failed: int
    """The number of trajectories whose environment or reward function failed."""
    seconds: float
    from_store: bool
    """True if the rollout was already in the store, from a killed run, so nothing was sampled."""
    figures: Figures = field(default_factory=dict[str, "float | int | None"])
    """Metrics from `rollout_figures`; empty if a part of the rollout is no longer available."""


class Collector:
    """Turns prompts into completed trajectories and writes them through the buffer's write path.

    Rollout `r` takes the prompts from cursor `r * prompts_per_rollout` on. The prompt's cursor is its `group_id` and
    seeds its completions, so a rollout that a crash interrupts is sampled again token for token, and a rollout that is
    already in the store is not sampled again: no prompt is lost or repeated.

    With `config.dynamic` above 1 (`collectors.dynamic`) a rollout has up to that many rounds, its groups keep their
    numbers, and the prompts from cursor `r * prompts_per_rollout * dynamic` on belong to it: which of them it used
    depends only on the weights, the seed and `r`. It is still one commit.

    Args:
        policy: samples the completions. A TorchRL wrapper works too, see `interop.torchrl.wrappers`; with an external
            engine (vLLM) a rollout is not a pure function of the seed.
        prompts: a pure source of prompts.
        reward: one function or several, see `rlhf_pipeline.user_code.arguments`, which are bound to the columns of
            `prompts`; or the result of `bind`. A call that raises fails only its trajectory.
        buffer: its `extend` runs the write path and commits.
        config: sizes and temperature.
        seed: the run's seed.
        kl_reward: the write path's KL penalty; rollouts already in the store are reported to it.
        hand_over: maps a version to the policy's weights, for an engine with its own copy; None if the engine samples
            with the policy's modules, or gets its weights elsewhere.
        retrieve: the write path's `RetrieveLogProb`, to score completions as they end, while others are being sampled;
            only with a `CausalLMPolicy`, and a reference that is a separate model. None scores on the write path.
        environment: answers the policy's turns; see `rlhf_pipeline.environments`. None samples one turn.
        temperature: the sampling temperature, in place of the config's; 0 selects the most probable token.
        marks: columns that are the same for every trajectory, such as `evaluation`.
        same_tasks: the prompts repeat after so many, and with them the seeds of their environments' tasks, whatever the
            run's seed: an evaluation. None gives each group a separate task.

    Raises:
        DefinitionError: the write path needs batches of another size than a rollout.

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
        reward: RewardFunction | Reward | Sequence[RewardFunction | Reward] | BoundRewards,
        buffer: TrajectoryReplayBuffer,
        config: Collect,
        seed: int,
        kl_reward: KLReward | None = None,
        hand_over: Callable[[int], Weights] | None = None,
        retrieve: RetrieveLogProb | None = None,
        environment: Callable[..., Any] | dict[str, Any] | None = None,
        temperature: float | None = None,
        marks: Mapping[str, bool] | None = None,
        same_tasks: int | None = None,
    ) -> None:
        self.policy: TokenPolicy = policy_of(policy, "Collector")
        process_runtime().pool.size = config.call_threads
        self.prompts = prompts
        bound = reward if isinstance(reward, BoundRewards) else bind(reward, columns_of(prompts, seed))
        self.marks = dict(marks or {})
        self.grader = Grader(
            bound,
            concurrency=config.reward_concurrency,
            timeout_s=config.reward_timeout_s,
            leaves_out=not self.marks.get(EVALUATION.name, False),
            retries=config.retries,
        )
        self._names = [reward.label for reward in self.grader.rewards] if bound.has_columns else []
        self.buffer = buffer
        self.config = config
        self.seed = seed
        self.kl_reward = kl_reward
        self.hand_over = hand_over
        self.retrieve = retrieve
        self.temperature = config.temperature if temperature is None else temperature
        self.conversations: Conversations | None = None
        if environment is not None:
            if not isinstance(self.policy, TokenPolicy):
                raise DefinitionError(
                    f"an environment needs a CausalLMPolicy, but the policy is of type {type(policy).__name__}."
                )
            self.conversations = Conversations(
                environment,
                policy=self.policy,
                config=config,
                temperature=self.temperature,
                seed=seed,
                as_chat=through_template(prompts),
                template=template_options(prompts),
                names=[
                    reward.function.name
                    for reward in self.grader.rewards
                    if isinstance(reward.function, EnvironmentReward)
                ],
                same_tasks=same_tasks,
            )
        self._by_source = SourceRewards.of(
            prompts, None if self.conversations is None else self.conversations.make, seed
        )
        self.keeps_each = self.conversations is not None and has_effects(self.conversations.make)
        """Whether each conversation is stored when it ends, so that a kill repeats none with external effects."""
        if self.keeps_each:
            _check_keeps_each(config, self.grader, kl_reward)
        self.stored = StoredGroups(buffer.store)
        """Finds groups that are already in the store."""
        if buffer.batch_groups not in (None, config.prompts_per_rollout):
            raise DefinitionError(
                f"MCAdvantage has batch_groups={buffer.batch_groups}, but a rollout has {config.prompts_per_rollout} "
                f"groups. Each batch must consist of one rollout: set batch_groups={config.prompts_per_rollout}."
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
        """Ensure that all of rollout number `rollout` is in the store.

        Args:
            rollout: 0, 1, 2, ...
            policy_version: optimizer steps behind the policy's weights.
            refresh: loads newer weights during sampling; only with a `CausalLMPolicy`.
            digests: of the published weights by version, read after sampling; None if none are published.
            is_first: this is the first attempt at the rollout, so the store is not searched for it.
            stop: whether a signal has requested a stop; reward calls are then not awaited.
            say: receives a notice: a reward call takes long, many trajectories failed, or too few groups have spread
                after the last round of dynamic sampling.

        Returns:
            The summary of the rollout, read from the store if it was already there.

        Raises:
            RewardError: every reward call failed. Nothing was stored.
            StopAskedError: there was a request to stop while reward calls were running. Nothing was stored.
            EngineError: the engine is unreachable, or aborted a completion. Nothing was stored.
            StoreError: the store could not write the rollout; none of it was acknowledged.
        """
        started, config = time.perf_counter(), self.config
        groups = rollout * config.prompts_per_rollout + np.arange(config.prompts_per_rollout)
        if self.keeps_each:
            return self._collect_each(rollout, groups, policy_version, started, refresh, digests, stop, say)
        # Looked up each time: a ring may have evicted part of what a resumed run replays.
        store, size = self.buffer.store, len(groups) * config.group_size
        rows = np.empty(0, np.int64) if is_first else self._rows_of(groups)
        episodes = rows[stored_last_rows(store, rows)]
        # A rollout is one commit. A stored rollout lacks rows if the write path dropped groups, or if a ring is
        # evicting it: then its remaining rows are the oldest in the store, and are evicted next.
        cut = 0 < len(episodes) < size and len(store) < store.watermark and rows[0] == store.ids()[0]
        if len(episodes) >= size or (
            len(rows) and not cut and (refresh is not None or not self._by_these_weights(rows, policy_version, digests))
        ):
            self.observe(groups)
            figures, rewards = self._stored_figures(rows), store.read_scalars("task_reward", episodes)
            if config.dynamic > 1 and CURSOR.name in store.schema:
                by = config.dynamic_by
                if by is not None and reward_column(by) in store.schema:
                    rewards = np.where(np.isfinite(rewards), store.read_scalars(reward_column(by), episodes), np.nan)
                figures |= self._dynamic_figures(rollout, store.read_scalars(CURSOR.name, episodes), rewards)
            task_rewards = store.read_scalars("task_reward", episodes)
            summary = self._summary(rollout, task_rewards, 0, started, figures=figures, from_store=True)
            # The rewards of dropped groups are not stored, and other weights would sample other groups.
            lost = {} if len(episodes) >= size else {"num_trajectories": size, "task_reward": None, "figures": {}}
            return replace(summary, **lost)

        self._hand_over(policy_version)
        beside = None if self.retrieve is None or self.conversations is not None else ScoringBeside(self.retrieve)
        rounds: list[Round] = []
        while not rounds or (len(rounds) < config.dynamic and sum(len(drawn.spread) for drawn in rounds) < len(groups)):
            rounds.append(self._round(rollout, len(rounds), beside, refresh, stop, say))
        joined, chosen_groups = rounds[0], np.arange(len(groups))
        if config.dynamic > 1:
            joined = as_one(rounds)
            chosen_groups = groups_to_store(joined.spread, len(joined.prompts), len(groups))
        sampled, owner, last = joined.rows, joined.owner, last_rows(joined.rows)
        places = np.flatnonzero(np.isin(owner, chosen_groups)).tolist()
        grades = [joined.grades[place] for place in places]
        names = np.full(len(joined.prompts), -1)
        names[chosen_groups] = groups
        batch = self._rows(joined, names, policy_version=policy_version, digests=digests)
        if beside is not None:
            batch |= beside.columns(batch)
        if len(places) < len(owner):
            batch = batch.select(torch.tensor(np.flatnonzero(np.isin(sampled.numbers(OWNER), chosen_groups))))
        # Otherwise the write path dropped part of it, and would again.
        self.buffer.extend(batch, write=len(rows) == 0 or cut)
        rewards = np.array([item.reward for item in grades], dtype=np.float32)
        _report_failures(rollout, joined.grades, config.alarm_failed, say)
        turns, reasons = num_turns(sampled), np.array(sampled.texts(keys.FINISH_REASON), dtype=object)[last]
        lengths = totals(sampled.lengths(keys.TOKENS) - sampled.numbers(keys.NUM_PROMPT_TOKENS), last)
        figures = rollout_figures(
            lengths=lengths[places],
            cut_off=np.array(
                [reasons[place] == "length" and not joined.grades[place].broken for place in places], bool
            ),
            rewards=rewards,
            groups=names[owner[places]],
            kinds=[item.kind for item in grades],
            values={name: np.array(values, np.float32) for name, values in self._reward_values(grades).items()},
            parts=self._parts(grades),
            turns=None if turns is None else totals(turns, last)[places],
        )
        if self._by_source is not None:
            figures |= self._by_source.figures(joined.cursors[owner[places]], rewards, figures)
        if config.dynamic > 1:
            figures |= self._dynamic_figures(rollout, joined.cursors[owner[places]], joined.steered[places])
            if say is not None and len(joined.spread) < len(groups):
                say(
                    f"rollout {rollout}: groups with spread in their {config.dynamic_by or 'rewards'} after "
                    f"{len(rounds)} rounds (collect.dynamic): {len(joined.spread)} of {len(joined.prompts)}; groups "
                    f"without spread that fill the rollout: {len(groups) - len(joined.spread)}."
                )
        num_tokens = int(sampled.numbers(keys.ASSISTANT_MASK).sum())
        return self._summary(rollout, rewards, num_tokens, started, figures=figures, from_store=False)

    def _collect_each(
        self,
        rollout: int,
        cursors: np.ndarray,
        policy_version: int,
        started: float,
        refresh: WeightRefresh | None,
        digests: Mapping[int, int] | None,
        stop: Callable[[], bool] | None,
        say: Callable[[str], None] | None,
    ) -> Rollout:
        """Store each conversation of a rollout as it ends; those that are in the store already are not begun again."""
        size, store, conversations = self.config.group_size, self.buffer.store, self.conversations
        assert conversations is not None
        stored_ids = {*store.read_scalars("trajectory_id", self._rows_of(cursors)).tolist()}
        names = (cursors[:, None] * size + np.arange(size)).ravel().tolist()
        left = [place for place, name in enumerate(names) if name not in stored_ids]
        grades: list[Grade] = []
        num_tokens = 0

        def ended(place: int, conversation: Conversation) -> None:
            nonlocal num_tokens
            with self.grader.begin(1) as grading:
                self._grade(grading, 0, conversation)
                (grade,) = grading.results(stop, say)
            rows = sampled_conversations([conversation], self._text, group_size=1)
            rows[MEMBER] = Flat(torch.full((rows.n,), place % size))
            at = cursors[[place // size]]
            completed = Round(
                prompts=[conversation.prompt], cursors=at, rows=rows, grades=[grade], steered=self._steered([grade])
            )
            self.buffer.extend(self._rows(completed, at, policy_version=policy_version, digests=digests))
            grades.append(grade)
            num_tokens += int(rows.numbers(keys.ASSISTANT_MASK).sum())

        if left:
            prompts = [prompt_at(self.prompts, int(cursor), self.seed) for cursor in cursors]
            self._hand_over(policy_version)
            conversations.run(prompts, cursors.tolist(), refresh=refresh, ended=ended, only=left)
            _report_notices(self._engine, say)
            _report_failures(rollout, grades, self.config.alarm_failed, say)
        else:
            self.observe(cursors)
        rows = self._rows_of(cursors)
        rewards = store.read_scalars("task_reward", rows[stored_last_rows(store, rows)])
        figures = self._stored_figures(rows)
        return self._summary(rollout, rewards, num_tokens, started, figures=figures, from_store=not left)

    def _stored_figures(self, rows: np.ndarray) -> Figures:
        """Return the figures of rows in the store, which are those of the rollout that stored them."""
        store, figures = self.buffer.store, stored_figures(self.buffer.store, rows, self._names)
        if self._by_source is not None:
            rows = rows[stored_last_rows(store, rows)]
            cursors = store.read_scalars(CURSOR.name if CURSOR.name in store.schema else "group_id", rows)
            figures |= self._by_source.figures(cursors, store.read_scalars("task_reward", rows), figures)
        return figures

    @property
    def _engine(self) -> Engine | None:
        """The engine that samples; None for a TorchRL wrapper, which samples itself."""
        return getattr(self.policy, "engine", None)

    def _hand_over(self, version: int) -> None:
        """Give an engine with its own copy the policy's weights, unless it has them."""
        if self.hand_over is not None and self.policy.engine.version != version:
            self.policy.engine.load_weights(self.hand_over(version), version)

    def _rows(
        self, drawn: Round, groups: np.ndarray, *, policy_version: int, digests: Mapping[int, int] | None
    ) -> Trajectories:
        """Return sampled rows with failures, each reward and marks, as far as the store has columns for them."""
        batch = trajectories(
            drawn.prompts,
            drawn.rows,
            drawn.grades,
            groups=groups,
            group_size=self.config.group_size,
            policy_version=policy_version,
            digests=digests,
        )
        columns: dict[Key, Flat | Text] = {
            keys.ENGINE: Text(["" if self._engine is None else self._engine.name] * batch.n),
            keys.TEMPERATURE: Flat(torch.full((batch.n,), self.temperature)),
            keys.LOG_PROB_MODE: Text(["processed"] * batch.n),
            keys.PROMPT_CURSOR: Flat(torch.from_numpy(drawn.cursors[drawn.rows.numbers(OWNER)])),
        }
        of, last = episode_of(drawn.rows), last_rows(drawn.rows)
        if any(item.kind for item in drawn.grades):
            columns[keys.FAILURE_REASON] = Text([drawn.grades[place].kind for place in of])
            columns[keys.REWARD_TRUSTED] = Flat(torch.tensor([not drawn.grades[place].kind for place in of]))
        if keys.TURN_REWARDS in self.buffer.store.schema:
            columns |= turn_rewards(drawn.rows, drawn.grades, self.grader.rewards)
        for name, values in self._reward_values(drawn.grades).items():
            each = np.where(last, np.array(values, np.float32)[of], np.float32(np.nan))
            columns[reward_column(name)] = Flat(torch.from_numpy(each))
        self._gain_columns(columns)
        if keys.EPISODE_ID in batch and keys.EPISODE_ID not in self.buffer.store.schema:
            self.buffer.store.add_columns(EPISODE)
        batch |= {key: column for key, column in columns.items() if key in self.buffer.store.schema}
        batch |= {name: Flat(torch.full((batch.n,), mark)) for name, mark in self.marks.items()}
        return batch

    def _reward_values(self, grades: Sequence[Grade]) -> dict[str, list[float]]:
        """Return each named reward and component of trajectories, without weights; NaN where it does not apply."""
        by_name = {name: [item.values[number] for item in grades] for number, name in enumerate(self._names)}
        return by_name | self._parts(grades)

    def _parts(self, grades: Sequence[Grade]) -> dict[str, list[float]]:
        """Return the components of rewards, also those of an environment that only earlier conversations were given."""
        rewards, schema = self.grader.rewards, self.buffer.store.schema
        whole = any(reward.function is environment_reward for reward in rewards)
        earlier = [column.name.removeprefix(_TURN) for column in schema if whole and column.name.startswith(_TURN)]
        return part_values(rewards, grades, [name for name in earlier if name not in self._names])

    def _gain_columns(self, columns: Mapping[Key, Flat | Text]) -> None:
        """Add the columns of components, whose names are known once a reward function has returned them.

        A store has at most 64 of them: what a policy writes may decide a component's name. `meta` holds the others.
        """
        store = self.buffer.store
        num_columns = len(reward_names(store.schema))
        names = [str(key) for key in columns if str(key) not in store.schema]
        gained = [named_reward(name.removeprefix(_REWARD)) for name in names if name.startswith(_REWARD)]
        gained += [turn_reward(name.removeprefix(_TURN)) for name in names if name.startswith(_TURN)]
        if gained := gained[: max(_MOST_NAMED - num_columns, 0)]:
            store.add_columns(gained)

    def _round(
        self,
        rollout: int,
        number: int,
        beside: ScoringBeside | None,
        refresh: WeightRefresh | None,
        stop: Callable[[], bool] | None,
        say: Callable[[str], None] | None,
    ) -> Round:
        """Sample and grade one round of a rollout."""
        size = self.config.prompts_per_rollout
        cursors = (rollout * self.config.dynamic + number) * size + np.arange(size)
        prompts = [prompt_at(self.prompts, int(cursor), self.seed) for cursor in cursors]
        grading = self.grader.begin(self.config.group_size)
        with grading:
            if self.conversations is None:
                rows = self._completed(
                    prompts, cursors, grading, refresh, beside, number * size * self.config.group_size
                )
            else:
                rows = self._conversed(self.conversations, prompts, cursors, grading, refresh)
            grades = grading.results(stop, say)
        _report_notices(self._engine, say)
        check_all_failed(grades, self.grader.rewards)
        steered, by = self._steered(grades), self.config.dynamic_by
        if by is not None and say is not None and not np.isfinite(steered).any():
            reward_names = ", ".join(self._reward_values(grades)) or "none"
            say(
                f"rollout {rollout}: collect.dynamic_by is {by!r}, but no trajectory has a reward or component with "
                f"that name, so no group has spread; the names are: {reward_names}."
            )
        return Round(prompts=prompts, cursors=cursors, rows=rows, grades=grades, steered=steered)

    def _steered(self, grades: Sequence[Grade]) -> np.ndarray:
        """Return what must differ within a group that dynamic sampling keeps, float32 [n]; NaN without a reward."""
        rewards, by = np.array([item.reward for item in grades], np.float32), self.config.dynamic_by
        if by is None:
            return rewards
        values = self._reward_values(grades).get(by, [np.nan] * len(grades))
        return np.where(np.isfinite(rewards), np.array(values, np.float32), np.nan).astype(np.float32)

    def _dynamic_figures(self, rollout: int, cursors: np.ndarray, rewards: np.ndarray) -> Figures:
        num_groups, most = self.config.prompts_per_rollout, self.config.dynamic
        return dynamic_figures(cursors - rollout * num_groups * most, rewards, num_groups=num_groups, most_rounds=most)

    def _completed(
        self,
        prompts: Sequence[Prompt],
        cursors: np.ndarray,
        grading: Grading,
        refresh: WeightRefresh | None,
        beside: ScoringBeside | None,
        num_before: int,
    ) -> Trajectories:
        """Sample one turn for each member, after so many of earlier rounds; their reward calls begin as they end."""
        as_chat, options = through_template(self.prompts), template_options(self.prompts)
        prompt_ids = [
            encode_any(self.policy.tokenizer, prompt, as_chat=as_chat, template=options) for prompt in prompts
        ]
        begins = self._prefill()
        how: dict[str, Any] = {} if refresh is None else {"refresh": refresh}
        if self.config.stop:
            how["stop"] = self.config.stop
        if self.config.is_truncated:
            how["truncation"] = Truncation(top_k=self.config.top_k, top_p=self.config.top_p, min_p=self.config.min_p)
        prompt_texts: list[str | None] = [None] * len(prompts)
        if self.grader.bound.takes_prompt_text:
            prompt_texts = [decode_prompt(self.policy.tokenizer, ids) for ids in prompt_ids]
        prompt_ids = [[*ids, *begins] for ids in prompt_ids]
        texts: dict[int, str] = {}

        def row(owner: int, text: str, tokens: Sequence[int], finish_reason: str = "stop") -> Sampled:
            before = prompt_ids[owner]
            return Sampled(
                prompt=prompts[owner],
                completion=text,
                ids=[*before, *tokens],
                mask=[False] * len(before) + [True] * len(tokens),
                finish_reason=finish_reason,
                prompt_text=prompt_texts[owner],
            )

        def ended(place: int, tokens: Sequence[int]) -> None:
            texts[place], owner = self._text(tokens), place // self.config.group_size
            grading.add(place, row(owner, texts[place], tokens))
            if beside is not None:
                beside.ended(num_before + place, prompt_ids[owner], tokens)

        if isinstance(self.policy, TokenPolicy):  # a TorchRL wrapper passes nothing on
            how["ended"] = ended
        completions = self._sampled(prompt_ids, cursors, how)
        reasons = np.where(completions.stopped, "stop", "length").tolist()
        ids = np.split(completions.token_ids, np.cumsum(completions.lengths)[:-1])
        for place, (tokens, reason) in enumerate(zip(ids, reasons, strict=True)):
            token_ids, owner = tokens.tolist(), completions.prompt_index[place]
            texts[place] = texts[place] if place in texts else self._text(token_ids)
            grading.add(place, row(owner, texts[place], token_ids, reason), ended=True)
        return sampled_completions(
            prompt_ids, completions, [texts[place] for place in range(len(completions))], prompt_texts
        )

    def _conversed(
        self,
        conversations: Conversations,
        prompts: Sequence[Prompt],
        cursors: np.ndarray,
        grading: Grading,
        refresh: WeightRefresh | None,
    ) -> Trajectories:
        """Run a conversation for each member; their reward calls begin as they end."""

        def ended(place: int, conversation: Conversation) -> None:
            self._grade(grading, place, conversation)

        finished = conversations.run(prompts, cursors.tolist(), refresh=refresh, ended=ended)
        return sampled_conversations(finished, self._text, group_size=self.config.group_size)

    def _grade(self, grading: Grading, place: int, conversation: Conversation) -> None:
        """Begin the reward calls of a conversation that is over."""
        if conversation.failure is not None:
            grading.fail(place, conversation.failure)
            return
        assert conversation.row is not None
        if self.grader.bound.takes_prompt_text:
            before = conversation.row.ids[: conversation.row.began]
            conversation.prompt_text = decode_prompt(self.policy.tokenizer, before)
        sampled = Sampled(
            prompt=conversation.prompt,
            completion=conversation.at.last_text,
            ids=conversation.row.ids,
            mask=conversation.row.mask,
            finish_reason=conversation.finish_reason,
            conversation=tuple(conversation.messages),
            num_asked=conversation.at.num_asked,
            rewards=dict(conversation.rewards),
            turns=conversation.num_turns,
            call_errors=conversation.call_errors,
            environment=getattr(conversation.environment, "owner", conversation.environment),
            prompt_text=conversation.prompt_text,
        )
        grading.add(place, sampled, ended=True)

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
                f"the engine {self.policy.engine.name} aborted {int(completions.aborted.sum())} of "
                f"{len(completions)} completions of this rollout, so it was not stored. Check whether another client "
                "of the engine cancelled them, then repeat the command with --resume to sample the rollout again."
            )
        return completions

    def _text(self, tokens: Sequence[int]) -> str:
        """Return a completion as rewards see it and the store keeps it."""
        keep, ends = not self.config.skip_special_tokens, self.policy.eos_token_ids
        text = decode_completion(self.policy.tokenizer, tokens, keep_special=keep, end_token_ids=ends)
        if self.config.stop and not self.config.keep_stop:
            text = StopStrings(self.policy.tokenizer, self.config.stop).without(text)
        return self.config.prefill + text

    def _prefill(self) -> list[int]:
        """Return the tokens of the text that every completion begins with."""
        if not self.config.prefill:
            return []
        return encode_text(self.policy.tokenizer, self.config.prefill, add_special_tokens=False)

    def observe(self, groups: np.ndarray) -> None:
        """Advance the KL controller over stored groups as the write path did when it wrote them.

        Args:
            groups: int64 [n], their ids, consecutive.
        """
        if self.kl_reward is None:
            return
        store, rows = self.buffer.store, self._rows_of(groups)
        log_probs, ref_log_probs, mask = (
            store.read_ragged(name, rows) for name in ("log_probs", "ref_log_probs", "assistant_mask")
        )
        self.kl_reward.observe(
            torch.from_numpy(log_probs.values),
            torch.from_numpy(ref_log_probs.values),
            torch.from_numpy(mask.values.astype(bool)),
            torch.from_numpy(np.asarray(mask.lengths, dtype=np.int64)),
        )

    def _by_these_weights(self, rows: np.ndarray, version: int, digests: Mapping[int, int] | None) -> bool:
        """Return whether the weights of this version sampled the rows, so that they would sample the same rollout."""
        read = self.buffer.store.read_scalars
        same = read("policy_version", rows) == version
        return bool(same.all() and (digests is None or (read("policy_digest", rows) == digests.get(version, 0)).all()))

    def _rows_of(self, groups: np.ndarray) -> np.ndarray:
        """Return the row ids of the groups from the first to the last one, int64, in the order of arrival."""
        return self.stored.rows(int(groups[0]), int(groups[-1]))

    @staticmethod
    def _summary(
        index: int,
        rewards: np.ndarray,
        num_tokens: int,
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
            seconds=time.perf_counter() - started,
            from_store=from_store,
            figures=figures,
        )


def _check_keeps_each(config: Collect, grader: Grader, kl_reward: KLReward | None) -> None:
    """Reject what sees several conversations at once where each is stored as it ends."""
    why = "the environment has external effects, so each conversation is graded and stored when it ends"
    if any(form.batched for form in grader.forms):
        raise DefinitionError(
            f"{why}; a batched reward function cannot be used. Use one that grades a single completion."
        )
    if config.retries:
        raise DefinitionError(f"{why}; collect.retries={config.retries} would repeat these effects. Set it to 0.")
    if config.dynamic > 1:
        raise DefinitionError(f"{why}; collect.dynamic={config.dynamic} discards groups. Set it to 1.")
    if kl_reward is not None and not isinstance(kl_reward.controller, ConstantKLController):
        raise DefinitionError(f"{why}; write.kl_target needs complete rollouts. Set it to None.")


def _report_notices(engine: Engine | None, say: Callable[[str], None] | None) -> None:
    if say is not None:
        of_engine = engine.take_notices() if isinstance(engine, SlotEngine) else []
        for sentence in process_runtime().take_notices() + of_engine:
            say(sentence)


def _report_failures(rollout: int, grades: Sequence[Grade], most: float, say: Callable[[str], None] | None) -> None:
    """Report a rollout of which a larger share than this has no reward to trust, as something failed."""
    broken = [item for item in grades if item.broken]
    if say is None or len(broken) <= most * len(grades):
        return
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(Counter(item.kind for item in broken).items()))
    say(
        f"rollout {rollout}: {len(broken)} of {len(grades)} trajectories failed and are not used for training "
        f"({kinds}); the first error is {broken[0].error}"
    )
