// What figures are called on all pages.
const TITLES = { task_reward: "Mean task reward", grad_norm: "Gradient norm", entropy: "Entropy", lr: "Learning rate",
  kl_k1: "KL to the reference (k1)", kl_approx: "KL to the behaviour policy", clip_fraction: "Share of clipped tokens",
  ess: "Effective sample size", sampler_gap: "Sampler gap", advantage_std: "Advantage spread", staleness: "Age",
  use_count: "Uses of a trajectory", num_trajectories: "Trajectories of a step", num_taught: "Trajectories with a gradient",
  completion_length: "Completion length", cut_off: "Share cut off", tokens_per_s: "Sampling speed",
  update_tokens_per_s: "Learning speed", padding_efficiency: "Padding efficiency", rollout_s: "Time of a rollout",
  update_s: "Time of an update", peak_memory_mb: "Peak memory", num_failed: "Failed rewards", flat_groups: "Groups without spread", num_unscored_tokens: "Tokens not scored", loss: "Loss" };
export const title = name => TITLES[name] ?? name.replace("evaluation/", "").replaceAll("_", " ");
