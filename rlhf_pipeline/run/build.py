"""Building the live objects of a definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrl.envs.transforms import Compose

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import (
    CURSOR,
    FAILURES,
    SAMPLED_BY,
    SUPPORT,
    TEMPERATURE,
    TOKEN_FIGURES,
    TURN_ADVANTAGES,
    TURN_REWARDS,
    TURNS,
    named_reward,
    turn_reward,
)
from rlhf_pipeline.collectors.collector import Collector
from rlhf_pipeline.collectors.curriculum import FollowedMix
from rlhf_pipeline.config import Pipeline, TinyPolicy, WritePath
from rlhf_pipeline.data.prompts import Mix, skips_too_long
from rlhf_pipeline.data.rewards import as_column
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.lora import AdaptersOff, add_adapters
from rlhf_pipeline.learner.reference import MovingReference
from rlhf_pipeline.losses.grpo import GRPOLoss
from rlhf_pipeline.policies.model_source import template_text
from rlhf_pipeline.policies.new_model import scratch_model
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.bound_rewards import bound_rewards
from rlhf_pipeline.run.completeness import is_free
from rlhf_pipeline.run.engines import HandOver
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.prompt_lengths import check_prompts, fitting
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.template_check import template_notices
from rlhf_pipeline.transforms.advantage_settings import estimator_entry
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController
from rlhf_pipeline.transforms.kl_reward import KLReward
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb
from trajectory_store import Column

if TYPE_CHECKING:
    from rlhf_pipeline.learner.distributed import Shards
    from trajectory_store import Schema


@dataclass(frozen=True, kw_only=True)
class Models:
    """The policy and, if a KL term needs one, a reference: a copy of its first weights, or itself without adapters."""

    policy: TokenPolicy
    reference: TokenPolicy | AdaptersOff | None
    trained: TokenPolicy | None = None
    """Under torchrun: the sharded policy that learns; `policy` is then a complete copy that samples."""
    shards: Shards | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The live objects of one run that collects."""

    policy: TokenPolicy
    buffer: TrajectoryReplayBuffer
    collector: Collector
    learner: Learner
    kl_reward: KLReward | None
    curriculum: FollowedMix | None = None

    def write_path_state(self) -> dict[str, Any]:
        """Return the state of the transforms, JSON-ready."""
        controller = self.kl_reward.controller if self.kl_reward is not None else None
        return {"kl_controller": controller.state_dict() if controller is not None else None}

    def load_write_path_state(self, state: dict[str, Any]) -> None:
        """Restore what `write_path_state` returned."""
        controller = self.kl_reward.controller if self.kl_reward is not None else None
        if controller is not None and state["kl_controller"] is not None:
            controller.load_state_dict(state["kl_controller"])


def build_models(pipeline: Pipeline, *, seed: int, device: str) -> Models:
    """Make or load the policy, and the reference model if the definition needs one."""
    policy = build_policy(pipeline, seed=seed, device=device)
    trained, shards = _sharded(pipeline, seed=seed, device=device, mirror=policy)
    reference: TokenPolicy | AdaptersOff | None = None
    if pipeline.needs_reference:
        if pipeline.policy.lora_rank:
            reference = AdaptersOff(policy)
        else:
            reference = _policy(pipeline, seed, device)
            reference.requires_grad_(False)
            # Scored by the code path of the update, so that the two differ in nothing but their weights.
            reference.set_scoring(layout=pipeline.learn.layout, compiled=pipeline.learn.compile)
    return Models(policy=policy, reference=reference, trained=trained, shards=shards)


def checked_models(setup: Setup, run: RunFolder, on_event: EventHandler) -> Models:
    """Build the models of a run that samples; before its first rollout, check that they have room for its prompts."""
    models = build_models(setup.pipeline, seed=setup.seed, device=setup.device)
    if is_free(run):  # later, the prompts are those of its record
        template_notices(setup.pipeline, models.policy)  # given later; what the template cannot show is raised here
        check_prompts(setup.pipeline, models.policy, setup.seed, on_event)
    return models


