"""A data source without a scorer stops a run before it loads a model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.config.helpers import typed
from tests.rewards.managers.batches import TOKENIZER
from verl.data.table import RowTable
from verl.protocol import DataProto
from verl.rewards.managers.scoring import check_data_sources, load_reward_manager
from verl.rewards.scorers import UnknownDataSource
from verl.sandbox.containment import Uncontained
from verl.trainer.buffer.rollout_buffer import RolloutBuffer, agent_name_problem, check_agent_names

JUDGE = {"reward_model.judge.url": "http://127.0.0.1:9/v1", "reward_model.judge.model": "m"}


@pytest.fixture
def dataset(tmp_path):
    def call(*sources):
        path = tmp_path / f"{'-'.join(sources).replace('/', '_')}.jsonl"
        path.write_text("".join(f'{{"data_source": "{source}"}}\n' for source in sources))
        return SimpleNamespace(dataframe=RowTable.from_files([str(path)]))

    return call


def check(datasets, **changes):
    config = typed().with_values(changes)
    check_data_sources(config, load_reward_manager(config, TOKENIZER, num_examine=0), datasets)


def test_the_nearest_known_source_is_named(dataset):
    check([dataset("openai/gsm8k", "digits"), None])
    with pytest.raises(UnknownDataSource, match="'openai/gsm9k' has no built-in scorer.*'openai/gsm8k'"):
        check([None, dataset("digits", "openai/gsm9k")])


def test_rows_that_are_left_out_do_not_count(dataset):
    kept = dataset("nobody/knows", "digits")
    kept.dataframe = kept.dataframe.select([1])
    check([kept])


def test_a_judge_a_function_of_ones_own_or_patience_will_do(dataset, tmp_path, caplog):
    unknown = [dataset("nobody/knows")]
    check(unknown, **JUDGE)
    (tmp_path / "mine.py").write_text("def compute_score(**row):\n    return 1.0\n")
    check(unknown, **{"custom_reward_function.path": str(tmp_path / "mine.py")})
    check(unknown, **{"reward_model.by_source": {"nobody/*": str(tmp_path / "mine.py")}})
    assert not caplog.records
    check(unknown, **{"reward_model.on_error": "zero_and_count"})
    assert "'nobody/knows' has no built-in scorer" in caplog.text


def test_assertions_that_a_service_judges_beside_the_program_are_said_to_be_forgeable(dataset, caplog):
    service = {"reward_model.sandbox_fusion.url": "http://127.0.0.1:9/run_code"}
    check([dataset("apps")], **service)
    check([dataset("mbpp")])
    assert not caplog.records
    check([dataset("mbpp")], **service)
    assert "a program made to fool them scores 1" in caplog.text and "'mbpp'" in caplog.text


def test_programs_that_cannot_be_contained_are_refused_before_the_first_step(dataset, monkeypatch):
    monkeypatch.setattr("verl.rewards.managers.scoring.containment", lambda: ("files",))
    code = [dataset("mbpp")]
    with pytest.raises(Uncontained, match="cannot promise files"):
        check(code)
    check([dataset("digits")])
    check(code, **{"reward_model.sandbox.allow_uncontained_code": True})
    check(code, **{"reward_model.sandbox_fusion.url": "http://127.0.0.1:9/run_code"})


# -- agent loops -------------------------------------------------------------------------------------------------------

LOOP = """
from verl.agents.base import AgentLoopBase, register


@register("asks_twice")
class AsksTwice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise NotImplementedError
"""


@pytest.fixture
def agents(tmp_path):
    def call(*names):
        path = tmp_path / "agents.jsonl"
        path.write_text("".join(json.dumps({"agent_name": name}) + "\n" for name in names))
        return SimpleNamespace(dataframe=RowTable.from_files([str(path)]))

    return call


def rollout(**changes):
    return typed().with_values({f"actor_rollout_ref.rollout.{key}": value for key, value in changes.items()})


def test_rows_of_an_agent_are_not_trained_on_in_one_turn_without_a_word(agents):
    check_agent_names(rollout(mode="sync"), [agents("single_turn_agent", None), None])
    words = "mode=sync with data whose column 'agent_name' asks for tool_agent: .* Set .*mode=async"
    with pytest.raises(ValueError, match=words):
        check_agent_names(rollout(mode="sync"), [None, agents("single_turn_agent", "tool_agent", None)])


def test_rows_of_a_dataset_of_the_users_are_looked_at_when_they_come():
    rows = DataProto(non_tensor_batch={"agent_name": np.array(["tool_agent"], dtype=object)})
    with pytest.raises(ValueError, match="asks for tool_agent"):
        RolloutBuffer.generate(SimpleNamespace(config=rollout(mode="sync")), rows, 1, 1)


def test_an_unknown_agent_loop_is_refused_before_a_model_is_loaded(agents, tmp_path):
    with pytest.raises(ValueError, match="agent_name='asks_twise' is not a known agent loop"):
        check_agent_names(rollout(mode="async"), [agents("asks_twise")])
    (tmp_path / "loops.py").write_text(LOOP)
    config = rollout(mode="async", **{"agent.agent_loop_config_path": str(tmp_path / "loops.py")})
    check_agent_names(config, [agents("asks_twice", "single_turn_agent", None)])
    with pytest.raises(ValueError, match="'asks_twise' is not a known agent loop; .* Did you mean 'asks_twice'"):
        check_agent_names(config, [agents("asks_twise")])


def test_a_wrong_default_agent_loop_is_refused_with_the_data():
    config = rollout(mode="async", **{"agent.default_agent_loop": "nobody"})
    assert "'nobody' is not a known agent loop" in agent_name_problem(config.actor_rollout_ref.rollout, [])
    with pytest.raises(ValueError, match="'nobody' is not a known agent loop"):
        check_agent_names(config, [None])
