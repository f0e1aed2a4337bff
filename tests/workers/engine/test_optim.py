from types import SimpleNamespace

import pytest
import torch

from verl.workers.engine.optim import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    load_optimizer_state,
    optimizer_state,
)

DEFAULTS = {
    "lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0, "min_lr_ratio": None, "num_cycles": 0.5, "warmup_style": "constant",
}  # fmt: skip


def rates(steps, total=10, **changes):
    config = SimpleNamespace(**{**DEFAULTS, **changes})
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


def test_a_cosine_of_unknown_length_and_an_unknown_style_are_refused():
    with pytest.raises(ValueError, match="needs the length of the run"):
        rates(1, total=-1, warmup_style="cosine")
    with pytest.raises(ValueError, match="use 'constant' or 'cosine'"):
        rates(1, warmup_style="linear")


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    assert torch.cat([p.grad for p in parameters]).norm() == pytest.approx(1.0, abs=1e-4)
    assert clip_gradients(parameters, None) == pytest.approx(1.0, abs=1e-4)


def test_optimizer_state_travels_by_name():
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2))]
    config = SimpleNamespace(**DEFAULTS)
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
