"""One check, five doors: doctor, check, --check, dry run and the start of a run say the same of the same bad input."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.base import ConfigError
from verl.preflight import checks, machine, models
from verl.preflight.command import check, doctor
from verl.trainer import main_ppo

from .conftest import BASE, loaded_with, make_model, make_rows

MODEL = "actor_rollout_ref.model"
LORA = f"{MODEL}.lora_rank=8"
FN = "custom_reward_function"


@pytest.fixture(scope="module", autouse=True)
def bad_inputs(workplace):
    """Beside the good model, data and rewards: one folder or file for each thing that can be wrong with them."""

    def model(name, tokens=260, **config):
        make_model(workplace / name, tokens=tokens, **config)
        return workplace / name

    (model("no_config") / "config.json").unlink()
    (model("broken_config") / "config.json").write_text("{not json")
    model("no_tokenizer", tokens=0)
    (model("no_template") / "chat_template.jinja").unlink()
    (model("no_weights") / "model.safetensors").unlink()
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    half = model("half")
    (half / "model.safetensors").rename(half / "model-00001-of-00002.safetensors")
    (half / "model.safetensors.index.json").write_text(json.dumps(shards))
    write_tensors(model("cut_off") / "model.safetensors", {"x": (64, 64)}, keep=100)
    (model("pointer") / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    adapter = {"lora_alpha": 16, "base_model_name_or_path": "Qwen/Other"}
    for name, width, rank in (("adapter", 64, 8), ("adapter_other", 96, 8), ("rank4", 64, 4)):
        (workplace / name).mkdir()
        (workplace / name / "adapter_config.json").write_text(json.dumps({**adapter, "r": rank}))
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        shapes = {f"{layer}.lora_A.weight": (8, width), f"{layer}.lora_B.weight": (64, 8)}
        write_tensors(workplace / name / "adapter_model.safetensors", shapes)
    (workplace / "adapter_empty").mkdir()
    (workplace / "models" / "tiny-qwen2").mkdir(parents=True)

    data = workplace / "data"
    rows = make_rows(64)

    def table(name, rows):
        pq.write_table(pa.Table.from_pylist(rows), data / f"{name}.parquet")

    def changed(number=40, **columns):
        return [{**row, **columns} if i == number else row for i, row in enumerate(rows)]

    table("role", changed(prompt=[{"role": "usr", "content": "Say 1."}]))
    table("no_goal", changed(reward_model=None))
    table("empty_prompt", changed(prompt=[]))
    table("agent", [{**row, "agent_name": "my_agnt"} for row in rows])
    table("images", [{**row, "images": [{"path": "a.png"}]} for row in rows])
    table("system", [{**row, "prompt": [{"role": "system", "content": f"Say {i}."}]} for i, row in enumerate(rows)])
    table("long", [{**row, "prompt": [{"role": "user", "content": "x" * 200}]} for row in rows])
    table("no_rows", rows[:0] or [])
    (data / "zero.parquet").write_bytes(b"")
    (data / "train.py").write_text("rows = []\n")
    (data / "nothing").mkdir()
    (data / "half.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"prompt": ')
    (workplace / "imports.py").write_text("import no_such_package\n\n\ndef compute_score(**sample):\n    return 1.0\n")
    (workplace / "loops.yaml").write_text("- name: mine\n  _target_: mine.Loop\n")


def write_tensors(path, shapes, keep=None):
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end if keep is None else keep))


def no_package(*names):
    """Patches: these packages are not installed."""

    def patch(monkeypatch):
        there = machine.is_package_available
        for module in (machine, models):
            monkeypatch.setattr(module, "is_package_available", lambda name: name not in names and there(name))

    return patch


def gpus(count):
    return lambda monkeypatch: (
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES"),
        monkeypatch.setattr(machine, "_gpus", lambda: [80 << 30] * count),
    )


def full_disk(monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)


def unreadable(monkeypatch):
    """As for a user who is not root."""
    from verl.data import files

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(files, "read_parquet", refuse)


def tensorboard(monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", "reward.py/board")


def hub(answer):
    def patch(monkeypatch):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(models, "query_hub", lambda *args: answer)

    return patch


BAD = {
    # the model
    "a typo in a folder": ([f"{MODEL}.path=models/tiny-qwen"], "did you mean models/tiny-qwen2"),
    "a folder that looks like a hub id": ([f"{MODEL}.path=models/nothere"], "models holds tiny-qwen2"),
    "the same with a network": ([f"{MODEL}.path=models/nothere"], "has no such model", hub("no")),
    "the same without one": ([f"{MODEL}.path=models/nothere"], "cannot be reached (no route)", hub("no route")),
    "a relative folder": ([f"{MODEL}.path=./nothere"], "does not exist (looked from"),
    "a folder of three parts": ([f"{MODEL}.path=data/models/nothere"], "a hub id such as Qwen/"),
    "a folder at home": ([f"{MODEL}.path=~/no/such/model"], "does not exist (looked from"),
    "a hub id, offline": ([f"{MODEL}.path=Nobody/No-Such-Model"], "HF_HUB_OFFLINE is set"),
    "an unknown hub id": ([f"{MODEL}.path=Nobody/No-Such-Model"], "has no such model, or shows it only", hub("no")),
    "a file for a model": ([f"{MODEL}.path=model/config.json"], "is a file. Name the folder"),
    "no config.json": ([f"{MODEL}.path=no_config"], "holds no config.json"),
    "a broken config.json": ([f"{MODEL}.path=broken_config"], "cannot be read as JSON"),
    "no tokenizer": ([f"{MODEL}.path=no_tokenizer"], "holds no tokenizer"),
    "no chat template": ([f"{MODEL}.path=no_template"], "the tokenizer has no chat template"),
    "no weights": ([f"{MODEL}.path=no_weights"], "holds no weights"),
    "a missing shard": ([f"{MODEL}.path=half"], "lacks 1 of the 2 files"),
    "weights cut off": ([f"{MODEL}.path=cut_off"], "is cut off: it has "),
    "a pointer of Git LFS": ([f"{MODEL}.path=pointer"], "is a pointer of Git LFS"),
    "an adapter for a model": ([f"{MODEL}.path=adapter"], "is an adapter of Qwen/Other, not a model"),
    "no tokenizer folder": (["data.tokenizer=./tokenizr"], "data.tokenizer=./tokenizr does not exist"),
    "a vision tower of a text model": (["actor_rollout_ref.actor.freeze_vision_tower=true"], "has no vision tower"),
    "a template file": ([f"{MODEL}.custom_chat_template=chat.jinja"], "is neither a Jinja template"),
    "a template that is none": ([f"{MODEL}.custom_chat_template='{{% if %}}'"], "72 of 72 rows cannot be used"),
    # adapters
    "no adapter": ([LORA, f"{MODEL}.lora_adapter_path=./adaptr"], "lora_adapter_path=./adaptr does not exist"),
    "an empty adapter": ([LORA, f"{MODEL}.lora_adapter_path=adapter_empty"], "holds no adapter_config.json"),
    "an adapter of another model": ([LORA, f"{MODEL}.lora_adapter_path=adapter_other"], "reads 96 numbers there"),
    "an adapter of another rank": ([LORA, f"{MODEL}.lora_adapter_path=rank4"], "was trained with 4"),
    "a LoRA target": ([LORA, f"{MODEL}.target_modules=[q_prj]"], "names q_prj"),
    "a LoRA target alone": ([LORA, f"{MODEL}.target_modules=q_prj"], "names q_prj"),
    "a layer to leave out": ([LORA, f"{MODEL}.exclude_modules=[o_prj]"], "names o_prj"),
    # packages and devices
    "no deepspeed": (["actor_rollout_ref.actor.strategy=deepspeed"], "the package deepspeed", no_package("deepspeed")),
    "no torchao": (["actor_rollout_ref.actor.optim.optimizer=AdamW8bit"], "the package torchao", no_package("torchao")),
    "an unknown optimizer": (["actor_rollout_ref.actor.optim.optimizer=SGD"], "optim.optimizer=SGD"),
    "no peft": ([LORA], "the package peft", no_package("peft")),
    "no vLLM": (
        ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"],
        "rollout.name=vllm is not installed",
        no_package("vllm"),
    ),
    "no SGLang": (
        ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"],
        "rollout.name=sglang is not installed",
        no_package("sglang"),
    ),
    "no wandb": (["trainer.logger=[file,wandb]"], "the package wandb", no_package("wandb")),
    "no flash-attn": (
        [f"+{MODEL}.override_config.attn_implementation=flash_attention_2"],
        "the package flash_attn",
        no_package("flash_attn"),
    ),
    "liger on a CPU": ([f"{MODEL}.use_liger=true"], "run on CUDA devices only"),
    "no CUDA device": (["trainer.device=cuda"], "has no CUDA device"),
    "fewer CUDA devices": (["trainer.device=cuda"], "has 1 CUDA devices", gpus(1)),
    "no such module": ([f"{MODEL}.external_lib=no_such_module"], "no module 'no_such_module'"),
    # places to write
    "a folder of the system": (["trainer.default_local_dir=/proc/run"], "=/proc/run cannot be written"),
    "samples below a file": (["trainer.rollout_data_dir=reward.py/samples"], "reward.py is a file"),
    "TensorBoard below a file": (["trainer.logger=[file,tensorboard]"], "TENSORBOARD_DIR=reward.py/board", tensorboard),
    "a full disk": ([], "one checkpoint takes about", full_disk),
    "no checkpoint to resume": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=run/global_step_9"],
        "resume_from_path=run/global_step_9 does not exist",
    ),
    # rewards
    "no reward file": ([f"{FN}.path=rewrd.py"], "custom_reward_function.path=rewrd.py does not exist"),
    "no reward function": ([f"{FN}.path=reward.py", f"{FN}.name=compute_scores"], "compute_score"),
    "a reward file that is no Python": ([f"{FN}.path=broken.py"], "SyntaxError"),
    "a reward file that imports too much": ([f"{FN}.path=imports.py"], "no_such_package"),
    "a reward of other arguments": ([f"{FN}.path=reward.py", f"{FN}.name=scores_of"], "data_sources"),
    "a reward that fails": ([f"{FN}.path=reward.py", f"{FN}.name=fails_on_nothing"], "IndexError"),
    "a source without a scorer": (["data.train_files=data/other_source.parquet"], "no built-in scorer for data_source"),
    # data
    "no such file": (["data.train_files=data/trian.parquet"], "data/trian.parquet does not exist"),
    "no such validation file": (["data.val_files=data/tset.parquet"], "data/tset.parquet does not exist"),
    "a Python file": (["data.train_files=data/train.py"], "has no known format"),
    "an empty file": (["data.train_files=data/zero.parquet"], "is empty (0 bytes)"),
    "a file without rows": (["data.train_files=data/no_rows.parquet"], "holds no rows"),
    "an empty folder": (["data.train_files=data/nothing"], "holds no file ending in"),
    "an unreadable file": (["data.train_files=data/train.parquet"], "permission denied", unreadable),
    "a broken file": (["data.train_files=broken.parquet"], "cannot be read as parquet"),
    "half a line": (["data.train_files=data/half.jsonl"], "1 of 73 rows cannot be used"),
    "a wrong prompt_key": (["data.prompt_key=question"], "data.prompt_key=question is not a column"),
    "a wrong source column": (["data.reward_fn_key=source"], "data.reward_fn_key=source is not a column"),
    "no column of goals": (["data.train_files=data/without_truth.parquet"], "has no column 'reward_model'"),
    "a row without a goal": (["data.train_files=data/no_goal.parquet"], "row 40: reward_model has no ground_truth"),
    "an unknown role": (["data.train_files=data/role.parquet"], "has the role 'usr' in message 0"),
    "an empty prompt": (["data.train_files=data/empty_prompt.parquet"], "1 of 72 rows cannot be used"),
    "prompts that are all too long": (
        ["data.train_files=data/long.parquet", "data.filter_overlong_prompts=true"],
        "none of data.train_files would be left",
    ),
    "one prompt that is too long": (["data.train_files=data/long.parquet"], "64 of 72 prompts exceed"),
    "images for a text model": (["data.train_files=data/images.parquet"], "the model has no image processor"),
    "more prompts than rows": (
        ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128"],
        "is larger than the 64 rows",
    ),
    "an unknown agent loop": (
        ["data.train_files=data/agent.parquet", "actor_rollout_ref.rollout.mode=async",
         "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"],
        "'my_agnt' of 64 rows is not a known agent loop",
    ),
    "no file of agents": (
        ["actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.agent.agent_loop_config_path=loop.yaml"],
        "agent_loop_config_path=loop.yaml does not exist",
    ),
    "no class of data": (["data.custom_cls.path=reward.py", "data.custom_cls.name=Mine"], "not defined in reward.py"),
    "an unknown service": (
        ["trainer.tracker_kwargs.wandb.base_url=http://127.0.0.1:9"],
        "no service answers at 127.0.0.1 port 9",
    ),
}  # fmt: skip

DOUBTFUL = {
    "no message of a user": (["data.train_files=data/system.parquet"], "64 prompts have no user message"),
    "no checkpoint": (["trainer.save_freq=-1"], "writes no checkpoint"),
    "long prompts that are cut": (
        ["data.train_files=data/long.parquet", "data.truncation=left"],
        "exceed data.max_prompt_length=64",
    ),
}


@pytest.fixture
def doors(there, monkeypatch, capsys):
    """``doors(*words)``: exit code, errors and warnings of each door; the words are composed once."""
    started, held = [], {}

    def load(words, *paths, **more):
        words = tuple(words[len(BASE) :])
        return held.setdefault(words, None) or held.update({words: loaded_with(*words)}) or held[words]

    monkeypatch.setattr(checks, "load", load)
    monkeypatch.setattr("verl.config.load.load", load)
    monkeypatch.setattr(main_ppo, "run_ppo", lambda config, command_line: started.append(command_line))

    def job(*words):
        try:
            main_ppo.main([*BASE, *words])
        except SystemExit as end:
            return end.code
        return 0 if not started or started.pop() else None

    def printed(code):
        report = json.loads(capsys.readouterr().out)
        if "findings" not in report:
            return code, *([finding["text"] for finding in report[level]] for level in ("errors", "warnings"))
        return code, *(
            [finding["text"] for finding in report["findings"] if finding["level"] == level]
            for level in ("error", "warning")
        )

    def read(*words):
        found = {"doctor": printed(doctor([*BASE, *words, "--json"]))}
        found["check"] = printed(check([*BASE, *words, "--json"]))
        for door, word in (("--check", "--check"), ("dry run", "trainer.dry_run=true"), ("run", None)):
            code, shown = job(*words, *filter(None, [word])), capsys.readouterr()
            shown = " ".join(f"{shown.out} {shown.err}".split())
            texts_shown = [[text for text in texts if " ".join(text.split()) in shown] for texts in found["doctor"][1:]]
            found[door] = (code, *texts_shown)
        return found

    return read


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_gets_one_answer_at_every_door(name, doors, monkeypatch):
    words, says, *patches = BAD[name]
    for patch in patches:
        patch(monkeypatch)
    found = doors(*words)
    code, errors, _ = found["doctor"]
    assert code == 2 and any(says in text for text in errors), errors
    assert all(answer == found["doctor"] for answer in found.values()), found


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_doubtful_input_gets_one_warning_at_every_door(name, doors):
    words, says = DOUBTFUL[name]
    found = doors(*words)
    code, errors, warnings = found["doctor"]
    assert code == 0 and not errors and any(says in text for text in warnings), found["doctor"]
    assert all(answer == found["doctor"] for answer in found.values()), found


def test_nothing_is_said_of_a_good_input_at_any_door(doors):
    assert set(map(str, doors().values())) == {str((0, [], []))}


def test_a_tree_made_by_hand_is_refused_where_its_run_would_start(there):
    config = loaded_with("data.prompt_key=question").config
    with pytest.raises(ConfigError, match="data.prompt_key=question is not a column of data/train.parquet"):
        main_ppo.run_ppo(config)


def test_a_file_alone_gets_the_answer_it_gets_in_a_configuration(there, capsys):
    for name, says in (("role", "has the role 'usr'"), ("no_goal", "no ground_truth"), ("zero", "is empty (0 bytes)")):
        assert check([f"data/{name}.parquet", "model=model", "--json"]) == 2
        alone = [finding["text"] for finding in json.loads(capsys.readouterr().out)["findings"]]
        assert doctor([*BASE, f"data.train_files=data/{name}.parquet", "data.val_files=[]", "--json"]) == 2
        errors = [finding["text"] for finding in json.loads(capsys.readouterr().out)["errors"]]
        assert says in alone[0] and alone[0] in errors


def test_every_door_is_quick_and_loads_nothing_heavy(there):
    """Of a path with a typo, in processes of their own: no Ray, no torch, no minute of asking a network."""
    program = "import sys\ntry:\n    from {} as f\n    sys.exit(f(sys.argv[1:]))\nfinally:\n"
    program += "    print(sorted({{'torch', 'transformers', 'ray', 'huggingface_hub'}} & set(sys.modules)))"
    words = [*BASE, f"{MODEL}.path=models/nothere"]
    doors = ("preflight.command import doctor", "preflight.command import check", "trainer.main_ppo import main")
    running = {
        door: subprocess.Popen(
            [sys.executable, "-c", program.format(f"verl.{door}"), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for door in doors
    }  # fmt: skip
    for key, process in running.items():
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 2 and out.splitlines()[-1] == "[]", (key, out)
        assert "models holds tiny-qwen2" in " ".join(out.split())


class Hub(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(200 if "Good" in self.path else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub_here(there, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    models.query_hub.cache_clear()
    Hub.asked.clear()
    yield server
    server.shutdown()
    server.server_close()
    models.query_hub.cache_clear()


def test_the_hub_is_asked_once_for_a_name(hub_here):
    for name, answer in (("Some/Good-Model", None), ("Some/Bad-Model", "has no such model")):
        Hub.asked.clear()
        texts = [problem.text for problem in models.missing_models(loaded_with(f"{MODEL}.path={name}").config)]
        assert models.is_available(name) is (answer is None)
        assert (not texts and answer is None) or answer in texts[0]
        assert Hub.asked == [f"/api/models/{name}"]


def test_a_hub_that_does_not_answer_is_asked_once_and_given_up(there, monkeypatch):
    """A port that takes connections and says nothing is the worst of networks."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        models.query_hub.cache_clear()
        loaded = loaded_with(f"{MODEL}.path=models/nothere")
        report = checks.examine_loaded(loaded)
        assert "models holds tiny-qwen2" in report.errors[0].text
        silent.setblocking(False)
        asked, _ = silent.accept()  # open, and never answered
        asked.close()
        with pytest.raises(BlockingIOError):
            silent.accept()
        models.query_hub.cache_clear()


