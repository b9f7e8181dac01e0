"""The forms of reward functions: TRL's and verl's as they are, and what is refused before anything is sampled."""

from __future__ import annotations

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from rlhf_pipeline import LeftOut, Matches, Reward, SoftOverlong, exact_match, mask_truncated
from rlhf_pipeline.collectors.grading import Grader
from rlhf_pipeline.data.prompts import CopyDigits, Mix, Prompt, Prompts, columns_of
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.arguments import Sampled, bind, form_of
from rlhf_pipeline.user_code.outputs import result_of, results_of

META = {"data_source": "gsm8k", "level": 3}
GROUP = [
    Sampled(prompt=Prompt(text="2+2=", answer="4", meta=META), completion="4", ids=[3, 7, 1], mask=[False, True, True]),
    Sampled(
        prompt=Prompt(text="2+2=", answer="4", meta=META),
        completion="five",
        ids=[3, 8],
        mask=[False, True],
        finish_reason="length",
    ),
]


def graded(*rewards):
    return [grade.reward for grade in Grader(bind(list(rewards), list(META))).grade(GROUP)]


def trl(completions, **kwargs):
    assert kwargs["level"] == [3, 3]
    assert kwargs["completion_ids"] == [[7, 1], [8]]
    return [float(len(text)) for text in completions]


def trl_columns(prompts, completions, completion_ids, answer, level, trainer_state=None):
    return [float(text == right) + 10 * one for text, right, one in zip(completions, answer, level, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", META)
    return {"score": float(solution_str == ground_truth), "acc": 1}


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text == right) for text, right in zip(solution_strs, ground_truths, strict=True)]


async def slow(completion, finish_reason):
    await asyncio.sleep(0.001)
    return None if finish_reason == "length" else 2.0


class Judge:
    async def __call__(self, messages):
        return float(messages[-1] == {"role": "assistant", "content": "4"})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda p, c, a, m: float(c == a) + m["level"], [4.0, 3.0]),
        (lambda prompt, answer: float(len(prompt + answer)), [5.0, 5.0]),
        (lambda completion, **rest: rest["level"] + len(rest["token_ids"]), [5.0, 4.0]),
        (lambda *given: float(given[1] == given[2]), [1.0, 0.0]),
        (functools.partial(lambda completion, level: level, level=9), [9.0, 9.0]),
        (functools.partial(exact_match, answer="five"), [0.0, 1.0]),
        (trl, [1.0, 4.0]),
        (trl_columns, [31.0, 30.0]),
        (compute_score, [1.0, 0.0]),
        (compute_scores, [1.0, 0.0]),
        (Judge(), [1.0, 0.0]),
        (SoftOverlong(max_tokens=2, cache=1), [-1.0, 0.0]),
        (Matches(pattern=r"\Afi"), [0.0, 1.0]),
    ],
)
def test_a_function_gets_what_it_asks_for(function, expected):
    """By place or by name, one completion or a group, columns of the data, TRL's and verl's names."""
    assert graded(function) == expected


def test_rewards_are_weighted_and_none_does_not_count():
    """A function that returns None leaves its weight out; if all do, there is no reward, and no failed call."""
    assert graded(Reward(exact_match, weight=0.5), Reward(slow, weight=2)) == [4.5, 0.0]
    first, second = Grader(bind(slow)).grade(GROUP)
    assert (first.reward, first.kind) == (2.0, "")
    assert math.isnan(second.reward)
    assert (second.kind, second.broken) == ("not_applicable", False)


def test_a_batched_function_fails_for_its_group_alone():
    """A list of another length is a failure of the group that it was called with."""
    grader = Grader(bind(lambda completions: [1.0] * (2 if completions[0] == "4" else 1)))
    grades = grader.grade([*GROUP, GROUP[1], GROUP[1]], groups=[0, 0, 1, 1])
    assert [grade.reward for grade in grades[:2]] == [1.0, 1.0]
    assert {grade.kind for grade in grades[2:]} == {"grader_error"}
    assert "for 2 completions; it must return a list with one value per completion" in str(grades[2].error)


