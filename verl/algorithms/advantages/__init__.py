# ruff: noqa: F401 - names for users
"""Advantage estimators, one module a method, chosen by ``algorithm.adv_estimator``.

Every estimator takes (B, R) tensors and a mask and gives ``advantages, returns``, both (B, R) and zero where masked.
It is called with those arguments it names; a new one is a function with ``@register_adv_est("name")`` on it, in a
module of this folder or in a file of your own. Nothing here is differentiated, and padding costs nothing (see
``valid_tokens``).

Letters: B responses, R response width, s_i = sum_t r_it the score of response i, G_i the responses to its prompt.
"""

from enum import Enum

from verl.algorithms.advantages.common import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageFn,
    NonFiniteError,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algorithms.advantages.gae import compute_gae_advantage_return
from verl.algorithms.advantages.gdpo import compute_gdpo_outcome_advantage
from verl.algorithms.advantages.gigpo import compute_gigpo_outcome_advantage
from verl.algorithms.advantages.gpg import compute_gpg_outcome_advantage
from verl.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from verl.algorithms.advantages.opo import compute_opo_outcome_advantage
from verl.algorithms.advantages.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from verl.algorithms.advantages.passk import compute_grpo_passk_outcome_advantage
from verl.algorithms.advantages.reinforce import (
    compute_agentic_reinforce_advantage,
    compute_reinforce_advantage,
    compute_step_reinforce_advantage,
)
from verl.algorithms.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.algorithms.advantages.remax import compute_remax_outcome_advantage
from verl.algorithms.advantages.rloo import compute_rloo_outcome_advantage
from verl.algorithms.registry import import_modules

import_modules(__name__, __path__)

# after the imports: what users register later is not in the enum
_NAMES = {name.upper(): name for name in ADV_ESTIMATOR_REGISTRY}
AdvantageEstimator = Enum("AdvantageEstimator", _NAMES, type=str, module=__name__)  # type: ignore[misc]  # no literal
AdvantageEstimator.__doc__ = """Built-in names: ``GAE``, ``GRPO``, ... Any other registered string will do as well."""
