"""What `rlhf-pipeline COMMAND --help` says beside the options: what the command is for, and examples."""

from __future__ import annotations

DESCRIPTION = """\
The data path of RL post-training: collect rollouts, keep every one of them, learn, look.

Start here (CPU, nothing to download, about a minute):
  rlhf-pipeline run copy_digits"""

EXAMPLES = """\
examples:
  rlhf-pipeline list                              what can be run, and what each needs
  rlhf-pipeline run copy_digits                   learn to copy digits, into runs/copy_digits
  rlhf-pipeline run my_task.py:my_pipeline        your own: a function that returns a Pipeline
  rlhf-pipeline run copy_digits --resume          go on where a run stopped
  rlhf-pipeline inspect runs/copy_digits          counts, lengths, rewards graded again
  rlhf-pipeline show runs/copy_digits --id 17     one trajectory, token by token
  rlhf-pipeline tail runs/copy_digits -f          watch what a run stores and learns
  rlhf-pipeline replay runs/copy_digits           the same learning curve, from the store alone

`rlhf-pipeline COMMAND --help` says more about each."""

RUN = """\
examples:
  rlhf-pipeline run copy_digits
  rlhf-pipeline run copy_digits --seed 1 --out runs/seed-1
  rlhf-pipeline run copy_digits --set learn.lr=3e-4 --set collect.group_size=8
  rlhf-pipeline run gsm8k --set policy.path=model --set prompts.path=train.jsonl --device cuda
  rlhf-pipeline run ./my_task.py:my_pipeline
  rlhf-pipeline run copy_digits --resume --steps 800
  rlhf-pipeline run long_running --collectors 2

Ctrl-C finishes the step, saves, and says how to go on. After a crash, --resume goes on from the
last checkpoint; trajectories that were stored since are used again, not sampled anew."""

COLLECT = """\
Claims one rollout after the other, samples it with the newest weights that the learner has published, and
stores it. Any number of collectors may work for one run on one machine; each may be stopped and killed
at any time, and no prompt is lost or repeated. A collector waits where a rollout would be too old
(buffer.max_staleness) by the time it is learned from.

examples:
  rlhf-pipeline collect long_running --run runs/mine     in one terminal,
  rlhf-pipeline learn --run runs/mine                    in another: the first one has made the run
  rlhf-pipeline collect --run runs/mine                  in a third: one more collector

`rlhf-pipeline run long_running --collectors 2` starts all of them and keeps them alive.
Exit code 3: trouble that another try may not have (the reward function, the disk)."""

LEARN = """\
Learns from the rollouts that `rlhf-pipeline collect` stores, in the order of their arrival, and publishes
the weights after each step. Killed, it is started again with the same command, and takes the steps
after its last checkpoint again as the ledger says.

examples:
  rlhf-pipeline learn long_running --run runs/mine
  rlhf-pipeline learn --run runs/mine                    definition and seed are the recorded ones
  rlhf-pipeline learn --run runs/mine --steps 5000       go on with a run that has ended

Exit code 3: trouble that another try may not have (the disk, a live learner)."""

INSPECT = """\
Counts trajectories, groups and tokens, and calls the definition's reward function again on every
stored prompt and completion: do the stored rewards, and the curve in metrics.jsonl, hold?

examples:
  rlhf-pipeline inspect runs/copy_digits
  rlhf-pipeline inspect runs/copy_digits --json | jq .reward_check
  rlhf-pipeline inspect runs/mine --definition ./my_task.py      where the file has moved

Exit code 1 if a reward does not agree."""

SHOW = """\
examples:
  rlhf-pipeline show runs/copy_digits              the newest trajectory, token by token
  rlhf-pipeline show runs/copy_digits --id 17
  rlhf-pipeline show runs/copy_digits --group 3    all completions of one prompt
  rlhf-pipeline show runs/copy_digits --last 20
  rlhf-pipeline show runs/copy_digits --step 12    what optimizer step 12 learned from

One trajectory is shown token by token, several as one line each; --full shows all of each."""

TAIL = """\
One line per trajectory: id, policy version, group, reward, completion tokens, how it finished, and the
start of the completion. Of a run also the newest optimizer step, and with --follow each one that comes.

examples:
  rlhf-pipeline tail runs/copy_digits
  rlhf-pipeline tail runs/copy_digits -f           watch a run that another process goes on with
  rlhf-pipeline tail runs/copy_digits -f -n 0 --filter 'reward>=1'
  rlhf-pipeline tail runs/mine/store -n 50 --filter 'finish_reason==failed'

A filter is written as for `export`. Following only reads: it holds nobody up, and the store may be
appended to, evicted from and compacted meanwhile."""

