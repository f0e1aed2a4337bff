"""Validators of prompts: their source, column and number."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.checks.base import problem, validator
from verl.config.ppo import PPOConfig


@validator("error")
def messages_key_or_prompt_key(config: PPOConfig) -> Iterator[Problem]:
    data = config.data
    if data.messages_key is not None and data.prompt_key not in ("prompt", data.messages_key):
        yield problem(
            config,
            "data.messages_key",
            f"and data.prompt_key={data.prompt_key} both name the column of prompts. Set one of them.",
            "data.prompt_key",
        )


@validator("error")
def max_samples_is_not_zero(config: PPOConfig) -> Iterator[Problem]:
    for key in ("data.train_max_samples", "data.val_max_samples"):
        if get_path(config, key) == 0:
            yield problem(config, key, "leaves no prompts. Give the number to use, or -1 for all.")


@validator("error")
def mixture_ratios_sum_to_one(config: PPOConfig) -> Iterator[Problem]:
    mixture = config.data.mixture
    if not mixture:
        return
    odd = [name for name, share in mixture.items() if isinstance(share, bool) or not isinstance(share, int | float)]
    if odd or min(mixture.values()) < 0 or abs(sum(mixture.values()) - 1) > 0.01:
        what = f"{odd[0]}={show(mixture[odd[0]])} is no number" if odd else f"they add up to {sum(mixture.values()):g}"
        yield problem(
            config,
            "data.mixture",
            f"must give shares from 0 to 1 that add up to 1; {what}. Write {{source: 0.7, other: 0.3}}.",
        )


@validator("error")
def one_source_of_training_prompts(config: PPOConfig) -> Iterator[Problem]:
    others = [key for key in ("data.sampler.class_path", "data.datagen.path") if get_path(config, key)]
    if config.data.mixture and others:
        yield problem(
            config, "data.mixture", f"and {others[0]} both decide which prompts are sampled. Set one of them.", *others
        )
    if config.data.custom_cls.path and config.data.datagen.path:
        yield problem(
            config,
            "data.datagen.path",
            "and data.custom_cls.path both name what the training prompts are. Set one of them; a class of yours may "
            "inherit from verl.data.dynamicgen_dataset.DynamicGenDataset.",
            "data.custom_cls.path",
        )
