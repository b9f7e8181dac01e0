"""TorchRL's recipe `sota-implementations/grpo/grpo-sync.py`, step for step, without Ray, vLLM, CUDA and wandb.

What is left: one process, tiny models, a `ChatEnv` over a few questions, and a list in place of the logger. The calls,
their arguments and their order are the recipe's. `test_recipe.py` runs it on this package, with the lines changed that
it lists. As it stands it does not run: TorchRL's wrapper writes no `("log_probs", "full")` when it samples, which its
loss reads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.data.llm.history import History
from torchrl.envs import Compose, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import KLRewardTransform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage

QUESTIONS = ("what is 1?", "what is 2?", "what is 3?")


class ShortAnswer(Transform):
    """The reward of a turn."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        answers = [row[-1].content for row in tensordict["history"].full.unbind(0)]
        return next_tensordict.set("reward", torch.tensor([[float(sum(c < "n" for c in a))] for a in answers]))

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1))
        return reward_spec


def make_env(cfg: Any) -> Any:
    """Questions, each `repeats` times, one turn long."""
    rows = [TensorDict({"query": text}) for text in QUESTIONS]
    loader = DataLoader(rows, batch_size=1, collate_fn=lambda samples: samples[0].unsqueeze(0))  # pyright: ignore[reportArgumentType]
    env = ChatEnv.from_dataloader(loader, repeats=cfg.env.repeats, batch_size=(1,), input_mode="history")
    return env.append_transform(Compose(ShortAnswer(), StepCounter(max_steps=1)))


def get_inference_model(cfg: Any, model: Any, tokenizer: Any) -> Any:
    """The policy that samples."""
    options = {"max_new_tokens": cfg.inference_model.max_tokens, "temperature": cfg.inference_model.temperature}
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs={**options, "do_sample": True},
    )


