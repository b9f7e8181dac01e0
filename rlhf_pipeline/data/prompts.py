"""Sources of prompts: a source is a pure function from a cursor to a prompt.

A collector asks for prompt 0, 1, 2, ... The order is shuffled by the seed, epoch by epoch, and depends on nothing but
`(seed, cursor)`. So after a crash the number of consumed prompts determines which come next: none is lost and none is
repeated.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal, Protocol, cast

from rlhf_pipeline.data.files import field_of, find_sources
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, PipelineError, did_you_mean
from rlhf_pipeline.settings import Settings, setting

Message = Mapping[str, object]
JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt and the inputs of its reward function.

    NumPy numbers and arrays, dates and decimals in `answer`, `meta` and `messages` become JSON values.

    Raises:
        DataError: there is neither text nor a message, a message has no role or no text, or a value is not JSON.

    >>> Prompt(messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"})).text
    '1 + 1?'
    >>> Prompt(text="", answer=2)
    Traceback (most recent call last):
    rlhf_pipeline.errors.DataError: the prompt is empty.
    """

    text: str = ""
    """The policy's input; with a chat template it becomes the user's message. For messages, the text of the last user
    message.
    """
    messages: tuple[Message, ...] | None = None
    """Chat messages instead of text. The last message must not be the assistant's."""
    answer: Any = None
    """The reference answer, a JSON value, passed to the reward function."""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further JSON data, passed to the reward function and stored with every trajectory."""

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        if self.messages is not None:
            set_("messages", tuple(_message(item, i) for i, item in enumerate(_listed(self.messages))))
            set_("text", self.text or _text_of(cast("tuple[Message, ...]", self.messages)))
        set_("answer", json_value(self.answer, "answer"))
        if not isinstance(cast(object, self.meta), Mapping):
            raise DataError(f"meta must be a mapping of names to values, got {type(self.meta).__name__}.")
        set_("meta", {str(name): json_value(value, f"meta {name!r}") for name, value in self.meta.items()})
        if not isinstance(cast(object, self.text), str):
            raise DataError(f"the prompt must be text, got {type(self.text).__name__}.")
        json_value(self.text, "the prompt")
        if not self.text:
            raise DataError("the prompt is empty.")


class PromptSource(Protocol):
    """A source of prompts: `prompt(cursor, seed)` must depend on nothing else.

    Any object with that method is one. A source with a length is finite: it is asked for prompts 0 to
    `len(source) - 1`, epoch by epoch, shuffled by the seed, or in their order if it has `shuffle = False`. A source may
    have `as_chat`, False if its text is not put through the tokenizer's chat template, and `chat_template_kwargs`, a
    mapping that the template gets.
    """

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor` (0, 1, 2, ...) of the order that `seed` gives."""
        ...


def prompt_at(source: PromptSource, cursor: int, seed: int) -> Prompt:
    """Return prompt number `cursor` of any source; what a custom source does wrong is one sentence."""
    name = type(source).__name__
    at = cursor
    if (length := getattr(source, "__len__", None)) is not None:
        size = int(length())
        if size < 1:
            raise DefinitionError(f"prompts: {name} has no prompts (its length is {size}).")
        at = _in_order(source, size, cursor, seed)
    try:
        prompt = cast(object, source.prompt(at, seed))
    except PipelineError:
        raise
    except (IndexError, StopIteration) as error:
        raise DefinitionError(
            f"prompts: {name} has no prompt {at} ({type(error).__name__}: {error}). If the source is finite, "
            "define its __len__ method; its prompts are then used epoch by epoch."
        ) from error
    except Exception as error:
        raise DefinitionError(
            f"prompts: {name}.prompt({at}, {seed}) raised {type(error).__name__}: {error}. "
            "A prompt source must have a prompt(cursor, seed) method that returns a Prompt."
        ) from error
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"prompts: {name}.prompt({at}, {seed}) returned {type(prompt).__name__}; it must return an "
            "rlhf_pipeline.Prompt(text=..., answer=..., meta=...)."
        )
    return prompt


