// What the numbers of a run mean: which curves are shown where, in which order, and which values
// should make a person look. docs/metrics.md has the formulas; the limits are those of its column
// "healthy".

// `above`, `below`: look when the value is beyond. `hint`: what may help. `kind`: the rollouts that
// show it.
export const METRICS = {
  reward: { text: "Mean reward of the surviving rollouts. It should rise." },
  reward_std: { text: "Standard deviation of the rewards. At 0 nothing can be learned.", below: 1e-9 },
  eval_reward: { text: "Mean reward of an evaluation (avg@k)." },
  "eval_pass@k": { text: "Share of evaluated examples with at least one reward of 1 or more." },
  advantage_abs: { text: "Mean size of the advantages over loss tokens. It should stay well above 0." },
  uniform_group_share: {
    text: "Share of groups whose rollouts all have the same reward: they teach nothing.",
    above: 0.5,
    hint: "set group_filter",
  },
  filtered_share: { text: "Share of generated groups that the filters left out." },
  loss: { text: "Its level says little, because the advantages of a group sum to 0." },
  grad_norm: { text: "Norm of the gradient before clipping. Spikes announce trouble." },
  entropy: {
    text: "Mean entropy of the policy over loss tokens, nats. Near 0, exploration has ended.",
    below: 0.01,
    hint: "entropy_beta, a higher temperature",
  },
  mismatch_kl: {
    text: "Estimate of KL(inference || trainer). Rising values predict collapse.",
    above: 0.05,
    hint: "the same dtype on both sides, fewer steps off-policy",
  },
  importance_ratio: { text: "Mean of p_trainer / p_inference of the sampled tokens. Close to 1." },
  importance_ratio_max: {
    text: "Largest importance ratio of the batch. Below 10 for one step off-policy.",
    above: 10,
  },
  clipped_share: { text: "Share of loss tokens whose ratio the loss capped or clipped.", above: 0.15 },
  masked_share: { text: "Share of loss tokens that the loss dropped.", above: 0.1 },
  clamped_share: { text: "Share of loss tokens whose log ratio was beyond 20.", above: 0 },
  reference_kl: { text: "Estimate of KL(policy || reference). It grows slowly." },
  staleness: { text: "Optimizer steps between the weights that sampled a token and those that train on it." },
  staleness_max: { text: "Staleness of the oldest token." },
  completion_tokens: { text: "Mean number of sampled tokens of a rollout. It should not jump." },
  num_turns: { text: "Mean number of model calls of a rollout." },
  truncated_share: {
    text: "Share of rollouts that a length limit cut.",
    above: 0.1,
    kind: "truncated",
    hint: "raise max_tokens or max_seq_len",
  },
  error_share: { text: "Share of rollouts that failed and were left out.", above: 0, kind: "failed" },
  broken_turn_share: {
    text: "Share of later turns that did not continue the tokens before them.",
    above: 0,
  },
  restarted_share: { text: "Share of rollouts that began again because a rollout worker died.", above: 0 },
  moved_share: { text: "Share of rollouts that began again at another server.", above: 0 },
  num_masked_samples: { text: "Sequences of the batch without a loss token.", above: 0 },
  skipped_update_share: { text: "Share of steps without an update.", above: 0 },
  idle_sample_share: { text: "Share of samples whose gradient is zero and that are not computed." },
  step_s: { text: "Seconds of one step.", unit: "s" },
  tokens_per_s: { text: "Tokens of the batch per second of the step." },
  generation_s: { text: "Seconds from requesting a batch until it is generated.", unit: "s" },
  wait_s: { text: "Seconds that the trainer waited for the batch.", unit: "s" },
  train_s: { text: "Seconds of forward and backward.", unit: "s" },
  sync_s: { text: "Seconds of one weight sync.", unit: "s" },
  mfu: { text: "Share of the GPU's peak that forward and backward reach." },
  padding_share: { text: "Share of positions in forward passes that hold no token." },
  peak_memory_gb: { text: "Largest memory of tensors (GPU) or of the process (CPU), GB.", unit: "GB" },
  prefix_sharing: { text: "Tokens of the samples / tokens computed for them." },
};

