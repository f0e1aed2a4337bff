"""Estimators and policy losses a user registers in a module of theirs."""

import pytest

from tests.compat.support import FILES, train
from tests.support.runs import main_ppo, overrides

LIB = {"actor_rollout_ref__model__external_lib": "my_algorithms"}


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FILES))


@pytest.mark.parametrize("estimator", ["group_mean", "no_baseline", "whitened"])
def test_a_registered_estimator_runs(task, estimator):
    trainer = train(task, algorithm__adv_estimator=estimator, **LIB)
    assert trainer.metrics["critic/advantages/max"] > 0 and trainer.metrics["actor/grad_norm"] > 0


def test_every_form_of_a_policy_loss_gives_the_same_gradient(task):
    norms = {}
    for loss in ("two_values", "four_values", "keywords", "no_config", "own_names"):
        metrics = train(
            task,
            algorithm__adv_estimator="no_baseline",
            actor_rollout_ref__actor__policy_loss__loss_mode=loss,
            **LIB,
        ).metrics
        norms[loss] = metrics["actor/grad_norm"]
        if loss == "two_values":
            assert metrics["actor/my_ratio"] == pytest.approx(1.0)
        if loss == "own_names":
            assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2)
    assert norms == pytest.approx(dict.fromkeys(norms, norms["four_values"]))


@pytest.mark.parametrize("named_by", ["external_lib", "VERL_USE_EXTERNAL_MODULES"])
def test_two_ranks_import_the_module_too(task, named_by, monkeypatch):
    lib = LIB if named_by == "external_lib" else {}
    if not lib:
        monkeypatch.setenv(named_by, "my_algorithms")
    trainer = train(
        task,
        trainer__n_gpus_per_node=2,
        actor_rollout_ref__actor__strategy="fsdp2",
        algorithm__adv_estimator="group_mean",
        actor_rollout_ref__actor__policy_loss__loss_mode="two_values",
        **lib,
    )
    assert trainer.metrics["actor/my_ratio"] == pytest.approx(1.0)


def test_a_module_that_cannot_be_imported_is_named_at_the_end(task):
    result = main_ppo(overrides(task, actor_rollout_ref__model__external_lib="no_such_project.losses"))
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode != 0 and "no_such_project" in last and "PYTHONPATH" in last
