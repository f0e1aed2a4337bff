import subprocess
import sys

import pytest

from verl.workers.rollout import get_rollout_class


def test_hf_is_known():
    assert get_rollout_class("hf").__name__ == "HFRollout"


def test_an_unknown_engine_names_the_known_ones():
    with pytest.raises(ValueError, match="rollout.name='vlm' is unknown. Known: hf"):
        get_rollout_class("vlm")


def test_engines_that_are_not_built_yet_say_so():
    with pytest.raises(NotImplementedError, match="sglang is not supported yet. Use one of hf, vllm"):
        get_rollout_class("sglang")


def test_an_engine_that_is_not_installed_names_the_install_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="name=vllm needs vllm.*Run: bash scripts/install_engines.sh vllm"):
        get_rollout_class("vllm")


def test_importing_the_package_loads_no_engine():
    code = "import sys, verl.workers.rollout; sys.exit(bool({'transformers', 'torch', 'vllm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