_PROMPTS_LOOKED_AT: Final = 16
"""Number of prompts that are read from a source that does not list them; their columns represent all prompts."""


def columns_of(source: PromptSource, seed: int = 0) -> tuple[str, ...]:
    """Return the columns that the prompts of a source have beside prompt and answer, all together, sorted.

    >>> rows = Prompts(rows=[{"question": "1?", "gold": "1"}], answer_field=None, as_chat=False)
    >>> columns_of(Mix((rows, CopyDigits())))
    ('gold', 'source_line')
    """
    if isinstance(source, Mix):
        return tuple(sorted({name for part in source.sources for name in columns_of(part, seed)}))
    if isinstance(source, ChosenPrompts):
        return columns_of(source.source, seed)
    if isinstance(source, Prompts):
        return source.columns()
    length = getattr(source, "__len__", None)
    most = _PROMPTS_LOOKED_AT if length is None else min(_PROMPTS_LOOKED_AT, max(int(length()), 1))
    listed = [prompt_at(source, 0, seed)]
    with contextlib.suppress(PipelineError):  # it ends before that; the code that needs those prompts reports it
        listed += [prompt_at(source, cursor, seed) for cursor in range(1, most)]
    return tuple(sorted({name for prompt in listed for name in prompt.meta}))


def through_template(source: PromptSource) -> bool:
    """Return whether a source's text goes through the tokenizer's chat template, where it has one; of most it does."""
    return bool(getattr(source, "as_chat", True))


