"""Environment groups as the rows of a run: what follows from them, which seeds they have, and that a run resumes."""

import json

import numpy as np
import pytest
import torch

from tests.config.helpers import RUNNABLE, notes, problems, typed
from tests.support.runs import overrides, run_job
from verl.agents import AgentLoopBase, AgentLoopOutput
from verl.agents.base import _LOOPS
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.config.env import EnvConfig, EnvSplitConfig, EnvValidationConfig
from verl.config.load import load
from verl.data.env_groups import EnvGroupDataset
from verl.preflight.data import Preview
from verl.preflight.environments import missing_environments
from verl.preflight.estimates import derivation
from verl.preflight.machine import names_in_files
from verl.protocol import DataProto
from verl.rewards.managers.episode import reward_of_episodes
from verl.rewards.managers.scoring import compute_reward
from verl.trainer.main_agentic import main
from verl.trainer.ppo.experience import Shaping
from verl.utils.tiny_model import make_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"
GROUPS = ("env.train.tags=[FrozenLake]", "trainer.total_training_steps=3", "data.train_batch_size=8")


# -- what the configuration makes of them ----------------------------------------------------------------------------


def test_groups_decide_what_a_step_samples():
    config = typed(*GROUPS, "env.train.group_size=4", "env.train.redundancy=2", "env.val.group_size=3")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.mode, rollout.n, rollout.val_kwargs.n, rollout.over_sample_rate) == ("async", 4, 3, 0.25)
    assert (config.data.train_files, config.data.val_files, config.has_validation) == ([], [], True)


@pytest.mark.parametrize(("words", "rows"), [((), 8), (("env.train.max_traj_per_env=2",), 16)])
def test_a_step_trains_on_the_episodes_of_all_groups(words, rows):
    loaded = load([*(word for word in RUNNABLE if "batch_size=8" not in word), *GROUPS[:2], *words])
    assert not loaded.problems and loaded.config.data.train_batch_size == rows


def test_the_one_that_is_given_of_two_names_decides():
    config = typed(*GROUPS, f"{ROLLOUT}.n=2")
    assert config.env.train.group_size == config.actor_rollout_ref.rollout.n == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((f"{ROLLOUT}.n=2", "env.train.group_size=4"), f"{ROLLOUT}.n=2 must be env.train.group_size=4"),
        ((f"{ROLLOUT}.mode=sync",), f"{ROLLOUT}.mode=sync runs no agent loops"),
        (("data.train_files=x.parquet",), "rows are environment groups"),
        (("env.train.n_groups=3",), "data.train_batch_size=8 must be a multiple of env.train.n_groups=3"),
        (("env.train.max_traj_per_env=1", "env.train.n_groups=4"), "asks for 2 episodes of each environment"),
        (("env.train.groups_per_tag=[8,1]",), "must have one number for each of the 1 tags"),
        (("env.train.tags=[FrozenLake,Sokoban]", "env.train.groups_per_tag=[3,4]"), "add up to env.train.n_groups=8"),
        (("env.train.tags=[FrozenLake,FrozenLake]",), "names FrozenLake twice"),
        (("env.registry.FrozenLake.maxsteps=3",), "did you mean 'max_steps'"),
        (("env.registry.FrozenLake.max_steps=0",), "must be greater than 0"),
        (("trainer.total_training_steps=null",), "environments have no end"),
        (("env.reward=sum",), "asks for a reward function"),
        ((f"{ROLLOUT}.skip_rollout=true",), "batches are kept by their prompts"),
        (("env.train.redundancy=1", f"{ROLLOUT}.over_sample_rate=0.5"), "must be env.train.redundancy=1 over"),
    ],
)
def test_contradictions_are_refused(words, sentence):
    assert sentence in problems(*GROUPS, *words)


def test_what_has_no_effect_is_said():
    assert "env.memory_mb=100 has no effect" in notes(*GROUPS, "env.memory_mb=100")
    assert "env.memory_mb" not in notes(*GROUPS, "env.memory_mb=100", "env.num_workers=1")
    assert "env.train.n_groups=4 has no effect" in notes("env.train.n_groups=4")
    assert "data.shuffle=true has no effect: rows are environment groups" in notes(*GROUPS, "data.shuffle=true")
    assert "custom_reward_function.path" in notes(*GROUPS, "custom_reward_function.path=r.py")


