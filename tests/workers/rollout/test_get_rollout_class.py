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
def test_an_engine_that_is_not_installed_names_the_install_line(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"name={name} needs {name}.*Run: bash scripts/install_engines.sh {name}"):
        get_rollout_class(name)


def test_importing_the_package_loads_no_engine():
    heavy = {"transformers", "torch", "vllm", "sglang"}
    code = f"import sys, verl.workers.rollout; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
