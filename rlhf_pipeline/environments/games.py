"""Games as text, made from a seed, with nothing downloaded."""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Step, Turn
from rlhf_pipeline.settings import Settings, setting

MOVES: Final = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Rows and columns of each move."""
LAKE_ALPHABET: Final = "LDRU.,O#G"
"""The alphabet of `FrozenLake`, one character per token."""

Cell = tuple[int, int]


def distances(rows: Sequence[str]) -> dict[Cell, int]:
    """Return the moves to the goal, in the last corner, from each cell from which it can be reached.

    >>> distances(["..", "OG"])
    {(1, 1): 0, (0, 1): 1, (0, 0): 2}
    """
    size = len(rows)
    steps: dict[Cell, int] = {(size - 1, size - 1): 0}
    todo = deque(steps)
    while todo:
        row, column = todo.popleft()
        for down, right in MOVES.values():
            cell = row + down, column + right
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in steps and rows[cell[0]][cell[1]] != "O":
                steps[cell] = steps[row, column] + 1
                todo.append(cell)
    return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class LakeMaps(Settings):
    """A source of maps of frozen lakes: safe cells (`.`), holes (`O`) and the goal (`G`), which can be reached.

    A hash of the map decides whether it is held out, one in five, so no map is in both parts.

    >>> LakeMaps(size=3).prompt(0, seed=0).meta["map"] == LakeMaps(size=3).prompt(0, seed=0).meta["map"]
    True
    """

    size: int = setting(4, min=2, help="Number of cells per side.")
    most_holes: int = setting(4, min=0, help="Maximum number of holes in a map; each map has at least half as many.")
    held_out: bool = setting(False, help="Use only the held-out maps.")
    start_anywhere: bool = setting(
        False, help="Start in any safe cell, not only in the top-left corner, so that dead ends occur more often."
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
    the way from the start. A fall subtracts the `nearer` rewards: otherwise it would be worth more than turning round
    in a dead end (potential-based shaping, Ng et al. 1999, where the end has no potential).

    >>> lake = FrozenLake()
    >>> lake.reset(Prompt(text="..|.G", meta={"map": ["..", ".G"], "start": [0, 0]}), seed=0)
    '#..#'
    >>> lake.step(Turn(text="R")).reply, lake.step(Turn(text="D")).rewards
    (',G##', {'reached': 1.0, 'nearer': 0.5})
    """

    rewards = ("reached", "nearer")

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Put the player on its start; nothing is random, so the seed has no effect."""
        self.rows: list[str] = list(prompt.meta["map"])
        row, column = prompt.meta["start"]
        self.at: Cell = (row, column)
        self.visited = {self.at}
        self.far = distances(self.rows)
        self.whole_way = self.far[self.at]
        return self._look()

    def step(self, turn: Turn) -> Step:
        """Walk one cell; any other text, and a move over the edge, leaves the player in its cell."""
        before, size = self.far[self.at], len(self.rows)
        down, right = MOVES.get(turn.text[-1:], (0, 0))
        row, column = self.at[0] + down, self.at[1] + right
        if 0 <= row < size and 0 <= column < size:
            self.at = row, column
            self.visited.add(self.at)
        here = self.rows[self.at[0]][self.at[1]]
        if here == "O":
            return Step(done=True, rewards={"reached": 0.0, "nearer": before / self.whole_way - 1.0})
        nearer = (before - self.far[self.at]) / self.whole_way
        reached = here == "G"
        return Step(
            "" if reached else self._look(), done=reached, rewards={"reached": float(reached), "nearer": nearer}
        )

    def _look(self) -> str:
        return "".join(self._cell(self.at[0] + down, self.at[1] + right) for down, right in MOVES.values())

    def _cell(self, row: int, column: int) -> str:
        size = len(self.rows)
        if not (0 <= row < size and 0 <= column < size):
            return "#"
        return "," if (row, column) in self.visited else self.rows[row][column]


SOKOBAN_ALPHABET: Final = "LDRU#_XOPS*"
"""The alphabet of `Sokoban`, one character per token."""


@dataclass(frozen=True, slots=True)
class Warehouse:
    """The walls and the target of a warehouse with one box.

    Attributes:
        walls: the cells that cannot be entered; the edge is all wall.
        target: where the box must go.
        size: cells of a side.
    """

    walls: frozenset[Cell]
    target: Cell
    size: int

    def push(self, state: tuple[Cell, Cell], move: str) -> tuple[Cell, Cell]:
        """Return player and box after a move; unchanged if a wall is in the way."""
        (row, column), box = state
        down, right = MOVES[move]
        to = row + down, column + right
        if to in self.walls:
            return state
        if to != box:
            return to, box
        beyond = box[0] + down, box[1] + right
        return state if beyond in self.walls else (to, beyond)

    def text_of(self, state: tuple[Cell, Cell], *, whole: bool = False) -> str:
        """Return the text of a state, row after row; without the walls of the edge unless `whole`."""
        player, box = state
        marks = {
            self.target: "O",
            player: "S" if player == self.target else "P",
            box: "*" if box == self.target else "X",
        }
        span = range(self.size) if whole else range(1, self.size - 1)
        cells = [(row, column) for row in span for column in span]
        return "".join("#" if cell in self.walls else marks.get(cell, "_") for cell in cells)


@functools.lru_cache(maxsize=1024)  # all members of a group, and every evaluation, play in the same warehouses
def solutions(house: Warehouse) -> Mapping[tuple[Cell, Cell], int]:
    """Return the moves to the end from each state (player, box) from which it can be reached.

    Found backwards from every state whose box is on the target: a step back pulls the box along, or does not.
    """
    cells = [(row, column) for row in range(house.size) for column in range(house.size)]
    moves_left = {(cell, house.target): 0 for cell in cells if cell not in house.walls and cell != house.target}
    todo = deque(moves_left)
    while todo:
        state = todo.popleft()
        (row, column), box = state
        for move, (down, right) in MOVES.items():
            came = row - down, column - right
            if came in house.walls:
                continue
            pulled = (came, (row, column)) if box == (row + down, column + right) else None
            for before in ((came, box), pulled):
                if before and before[0] != before[1] and before not in moves_left and house.push(before, move) == state:
                    moves_left[before] = moves_left[state] + 1
                    todo.append(before)
    return MappingProxyType(moves_left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Warehouses(Settings):
    """A source of warehouses with one box: `#` wall, `_` floor, `X` box, `O` target, `P` player, `*` box on the target.

    The characters are those of FreshPER's Sokoban (https://arxiv.org/abs/2604.16918), except `*`. A hash of the
    warehouse decides whether it is held out, one in five, so no warehouse is in both parts. Each can be solved.

    >>> source = Warehouses(size=5)
    >>> source.prompt(0, seed=0).meta["map"] == source.prompt(0, seed=0).meta["map"]
    True
    """

    size: int = setting(6, min=4, max=10, help="Number of cells per side, including the outer walls.")
    most_moves: int = setting(4, min=1, help="Maximum number of moves in the shortest solution.")
    most_walls: int = setting(1, min=0, help="Maximum number of inner walls.")
    held_out: bool = setting(False, help="Use only the held-out warehouses.")

    @property
    def as_chat(self) -> bool:
        """False: a warehouse is plain text."""
        return False

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return warehouse number `cursor`."""
        name = f"sokoban {self.size} {self.most_moves} {self.most_walls} {self.held_out} {seed} {cursor}"
        numbers, span = random.Random(name), range(self.size)
        inner = [(row, column) for row in span[1:-1] for column in span[1:-1]]
        edge = {(row, column) for row in span for column in span} - {*inner}
        while True:
            walls = edge | {*numbers.sample(inner, numbers.randint(0, self.most_walls))}
            house = Warehouse(frozenset(walls), numbers.choice(inner), self.size)
            if house.target in walls:
                continue
            # Every length of a solution is as likely: there are few warehouses with short ones.
            length = numbers.randint(1, self.most_moves)
            starts = sorted(state for state, moves in solutions(house).items() if moves == length)
            if not starts:
                continue
            text = house.text_of(numbers.choice(starts), whole=True)
            if (zlib.crc32(text.encode()) % 5 == 0) == self.held_out:
                rows = [text[at : at + self.size] for at in range(0, self.size**2, self.size)]
                return Prompt(text="|".join(rows), meta={"map": rows})