# -- rows ------------------------------------------------------------------------------------------------------------


def dataset(is_train=True, seed=1, **options):
    train = EnvSplitConfig(**{"n_groups": 4, "tags": ["FrozenLake", "Sokoban"], **options})
    val = EnvValidationConfig(n_groups=4, max_traj_per_env=3)
    return EnvGroupDataset(EnvConfig(train=train, val=val), seed, is_train)


def test_tags_are_divided_equally_or_as_said():
    assert dataset(n_groups=5).tags == ["FrozenLake"] * 3 + ["Sokoban"] * 2
    assert dataset(groups_per_tag=[1, 3]).tags == ["FrozenLake"] + ["Sokoban"] * 3


def test_a_step_has_every_group_once_and_each_episode_another_seed():
    rows = [dataset()[row] for row in range(40)]
    assert [row["env_tag"] for row in rows[:8]] == dataset().tags * 2
    assert len({row["env_seed"] for row in rows}) == 40
    assert rows == [dataset()[row] for row in range(40)] != [dataset(seed=2)[row] for row in range(40)]
    assert {row["agent_name"] for row in rows} == {"env_agent"} and [row["index"] for row in rows] == list(range(40))


def test_validation_meets_no_seed_of_training():
    held_out = dataset(is_train=False)
    assert len(held_out) == 12 and [held_out[row]["data_source"] for row in range(4)] == held_out.tags
    assert all(held_out[row]["env_seed"] % 2 == 1 for row in range(12))
    assert all(dataset()[row]["env_seed"] % 2 == 0 for row in range(200))


def test_rows_without_an_end_can_be_read_anywhere():
    assert dataset()[10**9]["index"] == 10**9
    with pytest.raises(IndexError):
        dataset()[2**31]


def test_a_position_in_other_groups_is_refused():
    dataset().load_state_dict(dataset(seed=2).state_dict())
    with pytest.raises(ValueError, match="had the environment groups 2 of FrozenLake, 2 of Sokoban, and this one"):
        dataset(n_groups=6).load_state_dict(dataset().state_dict())


# -- runs ------------------------------------------------------------------------------------------------------------


class TwoTurns(AgentLoopBase):
    """Two turns of four tokens on the row's seed; the reward is the share of digits."""

    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.encode(f"{row['env_tag']} {row['env_seed'] % 7}\n")
        asked = self.tokenizer.encode("next")
        limited = {**sampling_params, "max_tokens": 4}
        turns = [await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=limited)]
        so_far = prompt + turns[0].token_ids + asked
        turns.append(await self.server_manager.generate("x", prompt_ids=so_far, sampling_params=limited))
        first, second = (turn.token_ids for turn in turns)
        text = self.tokenizer.decode([*first, *second])
        return AgentLoopOutput(
            prompt,
            [*first, *asked, *second],
            [1] * len(first) + [0] * len(asked) + [1] * len(second),
            reward_score=sum(character.isdigit() for character in text) / 8,
            num_turns=4,
            extra_fields={"env_seed_seen": row["env_seed"]},
        )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the job on environment groups; returns the trainer and the rows it dumped, by step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(_LOOPS, "env_agent", TwoTurns)
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)

    def start(folder="run", **settings):
        task = {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "env.train.tags": "[FrozenLake]",
            "env.train.n_groups": 4,
            "env.val.n_groups": 3,
            "trainer.total_training_steps": 2,
            "trainer.default_local_dir": str(tmp_path / folder),
            "trainer.rollout_data_dir": str(tmp_path / folder / "samples"),
            "data.train_batch_size": 4,
        }
        trainer = run_job(overrides(task, **settings))
        files = sorted((tmp_path / folder / "samples").iterdir(), key=lambda path: int(path.stem))
        return trainer, [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    return start


def test_a_run_trains_and_validates_on_environments(run):
    trainer, steps = run(trainer__test_freq=1, env__val__max_traj_per_env=2)
    assert [len(rows) for rows in steps] == [16, 16]
    assert len(trainer.validations) == 2 and "FrozenLake" in str(trainer.validations)
    assert len({row["input"] for row in steps[0]}) > 1
    assert trainer.metrics["num_turns/mean"] == 4


@pytest.mark.parametrize("settings", [{}, {"env__train__redundancy": 2}], ids=["plain", "redundancy"])
def test_a_resumed_run_goes_on_with_the_same_episodes(run, settings):
    _, expected = run("whole", trainer__total_training_steps=4, **settings)
    run("cut", trainer__total_training_steps=2, trainer__save_freq=2, **settings)
    _, found = run("cut", trainer__total_training_steps=4, trainer__save_freq=2, **settings)
    if not settings:  # which groups are complete first is up to the clock
        compared = ("input", "output", "score")
        of_both = ([[[row[name] for name in compared] for row in rows] for rows in run] for run in (found, expected))
        assert next(of_both) == next(of_both)
    inputs = [[row["input"] for row in rows] for rows in found]
    assert [len(rows) for rows in inputs] == [16] * 4


def test_tags_are_mixed_and_groups_filtered(run):
    filters = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "score"}
    _, steps = run(env__train__tags="[FrozenLake,Sokoban]", **filters)
    sources = [{row["input"].split()[0] for row in rows} for rows in steps]
    assert all(source <= {"FrozenLake", "Sokoban"} for source in sources) and len(set.union(*sources)) == 2


