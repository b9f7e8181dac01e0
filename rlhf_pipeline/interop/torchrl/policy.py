"""`CausalLMPolicy` with TorchRL's arguments: `forward` reads prompts and samples, or reads tokens and scores."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch import distributions as D

from rlhf_pipeline.data.padding import Side, pad_rows
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError, did_you_mean
from rlhf_pipeline.functional.head import Head
from rlhf_pipeline.interop.torchrl.containers import CONTAINERS, LLMWrapperBase, LogProbs, Masks, Tokens, _sub
from rlhf_pipeline.interop.torchrl.distribution import TokenDistribution
from rlhf_pipeline.interop.torchrl.td_output import completion_row, grouped_rows, padded_completions, repeated_rows
from rlhf_pipeline.policies.chat import continued_prompt, decode_completion, encode_chat, encode_prompt
from rlhf_pipeline.policies.encoding import history_messages, text_list, tokenizer_with_template
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions
from rlhf_pipeline.policies.new_model import scratch_model
from rlhf_pipeline.policies.token_batches import Key, TokenBatch, leaf, pad_ids, pad_like, prompt_lengths, read_ids
from rlhf_pipeline.policies.token_policy import TokenPolicy

_GENERATE_KWARGS = ("max_new_tokens", "temperature", "num_return_sequences", "do_sample", "seed")
_COPIED = (
    *("tokenizer", "temperature", "max_new_tokens", "pad_token_id", "num_slots", "input_mode", "generate"),
    *("generate_kwargs", "return_log_probs", "pad_output", "inplace", "num_samples", "prefer_tokens"),
    *("attention_mask_key", "scoring_layout", *(f"{name}_key" for name in CONTAINERS)),
)
"""The arguments that a new version copies from the attributes of an older one."""
_ALIASES = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}


class CausalLMPolicy(TokenPolicy, LLMWrapperBase):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A policy around any causal language model of transformers, for token ids and for TensorDicts.

    See `policies.token_policy.TokenPolicy` for how it samples and scores. `forward` and the distributions have the
    arguments, keys and results of TorchRL's wrappers.

    Args:
        model: a causal language model; one wrapped by peft works as well, with adapters off the head.
        tokenizer: its tokenizer, or None if only token ids are used.
        input_mode: what `forward` reads: "tokens", "text" or "history".
        input_key: the input's key; by default `(tokens_key, "prompt")` or `(tokens_key, "full")`, or of another mode.
        attention_mask_key: key of the tokens' attention mask if there is none among the masks.
        generate: whether `forward` samples; it scores when False.
        generate_kwargs: sampling options: `max_new_tokens`, `temperature`, `num_return_sequences`, `do_sample`, `seed`.
        tokenizer_kwargs: `chat_template` or `chat_template_name`; other options that would change tokens are rejected.
        chat_template_name: one of TorchRL's chat templates, in place of the tokenizer's.
        chat_template: a chat template, in place of the tokenizer's.
        return_log_probs: whether sampling returns log-probs; True when None.
        pad_output: whether sampled results are padded.
        inplace: True writes into the input, False into a copy, "empty" into a new TensorDict.
        num_samples: completions per prompt; adds a batch dimension.
        prefer_tokens: with histories, continue the token ids under `(tokens_key, "prompt")` if there are any, so that
            tokens sampled in earlier turns stay unchanged, and encode only the messages after them.
        layout: None or `torch.strided`; rows are returned as a lazy stack.
        device: where to put the model; None keeps its device.
        tokens_key: key of the `Tokens`; likewise `masks_key`, `log_probs_key`, `text_key`, `history_key`.
        **options: `temperature`, `max_new_tokens`, `eos_token_id`, `pad_token_id`, `num_slots`, `scoring_layout` of
            `policies.token_policy.TokenPolicy`.

    Raises:
        DefinitionError: an argument is out of range, or the model is of a kind that cannot be scored from its hidden
            states (the message gives the reason).

    >>> from rlhf_pipeline import scratch_policy
    >>> policy = scratch_policy("01=", hidden_size=16, num_layers=1, num_heads=2, generate=True, max_new_tokens=3)
    >>> out = policy(TensorDict({"tokens": {"prompt": torch.tensor([[2, 3, 4]])}}, [1]))
    >>> out[0]["log_probs", "response"].shape == out[0]["tokens", "response"].shape
    True
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None = None,
        *,
        input_mode: str = "tokens",
        input_key: Key | None = None,
        attention_mask_key: Key = "attention_mask",
        generate: bool = False,
        generate_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        pad_output: bool = False,
        inplace: bool | str | None = None,
        num_samples: int | None = None,
        prefer_tokens: bool = False,
        layout: torch.layout | None = None,
        device: torch.device | str | None = None,
        tokens_key: Key = "tokens",
        masks_key: Key = "masks",
        log_probs_key: Key = "log_probs",
        text_key: Key = "text",
        history_key: Key = "history",
        **options: Any,
    ) -> None:
        templates = {"chat_template": chat_template, "chat_template_name": chat_template_name}
        if not isinstance(tokenizer, str):
            tokenizer = tokenizer_with_template(tokenizer, {**(tokenizer_kwargs or {}), **templates})
        if device is not None and isinstance(model, nn.Module):
            model = model.to(device)
        super().__init__(model, tokenizer, **options)
        if input_mode not in ("tokens", "text", "history"):
            raise DefinitionError(f"input_mode is {input_mode!r}; it must be 'tokens', 'text' or 'history'.")
        if inplace not in (True, False, None, "empty"):
            raise DefinitionError(f"inplace is {inplace!r}; it must be True, False or 'empty'.")
        if layout not in (None, torch.strided):
            raise DefinitionError(
                f"layout is {layout}; samples are returned as a lazy stack of rows. Read a leaf with td.get(key, "
                "as_nested_tensor=True, layout=torch.jagged), or pass pad_output=True."
            )
        sampling = {_ALIASES.get(k, k): v for k, v in (generate_kwargs or {}).items()}
        for name in sampling:
            if name not in _GENERATE_KWARGS:
                raise DefinitionError(
                    f"generate_kwargs has {name!r}, which would change the sampled distribution and is not "
                    "supported." + did_you_mean(name, _GENERATE_KWARGS)
                )
        if sampling.pop("do_sample", True) is False:
            sampling["temperature"] = 0.0
        num_sequences = sampling.pop("num_return_sequences", None)
        if num_sequences is not None and num_samples is not None and num_sequences != num_samples:
            raise DefinitionError(
                f"num_samples is {num_samples}, but generate_kwargs requests {num_sequences} samples; pass only one of "
                "these two numbers."
            )
        self.num_samples = num_samples if num_samples is not None else num_sequences
        if self.num_samples is not None and self.num_samples < 1:
            raise DefinitionError(f"num_samples is {self.num_samples}; it must be at least 1.")
        self.input_mode = input_mode
        self.input_key = input_key
        self.generate = generate
        self.generate_kwargs = sampling
        self.return_log_probs = True if return_log_probs is None else return_log_probs
        self.pad_output = pad_output
        self.prefer_tokens = prefer_tokens
        self.inplace = True if inplace is None else inplace
        self.tokens_key, self.masks_key, self.log_probs_key = tokens_key, masks_key, log_probs_key
        self.text_key, self.history_key, self.attention_mask_key = text_key, history_key, attention_mask_key
        self._prompts_sampled = 0
        self.in_keys = [self._input_key()]
        out: list[Key] = [self.tokens_key, self.masks_key]
        if self.return_log_probs or not generate:
            out.append(self.log_probs_key)
        if generate and self.tokenizer is not None:
            out.append(self.text_key)
        if generate and input_mode == "history":
            out.append(self.history_key)
        self.out_keys = out

    def get_new_version(self, **kwargs: Any) -> CausalLMPolicy:
        """Return a policy over the same model and tokenizer with some arguments changed.

        The weights are shared: training one version updates all of them.

        Args:
            **kwargs: keyword arguments of the constructor.

        >>> from rlhf_pipeline import scratch_policy
        >>> policy = scratch_policy("ab", hidden_size=8, num_heads=2)
        >>> sampler = policy.get_new_version(generate=True, temperature=0.7)
        >>> sampler.head_weight is policy.head_weight, sampler.temperature, policy.temperature
        (True, 0.7, 1.0)
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in _COPIED} | {"eos_token_id": self.eos_token_ids}
        if "generate" not in kwargs and "input_mode" not in kwargs:
            options["input_key"] = self.input_key
        if kwargs.get("device") not in (None, self.device):
            raise DefinitionError(
                f"A new version shares the weights of this policy, which are on {self.device}. Move the policy, or "
                "create a CausalLMPolicy with a copy of the model."
            )
        accepted = ("model", "input_key", "device", "layout", "tokenizer_kwargs", "chat_template_name", "chat_template")
        for name in kwargs:
            if name not in options and name not in accepted:
                raise DefinitionError(f"CausalLMPolicy does not accept {name!r}." + did_you_mean(name, options))
        version = type(self)(**{"model": self.model, **options, **kwargs})
        if self._checkpointing and version.model is self.model:
            version._checkpointing = True
            version._recompute(True)
        return version

    def token_distribution(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> TokenDistribution:
        """Return the distribution of the masked tokens given those before them, at the policy's temperature.

        First tokens and padding have no distribution and are removed from the mask. See `get_dist` for TensorDicts.
        """
        head_rows = self.scoring_rows(input_ids, attention_mask, mask)
        scored = torch.zeros(input_ids.shape, dtype=torch.bool, device=head_rows.rows.device)
        scored[head_rows.rows, head_rows.columns] = True
        temperature = self.temperature if self.temperature > 0 else 1.0
        head = Head(self.head_weight, self.head_bias, temperature, self.head_soft_cap)
        return TokenDistribution(head_rows.hidden, head, scored)

    def _input_key(self) -> Key:
        if self.input_key is not None:
            return self.input_key
        container = {"tokens": self.tokens_key, "text": self.text_key, "history": self.history_key}[self.input_mode]
        return _sub(container, "prompt" if self.generate else "full")

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **_: Any,
    ) -> TensorDictBase:
        """Sample (`generate=True`) or score (`generate=False`) a batch.

        Sampling reads the prompts and writes `tokens` (prompt, response, full), `masks`, `log_probs` (response, full: 0
        over the prompt), and with a tokenizer `text`. Rows are ragged unless `pad_output`; then prompts are padded on
        the left and responses on the right, as in TorchRL. With `num_samples` the result has batch size
        `[B, num_samples]`. Scoring reads the tokens and writes `log_probs` (full, aligned with the tokens, 0 where a
        token has none; and response if the prompts' lengths are known). With `pad_output`, ragged rows,
        texts and histories are returned padded on the left, with their `tokens` and `masks`.

        Args:
            tensordict: batch size `[B]` or `[]`.
            tensordict_out: receives the results instead.
            logits_only: when scoring, write "logits" `[B, T, V]` instead of log-probs; position `t` has the logits of
                token `t`.
            **_: TorchRL's arguments that have no effect here.

        Raises:
            DataError: the input is missing or has the wrong form.
        """
        single = not tensordict.batch_size
        source = cast(TensorDictBase, tensordict.unsqueeze(0)) if single else tensordict
        if len(source.batch_size) != 1:
            raise DataError(
                f"The batch size is {list(tensordict.batch_size)}; a policy accepts one batch dimension. "
                "Flatten the TensorDict with td.reshape(-1) first."
            )
        result = self._sample_td(source) if self.generate else self._score_td(source, logits_only)
        members = self.num_samples if self.generate else None
        if members is not None:
            source = repeated_rows(source, members)
        elif single and tensordict_out is None and self.inplace is True:
            return self._put(cast(TensorDictBase, result[0]), tensordict)
        if tensordict_out is not None:
            result = grouped_rows(result, members)
            return self._put(cast(TensorDictBase, result[0]) if single else result, tensordict_out)
        if self.inplace == "empty":
            done = result
        else:
            ragged = isinstance(result, LazyStackedTensorDict)
            if ragged and not isinstance(source, LazyStackedTensorDict):
                # A dense TensorDict cannot hold ragged rows, so its entries move to the rows.
                source = lazy_stack([row.copy() for row in source.unbind(0)])
            elif self.inplace is False and members is None:
                source = source.copy()
            done = self._put(result, source)
        done = grouped_rows(done, members)
        return cast(TensorDictBase, done[0]) if single else done

    def _put(self, source: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        """Set the containers of `source` on `target`, replacing entries of another kind."""
        if isinstance(source, LazyStackedTensorDict) and isinstance(target, LazyStackedTensorDict):
            for row, place in zip(source.unbind(0), target.unbind(0), strict=True):
                self._put(row, place)
            return target
        for key in (*self._container_keys().values(), "logits"):
            value = source.get(key, None)
            if value is not None:
                target.set(key, value)
        return target

    # Sampling

    def _read_prompts(self, td: TensorDictBase) -> tuple[list[list[int]], list[Any] | None]:
        """Return (prompt token ids, prompt histories or None)."""
        key = self._input_key()
        if self.input_mode == "tokens":
            batch = read_ids(td, key, self._mask_key(td), "left")
            if batch is None:
                raise MissingKeyError(
                    f"The TensorDict has no prompts under {key!r}. Write token ids there: ragged rows, or [B, T] with "
                    f"the mask under {self._attention_key!r}."
                )
            return [row.tolist() for row in batch.real_rows(batch.input_ids)], None
        value = cast(Any, td).get(key, None)
        if value is None:
            raise MissingKeyError(
                f"The TensorDict has no prompts under {key!r}, which input_mode={self.input_mode!r} reads."
            )
        if self.input_mode == "text":
            return [encode_prompt(self.tokenizer, text, as_chat=False) for text in text_list(value)], None
        rows = list(value.unbind(0))
        chats = [history_messages(row) for row in rows]
        stored_tokens = leaf(td, _sub(self.tokens_key, "prompt")) if self.prefer_tokens else None
        if stored_tokens is None:
            return [encode_prompt(self.tokenizer, chat) for chat in chats], rows
        # Conversations may also be a batch of equal lengths, without padding.
        ids = [row.reshape(-1).tolist() for row in stored_tokens]
        ends = self.eos_token_ids
        known_of = zip(chats, ids, strict=True)
        return [continued_prompt(self.tokenizer, chat, row, end_token_ids=ends) for chat, row in known_of], rows

    def _sample_td(self, td: TensorDictBase) -> TensorDictBase:
        prompts, histories = self._read_prompts(td)
        options = dict(self.generate_kwargs)
        seed = options.pop("seed", 0)
        members = self.num_samples or 1
        first = self._prompts_sampled
        self._prompts_sampled += len(prompts)
        done = self.generate_ragged(
            prompts,
            group_size=members,
            seed=seed,
            # Each call uses new streams, so that repeating a prompt does not repeat its completion.
            stream_ids=range(first, first + len(prompts)),
            **options,
        )
        device = td.device or torch.device("cpu")
        fields = self._fields(prompts, histories, done, device)
        if self.pad_output:
            return padded_completions(fields, self.pad_token_id, len(done), self._container_keys())
        return lazy_stack([completion_row(fields, i, self._container_keys()) for i in range(len(done))])

    def _container_keys(self) -> dict[str, Key]:
        return {name: getattr(self, f"{name}_key") for name in CONTAINERS}

    def _fields(
        self,
        prompts: list[list[int]],
        histories: list[Any] | None,
        done: RaggedCompletions,
        device: torch.device,
    ) -> dict[str, list[Any]]:
        """Return the leaves of the result, one entry per completion."""
        fields: dict[str, list[Any]] = {
            name: [] for name in ("prompt", "response", "full", "assistant", "response_scores", "full_scores")
        }
        for sampled in done:
            prompt = torch.tensor(prompts[sampled.prompt_index], dtype=torch.int64, device=device)
            response = torch.tensor(sampled.token_ids, dtype=torch.int64, device=device)
            scores = sampled.log_probs.to(device)
            fields["prompt"].append(prompt)
            fields["response"].append(response)
            fields["full"].append(torch.cat((prompt, response)))
            mask = torch.ones(len(prompt) + len(response), dtype=torch.bool, device=device)
            mask[: len(prompt)] = False
            fields["assistant"].append(mask)
            fields["response_scores"].append(scores)
            fields["full_scores"].append(torch.cat((scores.new_zeros(len(prompt)), scores)))
        if not self.return_log_probs:
            del fields["response_scores"], fields["full_scores"]
        if self.tokenizer is not None:
            starts = [self.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
            fields["prompt_text"] = [starts[int(i)] for i in done.prompt_index]
            fields["response_text"] = [decode_completion(self.tokenizer, r.tolist()) for r in fields["response"]]
        if histories is not None:
            fields["prompt_history"] = [histories[int(i)] for i in done.prompt_index]
        return fields

    # Scoring

    def _read_full(self, td: TensorDictBase) -> tuple[TokenBatch, Tensor | None]:
        """Return (tokens, assistant mask or None) for the input mode."""
        if self.input_mode == "tokens":
            key = self._input_key()
            batch = read_ids(td, key, self._mask_key(td), "left")
            if batch is None:
                return self.read_batch(td), None
            mask = leaf(td, self._assistant_key)
            return batch, None if mask is None else pad_like(mask, batch, repr(self._assistant_key)).bool()
        value = cast(Any, td).get(self._input_key(), None)
        if value is None:
            raise MissingKeyError(
                f"The TensorDict has nothing under {self._input_key()!r}, which input_mode={self.input_mode!r} reads."
            )
        if self.input_mode == "text":
            rows = [encode_prompt(self.tokenizer, text, as_chat=False, whole=True) for text in text_list(value)]
            return pad_ids([torch.tensor(r) for r in rows], "left"), None
        encoded = [encode_chat(self.tokenizer, history_messages(row)) for row in value.unbind(0)]
        batch = pad_ids([torch.tensor(ids) for ids, _ in encoded], "left")
        return batch, pad_rows([torch.tensor(mask) for _, mask in encoded], side="left")[0].bool()

    def read_batch(self, tensordict: TensorDictBase, padding_side: Side = "left") -> TokenBatch:
        """Read complete sequences; text and histories are encoded first, by `input_mode`."""
        if self.input_mode == "tokens" or leaf(tensordict, _sub(self.tokens_key, "full")) is not None:
            return super().read_batch(tensordict, padding_side)
        batch, _ = self._read_full(tensordict)
        return batch

    def get_rlhf_dist(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: Key | None = None,
        logits_key: Key = "logits",
        padding_side: Side = "left",
        **options: Any,
    ) -> D.Distribution:
        """Return the distribution of the assistant's tokens: the tokens that a policy produced, over all turns.

        For histories the mask comes from the chat template's generation markers.
        """
        key = self._assistant_key if assistant_mask_key is None else assistant_mask_key
        if self.input_mode == "history" and leaf(tensordict, key) is None:
            self._must_score("get_rlhf_dist")
            batch, assistant = self._read_full(tensordict)
            if assistant is not None:
                return self.token_distribution(batch.input_ids, batch.attention_mask, assistant)
        return super().get_rlhf_dist(tensordict, key, logits_key, padding_side, **options)

    def _score_td(self, td: TensorDictBase, logits_only: bool) -> TensorDictBase:
        batch, assistant = self._read_full(td)
        device = batch.input_ids.device
        if logits_only:
            dist = self.token_distribution(batch.input_ids, batch.attention_mask, batch.attention_mask)
            logits = cast(TokenDistribution, dist).logits.to(device)
            if not batch.ragged:
                return TensorDict({"logits": logits}, [len(logits)])
            return lazy_stack([TensorDict({"logits": row}) for row in batch.rows(logits)])
        scores = self.log_probs(batch.input_ids, batch.attention_mask).to(device)
        lengths = prompt_lengths(td, batch, _sub(self.tokens_key, "prompt"), self._assistant_key)
        if lengths is None and assistant is not None:
            lengths = (batch.attention_mask & (assistant.cumsum(1) == 0)).sum(1)
        rows = batch.rows(scores)
        responses = None
        if lengths is not None:
            responses = [r[int(n) :] for r, n in zip(batch.real_rows(scores), lengths, strict=True)]
        if self.pad_output or not batch.ragged:
            size = [len(scores)]
            response = None if responses is None else pad_rows(responses, side="right")[0]
            log_probs = LogProbs(full=scores, response=response, padded=True, batch_size=size)
            padded = TensorDict({self.log_probs_key: log_probs}, size)
            if batch.ragged:
                # The log-probs are aligned with these tokens, and not with the rows that were passed.
                real = batch.attention_mask
                ids = batch.input_ids.masked_fill(~real, self.pad_token_id)
                masks = Masks(all_attention_mask=real, all_assistant_mask=assistant, padded=True, batch_size=size)
                padded.set(self.tokens_key, Tokens(full=ids, padded=True, batch_size=size))
                padded.set(self.masks_key, masks)
            return padded
        out = [TensorDict({}, []) for _ in rows]
        tokens = batch.rows(batch.input_ids)
        assistant_rows = None if assistant is None else batch.rows(assistant)
        for i, row in enumerate(out):
            response = None if responses is None else responses[i]
            row.set(self.log_probs_key, LogProbs(full=rows[i], response=response, padded=False))
            if self.input_mode != "tokens":
                # Text was encoded here, so the scored tokens are returned as well.
                real = torch.ones_like(tokens[i], dtype=torch.bool)
                mask = None if assistant_rows is None else assistant_rows[i]
                row.set(self.tokens_key, Tokens(full=tokens[i], padded=False))
                row.set(self.masks_key, Masks(all_attention_mask=real, all_assistant_mask=mask, padded=False))
        return lazy_stack(out)


def scratch_policy(alphabet: str, *, seed: int = 0, **options: Any) -> CausalLMPolicy:
    """Create a tiny policy in memory: one token per character, random weights.

    >>> policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    >>> policy.tokenizer.encode("10="), policy.tokenizer.decode([3, 2, 12, 1], skip_special_tokens=True)
    ([3, 2, 12], '10=')
    """
    sizes = {n: options.pop(n) for n in ("hidden_size", "num_layers", "num_heads", "max_positions") if n in options}
    return CausalLMPolicy(*scratch_model(alphabet, seed=seed, **sizes), **options)
