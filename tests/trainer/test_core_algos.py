import subprocess
import sys

import torch
from torch.testing import assert_close

from verl.trainer.ppo import core_algos


def test_every_promised_name_is_there():
    assert all(hasattr(core_algos, name) for name in core_algos.__all__)
    assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GAE) is core_algos.compute_gae_advantage_return


def test_the_positional_calls_of_verls_users_work():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    advantages, returns = core_algos.compute_gae_advantage_return(x, x, mask, torch.tensor(0.9), torch.tensor(0.5))
    assert advantages.shape == returns.shape == (2, 3)
    core_algos.compute_grpo_outcome_advantage(x, mask, [0, 0], 1e-6, True, config=None)
    assert len(core_algos.compute_policy_loss(x, x, x, mask, 0.2, None, None, 3.0, "token-mean")) == 4
    assert len(core_algos.compute_value_loss(x, x, x, mask, 0.5, "token-mean")) == 2
    assert core_algos.kl_penalty(x, x, "kl").shape == (2, 3)


def test_entropy_loss_of_equal_logits_is_the_log_of_their_number():
    loss = core_algos.compute_entropy_loss(torch.zeros(2, 3, 8), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert_close(loss, torch.tensor(8.0).log())


def test_the_algorithms_import_nothing_but_torch_and_numpy():
    heavy = {"transformers", "ray", "tensordict", "hydra", "omegaconf", "verl.protocol", "verl.config"}
    code = (
        "import sys, verl; before = set(sys.modules); from verl.algorithms import advantages, losses; "
        "new = set(sys.modules) - before - {'verl.utils', 'verl.utils.exit_codes'}; "
        f"print([m for m in sorted(new) if m in {heavy!r} or 'verl.utils' in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]", result.stdout
