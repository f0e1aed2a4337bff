"""The judge, against a real server of the OpenAI protocol."""

import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.config.load import load_ppo_config
from verl.config.reward import JudgeConfig
from verl.rewards.functions.calling import reward_function
from verl.rewards.scorers import default_compute_score, http_json
from verl.rewards.scorers.judge import Judge, JudgeError
from verl.utils.py_functional import gather_awaitables


class Server(ThreadingHTTPServer):
    """Answers with what ``reply`` makes of the message; a number is an HTTP status, anything else a body."""

    def __init__(self):
        self.requests, self.headers, self.now, self.most = [], [], 0, 0
        self.reply = lambda message: "It is fine.\nScore: 7"
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, asked))
            self.server.headers.append(dict(self.headers))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        reply = self.server.reply(asked["messages"][-1]["content"])
        with self.server.lock:
            self.server.now -= 1
        body = {"choices": [{"message": {"role": "assistant", "content": reply}}]} if isinstance(reply, str) else reply
        data = json.dumps({} if isinstance(reply, int) else body).encode()
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_json, "FIRST_PAUSE_S", 0.01)
    served = Server()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def judge(server):
    return functools.partial(build, server)


def build(server, **options):
    return Judge(JudgeConfig(url=server.url, model="judge-1", **options))


INFO = {"question": "What is 3 + 4?"}


def test_the_last_score_of_the_answer_becomes_a_share_of_the_scale(server, judge):
    server.reply = lambda message: "Score: 2? No.\n**Score:** 7.5"
    result = judge().ask("essays", "<think>hm</think> It is 7.", "7", INFO)
    assert result == {"score": 0.75, "judge": "Score: 2? No.\n**Score:** 7.5"}
    assert judge(lowest=5, highest=10).ask("essays", "7", "7", INFO)["score"] == 0.5
    path, asked = server.requests[0]
    message = asked["messages"][0]["content"]
    assert path == "/v1/chat/completions" and asked["model"] == "judge-1" and asked["temperature"] == 0.0
    assert "What is 3 + 4?" in message and "It is 7." in message and "hm" not in message.split("Answer to judge")[1]


def test_the_prompt_is_the_users_text_or_file(server, judge, tmp_path):
    judge(prompt="{{x}} {response} | {data_source}").ask("essays", "yes {a}", "7")
    assert server.requests[-1][1]["messages"][0]["content"] == "{x} yes {a} | essays"
    (tmp_path / "prompt.txt").write_text("Is {response} = {ground_truth}?")
    judge(prompt=str(tmp_path / "prompt.txt")).ask("essays", "7", ["7", "seven"])
    assert server.requests[-1][1]["messages"][0]["content"] == "Is 7 = ['7', 'seven']?"


@pytest.mark.parametrize("prompt, message", [("{respond}", "has the placeholder {respond}"), ("x {question}", "lacks")])
def test_a_prompt_that_cannot_be_filled_is_refused_at_once(judge, prompt, message):
    with pytest.raises(ValueError, match=message):
        judge(prompt=prompt)


def test_a_judge_prompt_that_needs_a_missing_question_is_an_error(judge):
    with pytest.raises(JudgeError, match="extra_info has none of question") as error:
        judge().ask("essays", "7", "7", {"index": 3})
    assert error.value.reason == "prompt"


@pytest.mark.parametrize(
    "reply, reason",
    [
        ("I will not say.", "no_score"),
        ("Score: 11", "no_score"),
        ("Score: -1", "no_score"),
        ("", "no_score"),
        ({"choices": []}, "malformed"),
        ({"error": "no model"}, "malformed"),
        (401, "refused"),
        (503, "refused"),
    ],
)
def test_what_is_no_score_is_an_error_with_a_name(server, judge, reply, reason):
    server.reply = lambda message: reply
    with pytest.raises(JudgeError) as error:
        judge(tries=2).ask("essays", "7", "7", INFO)
    assert error.value.reason == reason


def test_a_server_that_is_busy_is_asked_again(server, judge):
    replies = [503, 429, "Score: 10"]
    server.reply = lambda message: replies.pop(0)
    assert judge().ask("essays", "7", "7", INFO)["score"] == 1.0 and not replies


