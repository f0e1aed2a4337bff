"""Chat templates that rewrite the history: each turn of a trajectory is a training row, in whole runs."""

import json

import pytest

from tests.support.runs import overrides, run_job
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.trajectories import trajectory_numbers
from verl.utils.tiny_model import make_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"

REWRITES = (  # marks earlier turns of the assistant, so that a prompt does not begin with the one before
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}(earlier) {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENVIRONMENT = '''
class Three:
    """Three turns; digits are rewarded."""

    def reset(self, *, seed, **task):
        self.turn = 0
        return f"say {seed % 7}", {}

    def step(self, action):
        self.turn += 1
        return "more", sum(c.isdigit() for c in action) / 4, self.turn == 3, False, {}
'''


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.py").write_text(ENVIRONMENT)
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)

    def run(folder, **settings):
        task = {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "actor_rollout_ref.model.custom_chat_template": str(tmp_path / "template.jinja"),
            "env.train.tags": "[Three]",
            "env.train.n_groups": 2,
            "env.train.group_size": 4,
            "env.registry.Three.type": f"{tmp_path / 'three.py'}:Three",
            "env.registry.Three.max_tokens_per_step": 6,
            "trainer.default_local_dir": str(tmp_path / folder),
            "trainer.rollout_data_dir": str(tmp_path / folder / "samples"),
            "trainer.total_training_steps": 2,
            "trainer.test_freq": -1,
            "data.train_batch_size": 2,
            "data.max_prompt_length": 128,
            "data.max_response_length": 96,
            f"{ROLLOUT}.n": 4,
            f"{ROLLOUT}.calculate_log_probs": True,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        }
        (tmp_path / "template.jinja").write_text(REWRITES)
        trainer = run_job(overrides(task, **settings))
        files = sorted((tmp_path / folder / "samples").iterdir(), key=lambda path: int(path.stem))
        return trainer, [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    return run


@pytest.mark.parametrize("estimator", ["grpo", "gigpo"])
def test_turns_become_rows_that_share_the_trajectorys_advantage(start, estimator, monkeypatch):
    batches = []
    improve = RayPPOTrainer.improve
    monkeypatch.setattr(RayPPOTrainer, "improve", lambda self, batch: (batches.append(batch), improve(self, batch)))
    options = {f"{ROLLOUT}__multi_turn__use_inference_chat_template": True, "algorithm__adv_estimator": estimator}
    trainer, steps = start("rows", **options)
    assert trainer.global_steps == 2
    assert trainer.metrics["training/rollout_probs_diff_max"] < 1e-3  # scored on the prompt they were generated from
    assert trainer.metrics["actor/grad_norm"] > 0
    assert [len(rows) for rows in steps] == [8, 8]  # one line a trajectory
    for batch in batches:
        numbers = trajectory_numbers(batch)
        assert len(batch) == 24 and numbers.max() == 7
        first = batch.column("advantages")[:, 0]
        by_row = [{round(first[row].item(), 6) for row in range(24) if numbers[row] == k} for k in range(8)]
        assert estimator == "gigpo" or all(len(values) == 1 for values in by_row)
        assert any(value for values in by_row for value in values)


def test_over_sampled_and_partial_trajectories_of_several_rows_train(start):
    trainer, _ = start(
        "partial",
        **{
            f"{ROLLOUT}__multi_turn__use_inference_chat_template": True,
            f"{ROLLOUT}__partial_rollout": True,
            "env__train__redundancy": 2,
            "trainer__total_training_steps": 3,
        },
    )
    assert trainer.global_steps == 3 and trainer.metrics["actor/grad_norm"] > 0
