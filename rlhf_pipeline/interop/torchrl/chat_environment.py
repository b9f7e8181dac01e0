"""TorchRL's `ChatEnv`, with whatever transforms it has, as an environment of a definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data import History
from torchrl.modules.llm.policies.common import ChatHistory

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Message, Step, Turn
from rlhf_pipeline.policies.encoding import history_messages


class ChatEnvironment:
    """Makes an environment of a `ChatEnv` in history mode; `Pipeline(environment=ChatEnvironment(make))`.

    The definition's prompts are its queries, so it needs no data loader. The text that its transforms append after a
    turn is the reply; a turn after which they append nothing, or set `done`, is the last one.

    Args:
        make: returns a new `ChatEnv` of batch size 1, with its transforms.
        rewards: keys of the step's rewards, which keep their names.
        has_effects: it changes something outside the conversation.

    >>> from torchrl.envs.llm import ChatEnv
    >>> environment = ChatEnvironment(lambda: ChatEnv(system_prompt="Be brief."))()
    >>> [message["role"] for message in environment.reset(Prompt(text="1 + 1?"), seed=0)]
    ['system', 'user']
    >>> environment.step(Turn(text="2")).done
    True
    """

    def __init__(
        self, make: Callable[[], Any], *, rewards: Sequence[str] = ("reward",), has_effects: bool = False
    ) -> None:
        self.make, self.rewards, self.has_effects = make, tuple(rewards), has_effects

    def __call__(self) -> ChatConversation:
        """Return a new conversation."""
        return ChatConversation(self.make(), self.rewards)


class ChatConversation:
    """One conversation; made by `ChatEnvironment`."""

    def __init__(self, env: Any, rewards: Sequence[str]) -> None:
        self.env, self.rewards = env, rewards

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """Pass the prompt as the query, with its answer and meta, and return the messages."""
        self.env.set_seed(seed % 2**31)
        query: Any = [prompt.text] if prompt.messages is None else History.from_chats([[*map(dict, prompt.messages)]])
        beside = {name: [value] for name, value in {**prompt.meta, "answer": prompt.answer}.items()}
        with set_list_to_stack(True):
            self.state = self.env.reset(TensorDict({**beside, self._base.data_key: query}, batch_size=[1]))
        return history_messages(self.state["history"].prompt[0])

    def step(self, turn: Turn) -> Step:
        """Append the turn to the history, and return the environment's messages after it."""
        with set_list_to_stack(True):
            reply = lazy_stack([lazy_stack([History(role=self._base.policy_role, content=turn.text)])])
            before = self.state["history"].prompt
            full = before.extend(reply, inplace=False, dim=-1)
            self.state["history"] = ChatHistory(prompt=before, response=reply, full=full)
            stepped = self.env.step(self.state)
            self.state = self.env.step_mdp(stepped)
        after = stepped["next"]
        replies = history_messages(after["history"].prompt[0])[full.shape[-1] :]
        rewards = {name: float(after[name].sum()) for name in self.rewards if after.get(name, None) is not None}
        return Step(replies, done=bool(after["done"].any()) or not replies, rewards=rewards)

    @property
    def _base(self) -> Any:
        return getattr(self.env, "base_env", self.env)
