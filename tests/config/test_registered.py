"""The config's table of methods is that of the registries, and a new file is a new method."""

import sys

import pytest
import torch

from verl.algorithms import losses
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from verl.algorithms.losses import POLICY_LOSS_REGISTRY
from verl.algorithms.registry import import_modules
from verl.config.checks import support
from verl.config.checks.support import full_keys, options_read

NEW_LOSS = '''
from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "newly_added",
    about=About("-2 A log pi", "tests", "[none](https://example.com)", "none", options="actor.{clip_ratio,tau_pos}"),
)
def compute_policy_loss_newly_added(x: LossInputs) -> TokenLoss:
    """-2 A log pi."""
    return TokenLoss(-2 * x.advantages * x.log_prob)
'''


@pytest.mark.parametrize(
    ("kind", "registry"), [("advantages", ADV_ESTIMATOR_REGISTRY), ("losses", POLICY_LOSS_REGISTRY)]
)
def test_names_and_options_are_those_of_the_registry(kind, registry):
    methods = options_read(kind)
    assert set(methods) == {name for name in registry if registry[name].__module__.startswith("verl.")}
    for name, keys in methods.items():
        assert set(keys) == {key for about in registry.about(name) for key in full_keys(about.options)}, name


def test_a_file_adds_a_loss_to_the_config_and_to_the_registry(tmp_path, monkeypatch):
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "newly_added.py").write_text(NEW_LOSS)
    keys = ("actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.tau_pos")
    with monkeypatch.context() as patch:
        patch.setattr(support, "_METHODS", tmp_path)
        assert options_read.__wrapped__("losses") == {"newly_added": keys}
        patch.setattr(losses, "__path__", [str(tmp_path / "losses")])
        import_modules(losses.__name__, losses.__path__)
    try:
        half, one = torch.full((1, 2), -0.5), torch.ones(1, 2)
        assert POLICY_LOSS_REGISTRY["newly_added"](half, half, one, one)[0] == 1
    finally:
        del POLICY_LOSS_REGISTRY["newly_added"], sys.modules["verl.algorithms.losses.newly_added"], losses.newly_added
