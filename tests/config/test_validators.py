"""Settings that contradict each other are refused before anything starts."""

import importlib
import re
import sys
import types

import pytest

from verl.config.base import ConfigError, get_path
from verl.config.checks import VALIDATORS
from verl.config.checks.batch import batch_plan
from verl.config.checks.support import LIMITS, NAMES
from verl.config.load import check
from verl.config.ppo import PPOConfig

from .helpers import loaded_with, problems, typed
from .test_megatron import ON, REFUSED

ACTOR, ROLLOUT, DYNAMIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "use_dynamic_bsz=true"
CORRECTION, KEPT = "algorithm.rollout_correction", f"{ROLLOUT}.calculate_log_probs=true"
MODEL = "actor_rollout_ref.model"
APART = "actor_rollout_ref.hybrid_engine=false"
REF = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"

GROUPS = ["env.train.tags=[FrozenLake]", "trainer.total_training_steps=3"]
RM = ["reward_model.enable=true", "reward_model.micro_batch_size_per_gpu=2", "data.return_raw_chat=true"]
RM_IDS = [*RM, "reward_model.model.input_tokenizer=null"]

TURNS = f"{ROLLOUT}.multi_turn"

DISTIL, LOSS = "distillation", "distillation.distillation_loss"
TAUGHT = [f"{DISTIL}.enabled=true", f"{DISTIL}.teacher_models.one.model_path=a", "algorithm.adv_estimator=grpo",
          f"{ROLLOUT}.n=2"]  # fmt: skip
AT = f"{DISTIL}.teacher_models.one.server_urls"
SERVED = [f"{DISTIL}.enabled=true", f"{AT}=http://node:8000", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]
TAUGHT_APART = [*TAUGHT, f"{DISTIL}.nnodes=1", f"{DISTIL}.n_gpus_per_node=2"]
TWO = [*TAUGHT, f"{DISTIL}.teacher_models.two.model_path=b"]

