"""The state of every random generator a training step may draw from, in types that load without running code."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from verl.utils.py_functional import derive_seed


def random_state(device: torch.device) -> dict[str, Any]:
    """State of torch's, numpy's and Python's generators; with CUDA, of the current device's too."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "cpu": torch.get_rng_state(),
        # a tensor, since torch.load(weights_only=True) refuses numpy arrays
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "random": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue every generator from ``random_state``."""
    torch.set_rng_state(state["cpu"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def new_random_state(saved: dict[str, Any], rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Generators of a rank that the run had not before: seeded from the ``saved`` state of another and its place.

    The same for the same three, so resuming twice gives the same numbers.
    """
    digest = hashlib.blake2b(saved["cpu"].numpy().tobytes()).hexdigest()
    seed = derive_seed("new rank", digest, rank, world_size)
    kind, keys, position, has_gauss, gauss = np.random.RandomState(seed % 2**32).get_state()
    state = {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "random": random.Random(seed).getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state