def test_completions_of_messages_are_messages_as_in_trl():
    """TRL hands a conversational data set's completions over as lists of messages."""
    seen = []

    messages = ({"role": "system", "content": "be short"}, {"role": "user", "content": "2+2="})

    def reward(prompts, completions):
        seen.append((prompts, completions))
        return [1.0]

    Grader(bind(reward)).grade([Sampled(prompt=Prompt(messages=messages), completion="4")])
    assert seen == [([list(messages)], [[{"role": "assistant", "content": "4"}]])]


RESULTS = (
    *(0.5, "0.5", np.float32(0.5), np.array([0.5]), torch.tensor([[0.5]], requires_grad=True), [0.5], (0.5,)),
    *((0.5, {"format": 1.0}), {"score": 0.5, "format": 1.0}, {"reward": 0.5, "note": "text"}, {"a": 0.25, "b": 0.25}),
)


@pytest.mark.parametrize("given", RESULTS)
def test_results_are_numbers_of_any_kind(given):
    """Numbers of Python, NumPy and torch, one in a list, and dicts of components."""
    assert result_of(given).value == 0.5


def test_results_of_a_batch():
    """An array, a list with None, a list per component; bool counts as a number."""
    assert [one.value for one in results_of(np.array([0.5, 1]), 2)] == [0.5, 1.0]
    assert [one.value for one in results_of([None, True], 2)] == [None, 1.0]
    assert results_of({"score": [1, 0], "format": [0.5, 0.25]}, 2)[1].parts == {"score": 0.0, "format": 0.25}
    (first, _) = Grader(bind(lambda completion: {"a": 1, "b": 0.5})).grade(GROUP)
    assert first.parts == {"function": {"a": 1.0, "b": 0.5}}


