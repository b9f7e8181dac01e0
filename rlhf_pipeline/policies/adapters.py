"""What counts as a policy, and how another library's model becomes one: adapters are registered from above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rlhf_pipeline.policies.engines.protocol import RaggedCompletions

__all__ = ["Adapter", "Policy", "actor_of", "methods_are_of", "policy_of", "register"]


@runtime_checkable
class Policy(Protocol):
    """What samples completions and scores tokens; `CausalLMPolicy` does.

    Attributes:
        temperature: of sampling and scoring.
        tokenizer: of prompts and completions, or None for work on token ids.
        eos_token_ids: what ends a completion.
        max_new_tokens: the limit of a completion.
    """

    temperature: float
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, or None where nobody knows."""
        ...

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        score_mask: Tensor | None = None,
        *,
        temperature: float | None = None,
    ) -> Tensor:
        """Log-probs float32 `[B, T]` of the tokens, 0 where not scored."""
        ...

    def generate_ragged(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int = 1,
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float | None = None,
        seed: int,
        stream_ids: Sequence[int] | None = None,
    ) -> RaggedCompletions:
        """Completions of every prompt, prompt by prompt."""
        ...


class Adapter(Protocol):
    """Turns one kind of model into a policy."""

    def matches(self, model: object) -> bool:
        """Whether a model is of this kind."""
        ...

    def policy(self, model: Any, owner: str) -> Policy:
        """A policy in the place of the model; `owner` asks, for messages."""
        ...

    def actor(self, model: Any) -> Any | None:
        """A policy with hidden states and a head for a loss, or None where the model has to be asked itself."""
        ...


_adapters: list[Adapter] = []


def register(adapter: Adapter) -> None:
    """Let the core take a kind of model wherever it takes a policy."""
    _adapters.append(adapter)


def policy_of(model: Any, owner: str) -> Any:
    """Return the policy that an adapter makes of a model, or the model where none knows it."""
    found = next((adapter for adapter in _adapters if adapter.matches(model)), None)
    return model if found is None else found.policy(model, owner)


def actor_of(model: Any) -> tuple[bool, Any | None]:
    """Return whether an adapter knows a loss's actor, and what it makes of it."""
    found = next((adapter for adapter in _adapters if adapter.matches(model)), None)
    return (False, None) if found is None else (True, found.actor(model))


def methods_are_of(model: Any, package: str, names: Sequence[str]) -> bool:
    """Whether the methods of these names that a model has are those of a package, and not somebody's own."""
    found = ((getattr(type(model), name, None), getattr(nn.Module, name, None)) for name in names)
    own = (method for method, missing in found if method is not missing)
    return all((getattr(method, "__module__", None) or "").partition(".")[0] == package for method in own)
