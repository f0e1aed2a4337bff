"""A teacher's servers are asked in their protocol, again where they fail, and refused by name where they are no use."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from verl.config.distillation import TeacherModelConfig
from verl.rewards.scorers import http_json
from verl.utils.tiny_model import make_tokenizer
from verl.workers.teacher_server import ServedTeacher, TeacherServerError

IDS, COUNT = [5, 6, 7, 8], 2


def vllm(body, offset=0, text=lambda token: None):
    """An answer of vLLM's server: of token i the log-prob -i/10, and -0.1, -0.2, ... of the likeliest: 20, 21, ..."""
    top = {20 + offset + n: -0.1 * (n + 1) for n in range(body["prompt_logprobs"])}
    places = [{token: -token / 10} | top for token in body["prompt"]]
    entries = [{str(i): {"logprob": v, "decoded_token": text(i)} for i, v in place.items()} for place in places]
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


def sglang(body):
    ids = body["input_ids"][body["logprob_start_len"] :]
    own = [[-token / 10 if at else None, token, None] for at, token in enumerate(ids)]
    top = [[[-0.1 * (n + 1), 20 + n, None] for n in range(body["top_logprobs_num"])] for _ in ids]
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [None, *top[1:]]}}


@contextmanager
def serving(answer, owner="vllm", key=None):
    """Yield (URL, bodies that came); ``answer(body)`` is a JSON answer, or (status, message)."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def reply(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            assert self.path == "/v1/models"
            self.reply(200, {"data": [{"id": "the-model", "owned_by": owner}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append((self.path, body))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                return self.reply(401, {"error": "Unauthorized"})
            found = answer(body)
            return self.reply(found[0], {"message": found[1]}) if isinstance(found, tuple) else self.reply(200, found)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()


def teacher(*urls, **options):
    return ServedTeacher("one", TeacherModelConfig(server_urls=list(urls), **{"timeout_s": 20.0, **options}))


def score(served, k=3, vocab=100):
    (found,) = served.score([IDS], [COUNT], k, vocab)
    return found


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(http_json, "FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize(("owner", "answer"), [("vllm", vllm), ("sglang", sglang)])
def test_each_kind_of_server_is_told_by_itself_and_asked_for_the_response_alone(owner, answer):
    with serving(answer, owner) as (url, bodies):
        found = score(teacher(f"{url}/v1/"))
        none = score(teacher(url), k=0)
    np.testing.assert_allclose(found.own, [-0.7, -0.8], rtol=1e-6)
    assert found.top_ids.tolist() == [[20, 21, 22]] * COUNT and found.top_ids.dtype == np.int32
    np.testing.assert_allclose(found.top, [[-0.1, -0.2, -0.3]] * COUNT, rtol=1e-6)
    assert none.top.shape == (COUNT, 0) and none.own.tolist() == found.own.tolist()
    path, body = bodies[0]
    assert (path, body["model"]) == ("/v1/completions", "the-model") if owner == "vllm" else path == "/generate"


def test_tokens_beyond_the_policys_vocabulary_give_way_to_others():
    with serving(lambda body: vllm(body, offset=-2)) as (url, bodies):
        assert sorted(score(teacher(url), k=3, vocab=21).top_ids[0]) == [18, 19, 20]
        # 19 and 20 and the text's own tokens are all there are below
        with pytest.raises(TeacherServerError, match="named fewer than 30 likeliest tokens below 21"):
            score(teacher(url), k=30, vocab=21)
    assert len(bodies) == 1 + 3


def test_a_failed_request_goes_to_the_next_server_and_ends_with_a_name():
    with serving(lambda body: (503, "loading")) as (bad, asked), serving(vllm) as (good, _):
        assert score(teacher(bad, good)).own.shape == (COUNT,) and len(asked) == 1
        with pytest.raises(TeacherServerError, match=r"one.server_urls: a text of 4 tokens .* 2 tries.*503: 'loading'"):
            score(teacher(bad, tries=2))
    with pytest.raises(TeacherServerError, match=r"Connect.*Look at the server's log"):
        score(teacher(good, tries=2))


def test_what_no_further_try_would_change_is_refused_at_once(monkeypatch):
    refusal = (400, "Requested prompt logprobs of 3, which is greater than max allowed: 2")
    with serving(lambda body: refusal) as (url, asked):
        with pytest.raises(ValueError, match=r"refuses a text of 4 tokens with 3 .* max allowed: 2.*--max-logprobs"):
            score(teacher(url))
        assert len(asked) == 1
    other = lambda body: sglang({**body, "input_ids": [9] * len(body["input_ids"])})  # noqa: E731
    with serving(other, "sglang") as (url, asked):
        with pytest.raises(TeacherServerError, match="scored the token 9 in place of 7"):
            score(teacher(url))
    with serving(lambda body: {"text": "hello"}) as (url, asked):
        with pytest.raises(TeacherServerError, match=r"answered as no server of kind 'vllm' does .*Set .*\.server to"):
            score(teacher(url))
    with serving(vllm, key="secret") as (url, _):
        with pytest.raises(ValueError, match="401: 'Unauthorized'.*environment variable MY_KEY"):
            score(teacher(url, api_key_env="MY_KEY"))
        monkeypatch.setenv("MY_KEY", "secret")
        score(teacher(url, api_key_env="MY_KEY"))


def test_other_tokens_at_the_server_are_named_before_training():
    tokenizer = make_tokenizer()
    with serving(lambda body: vllm(body, text=lambda token: tokenizer.decode([token]))) as (url, bodies):
        teacher(url).check(tokenizer)
        probed = {token for _, body in bodies for token in body["prompt"]}
        assert {*tokenizer.all_special_ids, max(tokenizer.get_vocab().values()) - 1} <= probed
    with serving(lambda body: vllm(body, text=lambda token: tokenizer.decode([token + 1]))) as (url, _):
        with pytest.raises(ValueError, match=r"the token \d+ is .* there and .* in the policy's tokenizer"):
            teacher(url).check(tokenizer)