def openrlhf(queries, prompts, labels, **kwargs):
    right = torch.tensor(
        [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    )
    return {"rewards": right, "scores": right / 2, "extra_logs": {"length": [len(one) for one in queries], "all": 7}}


def test_openrlhf_gets_text_that_its_queries_begin_with_and_logs_count_for_nothing():
    """Also for prompts of messages: `queries` is what the model read and wrote, `prompts` what it read."""
    messages = ({"role": "user", "content": "2+2="},)
    prompt = Prompt(messages=messages, answer="4")
    group = [Sampled(prompt=prompt, completion=text, prompt_text="<user>2+2=<assistant>") for text in ("4", "5")]
    first, second = Grader(bind(openrlhf)).grade(group)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.parts["openrlhf"] == {"length": 22.0, "all": 7.0, "rewards": 1.0, "scores": 0.5}


COLUMNS = ["difficulty", "gold", "kind", "level"]


@pytest.mark.parametrize(
    ("function", "names", "batched"),
    [
        (
            lambda prompts, completions, gold, difficulty, **kwargs: 0,
            ("prompts", "completions", "gold", "difficulty"),
            1,
        ),
        (lambda completions, gold, level, kind: 0, ("completions", "gold", "level", "kind"), 1),
        (lambda completion, gold, level, kind: 0, ("completion", "gold", "level", "kind"), 0),
        (lambda gold, level, difficulty, kind: 0, ("gold", "level", "difficulty", "kind"), 0),
        (lambda q, c, a, m: 0, None, 0),
        (lambda q, c, a, m, extra=None: 0, None, 0),
        (lambda q="", c="", a=None, m=None: 0, None, 0),
        (lambda gold=None: 0, ("gold",), 0),
    ],
)
def test_a_function_is_called_by_position_only_if_it_names_nothing_that_is_known(function, names, batched):
    """Four required arguments, some of them columns, are not (prompt, completion, answer, meta)."""
    form = form_of(Reward(function), COLUMNS)
    assert (form.names, form.batched) == (names, bool(batched))


@pytest.mark.parametrize(
    "wrong", ["prompt, completion, anser, meta", "completions, godl, level", "q, completion, a, m"]
)
def test_a_misspelt_name_beside_known_ones_is_refused(wrong):
    """It is not called by position instead, which would give it another argument without a word."""
    function = eval(f"lambda {wrong}: 0.0")
    with pytest.raises(DefinitionError, match=r"there is no '(anser|godl|q)'"):
        form_of(Reward(function), COLUMNS)


def test_answer_is_the_column_where_the_prompt_has_none():
    """TRL's arguments are columns; a definition that names its answer's field gets that."""

    def batched(completions, answer):
        return [float(one == "column") for one in answer]

    given = {"answer": "column", "labels": 3}
    without, both = (Sampled(prompt=Prompt(text="?", answer=own, meta=given), completion="") for own in (None, "own"))
    single = bind(lambda answer: float(answer == "column"), [*given])
    for one, expected in ((without, 1.0), (both, 0.0)):
        assert Grader(single).grade([one])[0].reward == expected
        assert Grader(bind(batched, [*given])).grade([one])[0].reward == 1.0
    labelled = form_of(Reward(lambda completion, labels: labels), [*given])  # a column of one of OpenRLHF's names
    assert (labelled.batched, labelled.call([both])) == (False, 3)


def test_a_column_that_some_prompts_lack_is_none_or_the_default():
    """Of a mixture each source has its own columns; a function of all of them is called for every prompt."""
    mix = Mix((Prompts(rows=[{"question": "a", "gold": 1}], answer_field=None, as_chat=False), CopyDigits()))
    grader = Grader(
        bind([lambda gold: 2.0 if gold is None else gold, Reward(lambda gold=5: gold, name="b")], columns_of(mix))
    )
    grades = grader.grade([Sampled(prompt=mix.prompt(cursor, 0), completion="") for cursor in (0, 1)])
    assert [grade.values for grade in grades] == [(1.0, 1.0), (2.0, 5.0)]


def test_an_argument_shows_how_the_prompt_ended():
    """A template that begins the answer with <think> leaves it out of the completion."""

    def closed(prompt_text, completion):
        return float((prompt_text + completion).rpartition("<assistant>")[2].startswith("<think>"))

    asked = bind(closed)
    assert (asked.takes_prompt_text, bind(exact_match).takes_prompt_text) == (True, False)
    prompt = Prompt(text="2+2=")
    shown = [
        Sampled(prompt=prompt, completion="x</think>4", prompt_text=f"2+2=<assistant>{end}") for end in ("<think>", "")
    ]
    assert [grade.reward for grade in Grader(asked).grade(shown)] == [1.0, 0.0]
    (unknown,) = Grader(asked).grade([Sampled(prompt=prompt, completion="4")])  # of a row of other rewards
    assert (unknown.kind, "was not stored" in str(unknown.error)) == ("grader_error", True)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completion, solutoin: 1.0, r"there is no 'solutoin'.* docs/rewards.md"),
        (lambda completions, trainer_state: [1.0], "there is no 'trainer_state'"),
        (lambda: 1.0, "takes no arguments"),
        (lambda a, b, /: 1.0, "too many positional arguments"),
        (lambda completoin="": 1.0, "there is no 'completoin'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function, said):
    """What it asks for is compared with the arguments and the columns of the first prompt."""
    with pytest.raises(DefinitionError, match=said):
        form_of(Reward(function), list(META))


def test_names_of_rewards_are_columns():
    """A name of its own for each; what cannot name a column, or is given twice, is refused."""
    with pytest.raises(DefinitionError, match="two rewards have the same name"):
        bind([Reward(trl, name="a"), Reward(slow, name="a")])
    for name in ("a__b", "trusted", "a b", ""):
        with pytest.raises(DefinitionError, match=r"Reward\.name is"):
            Reward(trl, name=name)
    with pytest.raises(DefinitionError, match=r"Reward\.weight is nan"):
        Reward(trl, weight=math.nan)
    assert [one.column for one in bind([trl, trl, Judge(), lambda completion: 1]).rewards] == [
        "reward_trl",
        "reward_trl_2",
        "reward_Judge",
        "reward_function",
    ]


def test_a_cut_off_completion_is_left_out_on_purpose():
    """The mask gives no reward and is no failed call."""
    first, second = Grader(bind([exact_match, mask_truncated])).grade(GROUP)
    assert first.reward == 1.0
    assert (second.kind, second.broken, second.values[0]) == ("truncated", False, 0.0)
    assert math.isnan(second.reward)
    assert LeftOut("x").reason == "x"
