"""A run in an object store: puts that only one process wins take the place of a folder's renames and locks.

config.json                              as in a folder
store/                                   the trajectories, see `trajectory_store.objects`
rollouts/000000000012.json               a rollout that is in the store: put once, by the collector that stored it
claims.json                              which collector works on which rollout: replaced by compare-and-swap
ledger.jsonl/, metrics.jsonl/            lines in numbered parts, each put once; a second writer's part is rejected
weights/latest.json                      the pointer: replaced by compare-and-swap
weights/*.json, checkpoints/*.json       the pieces of which a sealed folder's files consist
packs/                                   the pieces: a tensor each, found by its content
processes/NAME.lease                     renewed by its process; an unchanged lease means that the process is dead
"""
