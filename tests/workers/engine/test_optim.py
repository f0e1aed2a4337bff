import math
import sys

import pytest
import torch

from verl.config.engine import OptimConfig
from verl.workers.engine.optim import (
    DECAYS,
    build_optimizer,
    build_schedule,
    load_optimizer_state,
    optimizer_state,
    warn_of_endless_warmup,
)
from verl.workers.engine.train_step import add_l2_gradient, clip_gradients

DEFAULTS = {
    "lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0, "min_lr_ratio": None, "num_cycles": 0.5, "warmup_style": "constant",
}  # fmt: skip


def rates(steps, total=10, **changes):
    config = OptimConfig(**{**DEFAULTS, **changes})
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))], config)
    schedule = build_schedule(optimizer, config, total)
    found = []
    for _ in range(steps):
        found.append(round(schedule.get_last_lr()[0], 6))
        optimizer.step()
        schedule.step()
    return found


def test_warmup_rises_linearly_from_zero_then_stays():
    assert rates(6, lr_warmup_steps=4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(4, lr_warmup_steps_ratio=0.2) == [0.0, 0.5, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_cosine_falls_to_its_floor_and_stays_there():
    assert rates(13, warmup_style="cosine", lr_warmup_steps=2, min_lr_ratio=0.1) == [
        0.1, 0.55, 1.0, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1, 0.1,
    ]  # fmt: skip


def test_linear_falls_by_equal_steps_to_its_floor():
    assert rates(8, total=6, warmup_style="linear", lr_warmup_steps=2, min_lr_ratio=0.2) == [
        0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2,
    ]  # fmt: skip
    assert rates(4, total=4, warmup_style="linear") == [1.0, 0.75, 0.5, 0.25]


def test_wsd_is_constant_until_its_decay():
    steps = {"warmup_style": "wsd", "lr_warmup_steps": 2, "lr_wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"}
    assert rates(12, **steps) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    by_default = rates(24, total=22, warmup_style="wsd", lr_warmup_steps=2, min_lr_ratio=0.1)
    assert by_default[2:21] == [1.0] * 19  # the last tenth of 20 steps falls, along a cosine
    assert by_default[21:] == [0.55, 0.1, 0.1]
    assert rates(3, total=2, **{**steps, "lr_wsd_decay_steps": 9}) == [0.0, 0.5, 1.0]


def test_a_rate_has_a_floor_and_a_start_of_its_own():
    """Megatron's: up from ``lr_warmup_init``, down to ``min_lr``, both rates and no shares."""
    peak = DEFAULTS["lr"]
    found = rates(6, total=4, warmup_style="linear", lr_warmup_steps=2, min_lr=0.2 * peak, lr_warmup_init=0.5 * peak)
    assert found == [0.5, 0.75, 1.0, 0.6, 0.2, 0.2]
    assert rates(3, warmup_style="constant", lr_warmup_steps=2, lr_warmup_init=0.5 * peak) == [0.5, 0.75, 1.0]
    falls = rates(9, warmup_style="inverse-square-root", lr_warmup_steps=1, min_lr=0.4 * peak)
    assert falls == [0.0, 1.0, 0.707107, 0.57735, 0.5, 0.447214, 0.408248, 0.4, 0.4]


HALFWAY = {"linear": 0.5, "cosine": 0.5, "exponential": math.sqrt(2) - 1, "minus_sqrt": 1 - math.sqrt(0.5)}


@pytest.mark.parametrize("style", DECAYS)
def test_every_decay_goes_from_one_to_zero(style):
    decay = DECAYS[style]
    assert [decay(0.0), decay(0.5), decay(1.0)] == pytest.approx([1.0, HALFWAY[style], 0.0])
    falls = [decay(x / 20) for x in range(21)]
    assert falls == sorted(falls, reverse=True)


@pytest.mark.parametrize("style", ["cosine", "linear", "wsd"])
def test_a_fall_of_unknown_length_is_refused(style):
    with pytest.raises(ValueError, match=f"warmup_style={style} needs the length of the run.*total_training_steps=-1"):
        rates(1, total=-1, warmup_style=style)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="use constant, cosine, linear, wsd"):
        rates(1, warmup_style="cosin")
    with pytest.raises(ValueError, match="use 'AdamW' or 'AdamW8bit'"):
        rates(1, optimizer="Adam")


def test_a_warmup_longer_than_the_run_is_said(caplog):
    section = OptimConfig(**{**DEFAULTS, "lr_warmup_steps": 10})
    for total in (-1, 11):
        warn_of_endless_warmup(section, total)
    assert not caplog.records
    warn_of_endless_warmup(section, 10)
    [record] = caplog.records
    assert "lr_warmup_steps=10 is not less than the 10 training steps" in record.getMessage()


def test_an_optimizer_whose_package_is_missing_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"optimizer=AdamW8bit needs.*pip install -e '[^']*\[torchao\]'"):
        rates(1, optimizer="AdamW8bit")


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert torch.cat([p.grad for p in parameters]).norm() == pytest.approx(1.0, abs=1e-4)
    assert clip_gradients(parameters, None) == pytest.approx(1.0, abs=1e-4)


def test_optimizer_state_travels_by_name():
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2))]
    config = OptimConfig(**DEFAULTS)
    optimizer = build_optimizer(parameters, config)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer_state(optimizer, ["a", "b"])
    fresh = build_optimizer([p.detach().clone().requires_grad_() for p in reversed(parameters)], config)
    load_optimizer_state(fresh, ["b", "a"], state)
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], state["state"]["b"]["exp_avg"])
    with pytest.raises(ValueError, match="none named 'a'"):
        load_optimizer_state(fresh, ["b", "c"], state)


def test_the_l2_term_by_hand():
    trained, frozen = torch.nn.Parameter(torch.tensor([2.0, -4.0])), torch.nn.Parameter(torch.tensor([1.0]))
    trained.grad = torch.tensor([1.0, 1.0])
    add_l2_gradient([trained, frozen], 0.25)
    assert trained.grad.tolist() == [1.5, 0.0] and frozen.grad is None
    add_l2_gradient([trained], 0.0)
    assert trained.grad.tolist() == [1.5, 0.0]