# -- normalization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", ["state", "inductive", "batch"])
@pytest.mark.parametrize("method", ["identity", "mean", "mean_std", "asym_clip"])
def test_normalization_of_episodes_is_ragens(grouping, method):
    """Against RAGEN's definition, written out: (s - mean) / (std + 1e-6) of each group, 0 where all are equal."""
    words = [f"env.reward_normalization.grouping={grouping}", f"env.reward_normalization.method={method}"]
    algorithm = typed(*GROUPS, *words).algorithm
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, -3.0])
    uids, tags = ["a"] * 4 + ["b"] * 2 + ["c"] * 2, ["F"] * 4 + ["S"] * 4
    groups = {"state": uids, "inductive": tags, "batch": ["x"] * 8}[grouping]
    expected = scores.clone()
    for group in set(groups):
        rows = torch.tensor([name == group for name in groups])
        own = scores[rows]
        if method != "identity":
            expected[rows] = own - own.mean()
        if method in ("mean_std", "asym_clip") and own.std() > 1e-6:
            expected[rows] /= own.std() + 1e-6
        if method == "asym_clip":
            expected[rows] = expected[rows].clamp(-1, 3)
    batch = one_token_batch(scores, uids, tags)
    Shaping(algorithm, 1).shape_scores(batch)
    torch.testing.assert_close(batch.column("token_level_rewards").sum(-1), expected)


def one_token_batch(scores, uids, tags):
    count = len(scores)
    layout = Layout(torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int64), 1)
    columns = {
        "responses": Ragged(torch.ones(count, dtype=torch.int64), layout),
        "response_mask": Ragged(torch.ones(count, dtype=torch.int64), layout),
        "token_level_scores": Ragged(scores, layout),
    }
    objects = {"uid": np.array(uids, dtype=object), "data_source": np.array(tags, dtype=object)}
    return DataProto.from_ragged(columns, non_tensors=objects)


# -- rewards of environment and function -----------------------------------------------------------------------------


def episodes_batch(with_scores=True):
    """Two rows: turns of 2 and 1 tokens around a masked one, and one turn with a masked token behind."""
    layout = Layout(torch.zeros(2, dtype=torch.int64), torch.tensor([4, 3]), 5)
    columns = {
        "responses": Ragged(torch.arange(7), layout),
        "response_mask": Ragged(torch.tensor([1, 1, 0, 1, 1, 1, 0]), layout),
    }
    if with_scores:
        columns["rm_scores"] = Ragged(torch.tensor([0.0, 0.5, 0.0, 1.0, 0.0, 2.0, 0.0]), layout)
    turns = np.empty(2, dtype=object)
    turns[:] = [[0.5, 1.0], [2.0]]
    return DataProto.from_ragged(columns, non_tensors={"turn_rewards": turns})


