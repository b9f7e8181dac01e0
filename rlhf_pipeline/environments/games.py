"""Games as text, made from a seed, with nothing downloaded."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Step, Turn
from rlhf_pipeline.settings import Settings, setting

MOVES: Final = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Rows and columns of each move."""
LAKE_ALPHABET: Final = "LDRU.,O#G"
"""What `FrozenLake` shows and reads, one character a token."""

Cell = tuple[int, int]


def distances(rows: Sequence[str]) -> dict[Cell, int]:
    """Return the moves to the goal, in the last corner, from each cell from which it can be reached.

    >>> distances(["..", "OG"])
    {(1, 1): 0, (0, 1): 1, (0, 0): 2}
    """
    size = len(rows)
    found: dict[Cell, int] = {(size - 1, size - 1): 0}
    todo = deque(found)
    while todo:
        row, column = todo.popleft()
        for down, right in MOVES.values():
            cell = row + down, column + right
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in found and rows[cell[0]][cell[1]] != "O":
                found[cell] = found[row, column] + 1
                todo.append(cell)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LakeMaps(Settings):
    """A source of maps of frozen lakes: safe cells (`.`), holes (`O`) and the goal (`G`), which can be reached.

    A hash of the map decides whether it is held out, one in five, so no map is in both parts.

    >>> LakeMaps(size=3).prompt(0, seed=0).meta["map"] == LakeMaps(size=3).prompt(0, seed=0).meta["map"]
    True
    """

    size: int = setting(4, min=2, help="Cells of a side.")
    most_holes: int = setting(4, min=0, help="The most holes of a map; at least half as many are in each.")
    held_out: bool = setting(False, help="Give the maps that are held out, and none of the others.")
    start_anywhere: bool = setting(
        False, help="Start in any safe cell, not only in the first corner: dead ends are then seen more often."
    )

    @property
    def as_chat(self) -> bool:
        """False: a map is plain text."""
        return False

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return map number `cursor`."""
        numbers = random.Random(f"lake {self.size} {self.most_holes} {self.held_out} {seed} {cursor}")
        while True:
            cells = [*"." * (self.size**2 - 1), "G"]
            # Every number of holes is as likely: there are few maps with few.
            count = min(numbers.randint((self.most_holes + 1) // 2, self.most_holes), self.size**2 - 2)
            for cell in numbers.sample(range(1, self.size**2 - 1), count):
                cells[cell] = "O"
            rows = ["".join(cells[at : at + self.size]) for at in range(0, self.size**2, self.size)]
            far = distances(rows)
            if (zlib.crc32("".join(rows).encode()) % 5 == 0) == self.held_out and (0, 0) in far:
                start = numbers.choice(sorted(cell for cell, moves in far.items() if moves))
                meta = {"map": rows, "start": list(start if self.start_anywhere else (0, 0))}
                return Prompt(text="|".join(rows), meta=meta)


class FrozenLake:
    """Walk to the goal without falling into a hole; a turn is one letter of `LDRU`.

    The policy sees its four neighbours in the order left, down, right, up: `#` is the edge, `,` a cell where it has
    been. Rewards: `reached` (1 at the goal), and `nearer`, the moves by which a turn shortens the way, as a share of
    the way from the start. A fall takes back what was nearer: otherwise it would be worth more than turning round in a
    dead end (potential-based shaping, Ng et al. 1999, where the end has no potential).

    >>> lake = FrozenLake()
    >>> lake.reset(Prompt(text="..|.G", meta={"map": ["..", ".G"], "start": [0, 0]}), seed=0)
    '#..#'
    >>> lake.step(Turn(text="R")).reply, lake.step(Turn(text="D")).rewards
    (',G##', {'reached': 1.0, 'nearer': 0.5})
    """

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Put the walker on its start; nothing is drawn, so the seed has no effect."""
        self.rows: list[str] = list(prompt.meta["map"])
        row, column = prompt.meta["start"]
        self.at: Cell = (row, column)
        self.seen = {self.at}
        self.far = distances(self.rows)
        self.whole_way = self.far[self.at]
        return self._look()

    def step(self, turn: Turn) -> Step:
        """Walk one cell; anything but a move, and a move over the edge, leaves the walker where it is."""
        before, size = self.far[self.at], len(self.rows)
        down, right = MOVES.get(turn.text[-1:], (0, 0))
        row, column = self.at[0] + down, self.at[1] + right
        if 0 <= row < size and 0 <= column < size:
            self.at = row, column
            self.seen.add(self.at)
        here = self.rows[self.at[0]][self.at[1]]
        if here == "O":
            return Step(done=True, rewards={"reached": 0.0, "nearer": before / self.whole_way - 1.0})
        nearer = (before - self.far[self.at]) / self.whole_way
        reached = here == "G"
        return Step(
            "" if reached else self._look(), done=reached, rewards={"reached": float(reached), "nearer": nearer}
        )

    def _look(self) -> str:
        return "".join(self._shown(self.at[0] + down, self.at[1] + right) for down, right in MOVES.values())

    def _shown(self, row: int, column: int) -> str:
        size = len(self.rows)
        if not (0 <= row < size and 0 <= column < size):
            return "#"
        return "," if (row, column) in self.seen else self.rows[row][column]