def template_options(source: PromptSource) -> dict[str, Any]:
    """Return what a source hands to the tokenizer's chat template; empty for most."""
    return dict(getattr(source, "chat_template_kwargs", {}))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPrompts:
    """No prompts: for definitions that learn from stores only."""

    as_chat: bool = False
    """Unused."""

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Raise an error.

        Raises:
            DefinitionError: always.
        """
        raise DefinitionError(f"there is no prompt {cursor} (seed {seed}): the definition learns only from stores.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmptyPrompts:
    """Empty prompts, for environments whose `reset` supplies the prompt.

    >>> EmptyPrompts().prompt(3, seed=0).text.strip()
    ''
    """

    as_chat: bool = True
    """Whether the chat template is applied to the output of the environment."""

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a blank."""
        del cursor, seed
        return Prompt(text=" ")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyDigits(Settings):
    """Random digits followed by `=`. The answer repeats the digits.

    >>> source = CopyDigits(num_digits=3)
    >>> source.prompt(0, seed=0) == source.prompt(0, seed=0)
    True
    >>> source.prompt(0, seed=0).text.endswith("=")
    True
    """

    num_digits: int = setting(4, min=1, help="Number of digits to copy.")
    as_chat: bool = setting(False, help="Always false, because the prompt is raw text.")

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`: `num_digits` digits, then `=`."""
        # Seeding by a string hashes it with SHA-512, so neighbouring cursors are independent.
        rng = random.Random(f"copy_digits {seed} {cursor}")
        digits = "".join(rng.choices("0123456789", k=self.num_digits))
        return Prompt(text=f"{digits}=", answer=digits)


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """Rows held in memory. A run records their number and digest, so that it resumes with the same rows only.

    >>> RowsInMemory.of([{"question": "1 + 1?"}]).num_rows
    1
    """

    num_rows: int
    sha256: str
    rows: tuple[dict[str, Any], ...] = field(compare=False, repr=False, metadata={"recorded": False})

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> RowsInMemory:
        """Take over rows: a list of mappings, or a data set of `datasets`."""
        json_rows: list[dict[str, Any]] = []
        digest = hashlib.sha256()
        for number, row in enumerate(rows):
            if not isinstance(cast(object, row), Mapping):
                raise DataError(f"row {number}: expected a mapping of names to values, got {type(row).__name__}.")
            json_row = {str(name): json_value(value, f"row {number}: {name!r}") for name, value in row.items()}
            digest.update(json.dumps(json_row).encode())
            json_rows.append(json_row)
        return cls(len(json_rows), digest.hexdigest(), tuple(json_rows))


Skip = Literal["too_long", "empty", "no_answer"]


@dataclass(frozen=True, slots=True)
class Prompts(Settings):
    """Prompts from files or from rows in memory. Each row has a question or chat messages, and optionally an answer.

    The defaults read GSM8K's `train.jsonl`. All rows are read and checked before the first rollout, so an invalid row
    stops the run at the start. A field is specified by its name or by a dotted path (`reward_model.ground_truth`);
    every other column of a row is passed to the reward as `meta`.

    >>> source = Prompts(rows=[{"question": "1 + 1?", "answer": 2, "level": "easy"}], system="Be brief.")
    >>> prompt = source.prompt(0, seed=0)
    >>> prompt.text, prompt.answer, prompt.meta
    ('1 + 1?', 2, {'source_line': 0, 'level': 'easy'})
    >>> [message["role"] for message in prompt.messages]
    ['system', 'user']
    """

    path: str = setting(
        "",
        help="A file, a folder or a glob pattern. Supported formats are JSON Lines, JSON arrays, CSV, Parquet, Arrow, "
        "and datasets saved with the `datasets` library. Files can be compressed with gzip. Relative paths are "
        "resolved against the working directory.",
    )
    _: KW_ONLY
    rows: RowsInMemory | Iterable[Mapping[str, Any]] | None = setting(
        None,
        help="Rows in memory instead of a path: a list of dicts, or a dataset from the `datasets` library. Can only "
        "be set in Python.",
    )
    prompt_field: str = setting(
        "question", help="The field that contains the prompt, as text or as a list of chat messages."
    )
    answer_field: str | None = setting(
        "answer",
        help="The field that contains the reference answer, which can be any JSON value; None if the data has no "
        "answers.",
    )
    meta_fields: tuple[str, ...] | None = setting(
        None,
        help="The columns that are passed to the reward function as `meta`; None passes all columns except the prompt "
        "and the answer.",
    )
    system: str | None = setting(
        None,
        help="A system message that is inserted before every prompt that does not contain one. Requires a chat "
        "template.",
    )
    shuffle: bool = setting(True, help="Reshuffle the rows in every epoch; false keeps their order.")
    as_chat: bool = setting(True, help="If the tokenizer has a chat template, apply it to the prompt.")
    chat_template_kwargs: dict[str, Any] = setting(
        factory=dict, help='Arguments for the chat template, for example `{"enable_thinking": false}`.'
    )
    skip: tuple[Skip, ...] | Skip = setting(
        (),
        help="Rows that are skipped and counted instead of causing an error: `too_long` (longer than the model's "
        "context or `max_prompt_tokens`), `empty` (no text), `no_answer` (the answer is missing or null).",
    )
    max_prompt_tokens: int | None = setting(
        None, min=1, help="Maximum number of tokens in a prompt; None uses the model's context length."
    )
    limit: int | None = setting(None, min=1, help="Use only the first `limit` rows.")

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {"rows": self.rows, "skip": self.skip, "path": self.path}
        if isinstance(fields["skip"], str):
            object.__setattr__(self, "skip", (fields["skip"],))
        if isinstance(fields["rows"], Iterable) and not isinstance(fields["rows"], (str, bytes, Mapping)):
            object.__setattr__(self, "rows", RowsInMemory.of(cast("Iterable[Mapping[str, Any]]", fields["rows"])))
        if hasattr(fields["path"], "__fspath__"):
            object.__setattr__(self, "path", str(fields["path"]))
        Settings.__post_init__(self)

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (bool(self.path) != (self.rows is not None), "set either path or rows."),
            (self.system is None or self.as_chat, "system is a chat message, so it needs as_chat=True."),
        ]

    def all_prompts(self) -> tuple[Prompt, ...]:
        """Return all prompts in order, or those of the first `limit` rows, without rows that `skip` excludes here.

        Prompts that are too long for a model are included: see `run.prompt_lengths`.

        Raises:
            MissingPathError: the path does not exist.
            DataError: a row cannot be read, or lacks a field.
        """
        return _read(self._reading()).prompts

    def skipped(self) -> dict[str, int]:
        """Return the number of rows that each rule of `skip` excluded when the file was read."""
        return dict(_read(self._reading()).skipped)

    def columns(self) -> tuple[str, ...]:
        """Return the sorted names that occur in `meta` of any prompt."""
        return _read(self._reading()).columns

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`; every epoch is a new shuffle of all prompts, unless `shuffle` is false.

        Raises:
            MissingPathError: the path does not exist.
            DataError: a row cannot be read, or lacks a field.
        """
        prompts = self.all_prompts()
        return prompts[_in_order(self, len(prompts), cursor, seed)]

    def _reading(self) -> _Reading:
        return _Reading(
            path=self.path,
            rows=cast("RowsInMemory | None", self.rows),
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
            meta_fields=self.meta_fields,
            system=self.system,
            skip=cast("tuple[Skip, ...]", self.skip),
            limit=self.limit,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPrompts:
    """Some prompts of a source that can list them all, such as those that fit in a model's context."""

    source: Prompts
    positions: tuple[int, ...]
    """Positions in `source.all_prompts()`."""

    @property
    def shuffle(self) -> bool:
        """As of the source."""
        return self.source.shuffle

    @property
    def as_chat(self) -> bool:
        """As of the source."""
        return self.source.as_chat

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """As of the source."""
        return self.source.chat_template_kwargs

    def __len__(self) -> int:
        return len(self.positions)

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return the prompt at a position."""
        return self.source.all_prompts()[self.positions[cursor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum(Settings):
    """Settings for adjusting the weights of a mixture according to the success rates that a run has stored.

    Every `every` rollouts, each weight is recomputed from those rollouts: the mixture's own weight times
    `least + (1 - least) * 4 p (1 - p)`, the mean over the source's groups, where `p` is the share of a group's members
    that are correct. A source with all or none of its prompts solved keeps `least` of its weight; a source without
    graded prompts in these rollouts returns to its initial weight.

    >>> Curriculum(every=10, least=0.2).weight(1.0, [0.5, 1.0])
    0.6
    """

    every: int = setting(min=1, help="Number of rollouts between two updates of the weights.")
    by: str | None = setting(
        None,
        help=(
            "The name of the reward or component that determines whether a completion is correct; None uses the total "
            "reward."
        ),
    )
    success_at: float = setting(1.0, help="The minimum reward at which a completion counts as correct.")
    least: float = setting(
        0.1,
        above=0,
        max=1,
        help="The share of a source's weight that remains if each of the source's prompts is either always or never "
        "solved.",
    )

    def weight(self, base: float, success: Sequence[float]) -> float:
        """Return a source's weight, to four places.

        Args:
            base: the source's weight in the mixture.
            success: the share of correct members in each of its groups; at least one group.
        """
        learnable = sum(4 * rate * (1 - rate) for rate in success) / len(success)
        return max(round(base * (self.least + (1 - self.least) * learnable), 4), 1e-4)


@dataclass(frozen=True, slots=True)
class Mix(Settings):
    """Several sources. In any sequence of consecutive prompts, each source has about the share specified by its weight.

    The weights alone determine the source of prompt number `cursor`; the seed and the number of earlier prompts of this
    source determine which of its prompts is used. A mixture therefore resumes like its sources, and no source waits for
    the epoch of another.

    Args:
        sources: the sources. `as_chat` and the arguments of the chat template must be equal for all sources.
        weights: one per source, above 0; equal by default.
        curriculum: how the weights change during a run that collects in its own process; None keeps them constant.

    >>> mix = Mix((CopyDigits(num_digits=2), CopyDigits(num_digits=5)), weights=(3, 1))
    >>> [len(mix.prompt(cursor, seed=0).answer) for cursor in range(8)]
    [2, 2, 5, 2, 2, 2, 5, 2]
    """

    sources: tuple[PromptSource, ...] = setting(help="The sources of prompts.")
    weights: tuple[float, ...] = setting(
        (), above=0, help="One weight per source; if empty, all sources have the same weight."
    )
    curriculum: Curriculum | None = setting(
        None,
        help="Adjusts the weights according to the stored success rates; see `Curriculum`. None keeps the weights "
        "constant.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        same = {
            (through_template(source), json.dumps(template_options(source), sort_keys=True)) for source in self.sources
        }
        return [
            (len(self.sources) > 0, "there are no sources."),
            (
                len(self.weights) in (0, len(self.sources)),
                f"weights must be empty or contain one value per source: expected {len(self.sources)}, got "
                f"{len(self.weights)}.",
            ),
            (
                len(same) <= 1,
                "the sources differ in as_chat or chat_template_kwargs; use the same values in all sources.",
            ),
        ]

    @property
    def as_chat(self) -> bool:
        """As of the sources."""
        return through_template(self.sources[0])

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """As of the sources."""
        return template_options(self.sources[0])

    def source_of(self, cursor: int) -> int:
        """Return the number of the source of prompt number `cursor`, from 0."""
        return turn(self.base_weights, cursor)[0]

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`: the next prompt of the selected source.

        Raises:
            PipelineError: as the source does.
        """
        source, cursors = turn(self.base_weights, cursor)
        return prompt_at(self.sources[source], cursors[source], seed)

    @property
    def base_weights(self) -> tuple[float, ...]:
        """One per source, as given."""
        return self.weights or (1.0,) * len(self.sources)

    def with_sources(self, sources: Sequence[PromptSource]) -> Mix:
        """Return a mixture of other sources with the same settings."""
        return replace(self, sources=tuple(sources))