// Sections of the page. A name with * stands for all that begin so.
export const SECTIONS = [
  {
    title: "Reward",
    names: ["reward", "eval_reward", "eval_pass@k", "reward_std", "uniform_group_share", "filtered_share"],
  },
  {
    title: "Stability",
    names: [
      "entropy",
      "mismatch_kl",
      "importance_ratio_max",
      "grad_norm",
      "clipped_share",
      "masked_share",
      "masked_share/*",
      "reference_kl",
      "staleness_max",
      "loss",
    ],
  },
  {
    title: "Rollouts",
    names: [
      "completion_tokens",
      "num_turns",
      "truncated_share",
      "error_share",
      "broken_turn_share",
    ],
  },
  { title: "Environment", names: ["env/*", "eval_*"] },
  {
    title: "Speed",
    names: ["step_s", "tokens_per_s", "generation_s", "wait_s", "train_s", "sync_s", "mfu", "peak_memory_gb"],
  },
];

// Not curves: what they are is shown elsewhere, or says nothing about training.
const NO_CURVE = new Set([
  "step",
  "epoch",
  "train_runtime",
  "train_samples_per_second",
  "train_steps_per_second",
  "train_loss",
  "total_flos",
]);
const NOT_OF_ENV = new Set(["eval_runtime", "eval_wait_s", "eval_num_rollouts"]);

// What a step's seconds consist of. The rest of `step_s` is `other`.
export const PHASES = [
  { name: "wait_s", title: "Waiting for rollouts", color: "--wait", text: "generation has not finished yet" },
  { name: "sync_s", title: "Weight sync", color: "--sync", text: "new weights travel to the server" },
  { name: "train_s", title: "Training", color: "--train", text: "forward and backward" },
  {
    name: "other",
    title: "Other",
    color: "--other",
    text: "the optimizer, waiting for evaluations, callbacks",
  },
];

export function aboutMetric(name) {
  const base = name.includes("/") && !METRICS[name] ? name.slice(0, name.indexOf("/")) : name;
  return METRICS[name] || METRICS[base] || {};
}

// The sections with those of the names that exist; the rest is the last section.
export function inSections(names) {
  const left = new Set([...names].filter((name) => !NO_CURVE.has(name)));
  const take = (pattern) => {
    const found = pattern.endsWith("*")
      ? [...left].filter((name) => name.startsWith(pattern.slice(0, -1)) && !NOT_OF_ENV.has(name)).sort()
      : [...left].filter(
          (name) => name === pattern || (pattern.endsWith("@k") && name.startsWith("eval_pass@")),
        );
    for (const name of found) left.delete(name);
    return found;
  };
  // Environments have names of their own: NAME/reward is of one, as `group_share` tells.
  const envs = [...left]
    .filter((n) => n.endsWith("/group_share"))
    .map((n) => n.slice(0, -"/group_share".length));
  const sections = SECTIONS.map(({ title, names: patterns }) => {
    const own = title === "Environment" ? [...patterns, ...envs.map((env) => `${env}/*`)] : patterns;
    return { title, names: own.flatMap(take), isOpen: true };
  });
  sections.push({ title: "More", names: [...left].sort(), isOpen: false });
  return sections.filter((section) => section.names.length);
}

// What a person should look at, from the last lines of a run: texts, the gravest first.
export function attention(columns, notFinite) {
  const found = [];
  for (const [name, [count, step]] of Object.entries(notFinite)) {
    found.push({
      name,
      text: `${name} was not a finite number ${count === 1 ? "once" : `${count} times`}, first in step ${step}`,
    });
  }
  const parts = Object.keys(columns).filter((name) => name.startsWith("masked_share/"));
  for (const name of [...Object.keys(METRICS), ...parts]) {
    const { above, below, hint, kind } = METRICS[name] ?? METRICS.masked_share;
    const values = (columns[name] || []).filter((value) => value !== null).slice(-10);
    if (!values.length) continue;
    const value = values.reduce((sum, one) => sum + one, 0) / values.length;
    const isHigh = above !== undefined && value > above;
    if (isHigh || (below !== undefined && value < below)) {
      found.push({ name, value, isHigh, limit: isHigh ? above : below, hint, kind });
    }
  }
  return found;
}
