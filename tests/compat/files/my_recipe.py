"""Trainers of a project: one with a loop of its own, one that changes a stage, one that changes how it validates."""

import uuid
from pprint import pprint

import numpy as np
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import compute_reward
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import marked_timer


class OwnLoop(RayPPOTrainer):
    """Its own ``fit``: works on ``batch.batch`` and calls the worker groups itself."""

    def fit(self):
        from verl.utils.tracking import Tracking

        trainer = self.config.trainer
        tree = OmegaConf.to_container(self.config, resolve=True)
        logger = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=trainer.logger,
            config=tree,
        )
        self.history = []
        self.note = tree["my_project"]["note"]
        self.global_steps = 0
        self._load_checkpoint()
        if self.val_reward_fn is not None and trainer.get("val_before_train", True):
            val_metrics = self._validate()
            pprint(f"Initial validation metrics: {val_metrics}")
            logger.log(data=val_metrics, step=self.global_steps)
        self.global_steps += 1
        for epoch in range(trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                is_last_step = self.global_steps >= self.total_training_steps
                metrics, timing_raw = {"training/epoch": epoch}, {}
                with marked_timer("step", timing_raw):
                    batch = self.make_experience(batch_dict, metrics, timing_raw)
                    if self.use_critic:
                        with marked_timer("update_critic", timing_raw, color="pink"):
                            critic_output = self.critic_wg.update_critic(batch)
                        metrics.update(reduce_metrics(critic_output.meta_info["metrics"]))
                    if trainer.critic_warmup <= self.global_steps:
                        with marked_timer("update_actor", timing_raw, color="red"):
                            batch.meta_info["multi_turn"] = self.config.actor_rollout_ref.rollout.multi_turn.enable
                            actor_output = self.actor_rollout_wg.update_actor(batch)
                        metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
                    self.finish(batch, metrics, is_last_step)
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
                n_gpus = self.resource_pool_manager.get_n_gpus()
                metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus))
                logger.log(data=metrics, step=self.global_steps)
                self.history.append((batch, metrics))
                if is_last_step:
                    return
                self.global_steps += 1

    def make_experience(self, batch_dict, metrics, timing_raw):
        rollout, algorithm = self.config.actor_rollout_ref.rollout, self.config.algorithm
        batch: DataProto = DataProto.from_single_dict(batch_dict)
        gen_batch = batch.pop(
            batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["raw_prompt_ids"]
        )
        gen_batch = gen_batch.repeat(repeat_times=rollout.n, interleave=True)
        with marked_timer("gen", timing_raw, color="red"):
            assert not self.async_rollout_mode
            gen_batch_output = self.actor_rollout_wg.generate_sequences(gen_batch)
            timing_raw.update(gen_batch_output.meta_info["timing"])
            gen_batch_output.meta_info.pop("timing", None)
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch.batch))], dtype=object)
        batch = batch.repeat(repeat_times=rollout.n, interleave=True)
        batch = batch.union(gen_batch_output)
        batch.batch["response_mask"] = compute_response_mask(batch)
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
        reward_tensor, reward_extra_infos_dict = compute_reward(batch, self.reward_fn)
        old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
        metrics["actor/entropy"] = agg_loss(
            loss_mat=old_log_prob.batch["entropys"],
            loss_mask=batch.batch["response_mask"],
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
        ).item()
        old_log_prob.batch.pop("entropys")
        batch = batch.union(old_log_prob)
        if self.use_reference_policy and not self.ref_in_actor:
            batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        if self.use_critic:
            batch = batch.union(self.critic_wg.compute_values(batch))
        batch.batch["token_level_scores"] = reward_tensor
        if reward_extra_infos_dict:
            batch.non_tensor_batch.update({k: np.array(v) for k, v in reward_extra_infos_dict.items()})
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(
                batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
            )
            metrics.update(kl_metrics)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        self.extra = reward_extra_infos_dict
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )

    def finish(self, batch, metrics, is_last_step):
        trainer = self.config.trainer
        if dump_path := trainer.get("rollout_data_dir", None):
            self._dump_generations(
                inputs=self.tokenizer.batch_decode(batch.batch["prompts"], skip_special_tokens=True),
                outputs=self.tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True),
                scores=batch.batch["token_level_scores"].sum(-1).cpu().tolist(),
                reward_extra_infos_dict=self.extra,
                dump_path=dump_path,
            )
        if trainer.test_freq > 0 and (is_last_step or self.global_steps % trainer.test_freq == 0):
            metrics.update(self._validate())
        if trainer.save_freq > 0 and (is_last_step or self.global_steps % trainer.save_freq == 0):
            self._save_checkpoint()


class OwnStage(RayPPOTrainer):
    """Clips the advantages, and sees what it validates and saves."""

    def estimate_advantages(self, batch):
        batch = super().estimate_advantages(batch)
        batch.batch["advantages"] = batch.batch["advantages"].clamp(-0.5, 0.5)
        return batch

    def _validate(self):
        metrics = super()._validate()
        return {**metrics, "val-core/mine": 1.0}

    def _save_checkpoint(self):
        super()._save_checkpoint()
        self.saved = self.global_steps