def turn(weights: Sequence[float], cursor: int) -> tuple[int, list[int]]:
    """Return the source of prompt number `cursor` of a mixture, and how many prompts each has given before.

    Source `s` gives its prompt number `j` at the time `(j + 1/2) / weight`, and turns are taken in the order of time.
    Before the time `(cursor - sources) / all weights`, at most `cursor` of them have passed.

    >>> [turn((3.0, 1.0), cursor)[0] for cursor in range(4)], turn((3.0, 1.0), 4)[1]
    ([0, 0, 1, 0], [3, 1])
    """
    shares = [Fraction(weight) for weight in weights]
    start = max(Fraction(cursor - len(shares), 1) / sum(shares), Fraction(0))
    cursors = [int(start * share + Fraction(1, 2)) for share in shares]
    while True:
        times = [(number + Fraction(1, 2)) / share for number, share in zip(cursors, shares, strict=True)]
        source = times.index(min(times))
        if sum(cursors) == cursor:
            return source, cursors
        cursors[source] += 1


def skips_too_long(source: PromptSource) -> bool:
    """Return whether a source, or one of a mixture, excludes prompts that are too long for a model."""
    if isinstance(source, Mix):
        return any(skips_too_long(part) for part in source.sources)
    return isinstance(source, Prompts) and "too_long" in source.skip


