"""Every estimator on one batch, with literals: B = 4, R = 6, tool output at the zeros of ``MASK``.

Rows 0, 2 and 3 answer one prompt, row 1 is alone; row 0 has two turns, row 3 is padded on the left. The numbers were
worked out from the equations of the docstrings in plain loops, apart from the code, with

    gamma = lam = 1/2,   step_gamma = 0.9,   rewards of gdpo weighed 2 and 1
"""

import inspect
from types import SimpleNamespace

import numpy as np
import torch

from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.batch.ragged import Ragged

MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]])
INDEX = np.array(["a", "b", "a", "a"], dtype=object)
REWARDS = torch.tensor([[0, 0.5, 0, 0, 1, 0], [0, 0, 0, 0, 0, 2], [0, 0, -0.5, 0, 0, 0], [0, 0, 0.25, 0, 0, 0]])
COLUMNS = {
    "values": torch.tensor(
        [[0.2, 0.4, 0, 0.6, 0.8, 0], [0.5, 0.5, 0.5, 1, 1, 1], [0.1, 0, -0.1, 0, 0, 0], [0, 0.3, 0.2, 0, 0, 0]]
    ),
    "old_log_probs": torch.tensor(
        [
            [-0.5, -1, 0, -0.2, -2, 0],
            [-0.1, -0.3, -0.5, -0.7, -0.9, -1.1],
            [-1.5, -0.4, -0.6, 0, 0, 0],
            [0, -0.8, -0.25, 0, 0, 0],
        ]
    ),
    "sum_pi_squared": torch.tensor(
        [
            [0.5, 0.3, 0, 0.7, 0.2, 0],
            [0.8, 0.6, 0.5, 0.4, 0.3, 0.3],
            [0.2, 0.6, 0.5, 0, 0, 0],
            [0, 0.4, 0.7, 0, 0, 0],
        ]
    ),
    "reward_baselines": torch.tensor([0.5, 1, 0, 0.25]),
}
EXTRAS = {"accuracy": np.array([1.0, 0, 0, 1]), "format": np.array([0.5, 0.1, 0.1, 0.3])}
OPTIONS = {
    "gamma": 0.5,
    "lam": 0.5,
    "step_gamma": 0.9,
    "config": SimpleNamespace(gdpo_reward_keys=["accuracy", "format"], gdpo_reward_weights=[2, 1]),
}

TO_GO = [
    [0.375, 0.75, 0, 0.5, 1, 0],
    [0.0625, 0.125, 0.25, 0.5, 1, 2],
    [-0.125, -0.25, -0.5, 0, 0, 0],
    [0, 0.125, 0.25, 0, 0, 0],
]
UNDISCOUNTED = [[1.5, 1.5, 0, 1, 1, 0], [2] * 6, [-0.5, -0.5, -0.5, 0, 0, 0], [0, 0.25, 0.25, 0, 0, 0]]

