"""The TensorDict side of a policy: `forward` reads prompts and samples, or reads tokens and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch import distributions as D

from rlhf_pipeline.data.padding import Side, pad_rows
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError, did_you_mean
from rlhf_pipeline.policies.chat import continued_prompt, decode_completion, encode_chat, encode_prompt
from rlhf_pipeline.policies.containers import LLMWrapperBase, LogProbs, Masks, Tokens, _sub
from rlhf_pipeline.policies.distribution import TokenDistribution
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions
from rlhf_pipeline.policies.td_output import (
    completion_row,
    grouped_rows,
    history_messages,
    padded_completions,
    repeated_rows,
    text_list,
)
from rlhf_pipeline.policies.token_batches import Key, TokenBatch, leaf, pad_ids, pad_like, prompt_lengths, read_ids

_GENERATE_KWARGS = ("max_new_tokens", "temperature", "num_return_sequences", "do_sample", "seed")
_ALIASES = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}


class TensorDictPolicy(LLMWrapperBase):
    """What `CausalLMPolicy` adds to its tensor methods so that it works on TensorDicts, with TorchRL's arguments."""

    # To be given by the policy.
    tokenizer: Any
    temperature: float
    pad_token_id: int
    log_probs: Callable[..., Tensor]
    generate_ragged: Callable[..., RaggedCompletions]

    def _set_wrapper_options(
        self,
        *,
        input_mode: str,
        input_key: Key | None,
        generate: bool,
        generate_kwargs: dict[str, Any] | None,
        return_log_probs: bool | None,
        pad_output: bool,
        inplace: Any,
        num_samples: int | None,
        prefer_tokens: bool,
        layout: torch.layout | None,
        keys: dict[str, Key],
    ) -> None:
        if input_mode not in ("tokens", "text", "history"):
            raise DefinitionError(f"input_mode is {input_mode!r}; it must be 'tokens', 'text' or 'history'.")
        if inplace not in (True, False, None, "empty"):
            raise DefinitionError(f"inplace is {inplace!r}; it must be True, False or 'empty'.")
        if layout not in (None, torch.strided):
            raise DefinitionError(
                f"layout is {layout}; what is sampled comes as a lazy stack of rows. Read a leaf of it with "
                "td.get(key, as_nested_tensor=True, layout=torch.jagged), or pass pad_output=True."
            )
        options = {_ALIASES.get(k, k): v for k, v in (generate_kwargs or {}).items()}
        for name in options:
            if name not in _GENERATE_KWARGS:
                raise DefinitionError(
                    f"generate_kwargs has {name!r}, which would change what is sampled and is not supported."
                    + did_you_mean(name, _GENERATE_KWARGS)
                )
        if options.pop("do_sample", True) is False:
            options["temperature"] = 0.0
        wanted = options.pop("num_return_sequences", None)
        if wanted is not None and num_samples is not None and wanted != num_samples:
            raise DefinitionError(f"num_samples is {num_samples} and generate_kwargs says {wanted}; give one of them.")
        self.num_samples = num_samples if num_samples is not None else wanted
        if self.num_samples is not None and self.num_samples < 1:
            raise DefinitionError(f"num_samples is {self.num_samples}; it must be at least 1.")
        self.input_mode = input_mode
        self.input_key = input_key
        self.generate = generate
        self.generate_kwargs = options
        self.return_log_probs = True if return_log_probs is None else return_log_probs
        self.pad_output = pad_output
        self.prefer_tokens = prefer_tokens
        self.inplace = True if inplace is None else inplace
        for name, key in keys.items():
            setattr(self, name, key)
        self._calls = 0
        self.in_keys = [self._input_key()]
        out: list[Key] = [self.tokens_key, self.masks_key]
        if self.return_log_probs or not generate:
            out.append(self.log_probs_key)
        if generate and self.tokenizer is not None:
            out.append(self.text_key)
        if generate and input_mode == "history":
            out.append(self.history_key)
        self.out_keys = out

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
        `[B, num_samples]`. Scoring reads the tokens and writes `log_probs` (full, aligned with the tokens, 0 where none
        exists; and response where the prompts' lengths are known).

        Args:
            tensordict: batch size `[B]` or `[]`.
            tensordict_out: where results go instead.
            logits_only: when scoring, write "logits" `[B, T, V]` instead of log-probs; position `t` are the logits of
                token `t`.
            **_: TorchRL's arguments that have no effect here.

        Raises:
            DataError: the input is missing or does not fit.
        """
        single = not tensordict.batch_size
        source = cast(TensorDictBase, tensordict.unsqueeze(0)) if single else tensordict
        if len(source.batch_size) != 1:
            raise DataError(
                f"The batch size is {list(tensordict.batch_size)}; a policy takes one batch dimension. "
                "Flatten it with td.reshape(-1) first."
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
                # A TensorDict in one piece cannot hold ragged rows: its entries go along with the rows instead.
                source = lazy_stack([row.copy() for row in source.unbind(0)])
            elif self.inplace is False and members is None:
                source = source.copy()
            done = self._put(result, source)
        done = grouped_rows(done, members)
        return cast(TensorDictBase, done[0]) if single else done

    def _put(self, result: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        """Set the containers of `result` on `target`, whole: an entry of another kind is replaced."""
        if isinstance(result, LazyStackedTensorDict) and isinstance(target, LazyStackedTensorDict):
            for row, place in zip(result.unbind(0), target.unbind(0), strict=True):
                self._put(row, place)
            return target
        for key in (*self._container_keys().values(), "logits"):
            value = result.get(key, None)
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
        known = leaf(td, _sub(self.tokens_key, "prompt")) if self.prefer_tokens else None
        if known is None:
            return [encode_prompt(self.tokenizer, chat) for chat in chats], rows
        # A conversation may also come as a batch of one length, without padding.
        ids = [row.reshape(-1).tolist() for row in known]
        return [continued_prompt(self.tokenizer, chat, row) for chat, row in zip(chats, ids, strict=True)], rows

    def _sample_td(self, td: TensorDictBase) -> TensorDictBase:
        prompts, histories = self._read_prompts(td)
        options = dict(self.generate_kwargs)
        seed = options.pop("seed", 0)
        members = self.num_samples or 1
        first = self._calls * len(prompts)
        self._calls += 1
        done = self.generate_ragged(
            prompts,
            group_size=members,
            seed=seed,
            # New streams in every call: the same prompt twice must not give the same completion twice.
            stream_ids=range(first, first + len(prompts)),
            **options,
        )
        device = td.device or torch.device("cpu")
        fields = self._fields(prompts, histories, done, device)
        if self.pad_output:
            return padded_completions(fields, self.pad_token_id, len(done), self._container_keys())
        return lazy_stack([completion_row(fields, i, self._container_keys()) for i in range(len(done))])

    def _container_key_options(self) -> dict[str, Key]:
        return {f"{name}_key": key for name, key in self._container_keys().items()}

    def _container_keys(self) -> dict[str, Key]:
        return {
            "tokens": self.tokens_key,
            "masks": self.masks_key,
            "log_probs": self.log_probs_key,
            "text": self.text_key,
            "history": self.history_key,
        }

    def _fields(
        self,
        prompts: list[list[int]],
        histories: list[Any] | None,
        done: RaggedCompletions,
        device: torch.device,
    ) -> dict[str, list[Any]]:
        """Return the leaves of the result, one entry per completion."""
        ends = np.cumsum(done.lengths)
        fields: dict[str, list[Any]] = {
            name: [] for name in ("prompt", "response", "full", "assistant", "response_scores", "full_scores")
        }
        for i, (end, length) in enumerate(zip(ends, done.lengths, strict=True)):
            prompt = torch.tensor(prompts[int(done.prompt_index[i])], dtype=torch.int64, device=device)
            response = torch.from_numpy(done.token_ids[end - length : end]).to(device)
            scores = torch.from_numpy(done.log_probs[end - length : end]).to(device)
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
            rows = [encode_prompt(self.tokenizer, text, as_chat=False) for text in text_list(value)]
            return pad_ids([torch.tensor(r) for r in rows], "left"), None
        encoded = [encode_chat(self.tokenizer, history_messages(row)) for row in value.unbind(0)]
        batch = pad_ids([torch.tensor(ids) for ids, _ in encoded], "left")
        return batch, pad_rows([torch.tensor(mask) for _, mask in encoded], side="left")[0].bool()

    def read_batch(self, tensordict: TensorDictBase, padding_side: Side = "left") -> TokenBatch:
        """Read whole sequences; text and histories are encoded first, by `input_mode`."""
        if self.input_mode == "tokens" or leaf(tensordict, _sub(self.tokens_key, "full")) is not None:
            return super().read_batch(tensordict, padding_side)
        batch, _ = self._read_full(tensordict)
        return batch

    def get_rlhf_dist(
        self, tensordict: TensorDictBase, *, padding_side: Side = "left", **options: Any
    ) -> D.Distribution:
        """Return the distribution of the assistant's tokens: those that a policy produced, over all turns.

        For histories the mask comes from the chat template's generation markers.
        """
        if self.input_mode == "history" and leaf(tensordict, self._assistant_key) is None:
            self._must_score("get_rlhf_dist")
            batch, assistant = self._read_full(tensordict)
            if assistant is not None:
                return self.token_distribution(batch.input_ids, batch.attention_mask, assistant)
        return super().get_rlhf_dist(tensordict, padding_side=padding_side, **options)

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
        if not batch.ragged:
            size = [len(scores)]
            response = None if responses is None else pad_rows(responses, side="right")[0]
            found = LogProbs(full=scores, response=response, padded=True, batch_size=size)
            return TensorDict({self.log_probs_key: found}, size)
        out = [TensorDict({}, []) for _ in rows]
        tokens = batch.rows(batch.input_ids)
        said = None if assistant is None else batch.rows(assistant)
        for i, row in enumerate(out):
            response = None if responses is None else responses[i]
            row.set(self.log_probs_key, LogProbs(full=rows[i], response=response, padded=False))
            if self.input_mode != "tokens":
                # Text was encoded here: what was scored goes along.
                real = torch.ones_like(tokens[i], dtype=torch.bool)
                mask = None if said is None else said[i]
                row.set(self.tokens_key, Tokens(full=tokens[i], padded=False))
                row.set(self.masks_key, Masks(all_attention_mask=real, all_assistant_mask=mask, padded=False))
        return lazy_stack(out)
