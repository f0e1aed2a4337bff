"""Training on examples and on pairs on two ranks: started by the run itself, and by torchrun."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.runs import read_metrics, train_sft
from verl.trainer.preference.job import DPOJob, RewardJob
from verl.utils.tiny_model import make_tiny_model

pytestmark = pytest.mark.ranks

SIZE = 2


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    make_tiny_model(folder / "model", family="qwen2", size="tiny", seed=1)
    rows = [{"question": f"{i}?", "answer": "ab" * (i % 5 + 1)} for i in range(10)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        *("trainer.device=cpu", "trainer.logger=[file]", "trainer.progress_bar=false", "data.train_batch_size=5"),
        *(f"model.path={folder / 'model'}", f"data.train_files={folder / 'rows.jsonl'}"),
        *("engine.mixed_precision.param_dtype=fp32", "trainer.total_epochs=1", "optim.lr=1e-2"),
        *(f"data.val_files={folder / 'rows.jsonl'}", "trainer.save_freq=2", "data.num_workers=1"),
    ]


def torchrun(words, folder):
    """Metrics by step of a run under torchrun, and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={SIZE}", "-m"]
    command += ["verl.trainer.fsdp_sft_trainer", *words, f"trainer.default_local_dir={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = folder.glob("**/*.jsonl")
    return {row["step"]: row["data"] for row in read_metrics(path)}, done.stdout


def test_ranks_of_the_run_and_ranks_of_torchrun_give_the_numbers_of_one(words, tmp_path):
    def own(name, *more):
        return train_sft([*words, f"trainer.default_local_dir={tmp_path / name}", *more])[1]

    one = own("one", "trainer.n_gpus_per_node=1")
    shared = f"engine.ulysses_sequence_parallel_size={SIZE}"
    sharing = own("sharing", f"trainer.n_gpus_per_node={SIZE}", shared)
    theirs, said = torchrun(words, tmp_path / "torchrun")
    for other in (sharing, theirs):
        assert other.keys() == one.keys() == {0, 1, 2}  # a validation, and two steps
        for step, expected in one.items():
            for name in {"train/loss", "train/grad_norm", "val/loss"} & expected.keys():
                assert other[step][name] == pytest.approx(expected[name], rel=1e-5)
    assert said.count("Done: 2 steps") == 1  # rank 0 alone speaks
    assert (tmp_path / "torchrun" / "huggingface" / "config.json").exists()


def test_pairs_of_two_ranks_give_the_numbers_of_one(words, tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": "12" * (i % 5 + 1), "rejected": "ab" * (i % 3 + 1)} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{name}_files={tmp_path / 'pairs.jsonl'}" for name in ("train", "val")]
    changed = [*words, *files, "trainer.export_model=false", "optim.lr=1e-3"]

    def own(name, *more, job=DPOJob):
        return train_sft([*changed, f"trainer.default_local_dir={tmp_path / name}", *more], job)[1]

    one = own("one", "trainer.n_gpus_per_node=1")
    two = own("two", f"trainer.n_gpus_per_node={SIZE}", "data.micro_batch_size_per_gpu=1")
    scores = own("rm", f"trainer.n_gpus_per_node={SIZE}", "trainer.total_training_steps=1", job=RewardJob)
    assert two.keys() == one.keys() and scores[1]["val/preference_accuracy"] >= 0.5
    for step, expected in one.items():
        for name in {"train/loss", "train/grad_norm", "train/preference_margin", "val/loss"} & expected.keys():
            assert two[step][name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7)
