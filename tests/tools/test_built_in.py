"""Tools that come with the package: answers, errors and services that misbehave."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from verl.tools.calculator_tool import CalculatorTool, calculate
from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.python_tool import PythonTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.search_tool import SearchTool, passages_text

ANSWER = OpenAIFunctionToolSchema.model_validate(
    {"type": "function", "function": {"name": "answer", "parameters": {"type": "object", "properties": {}}}}
)


def execute(tool, **parameters):
    async def work():
        found = await tool.create()
        try:
            return await tool.execute(found[0], parameters)
        finally:
            await tool.release(found[0])

    return asyncio.run(work())


class Service:
    """An HTTP server in a thread: ``answer(body)`` returns a status and what is sent as JSON."""

    def __init__(self, answer):
        service = self
        self.bodies, self.running, self.most = [], 0, 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.bodies.append(body)
                service.running += 1
                service.most = max(service.most, service.running)
                status, found = answer(body)
                service.running -= 1
                payload = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/retrieve"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve():
    services = []

    def start(answer):
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.server.shutdown()
        service.server.server_close()


# -- search ------------------------------------------------------------------------------------------------------------


def passages(body):
    time.sleep(0.02)
    document = {"contents": "Rome\nIt is old."}
    return 200, {"result": [[{"document": document, "score": 1.0}] * body["topk"] for _ in body["queries"]]}


def test_search_posts_queries_and_shows_passages(serve):
    service = serve(passages)
    tool = SearchTool({"retrieval_service_url": service.url, "topk": 2})
    response, reward, metrics = execute(tool, query_list=["rome", "old"])
    assert service.bodies == [{"queries": ["rome", "old"], "topk": 2, "return_scores": True}]
    one = "Doc 1 (Title: Rome)\nIt is old.\n\nDoc 2 (Title: Rome)\nIt is old."
    assert json.loads(response.text) == {"result": f"{one}\n---\n{one}"} and reward == 0.0
    assert metrics == {"query_count": 2, "total_results": 4, "status": "success"}
    assert passages_text([]) == "No search results found."
    tool.close()


def test_search_keeps_to_its_rate_and_tries_again(serve):
    service, failures = serve(lambda body: (503, {}) if next(failures, False) else passages(body)), iter([True])
    tool = SearchTool({"retrieval_service_url": service.url, "rate_limit": 3})

    async def work():
        return await asyncio.gather(*(tool.execute("", {"query_list": [f"q{i}"]}) for i in range(12)))

    assert len(asyncio.run(work())) == 12 and service.most <= 3 and len(service.bodies) == 13
    tool.close()


def test_search_names_what_is_wrong(serve):
    with pytest.raises(ValueError, match="retrieval_service_url is not set"):
        SearchTool({})
    tool = SearchTool({"retrieval_service_url": serve(lambda body: (200, {"result": []})).url})
    with pytest.raises(Exception, match="without a list 'result' of one entry a query"):
        execute(tool, query_list=["x"])
    with pytest.raises(ValueError, match="query_list must be a list of queries, at least one"):
        execute(tool, query_list=[])
    tool.close()


# -- programs ----------------------------------------------------------------------------------------------------------


def test_sandbox_fusion_runs_a_program_and_shows_what_it_printed(serve):
    def answer(body):
        if "loop" in body["code"]:
            return 200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
        ran = {"status": "Finished", "return_code": 0, "stdout": f"ran {body['code']}", "stderr": ""}
        return 200, {"status": "Success", "run_result": ran}

    service = serve(answer)
    tool = SandboxFusionTool({"sandbox_fusion_url": service.url, "default_timeout": 7}, None)
    assert execute(tool, code="x")[0].text == "ran x"
    assert service.bodies[0]["run_timeout"] == 7.0 and service.bodies[0]["language"] == "python"
    assert tool.execute_code("", "loop", timeout=3) == "The program took longer than 3 seconds."
    tool.close()
    with pytest.raises(ValueError, match="sandbox_fusion_url is not set.*PythonTool"):
        SandboxFusionTool({})


@pytest.mark.parametrize(
    "code, words",
    [
        ("print(sum(range(5)))", "10\n"),
        ("x = 1", "The program printed nothing. Use print."),
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero"),
        ("print(1", "SyntaxError"),
        ("while True: pass", "Error: the program took longer than 1 seconds."),
        ("x = bytearray(10**10)", "Error: the program held more than 256 MiB."),
        ("print('x' * 10**6)", "Error: the program printed more than 64 KiB."),
        ("import os; os.kill(os.getpid(), 11)", "crash"),
    ],
)
def test_a_python_program_ends_within_its_limits_and_says_how(code, words):
    tool = PythonTool({"timeout": 1, "memory_limit_mb": 256})
    try:
        assert words in execute(tool, code=code)[0].text
    finally:
        tool.close()


def test_programs_run_at_the_same_time_and_leave_nothing():
    before = set(psutil.Process().children(recursive=True))
    tool = PythonTool({"timeout": 60, "num_workers": 2})

    async def work():
        code = "import time, subprocess; subprocess.Popen(['sleep', '100']); begin = time.monotonic()"
        code += "; time.sleep(1.5); print(begin, time.monotonic())"
        await asyncio.gather(*(tool.execute("", {"code": "print(0)"}) for _ in range(2)))
        found = await asyncio.gather(*(tool.execute("", {"code": code}) for _ in range(2)))
        return [tuple(map(float, one[0].text.split())) for one in found]

    (begin, end), (other_begin, other_end) = asyncio.run(work())
    assert begin < other_end and other_begin < end
    tool.close()
    time.sleep(0.2)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if p.is_running()]


# -- answers and arithmetic --------------------------------------------------------------------------------------------


def test_geo3k_scores_an_answer_without_a_box():
    tool = Geo3kTool({"type": "native"}, ANSWER)

    async def work():
        instance, _ = await tool.create(create_kwargs={"ground_truth": "3.5"})
        replies = [await tool.execute(instance, {"answer": answer}) for answer in ("2", "3.5")]
        return [reward for _, reward, _ in replies], await tool.calc_reward(instance)

    assert asyncio.run(work()) == ([-0.05, 0.0], 1.0)


@pytest.mark.parametrize(
    "expression, value",
    [("2 + 3 * 4", 14), ("(2 + 3) ^ 2", 25), ("7 / 2", 3.5), ("6 / 2", 3), ("sqrt(16) - -1", 5), ("max(1, 2) % 2", 0)],
)
def test_arithmetic_has_a_value(expression, value):
    assert calculate(expression) == value and execute(CalculatorTool({}), expression=expression)[0].text == str(value)


@pytest.mark.parametrize(
    "expression, words",
    [
        ("1 / 0", "has no value: division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("__import__('os')", "__import__ is no function here"),
        ("(1).real", "is no arithmetic"),
        ("[1]", "is no arithmetic"),
        ("2 +", "is no arithmetic expression"),
        ("(" * 500, "is no arithmetic expression"),
        ("1" * 2000, "2000 characters"),
        ("'a' * 3", "is no arithmetic"),
        ("(0 - 1) ** 0.5", "no real number"),
        ("exp(10000)", "has no value"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        calculate(expression)