BAD = {
    "a step before the first": (["trainer.profile_steps=[0]"], "names a step that there is not"),
    "no teacher": ([f"{DISTIL}.enabled=true"], "enabled=true names no teacher"),
    "an unknown key of a teacher": (
        [*TAUGHT, f"{DISTIL}.teacher_models.one.path=b"], "teacher_models.one.path is not an option"),
    "two teachers of the same rows": (TWO, "teacher_models.two.key=null is that of distillation.teacher_models.one"),
    "a teacher elsewhere in the update": (
        [*TAUGHT, f"{DISTIL}.nnodes=1", f"{LOSS}.loss_mode=jsd_full"], "nnodes=1 gives the teacher devices of its own"),
    "forked teachers on two nodes": (
        [*TAUGHT, f"{DISTIL}.nnodes=2", "trainer.controller=local"], "forked processes stay on one machine"),
    "a size that the teachers' own ranks have not": (
        [*TAUGHT, f"{DISTIL}.nnodes=1", f"{DISTIL}.n_gpus_per_node=2", f"{MODEL}.use_remove_padding=true",
         f"{DISTIL}.teacher.ulysses_sequence_parallel_size=4"], "does not divide the 2 workers"),
    "a server without its protocol": ([*SERVED, f"{AT}=node:8000"], "server_urls=node:8000 is no URL"),
    "whole distributions by a server": ([*SERVED, f"{LOSS}.loss_mode=jsd_full"], "whole distributions do not travel"),
    "a server at another temperature": (
        [*SERVED, f"{ROLLOUT}.temperature=0.7"], "rollout.temperature=0.7: servers give log-probs of the logits"),
    "a rollout engine over workers that are not there": (
        [*TAUGHT_APART, f"{DISTIL}.teacher_models.one.inference.tensor_model_parallel_size=3"],
        "tensor_model_parallel_size=3 does not divide the 2 workers of distillation.nnodes"),
    "a rollout engine at another temperature": (
        [*TAUGHT_APART, f"{DISTIL}.teacher_models.one.inference.name=vllm", f"{DISTIL}.temperature=2"],
        "inference with another temperature than 1"),
    "an unknown key of a teacher's engine": (
        [*TAUGHT_APART, f"{DISTIL}.teacher_models.one.inference.tp=2"], "one.inference.tp"),
    "a loss without a gradient": ([*TAUGHT, f"{LOSS}.loss_mode=k1"], "zero on average whatever the teacher is"),
    "no advantage of a token": (
        [*TAUGHT, f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.use_policy_gradient=true"], "so it is no advantage of it"),
    "an advantage with another gradient": (
        [*TAUGHT, f"{LOSS}.use_policy_gradient=true"], "use_policy_gradient=true: it is no log-ratio"),
    "tokens chosen by other advantages": (
        [*TAUGHT, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true", f"{LOSS}.policy_loss_mode=clip_cov"],
        "policy_loss_mode=clip_cov chooses tokens by the advantages"),
    "a divergence that falls as mass leaves": (
        [*TAUGHT, f"{LOSS}.loss_mode=reverse_kl_topk", f"{LOSS}.topk_tail=false"], "leaves the teacher's top k"),
    "the same of the other divergence": (
        [*TAUGHT, f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.topk_tail=false"], "leaves the teacher's top k"),
    "several teachers in the update": (
        [*TWO, f"{DISTIL}.teacher_models.two.key=b", f"{LOSS}.loss_mode=jsd_full"], "compares with one teacher"),
    "two models in the update": (
        [*TAUGHT, f"{LOSS}.loss_mode=jsd_full", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"],
        "both compare whole distributions"),
    "a teacher of another sequence parallel size": (
        [*TAUGHT, f"{LOSS}.loss_mode=jsd_full", f"{DISTIL}.teacher.ulysses_sequence_parallel_size=2",
         f"{MODEL}.use_remove_padding=true"], "actor and teacher go through each micro-batch together"),
    "distributions over ranks": (
        [*TAUGHT, *ON, f"{LOSS}.loss_mode=forward_kl_topk"], "splits the vocabulary among ranks"),
    "a critic without rewards": (
        [*TAUGHT, "algorithm.adv_estimator=gae", f"{LOSS}.use_task_rewards=false"], "nothing would read the values"),
    "an agent of tools without tools": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop=tool_agent"], "an agent loop without tools"),
    "a conversation with nobody": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop=interaction_agent"], "no simulated user"),
    "no agent outside": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop=openai_agent"],
        "openai_agent.function=null: no agent is named"),
    "two agents outside": (
        [f"{ROLLOUT}.agent.openai_agent.function=a.py:b", f"{ROLLOUT}.agent.openai_agent.command=[b]"],
        "an episode has one agent"),
    "an agent outside without messages": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop=openai_agent", "data.return_raw_chat=false"],
        "an agent outside reads messages"),
    "prompts measured with other tools than they show": (
        [f"{TURNS}.enable=true", f"{TURNS}.tool_config_path=a.yaml", "data.tool_config_path=b.yaml"],
        "data.tool_config_path=b.yaml differs from"),
    "judge without a name": (["reward_model.judge.url=http://h/v1"], "name the model as the server knows it"),
    "an unknown key of an environment": (["env.registry.a.typ=b"], "env.registry.a.typ is not an option"),
    "agents without an environment": (["env.train.tags=null"], "env.train.tags must be given"),
    "more tags than groups": (
        [*GROUPS, "env.train.tags=[FrozenLake,Sokoban]", "env.train.n_groups=1"], "is less than the 2 tags"),
    "another number of responses than environments": (
        [*GROUPS, f"{ROLLOUT}.n=2", "env.train.group_size=4"], "n=2 must be env.train.group_size=4"),
    "a reward function that is not there": ([*GROUPS, "env.reward=function"], "asks for a reward function"),
    "scores normalized twice": (
        ["env.reward_normalization.method=mean", "algorithm.reward_shaping.norm.mean=batch"],
        "norm.mean=batch must be group with env.reward_normalization.method=mean"),
    "a reward model beside environments": ([*RM, "env.reward=sum"], "env.reward=sum with reward_model.enable=true"),
    "batches of environments kept for the next run": (
        [*GROUPS, f"{ROLLOUT}.skip_rollout=true"], "skip_rollout=true with env.train.tags="),
    "weights that are freed between two syncs": (
        ["trainer.weight_sync_freq=2"], "the engine gives its weights back between steps"),
    "l2 term with ZeRO": (
        [f"{ACTOR}.l2_coef=0.1", f"{ACTOR}.strategy=deepspeed"],
        "l2_coef=0.1 needs fsdp2 or local, and actor_rollout_ref.actor.strategy=deepspeed"),
    "micro batch larger than the mini batch of a rank": (
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], "is larger than the 2 responses of a rank's mini-batch"),
    "mini batch larger than the train batch": (
        ["data.train_batch_size=2"],
        f"{ACTOR}.ppo_mini_batch_size=4 is larger than data.train_batch_size=2: no mini-batch could be filled"),
    "mini batch that leaves prompts over": ([f"{ACTOR}.ppo_mini_batch_size=6"], "=6 does not divide data.train_batch"),
    "both micro batch sizes": ([f"{ACTOR}.ppo_micro_batch_size=4"], "are both set"),
    "both critic micro batch sizes": (["critic.ppo_micro_batch_size=4"], "are both set"),
    "no micro batch size": (
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"], "ppo_micro_batch_size_per_gpu=null leaves open"),
    "no micro batch size for log-probs": (
        [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"], "log_prob_use_dynamic_bsz=true"),
    "no micro batch size for the reference": (
        ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null", f"{ACTOR}.use_kl_loss=true"],
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null leaves open"),
    "token budget below one row": (
        [f"{ACTOR}.{DYNAMIC}", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"], "=1000 cannot hold one row"),
    "shared prompts of padded rows": (
        ["actor_rollout_ref.model.use_prefix_sharing=true"],
        f"use_prefix_sharing=true with {ACTOR}.use_remove_padding=false"),
    "shared prompts of a critic's padded rows": (
        ["critic.model.use_prefix_sharing=true"], "with critic.model.use_remove_padding=false"),
    "group of one": (["algorithm.adv_estimator=grpo"], f"{ROLLOUT}.n=1 with algorithm.adv_estimator=grpo"),
    "a rollout apart without machines": ([APART, f"{ROLLOUT}.nnodes=0"], "nnodes=0 with actor_rollout_ref.hybrid"),
    "a copy of the engine that does not fit a rollout apart": (
        [APART, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.n_gpus_per_node=3"],
        "does not divide the 3 workers (actor_rollout_ref.rollout.nnodes"),
    "a rollout apart on two machines without Ray": (
        [APART, f"{ROLLOUT}.nnodes=2", "trainer.controller=local"], "rollout.nnodes=2 with trainer.controller=local"),
    "generating ahead on shared devices": ([f"{ROLLOUT}.max_staleness=1"], "nothing can be generated ahead"),
    "generating further ahead": (
        [f"{ROLLOUT}.partial_rollout=false", f"{ROLLOUT}.max_staleness=2"], "next version cannot reach the engines"),
    "generating further ahead in one call": (
        [f"{ROLLOUT}.mode=sync", f"{ROLLOUT}.max_staleness=2"], "Set actor_rollout_ref.rollout.mode=async and partial"),
    "generating further ahead on shared devices": (
        ["actor_rollout_ref.hybrid_engine=true", f"{ROLLOUT}.max_staleness=2"], "nothing can be generated ahead"),
    "generating further ahead without log-probs": (
        [f"{ROLLOUT}.calculate_log_probs=false", f"{ROLLOUT}.max_staleness=2"], "the log-probs it was sampled with"),
    "generating ahead with a greedy baseline": (
        [APART, f"{ROLLOUT}.max_staleness=1", "algorithm.adv_estimator=remax"], "with algorithm.adv_estimator=remax"),
    "choosing among groups of one": (
        ["algorithm.filter_groups.enable=true"], "filter_groups.enable=true with actor_rollout_ref.rollout.n=1"),
    "choosing groups and generating ahead": (
        ["algorithm.filter_groups.enable=true", APART, f"{ROLLOUT}.max_staleness=1", f"{ROLLOUT}.n=2"],
        "filter_groups.enable=true with actor_rollout_ref.rollout.max_staleness=1"),
    "choosing groups and putting prompts off": (
        ["algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=2", f"{ROLLOUT}.mode=async",
         f"{ROLLOUT}.over_sample_rate=0.5"], "enable=true with actor_rollout_ref.rollout.over_sample_rate=0.5"),
    "choosing groups by a reward with its KL": (
        ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_final_reward", f"{ROLLOUT}.n=2",
         "algorithm.use_kl_in_reward=true", REF], "metric=seq_final_reward with algorithm.use_kl_in_reward=true"),
    "resampling with another estimator": (
        ["algorithm.use_pf_ppo=true", "algorithm.adv_estimator=reinforce"], "use_pf_ppo=true with algorithm.adv_est"),
    "resampling rows whose log-probs come with the update": (
        ["algorithm.use_pf_ppo=true", f"{ACTOR}.skip_old_log_probs=true"], "with algorithm.use_pf_ppo=true"),
    "weights without the sampler's log-probs": (
        [f"{CORRECTION}.rollout_is=token"], f"rollout_is=token with {ROLLOUT}.calculate_log_probs=false"),
    "a bypass without the sampler's log-probs": (
        [f"{CORRECTION}.bypass_mode=true"], f"bypass_mode=true with {ROLLOUT}.calculate_log_probs=false"),
    "a veto before old log-probs are known": (
        [KEPT, f"{CORRECTION}.rollout_token_veto_threshold=1e-4", f"{ACTOR}.skip_old_log_probs=true",
         f"{ACTOR}.ppo_mini_batch_size=8"], "veto_threshold=0.0001 with actor_rollout_ref.actor.skip_old_log_probs"),
    "two sources of old log-probs": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.skip_old_log_probs=true", f"{ACTOR}.ppo_mini_batch_size=8"],
        "bypass_mode=true with actor_rollout_ref.actor.skip_old_log_probs=true: every ratio is then 1"),
    "weights of a policy that is the sampler": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_rs=token"],
        f"rollout_rs=token with {CORRECTION}.bypass_mode=true"),
    "a loss that takes the trainer's log-probs for the sampler's": (
        [KEPT, f"{ACTOR}.policy_loss.loss_mode=bypass_mode"], f"with {CORRECTION}.bypass_mode=false"),
    "bounds of scores the wrong way round": (
        ["algorithm.reward_shaping.clip_range=[3,-1]"], "clip_range=[3.0, -1.0] is no [low, high]"),
    "groups between a mean and itself": (
        ["algorithm.filter_groups.low=0.5", "algorithm.filter_groups.high=0.5"], "low=0.5 is not below"),
    "squares of a pass that is left out": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.calculate_sum_pi_squared=true"], "the sums come from"),
    "weights without room": (
        [KEPT, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold_lower=2"],
        "rollout_is_threshold=2 is not above the lower bound 2"),
    "a window without room": (
        [KEPT, f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=0.9"],
        "rollout_rs_threshold=0.9 is not above the lower bound 1.11"),
    "weights twice": (
        [KEPT, f"{CORRECTION}.rollout_is=token", f"{ACTOR}.policy_loss.loss_mode=tis"], "weighed twice"),
    "a score that may be rejected": (
        [KEPT, f"{CORRECTION}.rollout_rs=token", f"{ACTOR}.policy_loss.loss_mode=topr"], "would lose the score"),
    "a veto of everything": ([KEPT, f"{CORRECTION}.rollout_token_veto_threshold=1"], "must be less than 1"),
    "rloo of one": (["algorithm.adv_estimator=rloo"], "compared with others of its group"),
    "equal responses of a group": ([f"{ROLLOUT}.n=8", f"{ROLLOUT}.do_sample=false"], "would be the same"),
    "temperature zero": ([f"{ROLLOUT}.n=8", f"{ROLLOUT}.temperature=0"], "temperature=0 must be greater than 0"),
    "model length below a row": ([f"{ROLLOUT}.max_model_len=1000"], "=1000 is shorter than prompt and response"),
    "prompt window": ([f"{ROLLOUT}.prompt_length=100"], "differs from data.max_prompt_length=512"),
    "gpu share above one": ([f"{ROLLOUT}.gpu_memory_utilization=1.5"], "=1.5 must be at most 1"),
    "tensor parallel size": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=3"], "=3 does not divide the 2 workers"),
    "sequence parallel size": ([f"{ACTOR}.ulysses_sequence_parallel_size=3"], "=3 does not divide the 2 workers"),
    "shared sequences of padded rows": (
        [f"{ACTOR}.ulysses_sequence_parallel_size=2"], "=2 with actor_rollout_ref.actor.use_remove_padding=false"),
    "a critic's shared sequences of padded rows": (
        ["critic.ulysses_sequence_parallel_size=2"], "=2 with critic.model.use_remove_padding=false"),
    "token budget below a row of two ranks": (
        ["actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2",
         f"{ACTOR}.{DYNAMIC}", f"{ACTOR}.ppo_max_token_len_per_gpu=500"],
        "=500 x ulysses_sequence_parallel_size=2 cannot hold one row"),
    "full KL in the reward": (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full", REF], "kl_penalty=full with algorithm.use_kl"),
    "full KL of sequences cut in two ways": (
        ["actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full",
         f"{ACTOR}.ulysses_sequence_parallel_size=2", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
         "trainer.n_gpus_per_node=2"], "ref.ulysses_sequence_parallel_size=1 differs from"),
    "negative rate": ([f"{ACTOR}.optim.lr=-1"], "must be greater than 0"),
    "unknown estimator": (["algorithm.adv_estimator=grp0"], "is not a known advantage estimator; did you mean 'grpo'"),
    "unknown loss": ([f"{ACTOR}.policy_loss.loss_mode=vanila"], "is not a known policy loss; did you mean 'vanilla'"),
    "unknown KL": ([f"{ACTOR}.kl_loss_type=banana"], "kl_loss_type=banana must be one of kl"),
    "unknown aggregation": ([f"{ACTOR}.loss_agg_mode=token_mean"], "did you mean 'token-mean'"),
    "unknown schedule": ([f"{ACTOR}.optim.warmup_style=cosin"], "did you mean 'cosine'"),
    "compiled layers that liger computes": (
        [f"{MODEL}.compile_layers=true", f"{MODEL}.use_liger=true"], "compile_layers=true with actor_"),
    "compiled layers of ZeRO 3": (
        [f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.deepspeed.zero_stage=3", f"{MODEL}.compile_layers=true"],
        "deepspeed.zero_stage=3: ZeRO gathers weights inside of layers"),
    "liger without CUDA": (
        ["trainer.device=cpu", f"{MODEL}.use_liger=true"], "use_liger=true with trainer.device=cpu: liger's Triton"),
    "triton without CUDA": (
        ["trainer.device=cpu", f"{MODEL}.use_fused_kernels=true", f"{MODEL}.fused_kernel_options.impl_backend=triton"],
        "impl_backend=triton with trainer.device=cpu: liger's Triton kernels (`pip install -e '.[liger]'`) run on"),
    "validation alone, of nothing": (
        ["trainer.val_only=true", "data.val_files=null"], "with data.val_files=null: nothing is there to validate"),
    "unknown logger": (["trainer.logger=[consol]"], "is not a known logger; did you mean 'console'"),
    "a rule to halt on that is off": (
        ["trainer.halt_on=[truncation]", "trainer.health.truncation=null"], "switches that rule off"),
    "unknown device": (["trainer.device=gpu"], "must be one of cuda, cpu, npu"),
    "built-in rules for a whole batch": (
        ["reward_model.reward_manager=batch"], "without custom_reward_function.path: the built-in rules take one"),
    "built-in rules for a batch of one source": (
        ["reward_model.reward_manager=batch", "custom_reward_function.path=a.py", "reward_model.by_source={x:builtin}"],
        "by_source={'x': 'builtin'} sends x to the built-in rules"),
    "unknown reward manager": (["reward_model.reward_manager=niave"], "did you mean 'naive'"),
    "unknown engine": ([f"{ROLLOUT}.name=hff"], "is not a known rollout engine; did you mean 'hf'"),
    "gae without critic": (["critic.enable=false"], "GAE needs values"),
    "critic counts other samples": (["critic.rollout_n=2"], "differs from"),
    "clip range": ([f"{ACTOR}.clip_ratio_low=1.5"], "must be less than 1"),
    "sampler's probabilities are not kept": (
        [f"{ACTOR}.policy_loss.loss_mode=tis"], f"{ROLLOUT}.calculate_log_probs=false does not keep them"),
    "old log-probs of several steps": (
        [f"{ACTOR}.skip_old_log_probs=true"], "with 2 optimizer steps a batch"),
    "old log-probs in the reward": (
        [f"{ACTOR}.skip_old_log_probs=true", f"{ACTOR}.ppo_mini_batch_size=8", "algorithm.use_kl_in_reward=true", REF],
        "skip_old_log_probs=true with algorithm.use_kl_in_reward=true"),
    "nothing between the bounds": (
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=5"], "is not below"),
    "gdpo without rewards": (
        ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4"], "gdpo_reward_keys=null with algorithm.adv_estimator=gdpo"),
    "gdpo with too many weights": (
        ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", "algorithm.gdpo_reward_keys=[a]",
         "algorithm.gdpo_reward_weights=[1,2]"], "has 2 numbers for the 1"),
    "optimal baseline without its column": (
        ["algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.n=4"], "calculate_sum_pi_squared=false with"),
    "best of one": (["algorithm.adv_estimator=grpo_passk"], "compared with others of its group"),
    "sharding group": ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "must be -1"),
    "training in fp16": (
        [f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16"], "param_dtype=fp16 loses small gradients"),
    "offload of the other sharding": (
        [f"{ACTOR}.fsdp_config.offload_policy=true", f"{ACTOR}.strategy=fsdp1"],
        "needs fsdp2, and actor_rollout_ref.actor.strategy=fsdp1"),
    "one reduction with the other sharding": (
        [f"{ACTOR}.fsdp_config.reduce_once=true", f"{ACTOR}.strategy=fsdp1"], "reduce_once=true needs fsdp2: FSDP1"),
    "one gathering with the other sharding": (
        [f"{ACTOR}.fsdp_config.gather_once=true", f"{ACTOR}.strategy=fsdp1"], "gather_once=true needs fsdp2: FSDP1"),
    "local strategy on two workers": ([f"{ACTOR}.strategy=local"], "runs in one process, but there are 2"),
    "servers that other nodes cannot reach": (
        ["trainer.nnodes=2", f"{ROLLOUT}.mode=async", f"{ROLLOUT}.server_host=127.0.0.1"],
        "server_host=127.0.0.1 with trainer.nnodes=2"),
    "a server class without its name": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.custom_async_server.path=x.py"], "name the class to take from"),
    "local controller on two nodes": (["trainer.controller=local", "trainer.nnodes=2"], "stay on one machine"),
    "resume without a step folder": (["trainer.resume_mode=resume_path"], "global_step_N"),
    "contents that are not saved": (
        [f"{ACTOR}.checkpoint.save_contents=[model]", f"{ACTOR}.checkpoint.load_contents=[model,extra]",
         "trainer.save_freq=1"], "asks for extra"),
    "kept batches that depend on time": (
        [f"{ROLLOUT}.skip_rollout=true", f"{ROLLOUT}.mode=async", f"{ROLLOUT}.over_sample_rate=0.5"],
        "so none can be found again"),
    "an adapter alone for another group": (
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1",
         f"{ROLLOUT}.lora_sync=adapter"], "lora_sync=adapter with actor_rollout_ref.hybrid_engine=false"),
    "adapter without a rank": (
        ["actor_rollout_ref.model.lora_adapter_path=/a"], "lora_adapter_path=/a with actor_rollout_ref.model.lora_ra"),
    "kept tokens of no age": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.calculate_log_probs=true", f"{ROLLOUT}.partial_rollout=true",
         f"{ROLLOUT}.max_staleness=0"], "partial_rollout=true with actor_rollout_ref.rollout.max_staleness=0"),
    "over-sampling ahead": (
        [APART, f"{ROLLOUT}.mode=async", f"{ROLLOUT}.max_staleness=1", f"{ROLLOUT}.over_sample_rate=0.5"],
        "is known before it begins"),
    "one call for a whole batch": ([f"{ROLLOUT}.over_sample_rate=0.5"], "no request can be ended early"),
    "partial responses without log-probs": (
        [f"{ROLLOUT}.partial_rollout=true"], "corrected by the log-probs it was sampled with"),
    "a penalty that a response which goes on would forget": (
        [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.over_sample_rate=0.5", f"{ROLLOUT}.partial_rollout=true",
         f"{ROLLOUT}.calculate_log_probs=true", f"+{ROLLOUT}.frequency_penalty=0.5"],
        "sampling_kwargs.frequency_penalty=0.5 with actor_rollout_ref.rollout.partial_rollout=true"),
    "a pipeline the workers cannot hold": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2",
         f"{ROLLOUT}.engine_kwargs.vllm.pipeline_parallel_size=2"],
        "tensor_model_parallel_size=2 times engine_kwargs.vllm.pipeline_parallel_size=2 does not divide the 2 workers"),
    "a prompt that vLLM may not cut": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens=100"],
        "max_num_batched_tokens=100 with actor_rollout_ref.rollout.enable_chunked_prefill=false"),
    "a word hf cannot ban": ([f"+{ROLLOUT}.bad_words=[no]"], "name=hf knows frequency_penalty, presence_penalty"),
    "a sampling parameter under a second name": (
        [f"{ROLLOUT}.sampling_kwargs.top_p=0.9"], f"set {ROLLOUT}.top_p, the key it has of its own"),
    "a length for validation": ([f"+{ROLLOUT}.val_kwargs.max_tokens=9"], "set data.max_response_length"),
    "log-probs of many tokens": ([f"+{ROLLOUT}.logprobs=5"], "sampling_kwargs.logprobs=5 cannot be handed"),
    "an empty stop text": ([f"{ROLLOUT}.stop=['']"], "would end every response"),
    "more than all of min_p": ([f"{ROLLOUT}.min_p=1.5"], "must be at most 1"),
    "a reward model without messages": (
        [*RM, "data.return_raw_chat=false"], "data.return_raw_chat=false with reward_model.model.input_tokenizer="),
    "a reward model that would cut responses": (
        [*RM_IDS, "reward_model.max_length=100"], "reward_model.max_length=100 is shorter than prompt and response"),
    "a budget below the reward model's longest text": (
        [*RM, "reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=2000",
         "reward_model.max_length=3000"], "=2000 cannot hold one conversation of reward_model.max_length=3000"),
    "a budget of the reward model below one row": (
        [*RM, "reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=1000"],
        "reward_model.forward_max_token_len_per_gpu=1000 cannot hold one row"),
    "no micro batch size for the reward model": (
        [*RM, "reward_model.micro_batch_size_per_gpu=null"], "set reward_model.use_dynamic_bsz=true"),
    "both micro batch sizes of the reward model": ([*RM, "reward_model.micro_batch_size=4"], "are both set"),
    "a reward model in one process of two": (
        [*RM, "reward_model.strategy=local"], "reward_model.strategy=local runs in one process"),
    "a greedy baseline of another scale": (
        ["algorithm.adv_estimator=remax", "algorithm.reward_shaping.scale=2"],
        "algorithm.reward_shaping.scale=2.0 changes the rewards of sampled responses, but not the score of the greedy"),
    "a group of one to normalise by": (
        ["algorithm.reward_shaping.norm.mean=group"], "norm.mean=group compares responses to the same prompt"),
    "an overlong buffer without tokens": (
        ["algorithm.reward_shaping.overlong_buffer.enable=true"], "overlong_buffer.len=0 must be 1 to"),
    "an overlong buffer beyond the response": (
        ["algorithm.reward_shaping.overlong_buffer.enable=true", "algorithm.reward_shaping.overlong_buffer.len=9999"],
        "overlong_buffer.len=9999 must be 1 to"),
    "a band of difficulty upside down": (
        ["algorithm.sample_mask.difficulty=[0.9,0.1]"], "difficulty=[0.9, 0.1] is no [low, high]"),
    "a band of difficulty with one end": (
        ["algorithm.sample_mask.difficulty=[0.9]"], "is no [low, high]"),
    "every response truncated and dropped": (
        ["algorithm.sample_mask.drop_truncated=true", f"{ROLLOUT}.ignore_eos=true"], "leaves nothing to learn from"),
    "class without name": (["data.custom_cls.path=x.py"], "name the class"),
    "two columns of prompts": (
        ["data.messages_key=messages", "data.prompt_key=question"], "both name the column of prompts"),
    "no samples": (["data.train_max_samples=0"], "leaves no prompts"),
    "shares beyond one": (["data.mixture={a:0.7,b:0.7}"], "they add up to 1.4"),
    "a share that is no number": (["data.mixture={a:much}"], "a=much is no number"),
    "a mixture and a sampler": (
        ["data.mixture={a:1}", "data.sampler.class_path=s.py", "data.sampler.class_name=S"],
        "both decide which prompts are sampled"),
    "two classes of data": (
        ["data.custom_cls.path=c.py", "data.custom_cls.name=C", "data.datagen.path=d.py", "data.datagen.name=D"],
        "both name what the training prompts are"),
    "copies of several nodes": (
        ["trainer.default_hdfs_dir=s3://x/y", "trainer.nnodes=2"], "this machine's part of a checkpoint"),
    "sums from a pass that is left out": (
        [f"{ACTOR}.skip_old_log_probs=true", f"{ACTOR}.calculate_sum_pi_squared=true"],
        "skip_old_log_probs=true with actor_rollout_ref.actor.calculate_sum_pi_squared=true"),
    "kept rollouts of the step before": (
        [APART, f"{ROLLOUT}.skip_rollout=true", f"{ROLLOUT}.max_staleness=1"], "such a batch is begun a step early"),
    "kept rollouts of partial responses": (
        [f"{ROLLOUT}.skip_rollout=true", f"{ROLLOUT}.partial_rollout=true"], "skip_rollout=true with actor"),
    "a loss of the sampler's ratio from old log-probs": (
        [f"{CORRECTION}.loss_type=reinforce"], "loss_type=reinforce with actor_rollout_ref"),
    "weights before old log-probs are known": (
        [KEPT, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=token", f"{ACTOR}.skip_old_log_probs=true"],
        "rollout_is=token with actor_rollout_ref.actor.skip_old_log_probs=true"),
    "weights and a veto of the sampler by itself": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token",
         f"{CORRECTION}.rollout_token_veto_threshold=1e-4"], f"rollout_is=token with {CORRECTION}.bypass_mode=true"),
    "weights divided by the mean of a micro-batch": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.policy_loss.loss_mode=bypass_mode",
         f"{CORRECTION}.rollout_is_batch_normalize=true"], "their mean would depend on how batches are cut"),
    "rejection without the sampler's log-probs": (
        [f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_token_veto_threshold=1e-4"],
        f"rollout_rs=token with {ROLLOUT}.calculate_log_probs=false"),
    "a copy of the correction that is another": (
        [KEPT, f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.policy_loss.loss_mode=bypass_mode",
         f"{ACTOR}.policy_loss.rollout_correction.rollout_rs=token"], "which it follows. Set the latter only"),
    "an adapter without its rank, of the critic": (
        ["critic.model.lora_adapter_path=/adapter", "critic.model.lora_rank=0"], "model.lora_rank=0, which trains"),
    "a judge without marks": (
        ["reward_model.judge.lowest=5", "reward_model.judge.highest=5"], "is not above reward_model.judge.lowest=5"),
    "a judge that nobody asks": (["reward_model.server_urls=[http://judge:8000]"], "no reward function asks it"),
    "a reward server without URL": ([*RM, "reward_model.server_urls=[judge]"], "is no list of URLs"),
    "a classifier that does not sleep": ([*RM, "reward_model.rollout={name: vllm, free_cache_engine: false}"],
        "would not leave actor_rollout_ref.rollout the devices"),
    "a classifier without its weights": ([*RM, "reward_model.rollout={name: vllm, load_format: dummy}"],
        "reads no weights"),
    "a classifier in transformers": ([*RM, "reward_model.enable_resource_pool=true", "reward_model.rollout.name=hf"],
        "runs no classifier"),
    "a reward model on no devices": ([*RM, "reward_model.enable_resource_pool=true"], "Raise both to 1 or more"),
}  # fmt: skip


def test_the_runnable_configuration_has_no_problem():
    assert problems() == ""


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused(case):
    words, sentence = BAD[case]
    assert sentence in problems(*words)


def test_every_error_is_raised_by_some_case():
    validators = {check.name: check.function for check in VALIDATORS if check.severity == "error"}
    untouched = set(validators) - {"unsupported_values", "unknown_names"}
    # settings that no command line can give
    greedy = PPOConfig().with_values({f"{ROLLOUT}.n": 2, f"{ROLLOUT}.temperature": 0.0, f"{TURNS}.enable": True})
    cases = [
        *([*ON, *words] for words in REFUSED.values()),
        *(words for words, _ in BAD.values()),
        *([ZERO, *words] for words, _ in BAD_ZERO),
    ]
    for config in (greedy, *(loaded_with(*words).config for words in cases)):
        untouched -= {name for name in untouched if list(validators[name](config))}
    assert not untouched


def test_a_message_names_key_value_rule_and_way_out():
    text = problems("data.train_batch_size=2")
    for part in (f"{ACTOR}.ppo_mini_batch_size=4", "data.train_batch_size=2", "no mini-batch", "Lower the first"):
        assert part in text


def test_what_follows_the_actor_is_not_blamed_twice():
    assert "critic" not in problems("data.train_batch_size=2")


def test_a_reference_follows_the_actor_into_sequence_parallelism():
    config = typed("actor_rollout_ref.model.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert config.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    assert config.actor_rollout_ref.actor.use_remove_padding


def test_a_tree_made_by_hand_is_checked_too():
    config = typed()
    check(config)
    with pytest.raises(ConfigError, match="others of its group"):
        check(config.with_values({"algorithm.adv_estimator": "grpo"}))
    with pytest.raises(ConfigError, match="not supported yet"):
        check(config.with_values({"trainer.device": "npu"}))


UNBUILT = [
    f"{ROLLOUT}.name=server",
    f"{ROLLOUT}.load_format=tensorizer",
    "trainer.device=npu", "trainer.logger=[console,vemlp_wandb]",
]  # fmt: skip


@pytest.mark.parametrize("word", UNBUILT)
def test_an_unbuilt_feature_is_refused_by_name_with_a_way_out(word):
    text = problems(word)
    key = word.partition("=")[0]
    line = next(line for line in text.splitlines() if line.startswith(f"{key}="))
    assert re.search(r" is not supported yet \(.+\)\. [A-Z].+\.$", line)


def test_an_unbuilt_option_set_to_its_default_is_fine():
    config, words = typed(), []
    for limit in LIMITS:
        default = None if limit.key.endswith(".*") else get_path(config, limit.key)
        if isinstance(default, str | int | bool):
            words.append(f"{limit.key}={default}")
    assert len(words) > 1
    assert problems(*words) == ""


BUILT = [
    [f"{ACTOR}.strategy=fsdp2", "critic.strategy=fsdp2"],
    [f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.deepspeed.zero_stage=3", f"{ACTOR}.deepspeed.offload_param=true"],
    ["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=4"],
    ["algorithm.adv_estimator=remax"], ["algorithm.adv_estimator=reinforce_plus_plus_baseline", f"{ROLLOUT}.n=2"],
    [f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.offload_policy=true"], [f"{ACTOR}.strategy=fsdp1"],
    [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.offload_policy=true"],
    [f"{ACTOR}.fsdp_config.forward_prefetch=true", f"{ACTOR}.fsdp_config.reduce_once=true"],
    [f"{ACTOR}.fsdp_config.gather_once=true"],
    ["actor_rollout_ref.model.enable_activation_offload=true"],
    ["actor_rollout_ref.model.use_shm=true", "critic.model.use_shm=true"],
    [f"{ACTOR}.use_dynamic_bsz=true"], [f"{MODEL}.use_fused_kernels=true"], [f"{MODEL}.use_liger=true"],
    [f"{MODEL}.use_fused_kernels=true", f"{MODEL}.fused_kernel_options.impl_backend=triton"],
    [f"{ACTOR}.optim.lr_scheduler_type=wsd", f"{ACTOR}.optim.lr_wsd_decay_steps=3"],
    [f"{MODEL}.custom_chat_template=chat.jinja"],
    ["critic.optim.warmup_style=linear"], [f"{ACTOR}.optim.optimizer=AdamW8bit"],
    [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"],
    ["trainer.logger=[console,tensorboard,wandb,file]"], [f"{ACTOR}.checkpoint.save_contents=[model,hf_model]"],
    ["reward_model.reward_manager=batch", "custom_reward_function.path=f.py"], ["reward_model.reward_manager=prime"],
    ["reward_model.reward_manager=dapo"], [f"{ROLLOUT}.tensor_model_parallel_size=8"], ["trainer.device=cpu"],
    ["data.sampler.class_path=s.py", "data.sampler.class_name=S"], [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k3+", REF],
    [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"], [f"{ACTOR}.clip_ratio_c=null"],
    ["algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n=4"], ["algorithm.adv_estimator=agentic_reinforce"],
    ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", "algorithm.gdpo_reward_keys=[accuracy,format]"],
    ["algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.n=4", f"{ACTOR}.calculate_sum_pi_squared=true"],
    [f"{ACTOR}.policy_loss.loss_mode=tis", f"{ROLLOUT}.calculate_log_probs=true"],
    [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=2"],
    [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=1"], [f"{ACTOR}.loss_agg_mode=token-sum"],
    [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    ["algorithm.reward_shaping.norm.mean=running", "algorithm.reward_shaping.norm.std=batch"],
    ["algorithm.reward_clip=5", "algorithm.reward_norm.std=running", "algorithm.whiten_rewards=true"],
    ["algorithm.whiten_advantages=false", "algorithm.advantage_clip=3", "algorithm.sample_mask.difficulty=[0.1,0.9]"],
    ["algorithm.reward_shaping.overlong_buffer.enable=true", "algorithm.reward_shaping.overlong_buffer.len=64"],
    *([KEPT, f"{CORRECTION}.rollout_is={level}", f"{CORRECTION}.rollout_rs={level}"]
      for level in ("token", "sequence", "geometric")),
    [KEPT, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_mode=mask"],
    [KEPT, f"{CORRECTION}.bypass_mode=true"],
    ["algorithm.kl_ctrl.type=adaptive"], RM, [*RM, "reward_model.strategy=fsdp2", "reward_model.max_length=100"],
    RM_IDS, ["reward_model.launch_reward_fn_async=true"],
    [f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0.6"],
]  # fmt: skip


@pytest.mark.parametrize("words", BUILT, ids=lambda words: words[0])
def test_a_built_feature_is_accepted(words):
    assert problems(*words) == ""


def test_a_registered_name_is_known(monkeypatch):
    for names in NAMES:
        if names.registry is not None:
            module, collection = names.registry
            stub = types.ModuleType(module)
            setattr(stub, collection, {"mine": object()})
            monkeypatch.setitem(sys.modules, module, stub)
            assert problems(f"{names.key}=mine") == ""


def test_the_collections_of_registered_names_are_where_they_are_looked_for():
    importlib.import_module("verl.telemetry.trackers")  # those of others are registered when one is asked for
    for names in NAMES:
        if names.registry is not None:
            module, collection = names.registry
            assert set(names.built) <= set(getattr(importlib.import_module(module), collection))


def test_a_name_may_come_from_an_external_module():
    word = "algorithm.adv_estimator=theirs"
    assert "not a known advantage estimator" in problems(word)
    assert problems(word, "actor_rollout_ref.model.external_lib=my_module") == ""


def test_the_batch_plan_shows_the_derivation():
    plan = batch_plan(typed(f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_epochs=2"))
    assert "8 prompts x 4 responses = 32 rows on 2 workers, 16 each" in plan
    assert "actor: 4 optimizer steps, each over 4 prompts x 4 = 16 rows on 2 ranks, 8 each, in 4 forwards of 2" in plan
    assert "old log-probs: 32 rows on 2 ranks, 16 each, in 8 forwards of 2" in plan


def test_the_batch_plan_shows_rows_that_do_not_divide_and_what_is_left_out():
    one_step = (f"{ACTOR}.ppo_mini_batch_size=7", "data.train_batch_size=7", f"{ACTOR}.skip_old_log_probs=true")
    plan = batch_plan(typed(*one_step, f"{ACTOR}.{DYNAMIC}"))
    assert "7 prompts x 1 responses = 7 rows on 2 workers, 3 or 4 each" in plan
    assert "7 rows on 2 ranks, about 3.5 each, in forwards of at most 16384 tokens" in plan
    assert "old log-probs: those of the update's own forwards" in plan


ONE_STEP = (f"{ACTOR}.ppo_mini_batch_size=8", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")


def test_old_log_probs_are_left_out_where_nothing_reads_them_before_the_update():
    assert typed(*ONE_STEP).skips_old_log_probs and "of the update's own forwards" in batch_plan(typed(*ONE_STEP))
    refused = [words for words, text in BAD.values() if any("skip_old_log_probs=true" in word for word in words)]
    assert len(refused) >= 6
    for words in refused:  # by itself it is never on where it would be refused
        rest = [word for word in words if "skip_old_log_probs" not in word]
        assert not typed(*rest).skips_old_log_probs, words
    for reader in (f"{ACTOR}.ppo_epochs=2", "trainer.on_nonfinite=skip", f"{ACTOR}.skip_old_log_probs=false"):
        assert not typed(*ONE_STEP, reader).skips_old_log_probs, reader
    assert not typed(*TAUGHT, *ONE_STEP).skips_old_log_probs


def test_the_batch_plan_knows_old_log_probs_that_are_the_samplers():
    plan = batch_plan(typed(KEPT, f"{CORRECTION}.bypass_mode=true"))
    assert "old log-probs: those the responses were sampled with" in plan


def test_the_batch_plan_counts_workers_that_share_sequences_as_one_rank():
    one = [f"{key}.ppo_micro_batch_size_per_gpu=1" for key in (ACTOR, "critic")]
    config = typed("trainer.n_gpus_per_node=4", *one).with_values({f"{ACTOR}.ulysses_sequence_parallel_size": 2})
    plan = batch_plan(config)
    assert "actor: 2 optimizer steps, each over 4 prompts x 1 = 4 rows on 2 ranks of 2 workers, 2 each" in plan
    assert "critic: 2 optimizer steps, each over 4 prompts x 1 = 4 rows on 4 ranks, 1 each" in plan


def test_batches_that_do_not_divide_by_the_ranks_are_taken():
    assert problems("trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.tensor_model_parallel_size=1") == ""


ZERO = f"{ACTOR}.strategy=deepspeed"


BAD_ZERO = [
    ([f"{ACTOR}.deepspeed.offload_param=true"], "deepspeed.zero_stage=2: weights that are whole on every rank"),
    ([f"{ACTOR}.deepspeed.zero_stage=0", f"{ACTOR}.deepspeed.offload_optimizer=true"], "Set .* to 1, 2 or 3"),
    ([f"{ACTOR}.fsdp_config.model_dtype=bf16"], "the sharded optimizer keeps the weights in fp32"),
    ([f"{ACTOR}.deepspeed.zero_stage=1", f"{ACTOR}.fsdp_config.optimizer_offload=true"], "stays on the device"),
    ([f"{ACTOR}.deepspeed.zero_stage=3", f"{ACTOR}.deepspeed.zero_hpz_partition_size=3"], "Choose a divisor of 2"),
    (
        [f"{ACTOR}.deepspeed.config={{gradient_clipping:2}}"],
        "gradient_clipping=2 is decided by verl: set grad_clip",
    ),
    ([f"{ACTOR}.deepspeed.zero_stage=4"], "zero_stage=4"),
]


@pytest.mark.parametrize("words, expected", BAD_ZERO)
def test_what_zero_cannot_do_is_refused(words, expected):
    assert re.search(expected, problems(ZERO, *words))
    assert len(problems(ZERO, *words).splitlines()) <= 3
