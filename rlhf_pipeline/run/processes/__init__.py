"""Collectors, learner and supervisor as separate processes that share one run folder.

Only files connect them, so each may be started, stopped and killed at any time:

    store/       trajectories; every collector appends, the learner reads
    rollouts/    which rollouts are in the store, in the order of arrival: the set of consumed prompts
    weights/     a folder per published version, and `latest.json`, which names the newest
    claims/      which collector works on which rollout: one note each, which counts while the collector holds its name
    processes/   a lock and a heartbeat per process
"""
