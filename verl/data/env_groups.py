"""Dataset of environment groups: each row names an environment and the seed in which its episode begins."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from verl.config.env import EnvConfig
from verl.utils.py_functional import derive_seed

ENV_AGENT = "env_agent"
"""Agent loop of the rows."""
ENDLESS = 2**31
"""Length of the training dataset: environments have no end, and a loader asks for a length."""


class EnvGroupDataset(Dataset):
    """Rows of environment groups, in the order of their numbers, episode after episode.

    Row r is episode ``r // n_groups`` of group ``r % n_groups``, so that ``n_groups`` rows that follow one another
    have every group once. A row has no prompt: the environment's first observation becomes it. ``dataset[r]`` has
    ``agent_name``, ``env_tag``, ``env_seed``, ``env_kwargs`` (empty; arguments of ``reset``), ``data_source`` (the
    tag), ``reward_model`` (without an answer) and ``index`` (r). All responses to a row begin with its seed.

    Args:
        env: the section ``env``.
        seed: of the run.
        is_train: groups of ``env.train``, without an end; else those of ``env.val``.
    """

    def __init__(self, env: EnvConfig, seed: int, is_train: bool):
        split = env.train if is_train else env.val
        self.group_size, self.redundancy = split.group_size, split.redundancy if is_train else 0
        tags = list(env.train.tags or ()) if is_train else env.val_tags
        self.tags = split.tag_of_group(tags)
        self.seed, self.is_train = seed, is_train
        self._length = ENDLESS if is_train else len(self.tags) * max(1, split.max_traj_per_env)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self._length:
            raise IndexError(row)
        episode, group = divmod(row, len(self.tags))
        tag = self.tags[group]
        return {
            "agent_name": ENV_AGENT,
            "env_tag": tag,
            "env_seed": episode_seed(self.seed, self.is_train, tag, group, episode),
            "env_kwargs": {},
            "data_source": tag,
            # what a reward function reads, where env.reward asks for one
            "reward_model": {"style": "rule", "ground_truth": ""},
            "index": row,
        }

    @property
    def summary(self) -> str:
        """The groups in words: ``4 groups of 8 FrozenLake + 4 groups of 8 Sokoban``."""
        counts = [f"{self.tags.count(tag)} groups of {self.group_size} {tag}" for tag in dict.fromkeys(self.tags)]
        return " + ".join(counts) + (f" and {self.redundancy} groups more than it takes" if self.redundancy else "")

    def state_dict(self) -> dict[str, Any]:
        """Return what gives the position in these rows its meaning."""
        return {"tags": self.tags, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the checkpoint's position is one in the same rows.

        Raises:
            ValueError: its groups were others.
        """
        if list(state["tags"]) != self.tags:
            before, now = (", ".join(f"{tags.count(tag)} of {tag}" for tag in dict.fromkeys(tags))
                           for tags in (list(state["tags"]), self.tags))  # fmt: skip
            raise ValueError(
                f"The checkpoint's run had the environment groups {before}, and this one has {now}: its position has "
                "no meaning here. Use those of that run (env.train.tags, n_groups, groups_per_tag), or delete data.pt "
                "from the checkpoint to begin with the first episode."
            )


def episode_seed(seed: int, is_train: bool, tag: str, group: int, episode: int) -> int:
    """Return the seed of an environment's episode, 0 to 2**31 - 1: even in training, odd in validation."""
    split = "train" if is_train else "val"
    # environments hand it to generators of 32 bits
    return derive_seed(seed, split, tag, group, episode) % 2**30 * 2 + (not is_train)
