"""Seeds of samples."""

import subprocess
import sys

from verl.utils.py_functional import derive_seed


def test_seeds_differ_by_every_part():
    seeds = {derive_seed(run, step, p, k) for run in (1, 2) for step in range(5) for p in range(20) for k in range(8)}
    assert len(seeds) == 1600
    assert derive_seed(1, "23") != derive_seed(12, "3") != derive_seed(1, 23)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_another_process():
    code = "from verl.utils.py_functional import derive_seed; print(derive_seed(1, 'train', 2, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(other) == derive_seed(1, "train", 2, 3)
