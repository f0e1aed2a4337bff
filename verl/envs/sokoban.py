"""Sokoban: push every box onto a target. Rooms are made by pulling boxes off the targets, so each has a solution."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.envs.game import MOVES, TextGame, choice_of

Place = tuple[int, int]

_LETTERS = "# .$*@+"
"""Wall, floor, target, box, box on a target, player, player on a target, as Sokoban files have them."""

_ROOMS = 50
"""Rooms that are tried before the options are refused."""

_STATES = 300_000
"""States that `Sokoban.solve` looks at."""


class Sokoban(TextGame):
    """A room with walls, boxes and as many targets.

    Args:
        dim_room: rows and columns, outer walls included.
        num_boxes: boxes, and targets.
        search_depth: pulls by which a room is made; the more, the longer its solution may be.
        wall_share: probability that an inner tile is tried as a wall; walls cut off no floor, and at most half are.
        actions: names of left, down, right and up; ``LDRU`` stands for four of one letter.
        symbols: of wall, floor, target, box, box on a target, player, player on a target.
        step_reward: of each valid move.
        box_reward: for a box that comes onto a target, and minus it for one that leaves.
        finish_reward: when all boxes stand on targets, which ends the episode.
        options: see `TextGame`.

    A row's task may bring ``room``, the lines of a room in the letters ``# .$*@+`` of Sokoban files.
    """

    name = "Sokoban"
    task_keys = ("room",)

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 10,
        wall_share: float = 0.2,
        actions: Sequence[str] = ("Left", "Down", "Right", "Up"),
        symbols: str = "#_OX*PS",
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        finish_reward: float = 10.0,
        **options: Any,
    ):
        super().__init__(**options)
        is_room = len(dim_room) == 2 and all(isinstance(side, int) and side >= 5 for side in dim_room)
        self.require(is_room, "dim_room", dim_room, "must be rows and columns, each at least 5")
        most = (dim_room[0] - 2) * (dim_room[1] - 2) // 4
        self.require(
            1 <= num_boxes <= most, "num_boxes", num_boxes, f"must be from 1 to {most} in a room of {dim_room}"
        )
        self.require(search_depth >= 1, "search_depth", search_depth, "must be at least 1")
        self.require(0 <= wall_share <= 1, "wall_share", wall_share, "must be from 0 to 1")
        is_complete = len(set(symbols)) == 7 == len(symbols)
        self.require(is_complete, "symbols", symbols, "must be seven different characters: wall, floor, target, ...")
        self.actions = self.named("actions", actions, 4, "must be four different names, of left, down, right and up")
        self.dim_room, self.num_boxes, self.search_depth = tuple(dim_room), num_boxes, search_depth
        self.wall_share, self.symbols = wall_share, symbols
        self.step_reward, self.box_reward, self.finish_reward = step_reward, box_reward, finish_reward
        self.rows, self.columns = self.dim_room
        self.floor: frozenset[Place] = frozenset()
        self.targets: frozenset[Place] = frozenset()
        self.boxes: frozenset[Place] = frozenset()
        self.player: Place = (0, 0)

    def begin(self, task: Mapping[str, Any]) -> None:
        if task.get("room") is not None:
            return self._take(task["room"])
        self.rows, self.columns = self.dim_room
        for number in range(_ROOMS):
            # where none is found, with ever fewer walls
            self.floor = self._random_floor(self.wall_share * (1 - number / _ROOMS))
            if self._place_boxes():
                return None
        raise ValueError(
            f"Sokoban: no room of dim_room={self.dim_room} with num_boxes={self.num_boxes} and wall_share="
            f"{self.wall_share} was found in {_ROOMS}. Make it larger, or take fewer boxes or walls."
        )

    def read(self, text: str) -> int | None:
        return choice_of(text, self.actions, self.answer)

    def play(self, action: int) -> tuple[float, bool, dict[str, Any]]:
        before, placed = (self.player, self.boxes), len(self.boxes & self.targets)
        self.player, self.boxes = self._moved(self.player, self.boxes, action)
        now = len(self.boxes & self.targets)
        is_solved = self.boxes == self.targets
        reward = self.step_reward + self.box_reward * (now - placed) + self.finish_reward * is_solved
        info = {"success": is_solved, "effective": (self.player, self.boxes) != before, "boxes_on_targets": now}
        return reward, is_solved, info

    def view(self) -> str:
        return self._rendered(self.symbols)

    def rules(self) -> str:
        wall, floor, target, box, placed, player, on_target = list(self.symbols)
        return (
            "You move boxes in a room. Push every box onto a target; a box is pushed by walking into it, cannot be "
            f"pulled, and two cannot be pushed at once. {wall} is a wall, {floor} floor, {target} a target, {box} a "
            f"box, {placed} a box on a target, {player} is you, {on_target} you on a target.\nMoves are "
            f"{', '.join(self.actions)}. " + self.answer_rule("one move", self.actions[2])
        )

    def random_action(self, generator: np.random.Generator) -> str:
        """Return one of the four moves, as text."""
        return self.written(self.actions[int(generator.integers(4))])

    def solve(self) -> list[str]:
        """Return the fewest moves from here that solve the room, as texts; none: there are none, or too many states."""
        start = (self.player, self.boxes)
        came: dict[Any, tuple[Any, int] | None] = {start: None}
        waiting = deque([start])
        while waiting and len(came) < _STATES:
            state = waiting.popleft()
            if state[1] == self.targets:
                moves = []
                while (step := came[state]) is not None:
                    state, move = step
                    moves.append(self.written(self.actions[move]))
                return moves[::-1]
            for move in range(4):
                after = self._moved(*state, move)
                if after not in came:
                    came[after] = (state, move)
                    waiting.append(after)
        return []

    # -- rooms ----------------------------------------------------------------------------------------------------
    def _moved(self, player: Place, boxes: frozenset[Place], action: int) -> tuple[Place, frozenset[Place]]:
        down, right = MOVES[action]
        to = (player[0] + down, player[1] + right)
        if to not in self.floor:
            return player, boxes
        if to in boxes:
            behind = (to[0] + down, to[1] + right)
            if behind not in self.floor or behind in boxes:
                return player, boxes
            boxes = boxes - {to} | {behind}
        return to, boxes

    def _rendered(self, symbols: str) -> str:
        wall, floor, target, box, placed, player, on_target = list(symbols)
        lines = []
        for row in range(self.rows):
            line = ""
            for column in range(self.columns):
                place = (row, column)
                is_target = place in self.targets
                if place == self.player:
                    line += on_target if is_target else player
                elif place in self.boxes:
                    line += placed if is_target else box
                else:
                    line += wall if place not in self.floor else target if is_target else floor
            lines.append(line)
        return "\n".join(lines)

    def _random_floor(self, wall_share: float) -> frozenset[Place]:
        """Return the floor of a room whose tiles are all connected."""
        tiles = [(row, column) for row in range(1, self.rows - 1) for column in range(1, self.columns - 1)]
        floor = set(tiles)
        for index in np.flatnonzero(self.random.random(len(tiles)) < wall_share):
            rest = floor - {tiles[index]}
            if 2 * len(rest) >= len(tiles) and self._reached(next(iter(rest)), rest) == rest:
                floor = rest
        return frozenset(floor)

    @staticmethod
    def _reached(start: Place, floor: Iterable[Place]) -> set[Place]:
        waiting, seen, free = [start], {start}, set(floor)
        while waiting:
            row, column = waiting.pop()
            for down, right in MOVES:
                after = (row + down, column + right)
                if after in free and after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return seen

    def _place_boxes(self) -> bool:
        """Begin with every box on its target and pull; False: some box could not be moved off."""
        tiles = sorted(self.floor)
        if len(tiles) < 2 * self.num_boxes + 1:
            return False
        chosen = [tiles[index] for index in self.random.permutation(len(tiles))[: self.num_boxes + 1]]
        self.player, self.targets = chosen[0], frozenset(chosen[1:])
        self.boxes = self.targets
        best: tuple[int, Place, frozenset[Place]] | None = None
        for _ in range(self.search_depth):
            reached = self._reached(self.player, self.floor - self.boxes)
            pulls = []
            for box in sorted(self.boxes):
                for down, right in MOVES:
                    near, far = (box[0] + down, box[1] + right), (box[0] + 2 * down, box[1] + 2 * right)
                    if near in reached and far in self.floor and far not in self.boxes:
                        pulls.append((box, near, far))
            if not pulls:
                break
            box, near, self.player = pulls[int(self.random.integers(len(pulls)))]
            self.boxes = self.boxes - {box} | {near}
            distance = sum(min(abs(b[0] - t[0]) + abs(b[1] - t[1]) for t in self.targets) for b in self.boxes)
            if not self.boxes & self.targets and (best is None or distance > best[0]):
                best = (distance, self.player, self.boxes)
        if best is None:
            return False
        _, self.player, self.boxes = best
        return True

    def _take(self, room: Sequence[str]) -> None:
        """Take a room of the row's task.

        Raises:
            ValueError: it has other letters, not one player, or not as many boxes as targets.
        """
        tiles = {(r, c): letter for r, line in enumerate(room) for c, letter in enumerate(str(line))}
        where = {
            letter: {place for place, tile in tiles.items() if tile in letter} for letter in (".*+", "$*", "@+", "#")
        }
        targets, boxes, players, walls = where.values()
        if set(tiles.values()) - set(_LETTERS) or len(players) != 1 or not boxes or len(boxes) != len(targets):
            raise ValueError(
                f"Sokoban: room={list(room)} is no room: it needs lines in the letters {_LETTERS!r} (wall, floor, "
                "target, box, box on a target, player, player on a target), one player and as many boxes as targets. "
                "Correct the row's task."
            )
        self.rows, self.columns = len(room), max(len(str(line)) for line in room)
        (self.player,) = players
        self.floor = frozenset(set(tiles) - walls)
        self.targets, self.boxes = frozenset(targets), frozenset(boxes)
