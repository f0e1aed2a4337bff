"""The client of a sandbox-fusion service, against a real HTTP server that runs the programs."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.rewards.scorers import default_compute_score, http_json, sandbox_fusion
from verl.rewards.scorers.http_json import ServiceError
from verl.sandbox.code_runner import Tests

CASES = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}


class Service(ThreadingHTTPServer):
    """Runs programs as the service does; ``answers`` come before, one a request: a status, or a body."""

    def __init__(self):
        self.requests, self.answers, self.now, self.most = [], [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/run_code"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(asked)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            answer = self.server.answers.pop(0) if self.server.answers else None
        status = answer if isinstance(answer, int) else 200
        body = answer if isinstance(answer, (dict, str)) else run(asked) if status == 200 else {"detail": "busy"}
        with self.server.lock:
            self.server.now -= 1
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


def run(asked):
    program = [sys.executable, "-I", "-S", "-c", asked["code"]]
    try:
        ran = subprocess.run(
            program, input=asked["stdin"], text=True, capture_output=True, timeout=asked["run_timeout"]
        )
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
    result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
    return {"status": "Failed" if ran.returncode else "Success", "compile_result": None, "run_result": result}


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(http_json, "FIRST_PAUSE_S", 0.01)
    served = Service()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


def results(service, code, cases, **options):
    score, details = sandbox_fusion.compute_score(service.url, None, 256, code, cases, **options)
    return score, [detail["result"] for detail in details]


def test_the_share_of_tests_that_pass(service):
    assert results(service, "print(input())", CASES) == (1.0, [True] * 3)
    assert results(service, "print(1)", CASES) == (0.0, [True, False, False])
    assert results(service, "print(1)", CASES, continuous=True) == (1 / 3, [True, False, False])


def test_each_way_to_fail_has_its_code(service):
    code = "n = int(input())\nif n == 1: raise ValueError\nwhile n == 2: pass\nprint(n)"
    assert results(service, code, CASES, timeout=1)[1] == [-2, -3, True]
    assert results(service, "def f(:", CASES)[1] == [-4] * 3


def test_the_request_has_the_fields_of_the_service(service):
    results(service, "print(input())", {"inputs": ["7"], "outputs": ["7"]}, timeout=3)
    assert service.requests == [
        {
            "compile_timeout": 10.0,
            "run_timeout": 3,
            "code": "print(input())",
            "stdin": "7",
            "memory_limit_MB": 256,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ]


def test_functions_and_assertions_are_tested_there_too(service):
    calls = {"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}
    assert results(service, "def add(a, b):\n    print('noise')\n    return a + b", calls)[1] == [True, True]
    assert results(service, "import os\nos._exit(0)", calls)[1] == [-2, -2]
    asserts = {"assert_case": ["assert f(1) == 2", "assert f(2) == 2"]}
    assert results(service, "def f(x): return x + 1", asserts)[1] == [True, False]
    assert results(service, "import os\nos._exit(0)", asserts)[1] == [-2, -2]


def test_a_busy_service_is_asked_again(service):
    service.answers = [504, 503]
    assert results(service, "print(7)", {"inputs": [""], "outputs": ["7"]}) == (1.0, [True])
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    "answers, reason",
    [
        ([504] * 3, "refused"),
        ([404], "refused"),
        (["no json"], "malformed"),
        ([{"status": "SandboxError", "message": "no image"}], "malformed"),
        ([{}], "malformed"),
    ],
)
def test_a_service_that_fails_is_an_error_and_no_score(service, answers, reason):
    service.answers = answers
    with pytest.raises(ServiceError) as error:
        results(service, "print(7)", {"inputs": [""], "outputs": ["7"]})
    assert error.value.reason == reason and service.url in str(error.value)
    assert not service.answers


def test_a_service_that_is_down_or_does_not_answer_is_an_error(service):
    with pytest.raises(ServiceError) as error:
        sandbox_fusion.compute_score("http://127.0.0.1:9/run_code", None, 256, "", CASES)
    assert error.value.reason == "unreachable"
    with pytest.raises(ServiceError) as error:
        http_json.post(service.url, {"code": "import time\ntime.sleep(1)", "stdin": "", "run_timeout": 5}, 0.2, 2)
    assert error.value.reason == "timeout" and "2 tries" in str(error.value)


def test_no_more_requests_than_allowed_are_under_way(service):
    tests = Tests(("x",) * 8, ("x",) * 8)
    code = "import time\ntime.sleep(0.1)\nprint(input())"
    sandbox_fusion.run_remotely(service.url, code, tests, 5, 256, max_concurrent=2)
    assert service.most <= 2 and len(service.requests) == 8
    service.most = 0
    sandbox_fusion.run_remotely(service.url, code, tests, 5, 256, semaphore=threading.Semaphore(1))
    assert service.most == 1


def test_data_sources_of_code_are_run_there_when_a_url_is_given(service):
    options = {"sandbox_fusion_url": service.url, "memory_limit_mb": 99, "max_concurrent": 4}
    assert default_compute_score("taco", "```python\nprint(input())\n```", CASES, **options)["score"] == 1.0
    gold = {"test_list": ["assert f() == 1"]}
    assert default_compute_score("mbpp", "def f(): return 1", gold, **options)["acc"]
    assert len(service.requests) == 4 and service.requests[0]["memory_limit_MB"] == 99


def test_turns_come_at_an_even_pace(tmp_path, monkeypatch):
    monkeypatch.setattr(http_json.tempfile, "gettempdir", lambda: str(tmp_path))
    start = time.monotonic()
    for _ in range(4):
        http_json.pace("here", per_minute=1200)
    assert time.monotonic() - start > 0.14