def test_a_scorer_that_is_slow_to_start_is_not_at_fault(there, monkeypatch):
    monkeypatch.setattr("verl.rewards.functions.trial.FIRST_S", 10.0)
    (there / "slow.py").write_text(
        "import time\nready = []\n\n\ndef compute_score(solution_str, ground_truth, **sample):\n"
        "    if not ready:\n        time.sleep(2.5)\n        ready.append(1)\n"
        "    return float(solution_str.strip() == ground_truth)\n"
    )
    report = checks.examine_loaded(loaded_with(f"{FN}.path=slow.py"))
    assert not report.findings and len(report.data.scores[0].known_good) == 4, report.to_text()


def test_a_scorer_that_takes_long_to_load_is_left_to_the_run(there, monkeypatch):
    monkeypatch.setattr("verl.preflight.data._START_S", 1.0)
    (there / "heavy.py").write_text("import time\n\ntime.sleep(3)\n\n\ndef compute_score(**sample):\n    return 1.0\n")
    config = loaded_with(f"{FN}.path=heavy.py").config
    report = checks.examine_config(config)
    assert not report.errors and "it took more than 1 s" in report.warnings[0].text
    from verl.rewards.functions.calling import reward_function

    assert reward_function(config).__name__ == "compute_score"  # the same process goes on loading