def _sharded(
    pipeline: Pipeline, *, seed: int, device: str, mirror: TokenPolicy | None
) -> tuple[TokenPolicy | None, Shards | None]:
    """Return the sharded policy that learns and its shards; (None, None) in a single process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None, None
    from rlhf_pipeline.learner.distributed import shard_policy
    from rlhf_pipeline.learner.group import send

    if mirror is not None:
        send({"what": "build"})  # the others wait for it: they must not wait for a process that has failed
    trained = build_policy(pipeline, seed=seed, device=device)
    shards = shard_policy(trained)
    shards.check(pipeline.learn)
    shards.lead(None if mirror is None else mirror.model)
    return trained, shards


def take_part(pipeline: Pipeline, *, run_dir: Address, seed: int, device: str) -> None:
    """Take part in the steps of a group's first process, which runs the pipeline, until it is done or has failed."""
    from rlhf_pipeline.learner.group import receive

    if receive()["what"] == "stop":
        return
    trained, shards = _sharded(pipeline, seed=seed, device=device, mirror=None)
    if trained is None or shards is None:
        raise DefinitionError("the first process is missing: start all processes with torchrun.")
    if receive()["what"] == "stop":
        return
    run = RunFolder(run_dir)

    def local_path(folder: Path) -> Path:
        """Return this process's path of a folder in the first one's run, which may be on another machine."""
        return run.bring(run.path / folder.parent.name / folder.name)

    with closing(TrajectoryStorage(run.store_path, mode="r")) as storage:
        buffer = TrajectoryReplayBuffer(storage=storage, seed=seed)
        build_learner(pipeline, trained, buffer, ledger=None, seed=seed, shards=shards).follow(local_path)


def build_policy(pipeline: Pipeline, *, seed: int, device: str) -> TokenPolicy:
    """Make or load the policy, with its adapters if the definition asks for them."""
    policy, config = _policy(pipeline, seed, device), pipeline.policy
    if config.lora_rank:
        add_adapters(policy, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets, seed=seed)
    return policy


def _policy(pipeline: Pipeline, seed: int, device: str) -> TokenPolicy:
    config, collect = pipeline.policy, pipeline.collect
    sampling: dict[str, Any] = {
        "temperature": collect.temperature,
        "max_new_tokens": collect.max_new_tokens,
        "num_slots": collect.num_slots,
    }
    if isinstance(config, TinyPolicy):
        model, tokenizer = scratch_model(
            config.alphabet,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            seed=seed,
        )
        tokenizer.response_template = config.response_template
        _set_template(tokenizer, config.chat_template)
        return TokenPolicy(model, tokenizer, **sampling).to(device)
    dtype_name = config.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    dtype = getattr(torch, dtype_name)
    policy = TokenPolicy.from_pretrained(config.path, device=device, dtype=dtype, **sampling)
    _set_template(policy.tokenizer, config.chat_template)
    return policy


def _set_template(tokenizer: Any, template: str | None) -> None:
    """Give a tokenizer the chat template of a definition; its checkpoints have it, too."""
    if template is None:
        return
    if tokenizer is None:
        raise DefinitionError(
            "policy.chat_template needs a tokenizer, but the model folder has none. Copy the model's tokenizer to the "
            "folder."
        )
    tokenizer.chat_template = template_text(template)


def build_loss(pipeline: Pipeline, policy: TokenPolicy) -> GRPOLoss:
    """Make the loss of a definition."""
    return GRPOLoss(policy, pipeline.loss)


def build_learner(
    pipeline: Pipeline,
    policy: TokenPolicy,
    buffer: TrajectoryReplayBuffer,
    *,
    ledger: Ledger | None,
    seed: int,
    shards: Shards | None = None,
    reference: MovingReference | None = None,
    check_sampler: bool = False,
    may_be_empty: bool | None = None,
) -> Learner:
    """Build the learner of a definition; the only place where this is done."""
    replay = pipeline.replay
    drawn = replay is not None and not replay.recorded_order
    return Learner(
        policy=policy,
        loss=build_loss(pipeline, policy),
        buffer=buffer,
        config=pipeline.learn,
        # Trajectories drawn from stores may be of any age.
        max_staleness=None if drawn else pipeline.max_staleness,
        max_completion_tokens=pipeline.longest_completion,
        ledger=ledger,
        seed=seed,
        may_be_empty=pipeline.replay is None or pipeline.write.drops_groups if may_be_empty is None else may_be_empty,
        reference=reference,
        shards=shards,
        check_sampler=check_sampler,
        sample=pipeline.sample,
        batch_size=pipeline.step_size,
    )


