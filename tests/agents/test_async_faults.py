"""Runs with servers that outsiders use, whose workers die, or that hang."""

import json
import os
import re
import signal

import httpx
import psutil
import pytest

from tests.agents.conftest import ACTOR, ROLLOUT
from tests.support.runs import make_task, overrides
from tests.trainer.test_faults import alive, descendants, is_worker, start, wait_for

pytestmark = pytest.mark.ranks

SLOW = {"data__max_response_length": 100, f"{ROLLOUT}__ignore_eos": True}


class Run:
    """The main job with two workers, asynchronous, until somebody ends it."""

    def __init__(self, tmp_path, **settings):
        merged = {
            "trainer__n_gpus_per_node": 2,
            "trainer__total_training_steps": 100000,
            "trainer__default_local_dir": str(tmp_path / "run"),
            "trainer__save_freq": -1,
            f"{ACTOR}__strategy": "fsdp2",
            f"{ROLLOUT}__mode": "async",
            **settings,
        }
        self.log, self.file = tmp_path / "log", tmp_path / "run" / "rollout_servers.json"
        self.controller = settings.get("trainer__controller", "local")
        with open(self.log, "w") as log:
            self.driver = start(overrides(make_task(tmp_path / "task"), **merged), log)

    def text(self):
        return self.log.read_text()

    def wait_for(self, condition, what):
        wait_for(lambda: condition() or self.driver.poll() is not None, what)
        assert self.driver.poll() is None, self.text()[-3000:]

    def servers(self):
        """What the run tells agents outside."""
        self.wait_for(self.file.exists, "the servers")
        return json.loads(self.file.read_text())

    def wait_until_generating(self):
        """Return while requests of the second step are being generated."""
        self.wait_for(lambda: "step:1" in self.text(), "the first step")
        servers = self.servers()
        headers = {"Authorization": f"Bearer {servers['api_key']}"}
        health = [url.replace("/v1", "/health") for url in servers["base_urls"]]
        self.wait_for(lambda: all(httpx.get(url, headers=headers).json()["running"] > 1 for url in health), "requests")

    def workers(self):
        return [p for p in descendants(self.driver.pid) if is_worker(p, self.controller)]

    def end(self, timeout_s=120):
        """Wait for the end; returns the exit code and the log."""
        family = descendants(self.driver.pid)
        code = self.driver.wait(timeout=timeout_s)
        wait_for(lambda: not [p for p in family if alive(p)], "the workers to be gone")
        return code, self.text()


@pytest.fixture
def start_run(tmp_path):
    runs = []

    def begin(**settings):
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        if run.driver.poll() is None:
            os.killpg(run.driver.pid, signal.SIGKILL)


def test_a_worker_killed_while_it_generates_ends_the_run_with_its_name(start_run):
    run = start_run(**SLOW)
    run.wait_until_generating()
    run.workers()[-1].send_signal(signal.SIGKILL)
    code, text = run.end()
    assert code != 0
    assert re.search("[Rr]ank [01] of 2 died", text) and "SIGKILL" in text and "actor_rollout" in text, text[-3000:]
    assert not run.file.exists()


def test_a_worker_that_hangs_while_it_generates_ends_the_run_at_its_deadline(start_run):
    run = start_run(trainer__deadlines__other=10, **SLOW)  # of calls that ask servers for their state, not of loading
    run.wait_until_generating()
    worker = psutil.Process(run.workers()[-1].pid)
    worker.send_signal(signal.SIGSTOP)
    code, text = run.end()
    assert code != 0
    assert "server_state: rank 1 of 2 did not answer" in text, text[-3000:]
    assert "is stopped by a signal (SIGSTOP)" in text, text[-3000:]


def test_agents_outside_talk_to_the_newest_weights_while_the_run_goes_on(start_run):
    run = start_run()
    served = run.servers()
    key = {"Authorization": f"Bearer {served['api_key']}"}
    assert len(served["api_key"]) > 30 and oct(run.file.stat().st_mode)[-3:] == "600" and len(served["base_urls"]) == 2
    seen = []
    for turn in range(6):
        body = {"model": served["model"], "messages": [{"role": "user", "content": f"Hello {turn}"}], "max_tokens": 30}
        url = served["base_urls"][turn % 2] + "/chat/completions"
        assert httpx.post(url, json=body).status_code == 401
        answer = httpx.post(url, json=body, headers=key, timeout=60)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        seen.append(int(answer.json()["system_fingerprint"].removeprefix("version-")))
        steps = len(re.findall("step:", run.text()))
        run.wait_for(lambda before=steps: len(re.findall("step:", run.text())) > before, "a step")
    assert seen == sorted(seen) and len(set(seen)) > 3, seen
    run.driver.send_signal(signal.SIGTERM)
    assert run.end()[0] != 0 and not run.file.exists()
