"""Collectors, learner and supervisor as processes of their own, which meet in one run folder.

Nothing but files connects them, so each may be started, stopped and killed at any time:

    store/       trajectories; every collector appends, the learner reads
    rollouts/    which rollouts are in the store, in the order of arrival: the set of consumed prompts
    weights/     a folder per published version, and `latest.json`, which names the newest
    claims/      who works on which rollout: a note per collector, which counts while that one has its name
    processes/   a lock and a heartbeat per process
"""