def test_errors_stand_last_and_the_totals_are_theirs(there, capsys):
    assert doctor([*BASE, "data.train_files=data/role.parquet", "trainer.save_freq=-1"]) == 2
    text = capsys.readouterr().out
    blocks = [block.splitlines()[0] for block in text.strip().split("\n\n")]
    assert blocks[-3:] == ["warnings: it would run, but", "errors: the run would not start", "1 error, 1 warning"]
    assert "1 of 72 rows cannot be used" in text


def test_rows_are_counted_as_a_run_counts_them(there):
    """An epoch has the rows that are left: not those too long, not those that are no record, no file twice."""

    def epoch(*words):
        return next(n.value for n in checks.examine_loaded(loaded_with(*words)).derivation if n.name == "epoch")

    rows = make_rows(32)
    long = {**rows[0], "prompt": [{"role": "user", "content": "x" * 200}]}
    lines = [*map(json.dumps, [*rows, *[long] * 8]), "{broken"]
    (there / "data" / "mixed.jsonl").write_text("\n".join(lines))
    mixed = ["data.train_files=data/mixed.jsonl", "data.bad_rows=skip", "data.filter_overlong_prompts=true"]
    assert epoch(*mixed) == 4
    assert epoch("data.train_files=data/more_rows.jsonl") == 8
    assert epoch("data.train_files=[data/more_rows.jsonl,data/more_rows.jsonl]") == 8
    assert epoch("data.train_files='data/tra*.parquet'") == 8
    assert epoch("data.train_max_samples=16") == 2


@pytest.mark.parametrize(
    "words",
    [["doctor", *BASE], ["check", "data/train.parquet", "model=model"], ["--help"], ["ppo", "--help", "trainer"]],
)
def test_a_reader_that_has_seen_enough_gets_no_traceback(words, there):
    reading, writing = os.pipe()
    os.close(reading)  # as head does when it is done
    done = subprocess.run([sys.executable, "-m", "verl", *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "error" not in done.stderr