def json_value(value: object, where: str) -> JsonValue:
    """Return a value as JSON has it.

    NumPy numbers and arrays become numbers and lists, tuples lists, dates ISO 8601 text, decimals text, and numbers
    that are not finite null.

    >>> import numpy as np
    >>> json_value({"n": np.int64(3), "of": (1, 2.5), "on": datetime.date(2024, 5, 1)}, "meta")
    {'n': 3, 'of': [1, 2.5], 'on': '2024-05-01'}
    >>> json_value({"image": b"GIF"}, "row 3")
    Traceback (most recent call last):
    rlhf_pipeline.errors.DataError: row 3: 'image' is of type bytes, which JSON cannot represent.
    """
    if isinstance(value, str):
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise DataError(f"{where} contains half of a surrogate pair, which is not text.")
        return str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(name): json_value(item, f"{where}: {str(name)!r}") for name, item in items}
    if isinstance(value, (list, tuple)):
        return [json_value(item, where) for item in cast("list[object]", value)]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    plain: Any = getattr(value, "tolist", None)
    if type(value).__module__.partition(".")[0] == "numpy" and callable(plain):
        native = plain()
        if type(native) is not type(value):
            return json_value(native, where)
    raise DataError(f"{where} is of type {type(value).__name__}, which JSON cannot represent.")