class Sokoban:
    """Push the box onto the target; a turn is one letter of `LDRU`, and each reply shows the warehouse.

    The observation omits the walls of the edge, which never change: it has 16 characters for 6 x 6 cells.

    Rewards: `solved` (1 when the box is on the target), and `nearer`, the moves by which a turn shortens the shortest
    solution, as a share of its length at the start. A push after which no solution is left ends the conversation, and
    subtracts the `nearer` rewards (potential-based shaping, as in `FrozenLake`).

    >>> game = Sokoban()
    >>> game.reset(Prompt(text="a", meta={"map": ["#####", "#PXO#", "#___#", "#___#", "#####"]}), seed=0)
    'PXO______'
    >>> game.step(Turn(text="R")).rewards
    {'solved': 1.0, 'nearer': 1.0}
    """

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Put everything in its place; nothing is random, so the seed has no effect."""
        rows: list[str] = list(prompt.meta["map"])
        letters = {
            sign: (row, column) for row, line in enumerate(rows) for column, sign in enumerate(line) if sign in "XOPS"
        }
        walls = {(row, column) for row, line in enumerate(rows) for column, sign in enumerate(line) if sign == "#"}
        player = letters.get("P") or letters["S"]
        self.house = Warehouse(frozenset(walls), letters.get("O", player), len(rows))
        self.state = player, letters["X"]
        self.ways = solutions(self.house)
        self.whole_way = self.ways[self.state]
        return self.house.text_of(self.state)

    def step(self, turn: Turn) -> Step:
        """Make a move; any other text, and a move against a wall, has no effect."""
        before = self.ways[self.state]
        move = turn.text[-1:]
        if move in MOVES:
            self.state = self.house.push(self.state, move)
        if self.state not in self.ways:  # the box is stuck
            return Step(done=True, rewards={"solved": 0.0, "nearer": before / self.whole_way - 1.0})
        left = self.ways[self.state]
        nearer = (before - left) / self.whole_way
        reply = self.house.text_of(self.state) if left else ""
        return Step(reply, done=not left, rewards={"solved": float(not left), "nearer": nearer})
