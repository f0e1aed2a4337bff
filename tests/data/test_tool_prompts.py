"""Prompts are rendered and measured with the schemas of the tools that they show."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tiny_models import make_tokenizer
from verl.config.ppo import ROLLOUT, PPOConfig
from verl.data.loader import build_dataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.table import DataError
from verl.tools.prompt_schemas import prompt_schemas

TOOLS = '''
from verl.tools import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@function_tool
def sub(a: int, b: int) -> str:
    """Subtract one number from another."""
    return str(a - b)
'''


class OwnDataset(RLHFDataset):
    """A user's class whose ``__init__`` knows no argument for tools."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        super().__init__(data_files, tokenizer, config, processor)


@pytest.fixture
def build(tmp_path):
    """Return data set and schemas of rows with these columns."""
    (tmp_path / "tools.py").write_text(TOOLS)

    def build(rows, loop="tool_agent", **data):
        made = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "data_source": "x", **row} for row in rows]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / "rows.parquet")
        config = PPOConfig().with_values(
            {
                f"{ROLLOUT}.mode": "async",
                f"{ROLLOUT}.multi_turn.function_tool_path": str(tmp_path / "tools.py"),
                f"{ROLLOUT}.multi_turn.tool_num_workers": 0,
                f"{ROLLOUT}.agent.default_agent_loop": loop,
                "data.max_prompt_length": 2000,
                **{f"data.{name}": value for name, value in data.items()},
            }
        )
        schemas = prompt_schemas(config.actor_rollout_ref.rollout)
        files = [str(tmp_path / "rows.parquet")]
        return build_dataset(config.data, files, make_tokenizer("byte"), tool_schemas=schemas), schemas

    return build


def test_the_prompt_of_a_row_holds_the_schemas_of_its_tools(build):
    dataset, schemas = build([{"extra_info": {"tool_selection": ["sub"]}}], return_full_prompt=True)
    row = dataset[0]
    assert '"sub"' in row["full_prompts"] and '"add"' not in row["full_prompts"]
    messages = [{"role": "user", "content": "2 + 2?"}]
    tokenizer = dataset.tokenizer
    rendered = tokenizer.apply_chat_template(
        messages, tools=schemas({"extra_info": {"tool_selection": ["sub"]}}), add_generation_prompt=True, tokenize=False
    )
    assert row["raw_prompt_ids"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("workers", [1, 2])
def test_length_filters_count_the_schemas(build, workers):
    rows = [{"agent_name": name} for name in ("tool_agent", "single_turn_agent", None)]
    whole, _ = build(rows)
    lengths = [len(whole[i]["raw_prompt_ids"]) for i in range(3)]
    assert lengths[0] == lengths[2] > 300 > lengths[1]
    options = {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": workers, "max_prompt_length": 200}
    assert len(build(rows, **options)[0]) == 1
    assert len(build(rows, loop="interaction_agent", **options)[0]) == 2


def test_rows_that_ask_for_an_unknown_tool_are_named(build):
    with pytest.raises(DataError, match="row 1.*'mul'"):
        build([{"extra_info": {"tool_selection": [name]}} for name in ("add", "mul")], filter_overlong_prompts=True)


def test_a_class_of_the_users_gets_the_schemas_too(build, tmp_path):
    (tmp_path / "own.py").write_text("from tests.data.test_tool_prompts import OwnDataset\n")
    custom = {"custom_cls.path": str(tmp_path / "own.py"), "custom_cls.name": "OwnDataset"}
    dataset, _ = build([{}], **custom)
    assert len(dataset[0]["raw_prompt_ids"]) > 300
