"""`verl selftest`: its trials pass where the numbers are right, fail where they are not, and end where they hang."""

import json

import pytest
import torch

from verl.models import token_outputs
from verl.selftest.base import TRIALS, At
from verl.selftest.checks import outcome_of
from verl.selftest.command import main, run_trial


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    return At("cpu", "2.5M", tmp_path_factory.mktemp("selftest"))


@pytest.mark.parametrize("name", ["local", "packed", "checkpoint", "attention", "rollout hf", "update"])
def test_a_trial_passes_on_a_cpu(name, at):
    outcome = outcome_of(TRIALS[name].run, at)
    assert outcome["verdict"] == "pass", outcome["text"]
    assert name != "update" or outcome["figures"]["tokens_per_s"] > 0


@pytest.mark.parametrize("name", ["fsdp1", "liger"])
def test_what_needs_a_gpu_says_so(name, at):
    outcome = outcome_of(TRIALS[name].run, at)
    assert outcome["verdict"] == "none" and ("CUDA" in outcome["text"] or "GPU" in outcome["text"])


def test_a_wrong_number_fails(at, monkeypatch):
    right = token_outputs.chunked_log_probs
    monkeypatch.setattr(
        token_outputs,
        "chunked_log_probs",
        lambda *args, **options: tuple(1.01 * one for one in right(*args, **options)),
    )
    outcome = outcome_of(TRIALS["log-probs"].run, at)
    assert outcome["verdict"] == "FAIL" and "log-probs in torch.float32 differ by 1.0e-02" in outcome["text"]


def test_a_trial_that_does_not_end_or_dies_fails_alone(tmp_path):
    hangs = run_trial("device", "cpu", "2.5M", str(tmp_path), timeout_s=0.2)
    assert hangs.verdict == "FAIL" and "no end within 0 s" in hangs.text
    dies = run_trial("device", "no such device", "2.5M", str(tmp_path), timeout_s=100)
    assert dies.verdict == "FAIL" and "no such device" in dies.text


def test_the_command_prints_a_table(capsys):
    assert main(["--device", "cpu", "--only", "device, liger", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["device"] == "cpu" and f"torch {torch.__version__}" in printed["machine"]
    assert [(one["name"], one["verdict"]) for one in printed["trials"]] == [("device", "pass"), ("liger", "none")]
    assert main(["--only", "device", "--device", "cpu", "--limit", "1"]) == 0
    table = capsys.readouterr().out
    assert "| device | none | 0 | not tried: the 1 s of --limit are over |" in table


def test_a_name_that_is_no_trial_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "atention"])
    assert "--only=atention is no trial; did you mean 'attention'?" in capsys.readouterr().err
