"""Policies: a causal language model that generates, scores and is trained.

- `token_policy`: `TokenPolicy`, around any causal language model of `transformers`.
- `engines`: what turns prompts into completions: slots of a KV cache in process, or vLLM.
- `chat`: prompts to token ids and completions to text.
- `new_model`: a tiny checkpoint, or a tiny model in memory, made from scratch.

TensorDicts come in with `interop.torchrl.policy`, the public `CausalLMPolicy`.

Nothing is imported here, so that a program pays only for what it uses.
"""

from __future__ import annotations
