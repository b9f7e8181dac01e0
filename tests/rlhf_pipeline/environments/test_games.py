"""Games as text."""

from __future__ import annotations

import zlib
from collections import deque

import pytest

from rlhf_pipeline import FrozenLake, Prompt, Sokoban, Turn, Warehouses
from rlhf_pipeline.environments.games import MOVES, SOKOBAN_ALPHABET, Warehouse, solutions


@pytest.mark.parametrize(
    ("moves", "reached", "nearer"),
    [
        ("RRDD", 1.0, 1.0),  # all of the way
        ("RRL", 0.0, 0.25),  # one of four moves
        ("RL", 0.0, 0.0),  # and back
        ("RD", 0.0, 0.0),  # a hole: what was nearer is taken back
        ("LUx", 0.0, 0.0),  # over the edge twice, and no move
    ],
)
def test_a_walk_is_rewarded_for_where_it_ends(moves, reached, nearer):
    """`nearer` adds up to the share of the way that is behind the walker, and to nothing after a fall."""
    lake = FrozenLake()
    lake.reset(Prompt(text="a map", meta={"map": ["...", ".O.", "..G"], "start": [0, 0]}), seed=0)
    steps = [lake.step(Turn(text=move)) for move in moves]
    assert sum(step.rewards["reached"] for step in steps) == reached
    assert sum(step.rewards["nearer"] for step in steps) == pytest.approx(nearer)
    assert [step.done for step in steps] == [*[False] * (len(moves) - 1), moves in ("RRDD", "RD")]


def pushes_to_the_end(house, start):
    """Return the moves of a shortest solution, found forwards by breadth-first search."""
    todo, seen = deque([(start, 0)]), {start}
    while todo:
        state, moves = todo.popleft()
        if state[1] == house.target:
            return moves
        for move in MOVES:
            following = house.push(state, move)
            if following not in seen:
                seen.add(following)
                todo.append((following, moves + 1))
    return None


def test_warehouses_are_solvable_and_held_out_by_their_map():
    """Each has a shortest solution within the limit, as a search finds; a fifth of all maps is held out, by a hash."""
    parts = {held: [Warehouses(held_out=held).prompt(at, seed=3) for at in range(60)] for held in (False, True)}
    for held, prompts in parts.items():
        assert {zlib.crc32("".join(prompt.meta["map"]).encode()) % 5 == 0 for prompt in prompts} == {held}
    lengths = set()
    for prompt in parts[False]:
        game = Sokoban()
        shown = game.reset(prompt, seed=0)
        assert shown == "".join(row[1:-1] for row in prompt.meta["map"][1:-1])
        assert set(shown) <= set(SOKOBAN_ALPHABET)
        assert pushes_to_the_end(game.house, game.state) == game.whole_way
        lengths.add(game.whole_way)
    assert lengths == {1, 2, 3, 4}


def test_solutions_are_those_of_a_search_from_every_state():
    """Of all places of player and box on free cells, exactly the solvable ones have a number of moves, the smallest."""
    inner = [(row, column) for row in range(1, 5) for column in range(1, 5)]
    edge = {(row, column) for row in range(6) for column in range(6)} - {*inner}
    house = Warehouse(frozenset(edge | {(3, 2)}), target=(2, 3), size=6)
    free = [cell for cell in inner if cell != (3, 2)]
    searched = {(player, box): pushes_to_the_end(house, (player, box)) for player in free for box in free}
    solvable = {state: moves for state, moves in searched.items() if moves is not None and state[0] != state[1]}
    assert solvable[(2, 1), (2, 2)] == 1
    assert dict(solutions(house)) == solvable


def test_inner_walls_are_at_most_as_many_as_set():
    """Without inner walls only the edge is wall, 20 cells of 6 x 6; with at most one, some warehouses have none."""
    counts = {
        most: {Warehouses(most_walls=most).prompt(at, seed=0).text.count("#") for at in range(30)} for most in (0, 1)
    }
    assert counts == {0: {20}, 1: {20, 21}}


def test_a_solution_earns_two_and_a_stuck_box_nothing():
    """Rewards of turns sum to 1 for `nearer` where it is solved; a box in a corner ends the game and takes all back."""
    rows = ["######", "#____#", "#_PX_#", "#___O#", "#____#", "######"]
    game = Sokoban()
    game.reset(Prompt(text="a", meta={"map": rows}), seed=0)
    solved = [game.step(Turn(text=move)) for move in "RURD"]
    assert [step.done for step in solved] == [False, False, False, True]
    assert [step.rewards["solved"] for step in solved] == [0, 0, 0, 1]
    assert sum(step.rewards["nearer"] for step in solved) == pytest.approx(1)
    assert solved[0].reply == "______PX___O____"

    game.reset(Prompt(text="a", meta={"map": rows}), seed=0)
    walked = [game.step(Turn(text=move)) for move in "?LRDRU"]
    assert [step.done for step in walked] == [False] * 5 + [True]
    assert walked[0].rewards == {"solved": 0.0, "nearer": 0.0}
    assert sum(step.rewards["nearer"] for step in walked) == pytest.approx(0)
    assert sum(step.rewards["solved"] for step in walked) == 0