DIFF = """\
Compares the trajectories, by trajectory_id where each has one, else in the order of arrival. Of two runs
also config.json, and the first optimizer step at which batch, loss, reward or gradient norm differ.
NaN equals NaN; created_at, the time of writing, is not compared.

examples:
  rlhf-pipeline diff runs/copy_digits runs/again
  rlhf-pipeline diff runs/copy_digits runs/again --ignore use_count
  rlhf-pipeline diff runs/copy_digits/store copy --json | jq .trajectories.columns

Exit code 0 if nothing differs, 1 if something does, 2 if they cannot be compared."""

VERIFY = """\
Checks every checksum of the store. For a run also: each trajectory that the ledger names is in the
store, and the steps in metrics.jsonl and ledger.jsonl have no gap. Exit code 1 if something is damaged.

examples:
  rlhf-pipeline verify runs/copy_digits
  rlhf-pipeline verify runs/copy_digits/store"""

COMPACT = """\
Merges finished segments into few, folds later values (patches) in, and gives the space of the old ones
back. Ids, order and values stay, so a run resumes and replays as before. A zarr store becomes sharded,
zstd-compressed groups. While it works, both old and new segments are on the disk; it may be stopped at
any time. Readers are not disturbed; a run, an import or a recorder that writes is refused.

examples:
  rlhf-pipeline compact runs/copy_digits
  rlhf-pipeline compact runs/mine/store"""

REPLAY = """\
Learns from the trajectories of stores and runs, and samples nothing. They are copied into a new run
folder, which keeps what any run keeps; what is missing (log-probs, advantages) is computed first.

A RUN alone is replayed with its own definition and seed and in its own order, and the result compared
with it: on a CPU loss, reward, gradient norm and weights come out the same, bit for bit. A STORE is
learned from by `offline_replay`, or by --definition. A filter is written as for `export`.

examples:
  rlhf-pipeline replay runs/copy_digits                     the same learning curve, from the store alone
  rlhf-pipeline replay runs/solutions --set policy.path=model --epochs 2
  rlhf-pipeline replay runs/a runs/b --weight 3 --weight 1 --filter 'reward>=0.5' --steps 200
  rlhf-pipeline replay runs/copy_digits --from-step 290     take steps again from the newest checkpoint
                                                            before, as the ledger says; changes nothing

Exit code 1 if something should come out the same and does not."""

IMPORT = """\
Reads (prompt, completion, reward) groups from JSONL, Parquet and Hugging Face datasets (save_to_disk),
and the dumps of other trainers: trl (completions/*.parquet), verl (rollout_data_dir), open-instruct
(--save_traces), prime-rl (traces.jsonl, token exports), verifiers, skyrl, nemo-rl, openrlhf, tinker
(capture/sample.jsonl with its rollout summaries), gsm8k-solutions; and what `export` wrote. The format
is recognised by the field names. Rewards are named, or told by the table's advantages; else you are asked.

Token ids and log-probs in the file are kept; text is encoded once, with --tokenizer. An import that
was stopped is typed again and goes on; nothing is imported twice, and a broken line is named.

examples:
  rlhf-pipeline import example_model_solutions.jsonl --into runs/gsm8k-store --tokenizer model
  rlhf-pipeline import outputs/completions --into runs/trl-store --tokenizer model --field reward=accuracy
  rlhf-pipeline import answers.parquet --into runs/mine --field prompt=question --field reward=score"""

EXPORT = """\
Writes every column, ragged ones as lists of numbers; `import` makes an equal store of it again.
A filter is a column (reward, version, date and group are short names; num_tokens and
num_completion_tokens exist too), one of >= <= == != > <, and a value.

examples:
  rlhf-pipeline export runs/copy_digits --to copy_digits.parquet
  rlhf-pipeline export runs/copy_digits --to dataset --filter 'reward>=0.5' --filter 'version<100'
  rlhf-pipeline export runs/copy_digits --to best.jsonl --filter 'date>=2026-01-31' --columns prompt completion"""

COPY = """\
Copies trajectories in the order of arrival, all columns, later values (patches) folded in. The copy is a
store of its own with new ids, not a run; trajectory_id stays. With --backend zarr it is sealed: sharded,
zstd-compressed Zarr groups, read by plain Zarr too, and half the size or less. A filter is written as for
`export`.

examples:
  rlhf-pipeline copy runs/copy_digits --to archive --backend zarr
  rlhf-pipeline copy archive --to runs/again
  rlhf-pipeline copy runs/copy_digits --to best --filter 'reward>=1'"""

NEW_MODEL = """\
Trains a tokenizer on the text and writes a small untrained causal language model with it, as a
checkpoint folder that transformers loads. Nothing is downloaded.

example:
  rlhf-pipeline new-model model --text train.jsonl --hidden-size 256 --num-layers 4
  rlhf-pipeline run gsm8k --set policy.path=model --set prompts.path=train.jsonl"""
