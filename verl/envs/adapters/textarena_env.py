"""Games of textarena for one player: ``textarena:Mastermind-v0``."""

from typing import Any

import textarena

from verl.envs.adapters import OwnRandomState
from verl.utils.py_functional import nearest_name


class TextArenaEnvironment:
    """A game of textarena for one player. Each turn the policy reads what is new, without its own words.

    Args:
        name: its ID without a version of wrappers, as ``GuessTheNumber-v0``.
        success_reward: the game's reward from which an episode counts as success.
        options: arguments of ``textarena.make``.

    The policy's text is the action as it is: each game says in its first message how to write one.
    """

    def __init__(self, name: str, success_reward: float = 1.0, **options: Any):
        known = sorted(textarena.envs.registration.ENV_REGISTRY)
        # without wrappers, which repeat all of the game in each turn
        full = name if name.endswith("-raw") else f"{name}-raw"
        if full not in known:
            raise ValueError(
                f"textarena:{name} is not known to textarena.{nearest_name(full, known)} `verl env list` lists the "
                "known IDs."
            )
        self.id, self.success_reward = name, success_reward
        self.random = OwnRandomState()
        with self.random.entered(0):
            self.env = textarena.make(full, **options)
        self.is_over = True

    def reset(self, *, seed: int, **task: Any) -> tuple[str, dict[str, Any]]:
        """Begin a game.

        Raises:
            ValueError: it is for several players, or the row brings a task.
        """
        if task:
            raise ValueError(f"textarena:{self.id}: the row's task has {', '.join(task)}; a game takes none.")
        with self.random.entered(seed):
            try:
                self.env.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ValueError(
                    f"textarena:{self.id} is no game for one player ({error}). Take one that is, or write an "
                    "environment that plays the others (docs/environments.md)."
                ) from None
            self.is_over = False
            return self._observed(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the policy's text; the game's reward comes at its end."""
        if self.is_over:
            raise RuntimeError(f"textarena:{self.id}: step() was called while no episode is under way.")
        with self.random.entered():
            before = self.env.state.turn
            done, _ = self.env.step(action)
            self.is_over = bool(done)
            # an invalid move is no turn; the last one that a game allows ends it
            is_valid = self.env.state.turn != before or self.is_over and not self._is_invalid()
            reward = float((self.env.close()[0] or {}).get(0, 0.0)) if done else 0.0
            info = {"success": self.is_over and reward >= self.success_reward, "valid_action": is_valid}
            return self._observed(), reward, self.is_over, False, info

    def frame(self) -> str:
        """Return the messages of the game so far."""
        return "\n".join(message for _, message in self.env.state.logs)

    def _is_invalid(self) -> bool:
        return bool(self.env.state.game_info[0]["invalid_move"])

    def _observed(self) -> str:
        player, messages = self.env.get_observation()
        # a policy has its own words in the conversation
        return "\n\n".join(text.strip() for sender, text, *_ in messages if sender != player)
