"""``trainer.weight_sync_freq``, ``trainer.log_dir``, ``trainer.unread_keys``: what they do in real runs."""

import json

import pytest

from tests.support.runs import make_task, overrides, run_job
from verl.config.base import READ, ConfigError
from verl.config.load import load
from verl.config.unused_options import remember_given
from verl.preflight.checks import passed
from verl.trainer.ppo.job import PPOJob


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


KEEP = {"actor_rollout_ref__rollout__free_cache_engine": False, "trainer__resume_mode": "disable"}


def test_metrics_go_to_the_log_folder(task, tmp_path):
    folder = tmp_path / "logs"
    places = {"trainer__log_dir": folder, "trainer__default_local_dir": tmp_path / "c"}
    run_job(overrides(task, trainer__logger="[file]", trainer__total_training_steps=1, **places))
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]


def test_weights_reach_the_engine_every_so_many_steps(task, tmp_path, monkeypatch):
    from verl.workers.roles import ActorRolloutRefWorker

    synced = []
    sync = ActorRolloutRefWorker.sync_rollout
    monkeypatch.setattr(
        ActorRolloutRefWorker, "sync_rollout", lambda self: (synced.append(self.actor.version), sync(self))[1]
    )
    local = {"trainer__default_local_dir": tmp_path / "c", "trainer__total_training_steps": 5, **KEEP}
    run_job(overrides(task, trainer__weight_sync_freq=2, **local))
    every_second = list(synced)
    synced.clear()
    run_job(overrides(task, **local))
    assert len(synced) == 5 and every_second == synced[::2], "before steps 1, 3 and 5"


@pytest.mark.parametrize("words", [(), ("rollout.mode=async", "rollout.free_cache_engine=false")])
def test_an_engine_that_cannot_keep_its_weights_is_refused(task, words):
    words = [f"actor_rollout_ref.{word}" for word in words]
    text = str([problem.text for problem in load([*overrides(task, trainer__weight_sync_freq=2), *words]).problems])
    assert "trainer.weight_sync_freq=2" in text and "or leave it 1" in text


def test_an_option_that_nothing_reads_stops_the_run_after_the_first_step(task, tmp_path, monkeypatch):
    words = overrides(task, trainer__total_training_steps=3, trainer__default_local_dir=tmp_path / "c")
    words.append("actor_rollout_ref.model.lora_adapter_path=/nowhere")  # read with a LoRA rank only

    def job(*more):
        loaded = load([*words, *more])
        passed(loaded.config)  # as if no check had seen it
        warnings = [sentence for sentence in loaded.warnings if "lora" not in sentence]
        return PPOJob(remember_given(loaded.config, loaded.tree, loaded.given, warnings))

    for key in list(READ):  # other runs of this process may have read it
        monkeypatch.delitem(READ, key)
    with pytest.raises(ConfigError, match="lora_adapter_path=/nowhere was read by nothing"):
        job().run()
    said = []
    monkeypatch.setattr("verl.telemetry.progress.Progress.say", lambda self, text: said.append(text))
    assert job("trainer.unread_keys=warn").run().global_steps == 3
    assert sum("lora_adapter_path" in text for text in said) == 1


def test_environment_variables_of_the_workers_come_from_both_places():
    config = load(["ray_init.runtime_env.env_vars={A: 1, B: 2}", "ray_init.env.B=3"]).config
    assert config.ray_init.variables == {"A": 1, "B": 3}
