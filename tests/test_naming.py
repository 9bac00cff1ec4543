"""Reinforcement learning is recognised by what is logged: columns as trainers really log them."""

from __future__ import annotations

import pytest

from sentinel.naming import clean_name, find_metric, find_rl_columns

HF = "loss grad_norm learning_rate epoch"

RL = {
    "TRL GRPO": f"{HF} num_tokens completions/mean_length completions/clipped_ratio rewards/format/mean "
    "rewards/format/std reward reward_std frac_reward_zero_std entropy "
    "clip_ratio/low_mean clip_ratio/region_mean kl step_time",
    "TRL GRPO of early 2025": f"{HF} completion_length rewards/format_reward reward reward_std kl",
    "TRL PPO": "eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores "
    "policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio lr episode",
    "Stable-Baselines3 PPO": "rollout/ep_len_mean rollout/ep_rew_mean time/fps train/approx_kl train/clip_fraction "
    "train/entropy_loss train/explained_variance train/loss train/policy_gradient_loss train/value_loss",
    "Stable-Baselines3 PPO without Monitor": "time/fps train/approx_kl train/clip_fraction train/loss train/value_loss",
    "Stable-Baselines3 DQN": "rollout/ep_len_mean rollout/ep_rew_mean rollout/exploration_rate time/fps "
    "train/learning_rate train/loss train/n_updates",
    "CleanRL PPO": "charts/episodic_return charts/episodic_length charts/SPS losses/value_loss losses/policy_loss "
    "losses/entropy losses/old_approx_kl losses/approx_kl losses/clipfrac",
    "CleanRL DQN": "charts/episodic_return charts/episodic_length charts/epsilon losses/td_loss losses/q_values",
    "RLlib": "env_runners/episode_return_mean env_runners/episode_len_mean learners/default_policy/vf_loss "
    "learners/default_policy/mean_kl_loss learners/default_policy/entropy learners/default_policy/total_loss",
    "RLlib before 2.10": "episode_reward_mean episode_len_mean info/learner/default_policy/learner_stats/vf_loss",
    "verl": "actor/entropy actor/pg_loss actor/ppo_kl actor/pg_clipfrac actor/grad_norm critic/rewards/mean "
    "critic/score/mean critic/returns/mean response_length/mean",
    "OpenRLHF PPO": "train/policy_loss train/critic_loss train/reward train/return train/response_length train/kl "
    "train/actor_lr train/ppo_clip_ratio",
    "Tianshou": "train/returns_stat/mean train/lens_stat/mean update/loss test/returns_stat/mean",
    "a script": "loss reward epsilon",
}
NOT_RL = {
    "TRL DPO": f"{HF} rewards/chosen rewards/rejected rewards/accuracies rewards/margins logps/chosen logps/rejected "
    "logits/chosen logits/rejected entropy mean_token_accuracy num_tokens",
    "TRL Online DPO": f"{HF} objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward "
    "objective/scores rewards/chosen rewards/rejected rewards/margins logps/chosen beta",
    "TRL KTO": f"{HF} kl rewards/chosen rewards/rejected rewards/margins logps/chosen logits/chosen",
    "TRL reward model": f"{HF} num_tokens accuracy margin mean_reward min_reward max_reward",
    "OpenRLHF reward model": "train/loss train/acc train/chosen_reward train/reject_reward train/loss_mean",
    "TRL SFT": f"{HF} entropy num_tokens mean_token_accuracy",
    "TRL GKD (distillation)": f"{HF} entropy num_tokens mean_token_accuracy completions/mean_length",
    "distillation": "loss kd_loss ce_loss kl entropy eval/reward",
    "decision transformer": "training/train_loss_mean training/train_loss_std evaluation/target_3600_return_mean "
    "evaluation/target_3600_length_mean evaluation/target_1800_return_mean training/action_error time/training",
    "online decision transformer": "training/train_loss_mean training/nll training/entropy training/temp_value "
    "evaluation/return_mean_gm evaluation/length_mean_gm aug_traj/return aug_traj/length",
    "CORL decision transformer": "train_loss learning_rate eval/1.0_return_mean eval/1.0_normalized_score_mean",
    "differential privacy": "loss epsilon clip_fraction",
    "a VAE": "loss kl_loss reconstruction_loss entropy",
    "a VAE-GAN": "generator_loss critic_loss kl_loss",
    "a portfolio": "loss return entropy",
    "a VAE with a value head": "loss kl_loss value_loss",
    "one sign": "loss reward reward_std mean_reward return",
    "language model": "loss grad_norm lr ppl",
}


@pytest.mark.parametrize("trainer", RL)
def test_two_independent_signs_are_enough(trainer: str) -> None:
    columns = RL[trainer].split()
    found = find_rl_columns(columns)
    assert len(found) >= 2
    assert set(found) <= set(columns)


@pytest.mark.parametrize("trainer", NOT_RL)
def test_other_training_that_logs_rewards_is_not_recognised(trainer: str) -> None:
    assert find_rl_columns(NOT_RL[trainer].split()) == ()


def test_names_of_a_trainer_become_those_of_rules() -> None:
    columns = [
        "train/loss",
        "rollout/ep_rew_mean",
        "rewards/format/mean",
        "eval_reward",
        "eval/loss",
        "2 x",
        "Akkuratheit %",
        "-",
    ]
    assert [clean_name(column) for column in columns] == [
        "loss", "reward", "rewards_format_mean", "eval_reward", "eval_loss", "_2_x", "akkuratheit", "",
    ]  # fmt: skip
    assert clean_name("return", taken=["reward"]) == "return"
    assert clean_name("reward!", taken=["reward"]) == ""
    assert len(clean_name("a" * 100)) == 64
    assert find_metric("val/loss") == ""
