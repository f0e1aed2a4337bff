"""A rollout that samples with other probabilities than the actor's is found, with its worst tokens and its causes."""

import json

import numpy as np
import pytest
import torch

from tests.support.runs import make_task, overrides, run_job
from verl.batch.ragged import Ragged
from verl.config.load import load_ppo_config
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_correction import FILE, MismatchMonitor, likely_causes, worst_tokens

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("mismatch"))


@pytest.fixture
def config(task, tmp_path):
    def load(**settings):
        return load_ppo_config(overrides(task, trainer__default_local_dir=tmp_path / "run", **settings))

    return load


def sampled(mu, pi):
    """A batch of responses whose tokens had these probabilities, rows of unequal length."""
    columns = {
        "responses": Ragged.from_rows([[10 * i + t for t in range(len(row))] for i, row in enumerate(mu)], 8),
        "response_mask": Ragged.from_rows([[1] * len(row) for row in mu], 8),
        "rollout_log_probs": Ragged.from_rows([np.log(row).tolist() for row in mu], 8, dtype=torch.float32),
        "old_log_probs": Ragged.from_rows([np.log(row).tolist() for row in pi], 8, dtype=torch.float32),
    }
    return DataProto.from_ragged(
        columns, non_tensors={"uid": np.array([f"u{i}" for i in range(len(mu))], dtype=object)}
    )


MU = [[0.5, 0.5], [0.9, 0.5, 0.5], [0.5]]
PI = [[0.5, 0.4], [0.1, 0.5, 0.5], [0.5]]


def test_the_worst_tokens_are_named_by_row_place_and_text():
    first, second = worst_tokens(sampled(MU, PI), 7, lambda ids: f"<{ids[0]}>")[:2]
    assert (first["step"], first["uid"], first["row"], first["position"], first["text"]) == (7, "u1", 1, 0, "<10>")
    assert first["rollout_prob"] == pytest.approx(0.9) and first["actor_prob"] == pytest.approx(0.1)
    assert (second["uid"], second["position"]) == ("u0", 1)


def test_the_warning_comes_once_and_every_step_over_the_threshold_is_written_down(config, tmp_path):
    monitor = MismatchMonitor(config(actor_rollout_ref__rollout__calculate_log_probs=True), str)
    metrics, warning = monitor(sampled(MU, MU), 1)
    assert warning is None and metrics["training/rollout_probs_diff_max"] == 0
    assert not (tmp_path / "run" / FILE).exists()
    _, warning = monitor(sampled(MU, PI), 2)
    assert "by 0.1500 on average in step 2" in warning and "mismatch_threshold=0.01" in warning
    assert "u1, response 1, token 0" in warning
    assert monitor(sampled(MU, PI), 3)[1] is None
    rows = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3] and rows[0]["worst"][0]["token_id"] == 10


@pytest.mark.parametrize(
    "settings, first, said",
    [
        ({"dtype": "float16"}, "float16 but the actor computes in float32", 2),
        (
            {"top_p": 0.8, "top_k": 5, "dtype": "float32"},
            f"{ROLLOUT}.top_p=0.8, {ROLLOUT}.top_k=5: the rollout samples",
            2,
        ),
        ({"skip_rollout": True}, "skip_rollout=true reuses text", 2),
        ({}, "the policy itself became so sharp", 1),
    ],
)
def test_causes_are_read_off_the_settings(config, settings, first, said):
    keys = {f"actor_rollout_ref__rollout__{name}": value for name, value in settings.items()}
    causes = likely_causes(config(**keys))
    assert first in causes[0] and len(causes) == said


def test_causes_of_another_engine(config):
    shared = {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__temperature": 0.7}
    engine = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    causes = likely_causes(
        config(**shared, **{f"{engine}.logprobs_mode": "raw_logprobs", f"{engine}.kv_cache_dtype": "fp8"})
    )
    assert "logprobs_mode=raw_logprobs leaves out" in causes[0] and "kv_cache_dtype=fp8" in causes[1]
    assert "vllm computes this model otherwise" in causes[2]


def test_a_run_that_samples_from_a_truncated_distribution_is_warned(task, tmp_path, capsys):
    keys = {"calculate_log_probs": True, "top_k": 2}
    run_job(
        overrides(
            task,
            trainer__total_training_steps=2,
            trainer__default_local_dir=tmp_path / "run",
            **{f"actor_rollout_ref__rollout__{name}": value for name, value in keys.items()},
        )
    )
    out = capsys.readouterr().out
    assert out.count("WARNING: the rollout sampled tokens") == 1
    assert f"1. {ROLLOUT}.top_k=2: the rollout samples from a changed distribution" in out
    assert len((tmp_path / "run" / FILE).read_text().splitlines()) == 2
