"""GRPO by ``verl.trainer.main_ppo``, of this project or of verl 0.5: ``grpo_verl.py key=value ...``

verl 0.5 is made for CUDA and Ascend. What it assumes of them is answered here for a CPU, nothing that its step does is
left out: processes talk by gloo, attention is torch's, memory of a device is zero, and the rollout, which gets prompts
that the trainer has repeated, samples one response to each (on a GPU vLLM does that; the ``hf`` rollout would repeat
them again).
"""

import os

import marks


def mark_steps_here(module):
    """``verl.trainer.ppo.ray_trainer`` of this project."""
    finish = module.RayPPOTrainer.finish_step

    def finish_step(self, step, batch):
        finish(self, step, batch)
        _mark(step, self.metrics, len(batch))

    module.RayPPOTrainer.finish_step = finish_step


def mark_steps_v05(module):
    """``verl.utils.tracking`` of verl 0.5: a step's numbers are logged when it ends."""
    log = module.Tracking.log

    def logged(self, data, step, *args, **kwargs):
        log(self, data, step, *args, **kwargs)
        _mark(step, data, int(os.environ["PEERS_ROWS"]))

    module.Tracking.log = logged


def _mark(step, metrics, rows):
    marks.mark(
        step,
        tokens=round(metrics["perf/total_num_tokens"]),
        response_tokens=round(metrics["response_length/mean"] * rows),
        entropy=metrics.get("actor/entropy"),
    )


def device_of_v05(module):
    import torch

    class Device:
        """``torch.cpu``, with memory of which nothing is used."""

        def __getattr__(self, name):
            answers = {"mem_get_info": (0, 0), "get_device_name": "CPU"}
            if name in answers:
                return lambda *args: answers[name]
            if "memory" in name or name in ("empty_cache", "ipc_collect"):
                return lambda *args, **kwargs: 0
            return getattr(torch.cpu, name)

    module.get_torch_device = Device
    module.get_nccl_backend = lambda: "gloo"


def workers_of_v05(module):
    import torch
    from transformers import AutoConfig

    start, load, fsdp = torch.distributed.init_process_group, AutoConfig.from_pretrained, module.FSDP

    def init_process_group(backend=None, **kwargs):
        return start(backend="gloo", **kwargs)

    def from_pretrained(*args, **kwargs):
        if "attn_implementation" in kwargs:
            kwargs["attn_implementation"] = "sdpa"
        return load(*args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    AutoConfig.from_pretrained = from_pretrained
    # weights on a CPU cannot be broadcast from rank 0, which is the only one
    module.FSDP = lambda model, **kwargs: fsdp(model, **{**kwargs, "sync_module_states": False})


def rollout_of_v05(module):
    from omegaconf import OmegaConf

    init, config_of_generation = module.HFRollout.__init__, module.GenerationConfig

    def __init__(self, module, config):
        once = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        once.n = 1
        init(self, module, once)

    module.HFRollout.__init__ = __init__
    length = int(os.environ["PEERS_NEW_TOKENS"])
    module.GenerationConfig = lambda **kwargs: config_of_generation(min_new_tokens=length, **kwargs)


def prepare_v05():
    """In each process of a run, before it imports anything of verl."""
    marks.after_import(
        {
            "verl.utils.device": device_of_v05,
            "verl.utils.tracking": mark_steps_v05,
            "verl.workers.fsdp_workers": workers_of_v05,
            "verl.workers.rollout.hf_rollout": rollout_of_v05,
        }
    )


def main():
    marks.start()
    if os.environ.get("PEERS_VERL_05"):
        prepare_v05()
        import ray

        folder = os.path.dirname(os.path.abspath(__file__))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        # it counts GPUs before it starts, and asks for the device of each rank by its name
        ray.init(
            num_cpus=2,
            num_gpus=1,
            resources={"cpu": 1},
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": "grpo_verl.prepare_v05", "env_vars": {"PYTHONPATH": path}},
        )
    else:
        marks.after_import({"verl.trainer.ppo.ray_trainer": mark_steps_here})
    from verl.trainer.main_ppo import main as run

    run()


if __name__ == "__main__":
    main()
