"""Whether the chat template can show the conversations of a run: checked before the first rollout."""

from __future__ import annotations

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.prompts import template_options, through_template
from rlhf_pipeline.environments.environment import tools_of
from rlhf_pipeline.environments.makers import Environments, maker_of
from rlhf_pipeline.policies.call_formats import call_format_of, name_of, rewritten_history
from rlhf_pipeline.policies.chat import end_texts
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.tool_calls import schema_of


def template_notices(pipeline: Pipeline, policy: TokenPolicy) -> list[str]:
    """Return what a user should know about the chat template in the conversations of a run; usually nothing.

    Raises:
        DefinitionError: it cannot show the tools' calls and their results.
    """
    codec = policy.tokenizer
    if pipeline.environment is None or getattr(codec, "chat_template", None) is None:
        return []
    maker = maker_of(pipeline.environment)
    makers = maker.makers.values() if isinstance(maker, Environments) else [maker]
    template, ends = template_options(pipeline.prompts), end_texts(codec, policy.eos_token_ids)
    notices = dict[str, None]()
    for environment in makers:
        tools = [schema_of(tool) for tool in tools_of(environment)]
        call_format = call_format_of(codec, tools, template=template, ends=ends) if tools else None
        if call_format is not None and call_format.most_calls is not None:
            sentence = (
                "shows one call per turn: the reply to a turn with several calls is an error, and no call is executed."
            )
            notices[f"{name_of(codec)} {sentence}"] = None
        if pipeline.collect.history == "sampled" and (tools or through_template(pipeline.prompts)):
            rewritten = rewritten_history(codec, template=template, tools=tools, call_format=call_format, ends=ends)
            notices |= {} if rewritten is None else {rewritten: None}
    return [*notices]
