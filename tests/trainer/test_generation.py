"""Generation of responses into a file: whole, continued, on several ranks, and refused."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.runs import make_task, write_prompts
from verl.config.base import READ, ConfigError
from verl.config.generation import EvaluationConfig, GenerationConfig
from verl.config.load import load
from verl.trainer.generation.generator import Generator, runs_of
from verl.trainer.generation.responses import ResponseFile, Responses
from verl.trainer.main_generation import main

RELEASES = """
trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.device=cuda data.path=~/data/rlhf/math/test.parquet
data.prompt_key=prompt data.n_samples=5 data.output_path=/opt/tiger/math.parquet data.batch_size=128
model.path=~/models/Qwen2-7B-Instruct model.external_lib=null rollout.name=vllm rollout.mode=sync
rollout.temperature=1.0 rollout.top_k=50 rollout.top_p=0.7 rollout.prompt_length=1536 rollout.response_length=512
rollout.dtype=bfloat16 rollout.gpu_memory_utilization=0.5 rollout.ignore_eos=false rollout.enforce_eager=true
rollout.free_cache_engine=true rollout.load_format=dummy_dtensor rollout.tensor_model_parallel_size=1
rollout.max_num_batched_tokens=8192 rollout.max_model_len=null rollout.max_num_seqs=1024
rollout.log_prob_micro_batch_size=null rollout.log_prob_micro_batch_size_per_gpu=8 rollout.do_sample=true
rollout.disable_log_stats=true rollout.enable_chunked_prefill=true rollout.n=1 rollout.calculate_log_probs=false
actor.strategy=fsdp actor.ulysses_sequence_parallel_size=1 actor.entropy_from_logits_with_chunking=false
actor.entropy_checkpointing=false actor.fsdp_config.fsdp_size=-1 actor.fsdp_config.forward_prefetch=false
ray_init.num_cpus=null ray_init.timeline_json_file=null
""".split()
NEWER = """
rollout._target_=verl.workers.config.RolloutConfig rollout.mode=async rollout.load_format=auto
rollout.data_parallel_size=1 ray_kwargs.ray_init.num_cpus=null ray_kwargs.timeline_json_file=null
""".split()
EVALUATION = """
data.path=/tmp/math.parquet data.prompt_key=prompt data.response_key=responses data.data_source_key=data_source
data.reward_model_key=reward_model custom_reward_function.path=null custom_reward_function.name=compute_score
ray_init.num_cpus=null ray_init.timeline_json_file=null ray_kwargs.ray_init.num_cpus=null
ray_kwargs.timeline_json_file=null
""".split()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("generation"))


def words(task, path, **settings):
    common = {
        "rollout.name": "hf", "rollout.dtype": "float32", "rollout.response_length": 8, "rollout.prompt_length": 64,
        "trainer.device": "cpu", "trainer.controller": "local", "trainer.n_gpus_per_node": 1, "data.n_samples": 2,
        "trainer.progress_bar": False, "data.output_path": path,
    }  # fmt: skip
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    named = [task["actor_rollout_ref.model.path"], task["data.val_files"]]
    return named + [f"{key}={value}" for key, value in {**common, **settings}.items()]


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The responses of one start."""
    path = tmp_path_factory.mktemp("whole") / "whole.parquet"
    main(words(task, path))
    return path


def responses(path):
    return pq.read_table(path).select(["responses", "response_lengths", "finish_reasons"]).to_pydict()


@pytest.mark.parametrize(("root", "given"), [(GenerationConfig, RELEASES), (GenerationConfig, RELEASES + NEWER),
                                             (EvaluationConfig, EVALUATION)])  # fmt: skip
def test_the_keys_of_every_release_compose(root, given):
    loaded = load(given, config_name=root.config_name, root=root)
    assert not loaded.problems
    rollout = loaded.config.actor_rollout_ref.rollout
    assert root is EvaluationConfig or (rollout.n, rollout.top_p, rollout.prompt_length) == (5, 0.7, 1536)


def test_short_and_long_names_and_a_file_of_short_ones_are_one_configuration(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [generation, _self_]\nmodel: {path: /m}\nrollout: {n: 1, response_length: 9}\n"
        "data: {path: /d.parquet, n_samples: 3}\n"
    )
    short = ["model.path=/m", "rollout.n=1", "rollout.response_length=9", "data.path=/d.parquet", "data.n_samples=3"]
    long = ["actor_rollout_ref.model.path=/m", "actor_rollout_ref.rollout.n=3", "data.max_response_length=9"]
    of_file = load([], str(tmp_path), "mine", root=GenerationConfig)
    own = [load(given, config_name="generation", root=GenerationConfig) for given in (short, [*long, short[3]])]
    assert not of_file.problems and of_file.config == own[0].config == own[1].config
    assert of_file.config.actor_rollout_ref.rollout.response_length == 9
    with pytest.raises(ConfigError, match="rollout.temprature is not an option; did you mean"):
        load(["rollout.temprature=1"], config_name="generation", root=GenerationConfig)


