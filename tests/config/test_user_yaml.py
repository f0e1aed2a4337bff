"""YAML of users composes over verl's as with hydra's own command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl.config.base import ConfigError
from verl.config.load import load, load_ppo_config

from .helpers import RUNNABLE

REPOSITORY = Path(__file__).parents[2]


def _yaml(folder, text, name="mine.yaml"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder)


def test_defaults_ppo_trainer_and_self_compose(tmp_path):
    folder = _yaml(tmp_path, "defaults: [ppo_trainer, _self_]\ntrainer:\n  total_epochs: 2\n  experiment_name: mine\n")
    config = load_ppo_config([*RUNNABLE, "trainer.total_epochs=3"], folder, "mine")
    assert config.trainer.total_epochs == 3
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/mine"


def test_a_search_path_relative_to_the_repository_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    folder = _yaml(
        tmp_path,
        "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [ppo_trainer, _self_]\n"
        "data:\n  max_prompt_length: 99\n",
    )
    assert load_ppo_config(RUNNABLE, folder, "mine.yaml").actor_rollout_ref.rollout.prompt_length == 99


def test_a_search_path_that_is_not_there_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = _yaml(tmp_path, "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [ppo_trainer, _self_]\n")
    assert load_ppo_config(RUNNABLE, folder, "mine").trainer.seed == 1


def test_a_users_group_takes_the_place_of_ours(tmp_path):
    _yaml(tmp_path / "actor", "defaults: [dp_actor, _self_]\nppo_epochs: 4\n", "my_actor.yaml")
    folder = _yaml(tmp_path, "defaults: [ppo_trainer, {override actor@actor_rollout_ref.actor: my_actor}, _self_]\n")
    assert load_ppo_config(RUNNABLE, folder, "mine").critic.ppo_epochs == 4
    words = [*RUNNABLE, "actor@actor_rollout_ref.actor=my_actor"]
    assert load_ppo_config(words, folder).actor_rollout_ref.actor.ppo_epochs == 4


def test_unknown_keys_in_yaml_are_refused_with_the_nearest_name(tmp_path):
    folder = _yaml(tmp_path, "defaults: [ppo_trainer, _self_]\ntrainer: {sav_freq: 2}\nmine: {a: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_ppo_config(RUNNABLE, folder, "mine")
    assert "trainer.sav_freq is not an option; did you mean 'trainer.save_freq'?" in str(error.value)
    assert "mine is not an option" in str(error.value)


def test_numbers_written_as_text_in_yaml_become_numbers(tmp_path):
    folder = _yaml(
        tmp_path, "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {optim: {lr: '1e-5', eps: 1e-7}}}\n"
    )
    optim = load_ppo_config(RUNNABLE, folder, "mine").actor_rollout_ref.actor.optim
    assert (optim.lr, optim.eps) == (1e-5, 1e-7)


def test_a_tree_under_backend_config_and_old_names_in_yaml_are_understood(tmp_path):
    folder = _yaml(
        tmp_path,
        "defaults: [ppo_trainer, _self_]\nbackend_config:\n  trainer: {total_epochs: 5}\n"
        "af_output_dir: /out\ntrainer: {val_generations_to_log_to_wandb: 2}\n",
    )
    with pytest.warns(UserWarning, match="backend_config.* is read as the tree itself.*af_output_dir is now called"):
        trainer = load_ppo_config(RUNNABLE, folder, "mine").trainer
    assert (trainer.total_epochs, trainer.default_local_dir, trainer.log_val_generations) == (5, "/out", 2)


def test_what_yaml_sets_counts_as_given(tmp_path):
    folder = _yaml(tmp_path, "defaults: [ppo_trainer, _self_]\nalgorithm: {kl_ctrl: {kl_coef: 0.5}}\n")
    assert any("kl_coef=0.5 has no effect" in warning for warning in load(RUNNABLE, folder, "mine").warnings)


def test_an_interpolation_of_the_user_does_not_hide_an_unbuilt_feature(tmp_path):
    folder = _yaml(
        tmp_path,
        "defaults: [ppo_trainer, _self_]\nglobal_profiler: {tool: npu}\n"
        "trainer:\n  profile_steps: ['${trainer.seed}']\n",
    )
    with pytest.raises(ConfigError, match=r"global_profiler.tool=npu needs torch_npu"):
        load_ppo_config(RUNNABLE, folder, "mine")


@pytest.mark.parametrize(("path", "name"), [("nowhere", "mine"), (None, "nothing")])
def test_a_missing_folder_or_file_is_named(path, name):
    with pytest.raises(ConfigError, match=path or name):
        load_ppo_config(RUNNABLE, path, name)


def test_an_application_with_its_own_hydra_main_composes_and_types(tmp_path):
    (tmp_path / "app.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {experiment_name: app}\n")
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from verl.utils.config import to_ppo_config\n"
        "@hydra.main(config_path='.', config_name='app', version_base=None)\n"
        "def main(config):\n"
        "    typed = to_ppo_config(config)\n"
        "    print(config.trainer.seed, typed.trainer.default_local_dir, typed.critic.ppo_epochs)\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "app.py", *RUNNABLE, "actor_rollout_ref.actor.ppo_epochs=3", "hydra.run.dir=."],
        cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "checkpoints/verl_examples/app", "3"], done.stderr


def test_loading_inside_an_application_leaves_its_hydra_alone(tmp_path):
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "own.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        load_ppo_config(RUNNABLE)
        assert GlobalHydra.instance().is_initialized()
        assert hydra.compose("own").a == 1
