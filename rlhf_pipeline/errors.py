"""The errors of the pipeline, one tree.

    PipelineError
    +-- DefinitionError (ValueError)      a pipeline definition, a --set override or an argument is wrong
    |   +-- UnsupportedError (NotImplementedError)  the object does not support the request
    |   +-- MissingAttributeError (AttributeError)  an argument lacks a required attribute
    +-- DataError (ValueError)            a prompt file, a trajectory or a batch is invalid
    |   +-- MissingKeyError (KeyError)    a batch or a store lacks the requested key
    |   +-- IncompleteError (RuntimeError)  a trajectory has no end
    +-- MissingPathError (FileNotFoundError)   a given folder or file does not exist
    +-- RunExistsError (FileExistsError)  the run folder already exists
    |   +-- LeaseLostError                another process, perhaps on another machine, has taken over
    +-- RunMismatchError (ValueError)     a resumed run or replay does not match its record
    +-- RunStorageError (OSError)         the run folder cannot be written to: the disk is full, or a mount is lost
    +-- RewardError (RuntimeError)        every reward call of a rollout failed
    +-- StopAskedError (RuntimeError)     a signal requested a stop while reward calls were running
    +-- EngineError (RuntimeError)        an external engine is unreachable, or returns an invalid response
    +-- ProcessFailedError (RuntimeError) a process of a run failed repeatedly

The store has its own tree, `trajectory_store.StoreError`. Every message reports the value, its location and the next
command. Each subclass also derives from a built-in exception, so `except ValueError` works.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Final


def plain(text: str) -> str:
    r"""Return `text` with control characters spelled out, so that names and model output cannot drive a terminal.

    >>> plain("a\x1b[31m b")
    'a\\x1b[31m b'
    >>> plain("one\ntwo")
    'one\ntwo'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def typed(place: object) -> str:
    """Return a path or an address in command-line form: quoted, and not mistaken for an option.

    >>> typed("my run"), typed("-run")
    ("'my run'", './-run')
    """
    text = str(place)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


_PENALTY: Final = (
    " No engine reports the distribution that results from a penalty, so the stored log-probs would not match the "
    "sampled distribution, and ratios would be wrong. Penalise repetition in a reward function instead."
)
_REFUSED: Final[Mapping[str, str]] = dict.fromkeys(
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"), _PENALTY
)
"""Options of other samplers that are deliberately excluded, each with the reason."""


def no_such_field(name: str, names: Iterable[str]) -> str:
    """Return the message about a field that a definition does not have: why it is excluded, or the nearest one.

    >>> no_such_field("lrr", ["lr", "steps"])
    " Did you mean 'lr'?"
    """
    return _REFUSED.get(name.rpartition(".")[2]) or did_you_mean(name.partition(".")[0], names)


class PipelineError(Exception):
    """The base class of all errors of this package. The text of an error is safe to print to a terminal."""

    def __str__(self) -> str:
        return plain(super().__str__())


class DefinitionError(PipelineError, ValueError):
    """A pipeline definition, an override or an argument is invalid."""


class UnsupportedError(DefinitionError, NotImplementedError):
    """The object does not support the request."""


class MissingAttributeError(DefinitionError, AttributeError):
    """An argument lacks a required attribute."""


class DataError(PipelineError, ValueError):
    """A prompt file, a trajectory or a batch is invalid."""


class MissingKeyError(DataError, KeyError):
    """A batch or a store lacks the requested key."""

    def __str__(self) -> str:
        """Return the message unchanged; a KeyError would quote it."""
        return str(self.args[0]) if self.args else ""


class IncompleteError(DataError, RuntimeError):
    """A trajectory is incomplete: its last step is missing."""


class PromptTypeError(DataError, TypeError):
    """A prompt is not text."""


class MissingPathError(PipelineError, FileNotFoundError):
    """The specified folder or file does not exist."""


class RunExistsError(PipelineError, FileExistsError):
    """The run folder already exists."""


class LeaseLostError(RunExistsError):
    """This process stalled for so long that another process took over. Later writes by this process are discarded."""


class RunMismatchError(PipelineError, ValueError):
    """A resumed run or replay does not match its record."""


class RunStorageError(PipelineError, OSError):
    """The run folder cannot be written to."""


class RewardError(PipelineError, RuntimeError):
    """Every reward call of a rollout failed, so there is nothing to learn from."""


class StopAskedError(PipelineError, RuntimeError):
    """A signal requested a stop while reward calls were running. The rollout is sampled again later."""


class EngineError(PipelineError, RuntimeError):
    """An external engine is unreachable or returned an invalid response."""


class ProcessFailedError(PipelineError, RuntimeError):
    """A process of a run failed repeatedly. Acknowledged trajectories are kept."""


def refuse_unknown(
    owner: str,
    arguments: Mapping[str, object],
    names: Iterable[str],
    reasons: Mapping[str, str],
    harmless: Mapping[str, tuple[object, ...]],
) -> None:
    """Reject the first unknown argument of a call, with a reason if there is one.

    >>> refuse_unknown("GRPOLoss", {"clip_epsilom": 0.2}, ["clip_epsilon"], {}, {})
    Traceback (most recent call last):
    rlhf_pipeline.errors.DefinitionError: GRPOLoss does not accept 'clip_epsilom'. Did you mean 'clip_epsilon'?
    """
    for name, value in arguments.items():
        if any(value == default for default in harmless.get(name, ())):
            continue
        if name in reasons:
            raise DefinitionError(f"{owner} does not accept {name}: {reasons[name]}")
        raise DefinitionError(f"{owner} does not accept {name!r}.{did_you_mean(name, names)}")


def function_name(function: object) -> str:
    """Return the name of a function, or of the class of an object that is called like one, for a message.

    >>> function_name(len)
    'len'
    """
    return getattr(function, "__name__", type(function).__name__)


@contextmanager
def tried(what: str, on: str) -> Generator[None]:
    """Turn what a function of the user's raises when it is tried into a DefinitionError."""
    try:
        yield
    except DefinitionError:
        raise
    except Exception as error:
        raise DefinitionError(f"{what} raised {type(error).__name__} ({error}) in a test on {on}") from error


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "trajectory"), count(2500, "trajectory"), count(2, "group")
    ('1 trajectory', '2,500 trajectories', '2 groups')
    """
    if number == 1:
        return f"1 {noun}"
    many = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"
    return f"{number:,} {many}"


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest valid name, or the list of valid names.

    >>> did_you_mean("group_sise", ["group_size", "seed"])
    " Did you mean 'group_size'?"
    >>> did_you_mean("gsm8k", ["gsm8k-solutions", "trl"])
    " Did you mean 'gsm8k-solutions'?"
    >>> did_you_mean("zzz", ["b", "a"])
    ' Available: a, b.'
    """
    names = sorted(valid_names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not near and len(name) >= 3:
        near = [candidate for candidate in names if candidate.startswith(name)][:1]
    return f" Did you mean '{near[0]}'?" if near else f" Available: {', '.join(names)}."