def _in_order(source: PromptSource, size: int, cursor: int, seed: int) -> int:
    """Return the position of prompt number `cursor` of a finite source: epoch by epoch, shuffled by default."""
    epoch, position = divmod(cursor, size)
    return _epoch_order(size, seed, epoch)[position] if getattr(source, "shuffle", True) else position


@functools.lru_cache(maxsize=16)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """Everything that decides what is read."""

    path: str
    rows: RowsInMemory | None
    prompt_field: str
    answer_field: str | None
    meta_fields: tuple[str, ...] | None
    system: str | None
    skip: tuple[Skip, ...]
    limit: int | None

    def located(self) -> Iterable[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Yield place, row and provenance of each row."""
        if self.rows is not None:
            for number, row in enumerate(self.rows.rows):
                yield f"row {number}", row, {"source_line": number}
            return
        try:
            sources = find_sources([self.path])
        except MissingPathError as error:
            raise MissingPathError(
                f"the prompts cannot be read: {error} Set the path, for example: --set "
                "prompts.path=FOLDER/train.jsonl. To use a dataset from a hub, first save it to disk: "
                "datasets.load_dataset(NAME, split='train').save_to_disk(FOLDER)"
            ) from error
        for source in sources:
            provenance = {"source_file": source.path.name} if len(sources) > 1 else {}
            for number, row in source.rows():
                yield source.where(number), row, provenance | {"source_line": number}


@dataclass(frozen=True, slots=True)
class _Read:
    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]
    columns: tuple[str, ...]


@functools.lru_cache(maxsize=8)
def _read(reading: _Reading) -> _Read:
    prompts: list[Prompt] = []
    skipped: dict[str, int] = {}
    for number, (where, row, provenance) in enumerate(reading.located()):
        if reading.limit is not None and number >= reading.limit:
            break
        rule, prompt = _prompt_of(row, where, provenance, reading)
        if prompt is not None:
            prompts.append(prompt)
        else:
            skipped[rule] = skipped.get(rule, 0) + 1
    if not prompts:
        gone = "".join(f" Rows skipped by skip={rule}: {count:,}." for rule, count in skipped.items())
        raise DataError(
            f"{reading.path or 'the list of rows'} has no prompts in the field '{reading.prompt_field}'.{gone}"
        )
    return _Read(tuple(prompts), skipped, tuple(sorted({name for prompt in prompts for name in prompt.meta})))


def _prompt_of(
    row: Mapping[str, Any], where: str, provenance: Mapping[str, Any], reading: _Reading
) -> tuple[str, Prompt | None]:
    """Return a row's prompt; None, and the rule of `skip`, if it is excluded."""
    value = _field(row, reading.prompt_field, where)
    blank = _is_blank(value)
    if "empty" in reading.skip and (blank or value is None or value == []):
        return "empty", None
    if blank and value not in ("", []):
        raise DataError(
            f"{where}: field '{reading.prompt_field}': the prompt is empty or contains only whitespace. Skip such "
            'rows: skip="empty".'
        )
    answer = None
    if reading.answer_field is not None:
        try:
            answer = _field(row, reading.answer_field, where)
        except DataError:
            if "no_answer" not in reading.skip:
                raise
        if answer is None and "no_answer" in reading.skip:
            return "no_answer", None
    used_fields = {reading.prompt_field, reading.answer_field}
    names = [name for name in row if name not in used_fields] if reading.meta_fields is None else reading.meta_fields
    meta = {name: _field(row, name, where) for name in names}
    if not isinstance(value, (str, list, tuple)):
        raise DataError(
            f"{where}: field '{reading.prompt_field}' must be text or a list of messages, got {type(value).__name__}."
        )
    text, messages = (value, None) if isinstance(value, str) else ("", tuple(cast("Sequence[Message]", value)))
    if reading.system is not None:
        turns = messages if messages is not None else ({"role": "user", "content": text},)
        has_system = bool(turns) and isinstance(cast(object, turns[0]), Mapping) and turns[0].get("role") == "system"
        messages = turns if has_system else ({"role": "system", "content": reading.system}, *turns)
    try:
        return "", Prompt(text=text, messages=messages, answer=answer, meta={**provenance, **meta})
    except DataError as error:
        raise DataError(f"{where}: {_sentence(str(error), reading, names)}") from error


def _is_blank(value: object) -> bool:
    """Return whether a prompt is empty: text without a letter, or messages without one in any of them."""
    if isinstance(value, str):
        return not value.strip()
    contents = (
        [message.get("content") for message in value if isinstance(message, Mapping)] if isinstance(value, list) else []
    )
    return bool(contents) and all(isinstance(content, str) and not content.strip() for content in contents)


def _sentence(error: str, reading: _Reading, meta_fields: Sequence[str]) -> str:
    """Return what is wrong with a prompt, in the names of its row, and how to omit a column."""
    if error.startswith("meta "):
        others = ",".join(name for name in meta_fields if not error.startswith(f"meta {name!r}"))
        return (
            f"field {error.removeprefix('meta ')} List the columns that reward functions read, without this one: --set "
            f"prompts.meta_fields={others}"
        )
    field_name = reading.answer_field if error.startswith("answer") else reading.prompt_field
    return f"field '{field_name}': {error}"


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    try:
        return field_of(row, name)
    except KeyError:
        hint = did_you_mean(name, row)
        raise DataError(f"{where}: there is no field '{name}'.{hint}") from None


def _listed(messages: object) -> Sequence[object]:
    if not isinstance(messages, (list, tuple)):
        raise DataError(f"messages must be a list, got {type(messages).__name__}.")
    listed = cast("Sequence[object]", messages)
    if not listed:
        raise DataError("the prompt is empty: there are no messages.")
    last = listed[-1]
    if isinstance(last, Mapping) and cast("Message", last).get("role") == "assistant":
        raise DataError(
            "the last message is from the assistant, but a completion responds to a user or a tool. Remove that "
            "message."
        )
    return listed


def _message(message: object, index: int) -> Message:
    """Return a message as JSON, with its text parts joined; columns that Arrow filled with null are omitted."""
    if not isinstance(message, Mapping):
        raise DataError(f"message {index} must be an object with role and content, got {type(message).__name__}.")
    fields = cast("Mapping[str, object]", message)
    json_fields = {str(name): json_value(value, f"message {index}: {name!r}") for name, value in fields.items()}
    content = json_fields.get("content")
    if not isinstance(json_fields.get("role"), str):
        raise DataError(f"message {index} has no role.")
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            text = part.get("text") if isinstance(part, dict) else part
            if kind not in ("text", "str") or not isinstance(text, str):
                raise DataError(f"message {index} has content of type {kind}; the policy reads only text.")
            texts.append(text)
        content = "".join(texts)
    elif content is None and json_fields.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"message {index} must have text as its content, got {type(content).__name__}.")
    return {name: value for name, value in json_fields.items() if value is not None} | {"content": content}


def _text_of(messages: tuple[Message, ...]) -> str:
    """Return the last user's text; without a user, all texts."""
    user_texts = [str(message["content"]) for message in messages if message["role"] == "user"]
    return user_texts[-1] if user_texts else "\n".join(str(message["content"]) for message in messages)
