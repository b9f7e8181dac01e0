"""The policy protocol, and adapters, registered from above, that turn other libraries' models into policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rlhf_pipeline.policies.engines.protocol import RaggedCompletions

__all__ = ["Adapter", "Policy", "actor_of", "methods_are_of", "policy_of", "register"]


@runtime_checkable
class Policy(Protocol):
    """Samples completions and scores tokens, as `CausalLMPolicy` does."""

    temperature: float
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, or None if unknown."""
        ...

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        score_mask: Tensor | None = None,
        *,
        temperature: float | None = None,
    ) -> Tensor:
        """Return the log-probs of the tokens, float32 `[B, T]`, 0 where not scored."""
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
        """Sample completions of every prompt, prompt by prompt."""
        ...


class Adapter(Protocol):
    """Turns one kind of model into a policy."""

    def matches(self, model: object) -> bool:
        """Return whether a model is of this kind."""
        ...

    def policy(self, model: Any, owner: str) -> Policy:
        """Return a policy for the model; messages name `owner` as the caller."""
        ...

    def actor(self, model: Any) -> Any | None:
        """Return a policy with hidden states and a head for a loss, or None if the loss must call the model itself."""
        ...


_adapters: list[Adapter] = []


def register(adapter: Adapter) -> None:
    """Register an adapter: its kind of model is accepted wherever a policy is."""
    _adapters.append(adapter)


def policy_of(model: Any, owner: str) -> Any:
    """Return the policy that an adapter makes of a model, or the model itself if no adapter matches."""
    matching = next((adapter for adapter in _adapters if adapter.matches(model)), None)
    return model if matching is None else matching.policy(model, owner)


def actor_of(model: Any) -> tuple[bool, Any | None]:
    """Return whether an adapter matches the model, and the actor that it makes of the model."""
    matching = next((adapter for adapter in _adapters if adapter.matches(model)), None)
    return (False, None) if matching is None else (True, matching.actor(model))


def methods_are_of(model: Any, package: str, names: Sequence[str]) -> bool:
    """Return whether a model's methods of these names all come from a package, none from a subclass outside it."""
    pairs = ((getattr(type(model), name, None), getattr(nn.Module, name, None)) for name in names)
    defined = (method for method, missing in pairs if method is not missing)
    return all((getattr(method, "__module__", None) or "").partition(".")[0] == package for method in defined)