@contextmanager
def build_parts(
    pipeline: Pipeline,
    models: Models,
    *,
    run: RunFolder,
    seed: int,
    hand_over: HandOver | None = None,
    learns: bool = True,
) -> Iterator[Parts]:
    """Open or create the store and build everything that uses it; close the store at the end."""
    advantage = MCAdvantage(
        pipeline.collect.group_size,
        settings=pipeline.write,
        rewards=pipeline.reward_weights,
        batch_groups=pipeline.collect.prompts_per_rollout if estimator_entry(pipeline.write).by_batch else None,
        scored_in=models.policy.head_weight.dtype,
    )
    kl_reward = _kl_reward(pipeline.write)
    retrieve = RetrieveLogProb(models.reference) if models.reference is not None else None
    # `extend` runs the list in reverse: log-probs, then shaped reward, then advantage.
    write_path: list[Any] = [part for part in (advantage, kl_reward, retrieve) if part is not None]
    with closing(open_storage(run, pipeline, max_size=pipeline.buffer.max_trajectories)) as storage:
        if models.shards is not None:
            models.shards.broadcast("ready")  # the following processes open the store now
        buffer = TrajectoryReplayBuffer(storage=storage, transform=Compose(*write_path), seed=seed)
        prompts = pipeline.prompts
        if skips_too_long(prompts):
            prompts = fitting(prompts, models.policy, prefill=pipeline.collect.prefill)
        followed = None
        if pipeline.curriculum is not None and isinstance(prompts, Mix):
            each = pipeline.collect.prompts_per_rollout
            followed = prompts = FollowedMix(prompts, pipeline.curriculum, buffer.store, each)
        yield Parts(
            policy=models.policy,
            buffer=buffer,
            collector=Collector(
                policy=models.policy,
                prompts=prompts,
                reward=bound_rewards(pipeline),
                buffer=buffer,
                config=pipeline.collect,
                seed=seed,
                kl_reward=kl_reward,
                hand_over=hand_over,
                retrieve=retrieve if _scores_beside(pipeline, models) else None,
                environment=pipeline.environment,
            ),
            learner=build_learner(
                pipeline,
                models.trained or models.policy,
                buffer,
                ledger=Ledger(run.rows(run.ledger_file), metrics=run.metrics) if learns else None,
                seed=seed,
                shards=models.shards,
                reference=_moving_reference(pipeline, models),
                check_sampler=True,
            ),
            kl_reward=kl_reward,
            curriculum=followed,
        )


def _scores_beside(pipeline: Pipeline, models: Models) -> bool:
    """Return whether completions are scored with the reference while others are being sampled.

    Slots on a CPU would only wait for it, and last bits would depend on the order in which completions end. The
    reference of LoRA is the modules that sample, with their adapters off.
    """
    return (
        isinstance(models.reference, TokenPolicy)
        and pipeline.environment is None
        and (pipeline.collect.engine != "slots" or models.reference.device.type == "cuda")
    )


def open_storage(
    run: RunFolder, pipeline: Pipeline, *, max_size: int | None, schema: Schema | None = None
) -> TrajectoryStorage:
    """Open the run's trajectories, or create the store."""
    return TrajectoryStorage(
        run.store_path,
        max_size=max_size,
        backend=run.place.backend(pipeline.buffer.backend),
        durability=pipeline.buffer.durability,
        schema=schema,
        extra=_extra_columns(pipeline, collects=schema is None),
    )


def _extra_columns(pipeline: Pipeline, *, collects: bool) -> tuple[Column, ...]:
    """Return the columns of a run beside the usual ones; without `collects` not those of what is collected."""
    figures = TOKEN_FIGURES if pipeline.learn.keep_token_figures else ()
    if not collects:
        return figures
    collect = pipeline.collect
    sampled_by = SAMPLED_BY if collect.refresh_weights_every or collect.engine != "slots" else (TEMPERATURE,)
    support = (SUPPORT,) if collect.is_truncated else ()
    turns = ()
    if pipeline.environment is not None:
        turns = (TURNS, TURN_REWARDS, *map(turn_reward, filter(None, map(as_column, pipeline.environment_rewards))))
        turns += (TURN_ADVANTAGES,) if estimator_entry(pipeline.write).by_turn else ()
    cursor = (CURSOR,) if collect.dynamic > 1 else ()
    return (
        *sampled_by,
        *cursor,
        *support,
        *turns,
        *FAILURES,
        *figures,
        *map(named_reward, pipeline.reward_names),
    )


def _moving_reference(pipeline: Pipeline, models: Models) -> MovingReference | None:
    """Return the object that moves the reference towards the policy, or None if there is nothing to move."""
    learn = pipeline.learn
    if not learn.reference_every or not pipeline.needs_reference:
        return None
    if not isinstance(models.reference, TokenPolicy):
        raise DefinitionError(
            "learn.reference_every updates the reference only in a run with one process; with collectors, the "
            "reference is frozen. Use `rlhf-pipeline run`, or set learn.reference_every=0."
        )
    reference, policy = models.reference.model, models.policy.model
    return MovingReference(reference, policy, every=learn.reference_every, rate=learn.reference_rate)


def _kl_reward(config: WritePath) -> KLReward | None:
    """Return the KL penalty, or None if the definition has none."""
    if config.kl_coef == 0:
        return None
    controller = None
    if config.kl_target is not None:
        controller = AdaptiveKLController(
            init_kl_coef=config.kl_coef, target=config.kl_target, horizon=config.kl_horizon
        )
    return KLReward(coef=config.kl_coef, controller=controller)
