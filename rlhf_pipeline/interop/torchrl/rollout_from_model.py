"""`RolloutFromModel`: TorchRL's rollout with one step per token, for PPO-style learners."""

from __future__ import annotations

import collections
import inspect
import math
from typing import Any, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrl.data.llm.utils import KLControllerBase

from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl._rollout_models import RolloutModel, device_of, labels_log_probs
from rlhf_pipeline.interop.torchrl._rollout_views import (
    completion_lengths,
    prefix_windows,
    prompt_rows,
    right_padded_prefixes,
    start_aligned,
)
from rlhf_pipeline.policies.model_parts import evaluated
from rlhf_pipeline.transforms.kl_controllers import KLController

__all__ = ["RolloutFromModel"]


class RolloutFromModel:
    """Completes prompts and arranges the result like an environment that samples one token per step.

    The interface and the keys are those of `torchrl.data.RolloutFromModel` 0.14. Differences:

    - A trajectory is done once, at its first EOS or at the last step, and gets its score only there.
    - The EOS may be any token or several, as in the model's generation config, and may also be the padding token.
      Masks distinguish tokens from padding, so an EOS in a prompt is a token, and so is the one that ends a completion.
    - Log-probs are float32, at the sampling temperature, of the distribution that was sampled from: top-k, top-p and
      similar options are off, whatever the checkpoint specifies, and are rejected in a `generation_config`.
    - Nothing is NaN when every completion stops early, dropout is off, and `step_scheduler` needs no scheduler.
    - On request, memory grows with the number of tokens, not with its square: see `padding_side`.

    Prefixes: `input_ids` and `attention_mask`, `[B, T, P + T]`, here and under "next", hold the prefix of every step,
    tokens first and then padding, so a model with absolute positions (GPT-2) scores them unchanged. Here and under
    "next" are views of one buffer `[B, T + 1, P + T]`, 9 bytes per entry. With `padding_side="left"`, step `i` is a
    window that ends with the newest token, and all four are views of two buffers `[B, P + 2 T]`. TorchRL's
    `LMHeadActorValueOperator`, which reads the last column, also needs this, and a model with absolute positions then
    needs `position_ids`, or `pad_right`, which converts a mini-batch. After a completion's end, its later steps have
    padding on the right as well. Do not write into views. Indexing with integers or slices returns views, and an index
    tensor (a mini-batch) copies the selected steps only; `clone`, `reshape`, `to` another device and writing to a
    storage copy every prefix, so apply these to mini-batches.

    Args:
        model: the policy: a `CausalLMPolicy`, or a model with the `generate` and `forward` of transformers. The latter
            samples at the temperature of its generation config, 1 by default. Its mode is restored after each call.
        ref_model: the frozen reference, of either kind, with the same vocabulary.
        reward_model: called with `input_ids` and `attention_mask`, `[B, W]`, padded on the right, by keyword if it
            takes keywords; returns `(rewards, end_scores)`, like TorchRL's `GPT2RewardModel`, or the end scores alone.
        kl_coef: the initial coefficient of the KL penalty; always a float.
        max_new_tokens: `T`, the steps of every trajectory.
        score_clip: scores are clipped to `[-score_clip, score_clip]`.
        kl_scheduler: a controller of this package, or one of TorchRL's.
        num_steps: how many of the last rollouts `step_scheduler` uses; all since its last call when None.
        padding_side: of the prefixes: `right`, as in TorchRL, or `left`, without a copy per step.

    Attributes:
        model: the policy; likewise `ref_model`.
        eos_token_ids: the tokens that end a completion.
        pad_token_id: fills padding; it may be an EOS token.

    Raises:
        DefinitionError: an argument is out of range.

    >>> from rlhf_pipeline import scratch_policy
    >>> policy = scratch_policy("01=", hidden_size=8, num_layers=1, num_heads=2, seed=0)
    >>> rollout = RolloutFromModel(policy, policy, lambda ids, mask: mask.sum(1).float(), max_new_tokens=4)
    >>> prompts = TensorDict({"input_ids": [[2, 3, 0], [3, 4, 2]], "attention_mask": [[1, 1, 0], [1, 1, 1]],
    ...                       "prompt_rindex": [2, 3]}, batch_size=[2])
    >>> td = rollout.rollout_from_data(prompts)
    >>> td.shape, td["input_ids"].shape, td["next", "reward"].shape
    (torch.Size([2, 4]), torch.Size([2, 4, 7]), torch.Size([2, 4, 1]))
    >>> td["next", "done"].sum(1).flatten().tolist()
    [1, 1]
    >>> td["attention_mask"][0, 0].int().tolist()  # before the first step, the prompt
    [1, 1, 0, 0, 0, 0, 0]
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: KLController | KLControllerBase | None = None,
        num_steps: int | None = None,
        *,
        padding_side: Side = "right",
    ) -> None:
        if max_new_tokens < 1:
            raise DefinitionError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        if not score_clip > 0:
            raise DefinitionError(f"score_clip is {score_clip}; it must be above 0.")
        if num_steps is not None and num_steps < 1:
            raise DefinitionError(f"num_steps is {num_steps}; it must be at least 1, or None.")
        if padding_side not in get_args(Side):
            raise DefinitionError(f"padding_side is {padding_side!r}; it must be 'right' or 'left'.")
        self.padding_side: Side = padding_side
        self._actor = RolloutModel(model)
        self._reference = RolloutModel(ref_model)
        self.model, self.ref_model = self._actor.model, self._reference.model
        self.eos_token_ids, self.pad_token_id = tuple(self._actor.eos_token_ids), self._actor.pad_token_id
        self.reward_model = reward_model
        self.kl_coef = kl_coef
        self.max_new_tokens = int(max_new_tokens)
        self.score_clip = float(score_clip)
        self.kl_scheduler = kl_scheduler
        self._kl_queue: collections.deque[list[float]] = collections.deque(maxlen=num_steps)

    @property
    def kl_coef(self) -> float:
        """The current coefficient of the KL penalty. A controller's value becomes a float."""
        return self._kl_coef

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        value = float(value)
        if not math.isfinite(value) or value < 0:
            raise DefinitionError(f"kl_coef is {value}; it must be finite and at least 0.")
        self._kl_coef = value

    @torch.no_grad()
    def rollout_from_data(self, batch: Any) -> TensorDict:
        """Complete the prompts of a batch and return the rollout: `generate`, then `create_rollout_td`.

        Args:
            batch: `PromptData`, a TensorDict, or any object with `input_ids` int `[B, P]`, `attention_mask` `[B, P]`
                and `prompt_rindex` `[B]`, the column after each prompt's last token. Tokens after the prompt in
                `input_ids` (the label) are not shown to the policy.
        """
        return self.create_rollout_td(batch, *self.generate(batch))

    @torch.no_grad()
    def generate(self, batch: Any, generation_config: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Complete the prompts of a batch.

        Randomness comes from torch's global generator, so `torch.manual_seed` repeats it.

        Args:
            batch: as in `rollout_from_data`.
            generation_config: a `GenerationConfig` of transformers, for `temperature`, `do_sample` and options that do
                not change the distribution. `do_sample=False` or temperature 0 takes the likeliest tokens and scores
                them at temperature 1; anything else samples.

        Returns:
            `generated` int64 `[B, P + T]`, each prompt in its place, its completion from `prompt_rindex` on, then
            padding; `log_probs` float32 `[B, T, 1]` of the tokens; `log_ratio` float32 `[B, T]`, the log-prob under
            the model minus that under the reference, both scored the same way. Both are 0 after a completion's end.

        Raises:
            DataError: the batch lacks a field, a row has no prompt, or prompt and completion do not fit the model.
            DefinitionError: the config has an option that log-probs would not reflect.
        """
        sampling = self._actor.sampling(generation_config, self.max_new_tokens)
        prompts = prompt_rows(batch)
        completion, lengths, log_probs = self._actor.sample(
            prompts.input_ids, prompts.prompt_mask, self.max_new_tokens, sampling
        )
        steps = torch.arange(self.max_new_tokens, device=completion.device)
        place, real = prompts.rindex.unsqueeze(1) + steps, steps < lengths.unsqueeze(1)
        room = (0, self.max_new_tokens)
        ids = prompts.input_ids.masked_fill(~prompts.prompt_mask, self.pad_token_id)
        generated = pad(ids, room, value=self.pad_token_id).scatter(1, place, completion)
        scored = torch.zeros_like(generated, dtype=torch.bool).scatter(1, place, real)
        mask = scored | pad(prompts.prompt_mask, room)
        ours = self._actor.log_probs(generated, mask, scored, sampling.temperature).gather(1, place)
        theirs = self._reference.log_probs(generated, mask, scored, sampling.temperature).gather(1, place)
        log_probs = ours if log_probs is None else log_probs
        return generated, log_probs.unsqueeze(-1), ours - theirs

    @torch.no_grad()
    def create_rollout_td(self, batch: Any, generated: Tensor, log_probs: Tensor, log_ratio: Tensor) -> TensorDict:
        """Lay generated tokens out with one step per token.

        `reward = reward_raw + reward_kl`, as in TorchRL: `reward_kl = -kl_coef * log_ratio` includes the minus sign, so
        the penalty is subtracted from the raw reward at every token of the completion, its EOS included. Also as in
        TorchRL, `reward_raw = clip(end_score - end_score of the batch's own input_ids, -score_clip, score_clip)`: a
        completion's score is relative to that of the label (of the prompt if the batch has no labels).

        Args:
            batch: as in `rollout_from_data`.
            generated: int64 `[B, P + T]`, as `generate` returns it. A completion ends with its first EOS.
            log_probs: `[B, T, 1]` or `[B, T]`.
            log_ratio: `[B, T]`.

        Returns:
            A TensorDict of batch size `[B, T]` (names `None, "time"`):

            - "action": int64 `[B, T]`, the sampled tokens, padding after the end
            - "input_ids", "attention_mask": int64 and bool `[B, T, P + T]`, the policy's input before each step
            - "sample_log_prob": float32 `[B, T, 1]`, 0 after the end
            - ("next", "input_ids"), ("next", "attention_mask"): likewise after each step
            - ("next", "done"): bool `[B, T, 1]`, True at the one step that ends a trajectory: its EOS, or the limit
            - ("next", "terminated"): a copy of it, as documented by TorchRL
            - ("next", "reward"), ("next", "reward_raw"), ("next", "reward_kl"): float32 `[B, T, 1]`, 0 after the end

        Raises:
            DataError: shapes do not fit together, or a score is not finite.
        """
        prompts, steps = prompt_rows(batch), self.max_new_tokens
        rows, width = prompts.input_ids.shape[0], prompts.input_ids.shape[1] + steps
        if generated.shape != (rows, width):
            raise DataError(
                f"generated must have shape [{rows}, {width}] (the batch's columns plus max_new_tokens={steps}); "
                f"got {list(generated.shape)}."
            )
        prompts = type(prompts)(*(value.to(generated.device) for value in prompts))
        index = torch.arange(steps, device=generated.device)
        action = generated.gather(1, prompts.rindex.unsqueeze(1) + index)
        lengths = completion_lengths(action, self.eos_token_ids)
        real = index < lengths.unsqueeze(1)
        action = action.masked_fill(~real, self.pad_token_id)
        prefixes = right_padded_prefixes if self.padding_side == "right" else prefix_windows
        ids, mask = prefixes(prompts, action, lengths, self.pad_token_id)

        scores = self._end_scores(ids[:, -1], mask[:, -1]) - self._end_scores(prompts.input_ids, prompts.attention_mask)
        done = (index == lengths.unsqueeze(1) - 1).unsqueeze(-1)
        reward_raw = scores.clamp(-self.score_clip, self.score_clip).reshape(rows, 1, 1) * done
        log_ratio = torch.where(real, log_ratio.reshape(rows, steps).to(action.device).float(), 0.0)
        reward_kl = -self.kl_coef * log_ratio.unsqueeze(-1)
        sample_log_prob = torch.where(real, log_probs.reshape(rows, steps).to(action.device).float(), 0.0)
        if self.kl_scheduler is not None:
            self._kl_queue.append(log_ratio.sum(1).tolist())
        return TensorDict(
            {
                "action": action,
                "input_ids": ids[:, :-1],
                "attention_mask": mask[:, :-1],
                "sample_log_prob": sample_log_prob.unsqueeze(-1),
                "next": {
                    "input_ids": ids[:, 1:],
                    "attention_mask": mask[:, 1:],
                    "done": done,
                    "terminated": done.clone(),
                    "reward": reward_raw + reward_kl,
                    "reward_raw": reward_raw,
                    "reward_kl": reward_kl,
                },
            },
            batch_size=[rows, steps],
            device=generated.device,
        ).refine_names(..., "time")

    def _end_scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the reward model's score of each row, float32 `[B]`."""
        model, device = self.reward_model, device_of(self.reward_model, input_ids.device)
        input_ids, attention_mask = start_aligned(input_ids, attention_mask, self.pad_token_id)
        inputs = {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}
        with evaluated(model):
            out = model(**inputs) if _takes_keywords(model) else model(*inputs.values())
        scores = out[-1] if isinstance(out, tuple | list) else out
        if isinstance(scores, dict | TensorDictBase):
            scores = scores["end_scores"]
        scores = torch.as_tensor(scores)
        if scores.numel() != len(input_ids):
            raise DataError(
                f"the reward model returned scores of shape {list(scores.shape)} for {len(input_ids)} rows; it must "
                "return (rewards, end_scores) or the end scores alone, one per row."
            )
        scores = scores.detach().float().reshape(-1).to(input_ids.device)
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            raise DataError(
                f"the reward model returned the end score {scores[row].item()} for row {row}, which is not finite."
            )
        return scores

    logprobs_of_labels = staticmethod(labels_log_probs)

    @staticmethod
    def pad_right(td: TensorDict, pad_token_id: int = 0) -> TensorDict:
        """Return a copy with prefixes padded on the right; for a mini-batch of a rollout with `padding_side="left"`.

        Args:
            td: steps of a rollout, of any batch size. Every prefix is copied, so a whole rollout takes as much memory
                as TorchRL's.
            pad_token_id: fills padding; pass the rollout's `pad_token_id` if padding is read.
        """
        out = td.copy()
        for part in (out, out.get("next", None)):
            if part is not None:
                ids, mask = start_aligned(part.get("input_ids"), part.get("attention_mask"), pad_token_id)
                part.set("input_ids", ids).set("attention_mask", mask)
        return out

    def step_scheduler(self) -> float:
        """Pass the KL measured since the last call to the scheduler, and return the coefficient.

        A controller of this package gets the KL of each trajectory in nats (the sum over its tokens). TorchRL's expects
        this times `-kl_coef`. Without a scheduler the coefficient stays the same.
        """
        values = [value for rollout in self._kl_queue for value in rollout]
        self._kl_queue.clear()
        if self.kl_scheduler is not None and values:
            if not isinstance(self.kl_scheduler, KLController):  # TorchRL's
                values = [-self.kl_coef * value for value in values]
            self.kl_coef = self.kl_scheduler.update(values)
        return self.kl_coef


def _takes_keywords(function: Any) -> bool:
    if isinstance(function, TensorDictModuleBase):
        return True
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        signature.bind(input_ids=None, attention_mask=None)
    except (TypeError, ValueError):
        return False
    return True