def test_the_file_has_the_columns_of_the_data_and_n_responses_a_row(task, whole):
    table, data = pq.read_table(whole), pq.read_table(task["data.val_files"])
    assert table.drop_columns(["responses", "response_lengths", "finish_reasons"]).equals(data)
    found = responses(whole)
    assert all(len(texts) == 2 and texts[0] != texts[1] for texts in found["responses"])
    for lengths, reasons in zip(found["response_lengths"], found["finish_reasons"], strict=True):
        assert all((length == 8) == (reason == "length") for length, reason in zip(lengths, reasons, strict=True))


def test_an_interrupted_generation_goes_on_and_gives_the_same_with_any_batch_size(task, whole, tmp_path, monkeypatch):
    path, generate, made = tmp_path / "again.parquet", Generator.responses, []

    def until_the_third(self, rows):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(rows)
        return generate(self, rows)

    monkeypatch.setattr(Generator, "responses", until_the_third)
    with pytest.raises(SystemExit):
        main(words(task, path, data__batch_size=3))
    assert made == [range(0, 3), range(3, 6)] and not path.exists()
    (next((tmp_path / "again.parquet.parts").glob("rows-00000000*"))).unlink()  # a hole: a part that was lost
    made.clear()
    monkeypatch.setattr(Generator, "responses", lambda self, rows: made.append(rows) or generate(self, rows))
    main(words(task, path, data__batch_size=5))
    assert made == [range(0, 3), range(6, 8)]
    assert responses(path) == responses(whole) and sorted(os.listdir(tmp_path)) == ["again.parquet"]


def test_what_is_there_is_kept_and_something_else_is_not_overwritten(task, whole, capsys):
    before = whole.read_bytes()
    main(words(task, whole))
    assert "has all responses already" in capsys.readouterr().out
    for settings, said in [
        ({"rollout__temperature": 0.5}, "rollout.temperature: 1.0 -> 0.5"),
        ({"trainer__seed": 7}, "trainer.seed: 1 -> 7"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(words(task, whole, **settings))
        assert said in (text := capsys.readouterr().err) and "data.overwrite=true" in text
    assert whole.read_bytes() == before


def test_an_option_of_training_is_said_to_have_no_effect(task, tmp_path, capfd):
    READ.clear()  # by other runs of this process
    main(words(task, tmp_path / "out.parquet", actor__ppo_epochs=3, data__max_samples=1))
    shown = "".join(capfd.readouterr())
    assert "actor_rollout_ref.actor.ppo_epochs=3 was read by nothing" in shown and "n_samples" not in shown


def test_missing_words_are_named(task, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main([task["actor_rollout_ref.model.path"], "trainer.device=cpu"])
    assert "data.path is empty" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([task["actor_rollout_ref.model.path"], str(tmp_path / "no.parquet")])
    assert "no.parquet does not exist" in capsys.readouterr().err


def test_parts_are_of_one_identity_and_of_one_process(tmp_path):
    path, one = tmp_path / "out.parquet", [Responses(1, ["b"], [1], ["stop"]), Responses(0, ["a"], [1], ["stop"])]
    file = ResponseFile(path, {"seed": 1})
    with pytest.raises(ConfigError, match="another process is generating into it"):
        ResponseFile(path, {"seed": 1})
    file.add(one)
    file.close()
    with pytest.raises(ConfigError, match="seed: 1 -> 2"):
        ResponseFile(path, {"seed": 2})
    file = ResponseFile(path, {"seed": 1})
    assert file.rows_done() == {0, 1}
    file.finish(pa.table({"q": ["x", "y"], "responses": [["old"], ["old"]]}))
    assert pq.read_table(path).select(["q", "responses"]).to_pydict() == {"q": ["x", "y"], "responses": [["a"], ["b"]]}
    pq.write_table(pa.table({"mine": [1]}), path)
    with pytest.raises(ConfigError, match="it was not written by verl generate"):
        ResponseFile(path, {"seed": 1})
    assert ResponseFile(path, {"seed": 1}, overwrite=True).rows_done() == set()
    assert pq.read_table(path).column_names == ["mine"]  # until the new one is whole


def test_runs_are_of_neighbours():
    assert list(runs_of([0, 1, 2, 5, 6, 9], 2)) == [range(0, 2), range(2, 3), range(5, 7), range(9, 10)]


@pytest.mark.ranks
def test_two_ranks_and_a_file_of_json_give_the_same_responses(task, whole, tmp_path):
    rows = tmp_path / "val.jsonl"
    rows.write_text("\n".join(map(json.dumps, pq.read_table(write_prompts(tmp_path / "v.parquet", 8)).to_pylist())))
    main(words({**task, "data.val_files": str(rows)}, tmp_path / "two.parquet", trainer__n_gpus_per_node=2))
    assert responses(tmp_path / "two.parquet") == responses(whole)
