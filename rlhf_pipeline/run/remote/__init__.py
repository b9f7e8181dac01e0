"""A run in an object store: what a folder does with renames and locks, done with puts that only one process wins.

config.json                              as in a folder
store/                                   the trajectories, see `trajectory_store.objects`
rollouts/000000000012.json               a rollout that is in the store: put once, by whoever stored it
claims.json                              who works on which rollout: replaced by compare-and-swap
ledger.jsonl/, metrics.jsonl/            lines in numbered parts, each put once; a second writer's part is refused
weights/latest.json                      the pointer: replaced by compare-and-swap
weights/*.json, checkpoints/*.json       of a sealed folder, which pieces its files consist of
packs/                                   the pieces: a tensor each, found by its content
processes/NAME.lease                     renewed by its process; one that stays the same is taken for dead
"""
