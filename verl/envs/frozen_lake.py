"""FrozenLake: walk over the ice to the goal and into no hole, on a map that the policy reads as text."""

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.envs.game import MOVES, TextGame, choice_of


class FrozenLake(TextGame):
    """A square lake from the upper left corner to the lower right. Each map can be walked.

    Args:
        size: tiles of a side.
        num_holes: holes of a map. None: each tile is one with probability ``1 - p``.
        p: probability that a tile is ice, where ``num_holes`` is None.
        is_slippery: a move goes as it should, or to its left or right, with probability 1/3 each.
        show_map: False: the policy sees where it is, and of all other tiles a question mark.
        actions: names of left, down, right and up; ``LDRU`` stands for four of one letter.
        symbols: of the player, ice, a hole, the goal.
        step_reward, hole_reward, goal_reward: of each valid move, and added to it at the end.
        options: see `TextGame`.

    A row's task may bring ``desc``, the lines of a map in the letters S, F, H, G.
    """

    name = "FrozenLake"
    task_keys = ("desc",)

    def __init__(
        self,
        size: int = 4,
        num_holes: int | None = None,
        p: float = 0.8,
        is_slippery: bool = False,
        show_map: bool = True,
        actions: Sequence[str] = ("Left", "Down", "Right", "Up"),
        symbols: str = "P_OG",
        step_reward: float = 0.0,
        hole_reward: float = 0.0,
        goal_reward: float = 1.0,
        **options: Any,
    ):
        super().__init__(**options)
        self.require(size >= 2, "size", size, "must be at least 2")
        most = size * size - (2 * size - 1)
        rule = f"must be from 0 to {most}: more leave no way across {size}x{size} tiles"
        self.require(num_holes is None or 0 <= num_holes <= most, "num_holes", num_holes, rule)
        self.require(0 <= p <= 1, "p", p, "must be from 0 to 1")
        is_complete = len(set(symbols)) == 4 == len(symbols)
        self.require(is_complete, "symbols", symbols, "must be four different characters: player, ice, hole, goal")
        self.size, self.num_holes, self.p, self.is_slippery, self.show_map = size, num_holes, p, is_slippery, show_map
        self.actions = self.named("actions", actions, 4, "must be four different names, of left, down, right and up")
        self.symbols = symbols
        self.step_reward, self.hole_reward, self.goal_reward = step_reward, hole_reward, goal_reward
        self.rows = self.columns = size
        self.holes: frozenset[tuple[int, int]] = frozenset()
        self.start = self.player = (0, 0)
        self.goal = (size - 1, size - 1)

    def begin(self, task: Mapping[str, Any]) -> None:
        if task.get("desc") is None:
            self.rows = self.columns = self.size
            self.start, self.goal = (0, 0), (self.size - 1, self.size - 1)
            self.holes = self._random_holes()
        else:
            self._take(task["desc"])
        self.player = self.start

    def read(self, text: str) -> int | None:
        return choice_of(text, self.actions, self.answer)

    def play(self, action: int) -> tuple[float, bool, dict[str, Any]]:
        before = self.player
        if self.is_slippery:
            action = (action + int(self.random.integers(-1, 2))) % 4
        self.player = self._moved(self.player, action)
        is_there, is_in = self.player == self.goal, self.player in self.holes
        reward = self.step_reward + self.goal_reward * is_there + self.hole_reward * is_in
        return reward, is_there or is_in, {"success": is_there, "effective": self.player != before}

    def view(self) -> str:
        return self._rendered(self.show_map)

    def frame(self) -> str:
        return f"{self.name}, turn {self.turns}\n{self._rendered(True)}"

    def rules(self) -> str:
        player, ice, hole, goal = list(self.symbols)
        slips = " The ice is slippery: a move may go to the left or right of its direction." if self.is_slippery else ""
        hidden = "" if self.show_map else " Tiles that you cannot see are ?."
        return (
            f"You walk on a frozen lake. Reach the goal and step into no hole. {player} is you, {ice} ice, {hole} a "
            f"hole, {goal} the goal.{slips}{hidden}\nMoves are {', '.join(self.actions)}. "
            + self.answer_rule("one move", self.actions[2])
        )

    @property
    def state_id(self) -> str:
        """The whole map, whether or not the policy sees it."""
        return self._rendered(True)

    def random_action(self, generator: np.random.Generator) -> str:
        """Return one of the four moves, as text."""
        return self.written(self.actions[int(generator.integers(4))])

    def solve(self) -> list[str]:
        """Return the fewest moves from here to the goal, slips included, as texts; none: there is no way."""
        random = copy.deepcopy(self.random)
        slips: list[int] = []
        waiting: deque[tuple[tuple[int, int], list[int]]] = deque([(self.player, [])])
        seen = {(0, self.player)}
        # slips are known only to who has the generator: the search is over turns and tiles
        while waiting:
            place, path = waiting.popleft()
            if place == self.goal:
                return [self.written(self.actions[move]) for move in path]
            turn = len(path) if self.is_slippery else 0
            while self.is_slippery and len(slips) <= turn:
                slips.append(int(random.integers(-1, 2)))
            if turn > 20 * self.rows * self.columns:
                break
            for move in range(4):
                after = self._moved(place, (move + slips[turn]) % 4 if self.is_slippery else move)
                key = (turn + 1 if self.is_slippery else 0, after)
                if after not in self.holes and key not in seen:
                    seen.add(key)
                    waiting.append((after, [*path, move]))
        return []

    # -- maps -----------------------------------------------------------------------------------------------------
    def _moved(self, place: tuple[int, int], action: int) -> tuple[int, int]:
        row, column = place[0] + MOVES[action][0], place[1] + MOVES[action][1]
        return min(max(row, 0), self.rows - 1), min(max(column, 0), self.columns - 1)

    def _rendered(self, is_whole: bool) -> str:
        player, ice, hole, goal = list(self.symbols)
        lines = []
        for row in range(self.rows):
            tiles = [
                player
                if (place := (row, column)) == self.player
                else "?"
                if not is_whole
                else hole
                if place in self.holes
                else goal
                if place == self.goal
                else ice
                for column in range(self.columns)
            ]
            lines.append("".join(tiles))
        return "\n".join(lines)

    def _random_holes(self) -> frozenset[tuple[int, int]]:
        """Return holes that leave a way: one tile after the other in random order, each only if it blocks none."""
        tiles = [(row, column) for row in range(self.size) for column in range(self.size)][1:-1]
        count = self.num_holes
        if count is None:
            most = self.size * self.size - (2 * self.size - 1)
            count = min(int(self.random.binomial(len(tiles), 1 - self.p)), most)
        holes: set[tuple[int, int]] = set()
        for index in self.random.permutation(len(tiles)):
            if len(holes) == count:
                break
            if self._is_open(holes | {tiles[index]}):
                holes.add(tiles[index])
        if len(holes) < count:
            # the way that is left winds too much for so many holes: keep a shortest one free instead
            down = set(self.random.permutation(2 * self.size - 2)[: self.size - 1].tolist())
            place, free = (0, 0), {(0, 0)}
            for turn in range(2 * self.size - 2):
                place = (place[0] + 1, place[1]) if turn in down else (place[0], place[1] + 1)
                free.add(place)
            rest = [tile for tile in tiles if tile not in free]
            holes = {rest[index] for index in self.random.permutation(len(rest))[:count]}
        return frozenset(holes)

    def _is_open(self, holes: Iterable[tuple[int, int]]) -> bool:
        waiting, seen = [self.start], {self.start, *holes}
        while waiting:
            place = waiting.pop()
            for move in range(4):
                after = self._moved(place, move)
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return self.goal in seen and self.goal not in holes

    def _take(self, desc: Sequence[str]) -> None:
        """Take a map of the row's task.

        Raises:
            ValueError: it is no rectangle with one S and one G, or it has no way.
        """
        lines = [str(line) for line in desc]
        places: dict[str, list[tuple[int, int]]] = {letter: [] for letter in "SFHG"}
        for row, line in enumerate(lines):
            for column, letter in enumerate(line):
                places.setdefault(letter, []).append((row, column))
        is_map = len({len(line) for line in lines}) == 1 and set(places) == set("SFHG")
        if not is_map or len(places["S"]) != 1 or len(places["G"]) != 1:
            raise ValueError(
                f"{self.name}: desc={lines} is no map: it needs lines of one length in the letters S, F, H, G with one "
                "S and one G. Correct the row's task."
            )
        self.rows, self.columns = len(lines), len(lines[0])
        self.start, self.goal = places["S"][0], places["G"][0]
        self.holes = frozenset(places["H"])
        if not self._is_open(self.holes):
            raise ValueError(f"{self.name}: desc={lines} has no way from S to G. Correct the row's task.")