BY_HAND = {
    # name: (advantages of the batch, those of row 0 alone[, returns of the batch, where they are others]);
    # one number a response where all its tokens share it
    "gae": (
        [
            [0.397978, 1.122269, 0, -0.243061, 0.68936, 0],
            [-0.699385, -0.603125, -0.218085, -1.341984, -0.509466, 2.820606],
            [-0.20976, -0.243061, -0.909075, 0, 0, 0],
            [0, -0.342963, 0.289751, 0, 0, 0],
        ],
        [-0.163423, 1.100381, 0, -1.281962, 0.345004, 0],
        [
            [0.290625, 0.7625, 0, 0.45, 1, 0],
            [0.178711, 0.214844, 0.359375, 0.4375, 0.75, 2],
            [-0.0375, -0.15, -0.5, 0, 0, 0],
            [0, 0.1125, 0.25, 0, 0, 0],
        ],
    ),
    "grpo": ([1.072221, 1.999998, -0.907264, -0.164957], 1.499999),
    "grpo_passk": ([1.237178, 1.999998, 0, 0], 1.499999),
    "rloo": ([1.625, 2, -1.375, -0.25], 1.5),
    "remax": (
        [[1, 1, 0, 0.5, 0.5, 0], [1] * 6, [-0.5, -0.5, -0.5, 0, 0, 0], [0] * 6],
        [1, 1, 0, 0.5, 0.5, 0],
        UNDISCOUNTED,
    ),
    "reinforce": (TO_GO, TO_GO[0]),
    "step_reinforce": ([[0.7, 1.4, 0, 0.5, 1, 0], *TO_GO[1:]], [0.7, 1.4, 0, 0.5, 1, 0]),
    "agentic_reinforce": ([[1, 1, 0, 1, 1, 0], *UNDISCOUNTED[1:]], [1, 1, 0, 1, 1, 0]),
    "reinforce_plus_plus": (
        [
            [-0.047669, 0.56522, 0, 0.156627, 0.973813, 0],
            [-0.55841, -0.456262, -0.251966, 0.156627, 0.973813, 2.608185],
            [-0.864855, -1.069152, -1.477745, 0, 0, 0],
            [0, -0.456262, -0.251966, 0, 0, 0],
        ],
        [-1.014722, 0.338241, 0, -0.563734, 1.240216, 0],
        TO_GO,
    ),
    "reinforce_plus_plus_baseline": ([0.169175, 0.944559, -1.522573, -0.888168], 0),
    "opo": ([0.944444, 2, -1.055556, -0.305556], 1.5),
    "gpg": ([1.083333, 2, -0.916667, -0.166667], 1.5),
    "gdpo": ([1.042968, -0.003395, -1.739645, 0.533716], 0),
    "sppo": ([0.5, 0, -0.5, 0], 0),
    "optimal_token_baseline": (
        [
            [1.384, 1.128729, 0, 0.911566, 1, 0],
            [2] * 6,
            [-0.616, -0.871271, -0.588434, 0, 0, 0],
            [0, 0.134, -0.121271, 0, 0, 0],
        ],
        UNDISCOUNTED[0],
        UNDISCOUNTED,
    ),
}

BY_HAND["tir_optimal_token_baseline"] = BY_HAND["optimal_token_baseline"]
# "a" scores 1.5, -0.5, 0.25; its first turns are worth 1.4, -0.5, 0.25; no other row met the state of row 0's second
BY_HAND["gigpo"] = (
    [
        [2.134577, 2.134577, 0, 1.072221, 1.072221, 0],
        [1.999998] * 6,
        [-1.830294, -1.830294, -1.830294, 0, 0, 0],
        [0, -0.304282, -0.304282, 0, 0, 0],
    ],
    [1.499999, 1.499999, 0, 1.499999, 1.499999, 0],
)

CREDIT = {
    "gae": "token",
    "grpo": "response",
    "grpo_passk": "response",
    "rloo": "response",
    "remax": "token",
    "reinforce": "token",
    "step_reinforce": "turn",
    "agentic_reinforce": "turn",
    "reinforce_plus_plus": "token",
    "reinforce_plus_plus_baseline": "response",
    "opo": "response",
    "gpg": "response",
    "gdpo": "response",
    "sppo": "response",
    "optimal_token_baseline": "token",
    "tir_optimal_token_baseline": "token",
    "gigpo": "response and turn",
}
"""What shares a judgement: all tokens of a ``response``; or a ``token``, or ``turn``, judged by what follows it."""

for twin, name in (("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")):
    BY_HAND[twin], CREDIT[twin] = BY_HAND[name], CREDIT[name]

BASELINE_FREE = ("reinforce", "step_reinforce", "agentic_reinforce")
"""Those that compare with nothing, and say so."""

NAMES = [name for name in ADV_ESTIMATOR_REGISTRY if ADV_ESTIMATOR_REGISTRY[name].__module__.startswith("verl.")]


def num_turns(mask):
    """How many runs of ones each row has."""
    return (mask.diff(dim=-1, prepend=torch.zeros_like(mask[:, :1])) > 0).sum(-1).tolist()


def call(name, rewards, mask, index, columns, extras=None, **options):
    """Any estimator with those arguments it names: columns (B, ...), extras (B,) and options."""
    fn = get_adv_estimator_fn(name)
    available = {"token_level_rewards": rewards, "response_mask": mask, "index": index, **columns}
    padded = mask.padded() if isinstance(mask, Ragged) else mask
    available["turn_state_ids"] = [[k % 2 for k in range(count)] for count in num_turns(padded)]
    available |= {"non_tensor_batch": extras, **OPTIONS, **options}
    return fn(**{k: v for k, v in available.items() if k in inspect.signature(fn).parameters})


def whiten_off(name):
    """The option that leaves out whitening, for those estimators that whiten by themselves."""
    has_option = "whiten_advantages" in inspect.signature(get_adv_estimator_fn(name)).parameters
    return {"whiten_advantages": False} if has_option else {}
