"""Names that other libraries (TRL, verl, OpenRLHF, prime-rl, vLLM) have for the options of
`RLConfig`. They are for hints only: `RLConfig` accepts none of them.
"""

from __future__ import annotations

_SAME = {
    "rollouts_per_example": "num_generations n_samples_per_prompt group_size rollout_n "
    "samples_per_prompt num_samples_per_prompt n",
    "eval_rollouts_per_example": "num_generations_eval eval_n_samples_per_prompt",
    "batch_size": "train_batch_size generation_batch_size rollout_batch_size global_batch_size "
    "gen_batch_size ppo_mini_batch_size",
    "micro_batch_size": "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "updates_per_batch": "steps_per_generation",
    "max_tokens_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "max_tokens": "max_completion_length max_response_length generate_max_len max_new_tokens "
    "response_length max_completion_tokens",
    "max_prompt_len": "max_prompt_length prompt_max_len",
    "max_seq_len": "max_length seq_len max_len max_seq_length sequence_length max_model_len",
    "learning_rate": "lr actor_learning_rate",
    "max_steps": "steps total_training_steps num_steps num_training_steps",
    "max_grad_norm": "max_norm grad_clip clip_grad gradient_clipping",
    "kl_beta": "beta kl_coef kl_loss_coef init_kl_coef kl_coeff kl_tau",
    "entropy_beta": "entropy_coeff entropy_coef ent_coef",
    "advantage": "adv_estimator advantage_estimator",
    "loss": "loss_type policy_loss loss_mode",
    "loss_normalization": "loss_agg_mode",
    "max_off_policy_steps": "max_async_level async_level max_staleness staleness_threshold",
    "max_concurrent": "max_inflight_tasks max_concurrent_rollouts max_inflight_rollouts",
    "max_oversampling": "oversampling_factor over_sampling_batch_size",
    "generation_timeout": "request_timeout rollout_timeout",
    "num_rollouts_to_print": "log_completions num_completions_to_print",
    "eval_steps": "test_freq eval_interval",
    "save_steps": "save_freq save_interval",
    "eval_strategy": "evaluation_strategy",
    "use_cpu": "no_cuda cpu",
    "use_lora": "use_peft lora",
    "lora_rank": "lora_r peft_rank lora_dim",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "gradient_checkpointing": "enable_gradient_checkpointing",
    "vllm_server_host": "host",
    "vllm_server_port": "port",
    "run_name": "experiment_name wandb_run_name",
    "report_to": "logger log_with",
    "output_dir": "save_path checkpoint_dir default_local_dir logging_dir",
}
_STEPS = "each batch gives one optimizer step; set max_steps"
_CLIP = "set loss_args, such as {eps_low = 0.2, eps_high = 0.28} with loss = 'ppo'"
_SERVER = "it is an option of the server: give it to vf-vllm, or in [inference.args] of vf-rl"
_MODEL = "the model is RLTrainer's first argument, or `model` at the top level of vf-rl's TOML"
_ENV = "rewards and data belong to the environment"
_OTHER = {
    _STEPS: "num_iterations ppo_epochs epochs total_epochs num_episodes max_epochs num_updates",
    _CLIP: "epsilon epsilon_high clip_ratio clip_ratio_low clip_ratio_high eps_clip "
    "eps_clip_low_high clip_range cliprange eps_low eps_high",
    "set gradient_masks, such as {ratio = {min_ratio = 0, max_ratio = 4.0}}": "delta",
    _SERVER: "vllm_gpu_memory_utilization vllm_tensor_parallel_size gpu_memory_utilization "
    "tensor_parallel_size vllm_max_model_length vllm_max_model_len enforce_eager "
    "vllm_enable_prefix_caching max_num_seqs vllm_num_engines vllm_model_impl",
    _MODEL: "model model_name model_name_or_path pretrain model_path",
    _ENV: "reward_funcs reward_weights reward_func reward_fn reward_model dataset dataset_name "
    "train_dataset env env_id env_ids",
    "set vllm_server_host and vllm_server_port": "vllm_server_base_url base_url vllm_base_url "
    "vllm_server_url server_url",
    "rollouts always come from a vLLM server; remove it": "use_vllm vllm_mode",
    "set advantage: 'std' divides by the standard deviation, 'mean' does not": "scale_rewards "
    "norm_adv_by_std_in_grpo normalize_advantage whiten_advantages",
    "set loss = 'gspo' for ratios of whole sequences": "importance_sampling_level",
    "set loss = 'truncated_is' or 'cispo', which bound the importance ratio; remove it": (
        "vllm_importance_sampling_correction vllm_importance_sampling_cap"
    ),
    "the weights go to the server after every optimizer step; remove it": "weight_sync_steps "
    "sync_interval",
    "set warmup_steps; below 1 it is a share of all steps": "warmup_ratio lr_warmup_steps_ratio",
    "set min_reward_variance, min_reward or max_reward": "filter_groups dynamic_sampling",
    "the reference is the model at the start; see kl_beta": "ref_model sync_ref_model",
}
# The key is the other library's name.
HINTS = {name: f"here it is {ours}" for ours, names in _SAME.items() for name in names.split()} | {
    name: hint for hint, names in _OTHER.items() for name in names.split()
}