def get_train_model(cfg: Any, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The policy that learns."""
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True)
    return policy, tokenizer


def get_ref_model(cfg: Any, model: Any, tokenizer: Any) -> Any:
    """The frozen policy."""
    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True}
    return TransformersWrapper(model, tokenizer=tokenizer, **options)


def add_kl_transforms_to_replay_buffer(replay_buffer: Any, cfg: Any, model: Any, tokenizer: Any) -> None:
    """The reference on the write path."""
    if not cfg.train.use_kl_to_ref:
        return
    kl_transform = KLRewardTransform(
        ref_model_factory=partial(get_ref_model, cfg, model, tokenizer),
        coef=cfg.train.kl_to_ref_coeff,
        add_to_reward=not cfg.train.kl_coef_in_loss,
        device=torch.device("cpu"),
    )
    replay_buffer.append_transform(kl_transform, invert=True)


def log_training_metrics(
    logged: list[Any],
    replay_buffer: Any,
    batch: Any,
    loss: Any,
    grad_norm: Any,
    global_step: int,
    collector: Any,
    history_str: str,
    use_kl_to_ref: bool,
) -> None:
    """One row of figures, of the batch and of the whole buffer."""
    with torch.no_grad():
        rb_content = replay_buffer[:]
        step_count = rb_content.get(("next", "step_count")).view(-1).float().mean()
        batch_policy_version = batch["next", "policy_version"].view(-1).min()
        batch_policy_age = collector.policy_version - batch_policy_version
        buffer_policy_versions = rb_content.get(("next", "policy_version")).view(-1).float()
        responses = rb_content.get(("tokens", "response"), as_list=True)
        metrics = {
            "loss_objective": float(loss.loss_objective),
            "clip_fraction": float(loss.clip_fraction),
            "ESS": float(loss.ESS),
            "entropy_loss": float(loss.loss_entropy.mean()),
            "kl_approx_to_inference": float(loss.kl_approx),
            "kl_to_inference": float(loss.kl_to_inference.mean()),
            "grad_norm": float(grad_norm),
            "policy_version": collector.policy_version,
            "batch_policy_age": batch_policy_age,
            "staleness_mean": float((collector.policy_version - buffer_policy_versions).mean()),
            "write_count": int(replay_buffer.write_count),
            "reward_mean": float(torch.cat(rb_content.get(("next", "reward"), as_list=True)).mean()),
            "seq_length_mean": float(torch.tensor([t.numel() for t in responses], dtype=torch.float).mean()),
            "step_count_mean": float(step_count),
            "history": history_str,
            "global_step": global_step,
        }
        if use_kl_to_ref:
            metrics["kl_to_ref"] = float(loss.kl_to_ref.mean())
            metrics["kl_penalty_to_ref_mean"] = float(
                torch.cat(rb_content.get(("next", "kl_penalty"), as_list=True)).mean()
            )
            if loss.loss_kl_to_ref is not None:
                metrics["loss_kl_to_ref"] = float(loss.loss_kl_to_ref.mean())
        logged.append(metrics)


def train(replay_buffer: Any, cfg: Any, collector: Any, inference_policy: Any, model: Any, tokenizer: Any) -> list[Any]:
    """Collect, then optimize, in turn."""
    policy_training, train_tokenizer = get_train_model(cfg, model, tokenizer)
    train_device = torch.device("cpu")
    loss_fn = GRPOLoss(
        actor_network=policy_training,
        kl_to_ref_coeff=cfg.train.kl_to_ref_coeff if (cfg.train.kl_coef_in_loss and cfg.train.use_kl_to_ref) else 0.0,
        kl_to_inference_coeff=cfg.train.kl_to_inference_coeff,
        entropy_coeff=cfg.train.entropy_coeff,
        masking_strategy="rlhf" if cfg.env.reasoning else "sft",
        device=train_device,
    )
    inference_policy.model.load_state_dict(policy_training.model.state_dict())
    optimizer = torch.optim.Adam(
        policy_training.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay, fused=False
    )
    logged: list[Any] = []
    grad_norm: Any = 0.0
    global_step = data_read_count = 0
    for data in collector:
        if not len(replay_buffer):
            continue
        if data is not None:
            raise ValueError("Data is not None")
        for _ in range(cfg.train.epochs):
            for batch in replay_buffer:
                batch = batch.to(train_device)
                global_step += 1
                history: History = batch.view(-1)[0]["next", "history"].prompt
                history_str: Any = history.apply_chat_template(tokenizer=train_tokenizer)
                while not isinstance(history_str, str):
                    history_str = "\n".join(history_str)
                data_read_count += batch.numel()
                loss = loss_fn(batch)
                loss_val = loss.mean(reduce=True) / cfg.train.gradient_accumulation_steps
                loss_val.backward()
                if ((global_step + 1) % cfg.train.gradient_accumulation_steps) == 0:
                    grad_norm = torch.nn.utils.clip_grad_norm_(
                        policy_training.parameters(), cfg.optimizer.clip_grad_norm
                    )
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                if (global_step % cfg.train.logging_frequency) == 0:
                    log_training_metrics(
                        logged=logged,
                        replay_buffer=replay_buffer,
                        batch=batch,
                        loss=loss,
                        grad_norm=grad_norm,
                        global_step=global_step,
                        collector=collector,
                        history_str=history_str,
                        use_kl_to_ref=cfg.train.use_kl_to_ref,
                    )
        inference_policy.model.load_state_dict(policy_training.model.state_dict())
        collector.increment_version()
        if cfg.train.empty_replay_buffer:
            replay_buffer.empty(empty_write_count=False)
    collector.shutdown()
    return logged


def main(cfg: SimpleNamespace, folder: Path, make_model: Any, tokenizer: Any) -> Any:
    """The run; returns what was logged, the buffer and the trained model."""
    inference_policy = get_inference_model(cfg, make_model(), tokenizer)
    rb = ReplayBuffer(
        storage=LazyStackStorage(cfg.train.buffer_size or cfg.env.repeats * cfg.env.num_envs),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=cfg.env.repeats),
        batch_size=max(1, cfg.train.optim_batch_size // cfg.train.gradient_accumulation_steps),
    )
    add_kl_transforms_to_replay_buffer(rb, cfg, make_model(), tokenizer)
    collector = LLMCollector(
        env=make_env(cfg),
        policy=inference_policy,
        dialog_turns_per_batch=cfg.train.dialog_turns_per_batch,
        total_dialog_turns=cfg.train.total_dialog_turns,
        replay_buffer=rb,
        track_policy_version=True,
        yield_only_last_steps=cfg.env.reasoning,
    )
    model = make_model()
    logged = train(rb, cfg, collector, inference_policy, model, tokenizer)
    return SimpleNamespace(logged=logged, buffer=rb, model=model, collector=collector)