def test_a_server_that_is_too_slow_or_not_there_is_an_error(server, judge):
    server.reply = lambda message: time.sleep(1) or "Score: 1"
    with pytest.raises(JudgeError) as error:
        judge(timeout_s=0.2, tries=1).ask("essays", "7", "7", INFO)
    assert error.value.reason == "timeout"
    with pytest.raises(JudgeError) as error:
        Judge(JudgeConfig(url="http://127.0.0.1:9/v1", model="m", tries=1)).ask("essays", "7", "7", INFO)
    assert error.value.reason == "unreachable"


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(server, judge, monkeypatch, tmp_path):
    judge().ask("essays", "7", "7", INFO)
    assert "Authorization" not in server.headers[-1]
    monkeypatch.setenv("MY_KEY", "secret-7")
    judge(api_key_env="MY_KEY", cache_dir=str(tmp_path)).ask("essays", "7", "7", INFO)
    assert server.headers[-1]["Authorization"] == "Bearer secret-7"
    assert "secret-7" not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))


def test_answers_are_kept_by_all_that_was_asked(server, judge, tmp_path):
    kept = functools.partial(judge, cache_dir=str(tmp_path))
    assert [kept().ask("essays", "7", "7", INFO)["score"] for _ in range(3)] == [0.7] * 3
    assert len(server.requests) == 1
    kept().ask("essays", "8", "7", INFO)
    kept(temperature=0.5).ask("essays", "7", "7", INFO)
    assert len(server.requests) == 3


def test_an_answer_without_a_score_is_not_kept(server, judge, tmp_path):
    server.reply = lambda message: "hm"
    for _ in range(2):
        with pytest.raises(JudgeError):
            judge(cache_dir=str(tmp_path)).ask("essays", "7", "7", INFO)
    assert len(server.requests) == 2


def test_many_are_judged_at_once_but_no_more_than_allowed(server, judge):
    server.reply = lambda message: time.sleep(0.05) or "Score: 7"
    asked = judge(max_concurrent=3)
    results = gather_awaitables([asked.score("essays", str(i), "7", INFO) for i in range(9)], 64)
    assert [result["score"] for result in results] == [0.7] * 9 and 1 < server.most <= 3


def test_requests_keep_to_a_rate(server, judge):
    asked, start = judge(requests_per_minute=1200), time.monotonic()
    for i in range(4):
        asked.ask("essays", str(i), "7", INFO)
    assert time.monotonic() - start > 0.14


def test_the_judge_scores_the_sources_it_is_given_or_those_without_a_scorer(judge):
    named = judge(data_sources=["essays/*", "openai/gsm8k"])
    assert named.judges("essays/en") and named.judges("openai/gsm8k") and not named.judges("poems")
    rest = judge()
    assert rest.judges("poems") and not rest.judges("openai/gsm8k") and not rest.judges("aime2025")


def options(*more):
    needed = ["data.train_files=a.parquet", "data.val_files=a.parquet", "actor_rollout_ref.model.path=m"]
    needed += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.n_gpus_per_node=1"]
    needed += ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=hf"]
    return load_ppo_config(overrides=[*needed, *more])


def function_of(*more):
    return reward_function(options(*more))


def test_the_options_of_a_run_reach_the_judge_and_the_rules_stay(server):
    function = function_of(
        f"reward_model.judge.url={server.url}", "reward_model.judge.model=m", "reward_model.judge.highest=14"
    )
    judged = function(data_source="essays", solution_str="7", ground_truth="7", extra_info=INFO)
    assert judged["score"] == 0.5
    assert function(data_source="openai/gsm8k", solution_str="#### 7", ground_truth="7", extra_info=INFO) == 1.0


def test_nothing_is_sent_unless_a_url_is_given():
    assert function_of().keywords == {}
    assert function_of("reward_model.sandbox_fusion.memory_limit_mb=99").keywords == {"memory_limit_mb": 99}
    with pytest.raises(NotImplementedError):
        default_compute_score("essays", "7", "7")
    with pytest.raises(NotImplementedError):
        default_compute_score("essays", "7", "7", judge={"url": None})


def test_a_judge_without_a_name_or_a_scale_is_refused():
    with pytest.raises(ValueError, match="reward_model.judge.model"):
        options("reward_model.judge.url=http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="reward_model.judge.highest=1.*lowest"):
        options("reward_model.judge.highest=1", "reward_model.judge.lowest=1")
