import subprocess
import sys

import pytest

from verl.workers.rollout import get_rollout_class


def test_hf_is_known():
    assert get_rollout_class("hf").__name__ == "HFRollout"


def test_an_unknown_engine_names_the_known_ones():
    with pytest.raises(ValueError, match="rollout.name='vlm' is unknown. Known: hf"):
        get_rollout_class("vlm")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines_that_are_not_built_yet_say_so(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported yet. Use rollout.name=hf"):
        get_rollout_class(name)


def test_importing_the_package_loads_no_engine():
    code = "import sys, verl.workers.rollout; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