class Function:
    """A reward manager that gives 10 and 20 on the first token."""

    def __call__(self, data, return_dict=False):
        self.infos = data.non_tensor_batch["extra_info"].tolist()
        assert "rm_scores" not in data.keys()
        rewards = torch.zeros(2, 5)
        rewards[:, 0] = torch.tensor([10.0, 20.0])
        return {"reward_tensor": rewards, "reward_extra_info": {"seen": [1, 2]}}


@pytest.mark.parametrize("with_scores", [True, False], ids=["rm_scores", "turn_rewards"])
@pytest.mark.parametrize(
    ("source", "sums"), [("environment", [1.5, 2.0]), ("function", [10.0, 20.0]), ("sum", [11.5, 22.0])]
)
def test_the_reward_is_the_environments_the_functions_or_their_sum(source, sums, with_scores):
    data, function = episodes_batch(with_scores), Function()
    rewards, columns = compute_reward(data, reward_of_episodes(function, source))
    assert rewards.sum(-1).tolist() == sums
    if source == "environment":
        assert columns == {} and rewards[0].tolist() == [0.0, 0.5, 0.0, 1.0, 0.0] and rewards[1, 1] == 2
    else:
        assert columns == {"seen": [1, 2]} and function.infos[0]["rollout_reward_scores"]["turn_rewards"] == [0.5, 1.0]
    assert ("rm_scores" in data.keys()) == with_scores and "extra_info" not in data.non_tensor_batch


def test_an_environment_without_rewards_is_named():
    data = episodes_batch(False)
    del data.non_tensor_batch["turn_rewards"]
    with pytest.raises(ValueError, match="the agent loops of this batch return none"):
        compute_reward(data, reward_of_episodes(Function(), "environment"))


# -- before a model is loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["env.train.tags=[FrozenLak]"], "environment type 'FrozenLak' is not known"),
        (["env.train.tags=[FrozenLak]"], "FrozenLake"),
        (["env.registry.FrozenLake.kwargs.size=1"], "FrozenLake: size=1 must be at least 2"),
        (["env.registry.FrozenLake.kwargs.sizes=3"], "unexpected keyword argument 'sizes'"),
        (["env.registry.FrozenLake.type=nowhere.py:Lake"], "there is no file nowhere.py"),
    ],
)
def test_the_doctor_names_what_is_wrong_with_an_environment(words, sentence):
    config = typed(*GROUPS, *words)
    found = [problem.text for problem in (*missing_environments(config), *names_in_files(config))]
    assert any(sentence in text for text in found), found


def test_the_doctor_finds_nothing_wrong_with_a_runnable_environment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Lake:\n    pass\n")
    words = [f"env.registry.mine.type={file}:Lake", "env.train.tags=[FrozenLake,mine]"]
    config = typed(*GROUPS, *words)
    assert [*missing_environments(config), *names_in_files(config)] == []
    (problem,) = names_in_files(typed(*GROUPS, *words, f"env.registry.mine.type={file}:Sea"))
    assert "Sea" in problem.text and "is not defined in" in problem.text


def test_main_agentic_asks_for_environments(capsys):
    with pytest.raises(SystemExit) as end:
        main(["trainer.total_training_steps=1", "--check"])
    assert end.value.code == 2 and "env.train.tags must be given" in capsys.readouterr().err


def test_the_doctor_derives_the_batch_from_the_groups():
    config = typed(*GROUPS, "env.train.n_groups=4", "env.train.group_size=2")
    texts = [number.text for number in derivation(config, Preview())]
    assert texts[:2] == ["4 environment groups of FrozenLake, 2 episodes of each", "8 prompts a step"]
    assert texts[2] == "8 prompts x 2 responses = 16 samples"
