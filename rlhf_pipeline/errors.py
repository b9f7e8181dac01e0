"""The errors of the pipeline, one tree.

    PipelineError
    +-- DefinitionError (ValueError)      a pipeline definition, a --set override or an argument is wrong
    |   +-- UnsupportedError (NotImplementedError)  what is asked for cannot be done with this object
    |   +-- MissingAttributeError (AttributeError)  an object that was passed has not what it needs
    +-- DataError (ValueError)            a prompt file, a trajectory or a batch is not what it must be
    |   +-- MissingKeyError (KeyError)    a batch or a store has not the key that is asked for
    |   +-- IncompleteError (RuntimeError)  a trajectory has no end
    +-- MissingPathError (FileNotFoundError)   a folder or file that the definition names is not there
    +-- RunExistsError (FileExistsError)  the run folder is taken
    |   +-- LeaseLostError                another process has taken over, on another machine perhaps
    +-- RunMismatchError (ValueError)     a resumed run or replay does not match what was recorded
    +-- RunStorageError (OSError)         the run folder cannot be written: a full disk, a lost mount
    +-- RewardError (RuntimeError)        every reward call of a step failed
    +-- EngineError (RuntimeError)        an engine elsewhere cannot be reached, or answers what it must not
    +-- ProcessFailedError (RuntimeError) a process of a run cannot be kept alive

The store has its own tree, `trajectory_store.StoreError`. Every message says what was seen, where, and what to
type next. Each class is also a standard error, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping


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
    """Return a path or an address as it is typed in a command: quoted, and not taken for an option.

    >>> typed("my run"), typed("-run")
    ("'my run'", './-run')
    """
    text = str(place)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class PipelineError(Exception):
    """The root of all errors that this package raises on purpose. Its text is safe for a terminal."""

    def __str__(self) -> str:
        return plain(super().__str__())


class DefinitionError(PipelineError, ValueError):
    """A pipeline definition, an override or an argument is wrong."""


class UnsupportedError(DefinitionError, NotImplementedError):
    """What is asked for cannot be done with this object."""


class MissingAttributeError(DefinitionError, AttributeError):
    """An object that was passed has not what it needs."""


class DataError(PipelineError, ValueError):
    """A prompt file, a trajectory or a batch is not what it must be."""


class MissingKeyError(DataError, KeyError):
    """A batch or a store has not the key that is asked for."""

    def __str__(self) -> str:
        """Return the message as it is; a KeyError would quote it."""
        return str(self.args[0]) if self.args else ""


class IncompleteError(DataError, RuntimeError):
    """A trajectory has no end."""


class MissingPathError(PipelineError, FileNotFoundError):
    """A folder or file that was named does not exist."""


class RunExistsError(PipelineError, FileExistsError):
    """The run folder exists already."""


class LeaseLostError(RunExistsError):
    """This process stood still for so long that another one has taken its place; nothing that it adds counts now."""


class RunMismatchError(PipelineError, ValueError):
    """What is being resumed or replayed does not match what was recorded."""


class RunStorageError(PipelineError, OSError):
    """The run folder cannot be written."""


class RewardError(PipelineError, RuntimeError):
    """Every reward call of a step failed, so there is nothing to learn from."""


class EngineError(PipelineError, RuntimeError):
    """An engine outside this process cannot be reached, or answers what it must not."""


class ProcessFailedError(PipelineError, RuntimeError):
    """A process of a run failed again and again; what was acknowledged is kept."""


def refuse_unknown(owner: str, names: Iterable[str], known: Iterable[str], reasons: Mapping[str, str]) -> None:
    """Refuse the first argument of a call that has no place, with the reason where there is one.

    Args:
        owner: whose arguments they are.
        names: the arguments that were passed and are not taken.
        known: those that are.
        reasons: why some known from elsewhere are not, one sentence each.

    Raises:
        DefinitionError: there is a name.

    >>> refuse_unknown("GRPOLoss", ["clip_epsilom"], ["clip_epsilon"], {})
    Traceback (most recent call last):
    rlhf_pipeline.errors.DefinitionError: GRPOLoss takes no 'clip_epsilom'. Did you mean 'clip_epsilon'?
    """
    for name in names:
        if name in reasons:
            raise DefinitionError(f"{owner} takes no {name}: {reasons[name]}")
        raise DefinitionError(f"{owner} takes no {name!r}.{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known name, or the list of known names.

    Args:
        name: what the user typed.
        known: the names that would have been right.

    Returns:
        A sentence with a leading space, ready to end an error message.

    >>> did_you_mean("group_sise", ["group_size", "seed"])
    " Did you mean 'group_size'?"
    >>> did_you_mean("gsm8k", ["gsm8k-solutions", "trl"])
    " Did you mean 'gsm8k-solutions'?"
    >>> did_you_mean("zzz", ["b", "a"])
    ' Known: a, b.'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not near and len(name) >= 3:
        near = [known for known in names if known.startswith(name)][:1]
    return f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(names)}."
