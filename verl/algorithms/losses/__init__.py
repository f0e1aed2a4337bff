# ruff: noqa: F401 - names for users
"""Policy losses, one module a method, chosen by ``actor.policy_loss.loss_mode``; the actor's loss and the critic's.

A policy loss is called with keywords and takes those it names:

    fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) -> loss, metrics

all tensors (B, R), ``config`` the ``actor`` section, metrics a dict of scalars under the names they are logged with.
Losses written for older releases of verl, which return four scalars, work as they are (see ``loss_and_metrics``).
A built-in loss is an equation on ``LossInputs``, the valid tokens of these; ``builtin_policy_loss`` makes an fn of it,
which takes columns without padding, too. An update has these, and pads them for a loss of the user's.

Letters: A advantage, pi the policy, pi_old the one the batch was scored with, mu the one that sampled, w =
pi(y_t) / pi_old(y_t) the importance ratio, T_i the tokens of response i, sg[] a constant.
"""

from verl.algorithms.losses.actor import PPOLoss, TokenOutputs, imitation_loss, nonfinite_columns, response_weights
from verl.algorithms.losses.bypass import compute_policy_loss_bypass_mode
from verl.algorithms.losses.cispo import compute_policy_loss_cispo
from verl.algorithms.losses.clip_cov import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algorithms.losses.common import (
    POLICY_LOSS_REGISTRY,
    LossInputs,
    PolicyLossFn,
    TokenLoss,
    get_policy_loss_fn,
    loss_and_metrics,
    register_policy_loss,
)
from verl.algorithms.losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from verl.algorithms.losses.dro import compute_policy_loss_dro
from verl.algorithms.losses.geo_mean import compute_policy_loss_geo_mean
from verl.algorithms.losses.gpg import compute_policy_loss_gpg, compute_policy_loss_reinforce
from verl.algorithms.losses.gspo import compute_policy_loss_gspo
from verl.algorithms.losses.kimi15 import compute_policy_loss_kimi15
from verl.algorithms.losses.ppo import compute_policy_loss, compute_policy_loss_vanilla
from verl.algorithms.losses.sapo import compute_policy_loss_sapo
from verl.algorithms.losses.sppo import compute_policy_loss_sppo
from verl.algorithms.losses.tis import compute_policy_loss_tis
from verl.algorithms.losses.topr import compute_policy_loss_topr
from verl.algorithms.losses.value import ValueLoss, compute_value_loss
from verl.algorithms.registry import import_modules

import_modules(__name__, __path__)
