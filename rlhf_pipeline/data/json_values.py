"""Values from files and from Python, as JSON values."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any, cast

from rlhf_pipeline.errors import DataError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def json_value(value: object, where: str) -> JsonValue:
    """Return a value as JSON has it.

    NumPy numbers and arrays become numbers and lists, tuples lists, dates ISO 8601 text, decimals text, and numbers
    that are not finite null.

    Args:
        value: any value.
        where: its place, which begins the message.

    Raises:
        DataError: JSON has no such value, or a text holds half of a surrogate pair.

    >>> import numpy as np
    >>> json_value({"n": np.int64(3), "of": (1, 2.5), "on": datetime.date(2024, 5, 1)}, "meta")
    {'n': 3, 'of': [1, 2.5], 'on': '2024-05-01'}
    >>> json_value({"image": b"GIF"}, "row 3")
    Traceback (most recent call last):
    rlhf_pipeline.errors.DataError: row 3: 'image' is of type bytes, which JSON does not have.
    """
    if isinstance(value, str):
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise DataError(f"{where} holds half of a surrogate pair, which is not text.")
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
        found = plain()
        if type(found) is not type(value):
            return json_value(found, where)
    raise DataError(f"{where} is of type {type(value).__name__}, which JSON does not have.")
