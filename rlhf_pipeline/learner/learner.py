"""The learner: one optimizer step over fresh trajectories, split into micro-batches that cannot change the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.samplers import StoreView
from rlhf_pipeline.config import Learn, Sample
from rlhf_pipeline.data.episodes import complete_episodes, episode_names, stored_last_rows
from rlhf_pipeline.data.upload import download
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.learner.ess_guard import guard
from rlhf_pipeline.learner.host_copies import HostCopies
from rlhf_pipeline.learner.metrics import (
    StepMeter,
    StepSeen,
    check_metrics,
    custom_metrics,
    data_metrics,
    kl_metrics,
    loss_metrics,
)
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.proximal import ProximalLogProbs
from rlhf_pipeline.learner.reference import MovingReference
from rlhf_pipeline.learner.state import LearnerState, StateCopy, learner_state, read_state, read_tensors, write_tensors
from rlhf_pipeline.learner.step_plan import (
    ChosenRows,
    StepLedger,
    StepPlan,
    UseCounts,
    check_reduction,
    part_of_rollout,
    plan_step,
    sampler_of,
    trajectory_names,
)
from rlhf_pipeline.losses.grpo import GRPOLoss, GRPOLossOutput
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.model_parts import rounding
from rlhf_pipeline.policies.token_policy import TokenPolicy

if TYPE_CHECKING:
    from rlhf_pipeline.learner.distributed import Shards

_LARGE_ADVANTAGE = 1e6
"""Above this value, the rewards cause a gradient that overflows."""
_ROW = torch.zeros(1, 2)
_NOTHING = LossBatch(
    tokens=_ROW.long(),
    attention=_ROW == 0,
    candidates=torch.tensor([[False, True]]),
    mask=torch.tensor([[False, True]]),
    behaviour=_ROW,
    advantage=_ROW,
    ref=_ROW,
    proximal=_ROW,
    weight=_ROW,
)
"""The batch of a process without further micro-batches while other processes gather weights: a row without weight."""


class Learner:
    """Takes optimizer steps on the trajectories of a buffer.

    A step is a pure function of the weights, the store and the step number: it sees the graded trajectories whose
    policy version is at most `max_staleness` behind, and takes all of them, in the order of their ids, or as many as
    `sample` selects. Loss weights are fixed from the counts of the whole step before it is split, so the token budget
    changes memory use but not the gradient. The step's ledger row is on disk before the optimizer steps, and the uses
    of a trajectory are counted from the ledger.

    Args:
        policy: the policy that learns.
        loss: takes a padded batch with per-token weights. If it is `decoupled`, the learner computes the trainer's own
            log-probs of new trajectories before the first step that may use them, and keeps them for later steps.
        buffer: where trajectories are read.
        config: optimizer and token budget.
        max_staleness: largest age, in optimizer steps, of a trajectory to learn from; None sets no limit.
        sample: which of these trajectories a step takes; all by default.
        batch_size: how many of these a step takes, unless `sample` sets it.
        max_completion_tokens: the limit at sampling; the divisor of the `dr_grpo` aggregation.
        ledger: records which trajectories entered which step; None records nothing (a replay).
        seed: recorded in the ledger.
        may_be_empty: the write path may drop every group of a rollout; such a step is counted and changes nothing.
        reference: moved towards the policy after each step; None if there is no reference or it is frozen.
        shards: of a policy that is sharded over several processes; see `learner.distributed`.
        check_sampler: report once if the log-probs stored with trajectories of the current weights differ from the
            policy's scores.

    Raises:
        DefinitionError: the loss sums or does not reduce, or an option does not work with several processes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from rlhf_pipeline import Collect, Collector, CopyDigits, MCAdvantage, token_match
    >>> from rlhf_pipeline.run.ledger import Ledger
    >>> from rlhf_pipeline import scratch_policy
    >>> folder = tempfile.mkdtemp()
    >>> policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    >>> buffer = TrajectoryReplayBuffer(storage=folder + "/store", transform=MCAdvantage(4))
    >>> collector = Collector(
    ...     policy=policy, prompts=CopyDigits(num_digits=2), reward=token_match, buffer=buffer, seed=0,
    ...     config=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
    ... )
    >>> learner = Learner(
    ...     policy=policy, loss=GRPOLoss(policy), buffer=buffer, config=Learn(), max_staleness=0,
    ...     max_completion_tokens=3, ledger=Ledger(Path(folder) / "ledger.jsonl"), seed=0,
    ... )
    >>> rollout = collector.collect(0, policy_version=0)
    >>> learner.step(1)["num_trajectories"], len(learner.ledger.rows)
    (8, 1)
    >>> buffer.trajectories.close()
    """

    def __init__(
        self,
        *,
        policy: TokenPolicy,
        loss: GRPOLoss,
        buffer: TrajectoryReplayBuffer,
        config: Learn,
        max_staleness: int | None,
        max_completion_tokens: int,
        ledger: StepLedger | None,
        seed: int,
        may_be_empty: bool = False,
        reference: MovingReference | None = None,
        shards: Shards | None = None,
        check_sampler: bool = False,
        sample: Sample | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_reduction(loss)
        self.policy = policy
        self.loss = loss
        self.buffer = buffer
        self.max_staleness = max_staleness
        self.max_completion_tokens = max_completion_tokens
        self._ledger = ledger
        self.seed = seed
        self.sample = Sample() if sample is None else sample
        self.batch_size = self.sample.batch_size or batch_size
        self._sampler = sampler_of(self.sample, max_staleness=max_staleness, steps_per_rollout=config.steps_per_rollout)
        self._uses = None if ledger is None else UseCounts(ledger, window=self.max_staleness)
        self.may_be_empty = may_be_empty
        self.reference = reference
        self.shards = shards
        if shards is not None:
            shards.check(config)
            config = dataclasses.replace(config, layout="padded", compile="off")
            if self.sample.min_ess is not None:
                raise DefinitionError("sample.min_ess does not support several processes. Set it to none.")
            if config.keep_token_figures:
                raise DefinitionError("learn.keep_token_figures does not support several processes. Set it to false.")
            if loss.settings.chooses_tokens:
                raise DefinitionError(
                    "loss.top_entropy_quantile and loss.clip_cov select among all tokens of a step, which does not "
                    "work with several processes. Set loss.top_entropy_quantile=1 and loss.clip_cov=none."
                )
        schema = buffer.store.schema
        if "advantage" in schema and schema["advantage"].ragged:
            raise DefinitionError(
                f"the store at {buffer.store.path} has an advantage per token, but a learner needs one per "
                "trajectory. Create the store with trajectory_schema(), or sample from the buffer and call the loss "
                "yourself."
            )
        self.config = config
        check_metrics(config.metrics)
        if config.activation_checkpointing:
            policy.checkpoint_activations()
        eager = policy.set_scoring(layout=config.layout, compiled=config.compile)
        self.optimizer = PolicyOptimizer(policy.model, config)
        self._meter = StepMeter(
            policy, peak_flops=config.peak_flops, processes=1 if shards is None else shards.world_size
        )
        self._allowed_gap = rounding(policy.head_weight, fine=1e-5, coarse=5e-3) if check_sampler else None
        """The difference of sampled and scored log-probs that rounding explains; None if it is no longer checked."""
        self._notices: list[str] = [] if eager is None else [eager]
        self._passed = (0, 0, -1)
        self._proximal = ProximalLogProbs()
        self._copies = HostCopies()
        self._copy: StateCopy | None = None

    @property
    def ledger(self) -> StepLedger:
        """The record of which trajectories entered which step.

        Raises:
            DefinitionError: the learner was created without a ledger.
        """
        if self._ledger is None:
            raise DefinitionError("this learner records nothing: it was created with ledger=None.")
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: StepLedger | None) -> None:
        self._ledger = ledger
        self._uses = None if ledger is None else UseCounts(ledger, window=self.max_staleness)

    def write(self, folder: Path) -> None:
        """Write weights, optimizer, random generator, moving reference, proximal log-probs and use counts.

        `run.checkpoint.save_checkpoint` turns this into a checkpoint atomically.
        """
        if self.shards is None:
            self._state().write(folder)
            return
        self.shards.broadcast("write", folder=str(folder))
        self.shards.write(folder, policy=self.policy, optimizer=self.optimizer)
        if self.shards.is_first:
            write_tensors(folder, self._files())

    def begin_copy(self) -> StateCopy | None:
        """Return a copy of everything that `write` writes, for a thread to make and to write while steps are taken.

        It is valid until the next call, which reuses its memory. None if this machine has too little memory for it, or
        if the state is sharded over several processes.
        """
        if self.shards is not None:
            return None
        self._settle_copy()
        state = self._state()
        if not self._copies.fit(state.changing()):
            return None
        self._copy = StateCopy(state, self._copies)
        return self._copy

    def _settle_copy(self) -> None:
        """Wait until a copy of the state is made that was begun; called before anything changes the state."""
        if self._copy is not None:
            self._copy.settle()
            self._copy = None

    def _state(self) -> LearnerState:
        return learner_state(policy=self.policy, optimizer=self.optimizer, more=self._files())

    def _files(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what a checkpoint has beside weights and optimizer."""
        files: dict[str, dict[str, torch.Tensor]] = {}
        if self.reference is not None:
            files["reference"] = self.reference.state_tensors()
        if self.loss.settings.decoupled:
            files["proximal"] = self._proximal.state_tensors()
        if self._uses is not None:
            files["uses"] = {"uses": torch.from_numpy(self._uses.state())}
        return files

    def read(self, folder: Path) -> None:
        """Load what `write` wrote.

        Raises:
            DataError: the folder is damaged, or belongs to another model.
        """
        self._settle_copy()
        moved, proximal = read_tensors(folder, "reference"), read_tensors(folder, "proximal")
        uses = read_tensors(folder, "uses")
        if self.shards is not None:
            self.shards.broadcast("read", folder=str(folder))
        read_state(folder, policy=self.policy, optimizer=self.optimizer)
        if self.shards is not None:
            self.shards.refresh_mirror()
        if self.reference is not None and moved is not None:
            self.reference.load_state_tensors(moved)
        self._proximal.load_state_tensors(proximal or {})
        if self._uses is not None and uses is not None:
            self._uses.load_state(uses["uses"].numpy())

    def follow(self, bring: Callable[[Path], Path] = lambda path: path) -> None:
        """Repeat the steps, writes and reads of the first process until it sends a stop.

        For the other processes of a group whose first one leads; see `Shards.lead`.

        Args:
            bring: maps a folder that the first process reads to the path where this one can read it.
        """
        from rlhf_pipeline.learner.group import receive  # one process does not need its imports

        while (message := receive())["what"] != "stop":
            if message["what"] == "step":
                self.buffer.refresh()
                fields = ("row_ids", "ages", "admitted")
                row_ids, ages, admitted = (np.asarray(message[name], dtype=np.int64) for name in fields)
                self.step(message["step"], row_ids=row_ids, ages=ages, admitted=admitted)
            elif message["what"] == "write":
                self.write(Path(message["folder"]))
            else:
                self.read(bring(Path(message["folder"])))

    def take_notices(self) -> list[str]:
        """Return the notices for the user since the last call, and clear them."""
        notices, self._notices = self._notices, []
        return notices

    def step(
        self,
        step: int,
        *,
        row_ids: np.ndarray | None = None,
        ages: np.ndarray | None = None,
        admitted: np.ndarray | None = None,
        ledger_fields: Mapping[str, object] | None = None,
    ) -> dict[str, float | int | str | None]:
        """Take optimizer step number `step` (1-based) and return its metrics.

        Args:
            step: its number; the weights' version before it is `step - 1`.
            row_ids: int64 [n], the rows to learn from; None takes those of `chosen_rows`.
            ages: int64 [n], the ages of these rows, if the stored policy version does not give them; None takes
                `step - 1` minus that version.
            admitted: int64 [n], the rows that this step and later ones may use, in the order of their trajectory ids: a
                `decoupled` loss scores those that are new before this step. None takes those of `admitted_rows` if
                `row_ids` is None, else `row_ids`.
            ledger_fields: further fields of the step's ledger row, JSON-ready.

        Raises:
            DataError: no graded trajectory is fresh enough.
        """
        self._meter.start()
        store, version = self.buffer.store, step - 1
        if self.loss.settings.decoupled and self.max_staleness is not None:
            self._forget_proximal(version, self.max_staleness)
        if row_ids is None:
            chosen = self.chosen_rows(step)
            if admitted is None and self.chooses_a_part:
                admitted = complete_episodes(store, self.admitted_rows(step).row_ids)[0]
        else:
            if ages is None:
                ages = version - store.read_scalars("policy_version", row_ids)
            chosen = self._with_episodes(ChosenRows(row_ids, ages, trajectory_names(store, row_ids)))
            admitted = None if admitted is None else complete_episodes(store, admitted)[0]
        if len(chosen.row_ids) == 0:
            self._notices.append(
                f"step {step} has nothing to learn from and is a no-op: no trajectory within the age limit "
                "belongs to a group with spread"
                + (" and may be used again." if self.sample.max_uses is not None else ".")
            )
        uses = None if self._uses is None else self._uses.before(step, chosen.trajectory_ids)
        unscored = self._unscored(chosen.row_ids, admitted)
        if self.shards is not None:
            message = {"row_ids": chosen.row_ids, "ages": chosen.ages, "admitted": unscored}
            self.shards.broadcast("step", step=step, **{name: values.tolist() for name, values in message.items()})
        if len(unscored):
            self._score_proximal(self._plan(unscored))
        plan = self._plan(chosen.row_ids)
        if len(chosen.row_ids) and not bool(plan.advantages.any()):
            self._notices.append(
                f"step {step}: every advantage is 0, because no group has two different rewards"
                + ("; only the other terms of the loss act." if bool(plan.learns.any()) else ": it is a no-op.")
            )
        if self.loss.settings.decoupled:
            plan = self._freeze_proximal(plan)
        guarded: dict[str, float | None] = {}
        if self.sample.min_ess is not None:
            plan, guarded["ess_weight"], ess_notice = guard(
                plan, chosen.ages, self.sample, self.policy, self._micro_batch
            )
            if ess_notice:
                self._notices.append(f"step {step}: {ess_notice}")
        if self.loss.settings.chooses_tokens:
            plan = self._choose_tokens(plan, step)
        losses = loss_metrics(self._accumulate_gradient(plan))
        if self._allowed_gap is not None and len(chosen.ages) and not chosen.ages.any():
            self._compare_with_the_sampler(step, losses, self._allowed_gap)
        gradient_norm = self.optimizer.clip(self.config.max_grad_norm)
        if not torch.isfinite(gradient_norm):
            self.optimizer.zero_grad()
            reach = float(plan.advantages.abs().max())
            advice = "Lower learn.lr or learn.max_grad_norm in a new run"
            if reach > _LARGE_ADVANTAGE:
                advice = (
                    f"The advantages of this step reach {reach:.1e}: use smaller rewards, or set write.estimator=grpo"
                )
            raise DataError(
                f"the gradient of step {step} is not finite (norm {float(gradient_norm)}, loss {losses['loss']}); "
                f"the weights were not changed. {advice}, or inspect the trajectories of the step with "
                "`rlhf-pipeline show`."
            )
        if self._ledger is not None and (self.shards is None or self.shards.is_first):
            self._record(self._ledger, step, chosen, plan, losses["ess"], ledger_fields or {})
        if self.config.keep_token_figures:
            self._keep_token_figures(plan)
        lr = self.config.learning_rate(step)
        self._settle_copy()
        self.optimizer.step(lr)
        if self.reference is not None:
            self.reference.after_step(step)
        if self.shards is not None:
            self.shards.refresh_mirror()
        if self.config.layout != "padded":
            self._notices += self.policy.layout_notices()
        step_view = StepSeen(
            step=step,
            store=store,
            row_ids=plan.row_ids,
            advantages=plan.advantages.numpy(),
            ages=chosen.ages,
            teaches=plan.teaches,
            uses=uses,
        )
        figures: dict[str, float | int | None] = {
            "policy_version": version,
            "num_trajectories": len(chosen.row_ids),
            "watermark": store.watermark,
            **losses,
            **guarded,
            **data_metrics(step_view),
            **kl_metrics(plan.parts, [*plan.batches, *plan.measured], self.shards),
            "grad_norm": float(gradient_norm),
            "lr": lr,
            **self._meter.metrics(plan),
        }
        if self.config.metrics:
            view = dataclasses.replace(step_view, figures=figures)
            custom_figures, problems = custom_metrics(self.config.metrics, view)
            figures |= custom_figures
            self._notices += [f"step {step}: {problem}" for problem in problems]
        # On a GPU the last bits depend on the kernels that ran.
        computed = self.policy.take_computed() if self.policy.device.type == "cuda" else {}
        return {**figures, **computed}

    @property
    def chooses_a_part(self) -> bool:
        """Whether a step may use some of the rows that it could, and a `decoupled` loss must score the others too."""
        in_parts = self.sample.strategy != "fresh" or self.sample.max_uses is not None or self.config.minibatches > 1
        return self.loss.settings.decoupled and in_parts

    def _plan(self, row_ids: np.ndarray) -> StepPlan:
        """Return the plan of a step that learns from these rows."""
        return plan_step(
            self.buffer.trajectories,
            row_ids,
            loss=self.loss,
            token_budget=self.config.token_budget,
            max_completion_tokens=self.max_completion_tokens,
            policy=self.policy,
            shards=self.shards,
            complete_episodes=self.config.episode_weight == "one",
        )

    def _with_episodes(self, chosen: ChosenRows) -> ChosenRows:
        """Return the rows of all episodes that rows were chosen from, one after the other."""
        row_ids, place = complete_episodes(self.buffer.store, chosen.row_ids)
        if len(row_ids) == len(chosen.row_ids):
            return chosen
        names = trajectory_names(self.buffer.store, row_ids)
        return ChosenRows(row_ids, chosen.ages[place], names, chosen.left_out)

    def _fresh(self, version: int, watermark: int | None) -> ChosenRows:
        """Return the graded trajectories with an advantage that are young enough for the weights of a version."""
        store = self.buffer.store
        if watermark is None:
            self.buffer.trajectories.check_new()
        oldest = math.inf if self.max_staleness is None else self.max_staleness
        every = store.ids()
        if watermark is not None:
            every = every[: max(len(every) - (store.watermark - watermark), 0)]
        # In a long run nearly all trajectories are too old and stay so. The search begins at the first that is not.
        # Eviction shifts positions, and so does a commit that is seen late: then all trajectories are searched.
        earlier, passed, last = self._passed
        if version < earlier or len(every) != store.watermark or (passed and every[passed - 1] != last):
            passed = 0
        new_rows = every[passed:]
        # Candidates are read unchecked: the rows of a step are checked when they are chosen, and a damaged row that no
        # step uses stops nothing.
        ages = version - store.read_scalars(
            "policy_version", new_rows if len(new_rows) < len(store) else None, checked=False
        )
        if len(every) == store.watermark:
            young = ages <= oldest
            begin = int(young.argmax()) if young.any() else len(young)
            passed, new_rows, ages = passed + begin, new_rows[begin:], ages[begin:]
            self._passed = (version, passed, int(every[passed - 1]) if passed else -1)
        young = (ages >= 0) & (ages <= oldest)
        graded = np.isfinite(store.read_scalars("task_reward", new_rows, checked=False))
        # A NaN reward marks a trajectory whose reward call failed: stored, never used for training.
        # Only the last row of an episode has a reward; the others are learned from with it.
        last = stored_last_rows(store, new_rows, checked=False)
        usable, left_out = young & graded, {"failed": int((young & ~graded & last).sum())}
        ready = self.buffer.trajectories.ready(new_rows)
        if ready is not None:
            waiting = int((young & ~ready & last).sum())
            left_out = {"failed": int((young & ready & ~graded & last).sum()), "waiting": waiting}
            usable &= ready
        if not usable.any() and not self.may_be_empty:
            raise DataError(
                f"no graded trajectory is within the age limit at policy version {version} (buffer.max_staleness="
                f"{'none' if self.max_staleness is None else self.max_staleness}; trajectories in the store: "
                f"{len(every)}). Collect new rollouts, or raise buffer.max_staleness."
            )
        row_ids = new_rows[usable]
        # The versions by which these rows were chosen are read again, checked: a damaged one is an error that names it.
        ages = version - store.read_scalars("policy_version", row_ids)
        fresh_rows = ChosenRows(row_ids, ages, trajectory_names(store, row_ids), left_out)
        # In the order of the trajectory ids, each once: if a trajectory was sampled again, its newest row.
        names = episode_names(store, row_ids, fresh_rows.trajectory_ids, checked=False)
        _, from_the_end = np.unique(names[::-1], return_index=True)
        return fresh_rows.take(len(row_ids) - 1 - from_the_end)

    def admitted_rows(
        self,
        step: int,
        *,
        keep: Callable[[ChosenRows], np.ndarray] | None = None,
        watermark: int | None = None,
    ) -> ChosenRows:
        """Return the trajectories that `chosen_rows` chooses from, in the order of their ids; arguments as there.

        Of an episode of several rows this is the last one, which has the reward.
        """
        fresh = self._fresh(step - 1, watermark)
        return fresh if keep is None else fresh.take(keep(fresh))

    def chosen_rows(
        self,
        step: int,
        *,
        keep: Callable[[ChosenRows], np.ndarray] | None = None,
        of_newest: Callable[[ChosenRows], np.ndarray] | None = None,
        watermark: int | None = None,
    ) -> ChosenRows:
        """Choose the trajectories of a step: a pure function of the store, the ledger, the seed and the step.

        Args:
            step: its number, from 1.
            keep: returns which trajectories are allowed, bool [n]; None allows all.
            of_newest: returns which of these are of the newest rollout, bool [n]; None if their age shows it.
            watermark: read the store as of this watermark; None means now, with all that is new compared with its
                checksums.

        Returns:
            The trajectories, in the order of their ids, each with all rows of its episode; none if the strategy rejects
            all.

        Raises:
            DataError: all are too old, or each has been used the maximum number of times.
        """
        fresh = self.admitted_rows(step, keep=keep, watermark=watermark)
        if self.config.minibatches > 1 and self.sample.strategy == "fresh":
            rollout = fresh.take(fresh.ages <= (step - 1) % self.config.steps_per_rollout)
            return self._with_episodes(rollout.take(self.part(len(rollout.row_ids), step)))
        most = self.sample.max_uses
        if self.sample.strategy == "fresh" and most is None:
            return self._with_episodes(fresh)
        uses = np.zeros(len(fresh.row_ids), np.int64)
        if self._uses is not None and most is not None:
            uses = self._uses.before(step, fresh.trajectory_ids)
        if most is not None and len(uses) and bool((uses >= most).all()) and not self.may_be_empty:
            raise DataError(
                f"step {step}: each of the {len(uses)} trajectories within the age limit has been used "
                f"{'once' if most == 1 else f'{most} times'}. Raise sample.max_uses, or lower sample.batch_size."
            )
        newest = None if of_newest is None else of_newest(fresh)
        view = StoreView(self.buffer.store, fresh.row_ids, version=step - 1, uses=uses, newest=newest)
        drawn = np.sort(self._sampler.select(view, self.batch_size, seed=self.seed, step=step))
        return self._with_episodes(fresh.take(drawn))

    def part(self, num_rows: int, step: int) -> np.ndarray:
        """Return which of the newest rollout's trajectories a step learns from; see `step_plan.part_of_rollout`."""
        return part_of_rollout(num_rows, step=step, config=self.config, seed=self.seed)

    def _accumulate_gradient(self, plan: StepPlan) -> GRPOLossOutput | None:
        """Run forward and backward over the step's micro-batches; return the loss and the figures of the whole step.

        Rows without a gradient run forward only, so that the figures cover all trajectories. Without rows, return None.
        """
        longest = int(plan.lengths.max()) if len(plan.lengths) else 0
        if longest > self.config.token_budget:
            self._notices.append(
                f"a trajectory of {longest} tokens is longer than learn.token_budget={self.config.token_budget}; it "
                "is computed in a separate forward pass."
            )
        outputs: list[GRPOLossOutput] = []
        for batches, learns in ((plan.batches, True), (plan.measured, False)):
            by_number: dict[int, GRPOLossOutput] = {}
            numbers = range(len(batches))
            for number in numbers if self.shards is None else self.shards.share(numbers):
                batch = _NOTHING if number is None else self._micro_batch(plan, batches[number])
                with torch.set_grad_enabled(learns):
                    if self.shards is None:
                        output = self.loss(batch)
                        total = output.total_loss()
                    else:
                        total, output = self.shards.run(partial(self._total_and_output, batch))
                if learns:
                    total.backward()
                if number is not None:
                    by_number[number] = output
            if batches:
                outputs += by_number.values() if self.shards is None else self.shards.gather(by_number, len(batches))
        return GRPOLossOutput.merge(outputs) if outputs else None

    def _total_and_output(self, batch: LossBatch) -> tuple[torch.Tensor, GRPOLossOutput]:
        output = self.loss(batch)
        return output.total_loss(), output

    def _unscored(self, chosen: np.ndarray, admitted: np.ndarray | None) -> np.ndarray:
        """Return the rows besides the chosen ones whose proximal log-probs are to be taken now: int64 [n]."""
        if admitted is None or not self.loss.settings.decoupled:
            return np.empty(0, np.int64)
        return admitted[self._proximal.missing(admitted) & ~np.isin(admitted, chosen)]

    def _freeze_proximal(self, plan: StepPlan) -> StepPlan:
        """Score the rows that have no proximal log-probs yet; return the plan without lost tokens."""
        self._score_proximal(plan)
        proximal_rows = [self._proximal.row(row) for row in plan.row_ids.tolist()]
        lost = torch.tensor([int((~torch.isfinite(row)).sum()) for row in proximal_rows], dtype=torch.int64)
        if not bool(lost.any()):
            return plan
        return plan.without(lost, loss=self.loss, max_completion_tokens=self.max_completion_tokens)

    @torch.no_grad()
    def _score_proximal(self, plan: StepPlan) -> None:
        """Keep the policy's log-probs of the plan's rows that have none yet."""
        new = torch.from_numpy(self._proximal.missing(plan.row_ids))
        scored: dict[int, torch.Tensor] = {}
        for batches in (plan.batches, plan.measured):
            numbers = [number for number, chosen in enumerate(batches) if bool(new[chosen].any())]
            mine = numbers if self.shards is None else self.shards.share(numbers)
            share = [None if number is None else batches[number] for number in mine]
            calls = [partial(self._current_log_probs, plan, chosen) for chosen in share]
            # One wait for all of them: meanwhile the host prepares the next.
            scores = download([call() if self.shards is None else self.shards.run(call) for call in calls])
            own_rows: dict[int, torch.Tensor] = {}
            for chosen, of_batch in zip(share, scores, strict=True):
                own_rows |= {} if chosen is None else _of_rows(plan, chosen, of_batch)
            positions = [at for number in numbers for at in batches[number].tolist()]
            scored |= self.shards.exchange(own_rows, positions) if self.shards is not None and positions else own_rows
        for at in new.nonzero()[:, 0].tolist():
            self._proximal.put(int(plan.row_ids[at]), scored[at])

    def _choose_tokens(self, plan: StepPlan, step: int) -> StepPlan:
        """Return the plan with the choice of the tokens that keep their policy loss, a function of weights and step."""
        rows = [*plan.batches, *plan.measured]
        if not rows:
            return plan
        batches = [self._micro_batch(plan, chosen) for chosen in rows]
        chosen_tokens = self.loss.choose_tokens(batches, rows=rows, seed=(self.seed, step))
        parts = {
            int(at[0]): dataclasses.replace(plan.parts[int(at[0])], keep=k)
            for at, k in zip(rows, chosen_tokens, strict=True)
        }
        return dataclasses.replace(plan, parts=parts)

    def _keep_token_figures(self, plan: StepPlan) -> None:
        """Give the step's rows the log-prob and the entropy that the weights before it have for each token."""
        figures_by_row: dict[int, np.ndarray] = {}
        for chosen in (*plan.batches, *plan.measured):
            batch = self._micro_batch(plan, chosen)
            figures = self.loss.token_figures(batch).unbind(1)
            present = batch.attention.cpu()
            figures_by_row |= {
                at: row[:, mask].numpy() for at, row, mask in zip(chosen.tolist(), figures, present, strict=True)
            }
        if figures_by_row:
            log_probs, entropy = ([values[kind] for values in figures_by_row.values()] for kind in (0, 1))
            self.buffer.store.update(plan.row_ids[list(figures_by_row)], policy_log_probs=log_probs, entropy=entropy)

    def _current_log_probs(self, plan: StepPlan, chosen: torch.Tensor | None) -> torch.Tensor:
        """Return the policy's log-probs of a micro-batch, `[B, T]`, on its device; None represents an empty one."""
        if chosen is None:
            return self.policy.log_probs(_NOTHING.tokens, _NOTHING.attention, _NOTHING.mask)
        batch = plan.parts[int(chosen[0])]
        return self.policy.log_probs(batch.tokens, batch.attention, batch.candidates)

    def _forget_proximal(self, version: int, max_staleness: int) -> None:
        """Drop the log-probs of trajectories that are too old or no longer in the store."""
        proximal_ids, store = self._proximal.row_ids(), self.buffer.store
        if not len(proximal_ids):
            return
        stored = store.holds(proximal_ids)
        young = version - store.read_scalars("policy_version", proximal_ids[stored], checked=False) <= max_staleness
        self._proximal.forget(np.concatenate([proximal_ids[~stored], proximal_ids[stored][~young]]))

    def _micro_batch(self, plan: StepPlan, chosen: torch.Tensor) -> LossBatch:
        """Return a micro-batch, with its loss weights."""
        batch = plan.parts[int(chosen[0])]
        mask, ref, proximal = batch.mask, batch.ref, None
        if self.loss.settings.decoupled:
            proximal_values = torch.cat([self._proximal.row(row) for row in plan.row_ids[chosen.numpy()].tolist()])
            proximal = torch.zeros(mask.shape)
            proximal[batch.candidates] = proximal_values
            mask = mask & torch.isfinite(proximal)
        if ref is None and self.loss.settings.reads_reference and bool(plan.scored.any() or not plan.produced.any()):
            ref = torch.full(mask.shape, torch.nan)  # other rows of the step have them; the loss excludes these
        weight = plan.weights[chosen][:, None] * batch.candidates
        return dataclasses.replace(batch, mask=mask, ref=ref, proximal=proximal, weight=weight)

    def _compare_with_the_sampler(self, step: int, losses: Mapping[str, float | int | None], allowed: float) -> None:
        """Report, once, if the stored log-probs differ from those of the weights that sampled."""
        bias, gap = losses["kl_approx"], losses["sampler_gap"]
        if bias is not None and gap is not None and gap > allowed:
            self._allowed_gap = None
            self._notices.append(
                f"step {step} learns from trajectories of the current weights, but the sampled log-probs differ from "
                f"the scored ones: the mean difference is {bias:.1e}, and the mean absolute difference is {gap:.1e} "
                f"(rounding explains at most {allowed:.0e}). Does the engine use a different temperature, a different "
                "precision, top-k or top-p? --set loss.tis_cap=2 corrects for a difference that cannot be avoided."
            )

    def _record(
        self,
        ledger: StepLedger,
        step: int,
        chosen: ChosenRows,
        plan: StepPlan,
        ess: float | None,
        more: Mapping[str, object],
    ) -> None:
        as_before = ledger.record(
            {
                "step": step,
                "row_ids": chosen.row_ids.tolist(),
                # Evicted trajectories that are sampled again have other rows and the same trajectory ids.
                "trajectory_ids": chosen.trajectory_ids.tolist(),
                "watermark": self.buffer.store.watermark,
                "seed": self.seed,
                "ages": chosen.ages.tolist(),
                "ess": ess,
                # A page that shows which rows taught nothing reads it here.
                "no_gradient": chosen.row_ids[~plan.teaches].tolist(),
                "left_out": dict(chosen.left_out),
                **more,
            },
            differs=self._check_replaceable,
        )
        if not as_before:
            self._notices.append(
                f"step {step} uses different trajectories than before the restart, because some are no longer in the "
                "store; the run continues but is no longer identical to the interrupted one."
            )

    def _check_replaceable(self, earlier: Mapping[str, Any]) -> None:
        """Reject other trajectories than those of a step's ledger row, unless these were lost."""
        step, store = int(earlier["step"]), self.buffer.store
        rows = np.asarray(earlier["row_ids"], dtype=np.int64)
        if not store.holds(rows).all():
            return
        recorded_names = earlier.get("trajectory_ids")
        if recorded_names == trajectory_names(store, rows).tolist():
            ages = earlier.get("newest_version", step - 1) - store.read_scalars("policy_version", rows)
            if ages.tolist() != earlier["ages"]:
                return  # a power loss took them, and other weights sampled them again
            what = "but other trajectories would now be used in the step"
        else:
            what = "but they are now other trajectories"
        raise DataError(
            f"the ledger lists {len(rows)} rows for step {step}, and {store.path} still contains all of them, {what}: "
            "the store or the ledger does not belong to this run, or was damaged. Check both with `rlhf-pipeline "
            "verify`, and restore the run from a copy, or start a new run from its checkpoint: rlhf-pipeline run "
            "--from RUN."
        )


def _of_rows(plan: StepPlan, chosen: torch.Tensor, scores: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the policy's log-probs of the assistant tokens of a micro-batch's rows, by position in the plan."""
    batch = plan.parts[int(chosen[0])]
    scores = scores.where(batch.mask, 0.0)  # the loss excludes the others already, whatever the reason
    return {at: row[keep] for at, row, keep in zip(chosen.tolist(), scores, batch.candidates, strict=True)}
