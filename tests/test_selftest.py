"""`verl selftest`: its trials pass where the numbers are right, fail where they are not, and end where they hang."""

import json

import pytest
import torch

from verl.models import token_outputs
from verl.selftest import base, checks, figures
from verl.selftest.base import TRIALS, At
from verl.selftest.checks import outcome_of
from verl.selftest.command import all_trials, main, run_trial, run_trials, seconds_kept


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    return At("cpu", "2.5M", tmp_path_factory.mktemp("selftest"))


@pytest.mark.parametrize("name", ["local", "packed", "checkpoint", "attention", "rollout hf", "update"])
def test_a_trial_passes_on_a_cpu(name, at):
    outcome = outcome_of(TRIALS[name].run, at)
    assert outcome["verdict"] == "pass", outcome["text"]
    assert name != "update" or outcome["figures"]["tokens_per_s"] > 0
    assert name != "update" or "no MFU: the peak of a CPU is not in verl's table" in outcome["text"]
    assert name != "attention" or "flash-attn: for CUDA" in outcome["text"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fsdp2", "ranks", "run"])
def test_a_trial_of_processes_passes_on_a_cpu(name, tmp_path):
    outcome = run_trial(name, "cpu", "tiny", str(tmp_path), timeout_s=250)
    assert outcome.verdict == "pass", outcome.text


def test_decoding_is_measured_on_a_cpu(at, monkeypatch):
    monkeypatch.setattr(figures, "_fastest", lambda: "hf")  # whatever is installed here
    outcome = outcome_of(TRIALS["decode"].run, at)
    assert outcome["verdict"] == "pass" and outcome["figures"]["sync_over_copy"] > 0, outcome["text"]


def test_kernels_are_compared_with_numbers_of_the_cpu(at, monkeypatch):
    """On a device whose every product is wrong, a reference computed there would be as wrong."""
    devices = []
    full = token_outputs.full_log_probs

    def watched(logits, *rest):
        devices.append(logits.device.type)
        return full(logits, *rest)

    monkeypatch.setattr(token_outputs, "full_log_probs", watched)
    monkeypatch.setattr(checks, "current_device", lambda device: torch.device("meta"))
    outcome_of(TRIALS["log-probs"].run, at)  # numbers of the meta device cannot be read
    assert devices == ["cpu"]


def test_a_sleep_that_keeps_the_weights_fails(at, monkeypatch):
    monkeypatch.setattr(checks, "_used", lambda device: 1 << 30)  # asleep as awake
    monkeypatch.setattr(At, "is_cuda", True)
    monkeypatch.setattr(checks, "rollout_model", base.tiny_model)
    outcome = outcome_of(TRIALS["rollout hf"].run, at)
    assert outcome["verdict"] == "FAIL" and "sleep gave 0 MiB of device memory back; the weights" in outcome["text"]


def test_figures_have_a_share_of_the_limit_that_comparisons_leave_them(monkeypatch):
    trials = all_trials()
    names = list(trials)
    assert [name for name in names if trials[name].measures] == names[-2:] == ["update", "decode"]
    assert seconds_kept(names, trials, 600) == 200 and seconds_kept(["run"], trials, 600) == 0
    given, begun = {}, []

    def run(name, device, size, folder, timeout_s):
        given[name] = timeout_s

    monkeypatch.setattr("verl.selftest.command.run_trial", run)
    list(run_trials(["run", "update"], "cpu", "tiny", 30, begun.append))
    assert 19 < given["run"] <= 20 and 29 < given["update"] <= 30 and begun == ["run", "update"]


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
    assert "| device | none | 0 | not tried: its share of the 1 s of --limit is over |" in table


def test_a_name_that_is_no_trial_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "atention"])
    assert "--only=atention is no trial; did you mean 'attention'?" in capsys.readouterr().err
