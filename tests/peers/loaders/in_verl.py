"""verl's own trainer builds our buffers, samples through them, and computes advantages and metrics of what they serve.

Runs in an environment of `verl==0.9.1` and `TransferQueue`, on a real queue in a local Ray: `python in_verl.py FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A busy machine starts a raylet more slowly than the 30 s that Ray waits.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "1", "RAY_raylet_start_wait_time_s": "300"}

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from trajectory_store import TrajectoryStore

MODULE = "pkg://trajectory_store.adapters.verl"
SETTINGS = (
    *("filter_groups_metric", "train_batch_size", "gen_batch_size", "max_inflight_gen_batches"),
    *("sync_refill_failed_groups", "max_off_policy_threshold", "max_off_policy_strategy", "poll_interval"),
)


def config(mode: str, sampler: str | None, metric: str) -> Any:
    """Return the settings that the functions below read."""
    custom = {"path": MODULE, "name": sampler} if sampler else None
    return OmegaConf.create(
        {
            "trainer": {
                "v1": {
                    "trainer_mode": mode,
                    "sync": {},
                    "separate_async": {},
                    "sampler": {
                        "custom_sampler": custom,
                        "max_off_policy_threshold": 2,
                        "max_off_policy_strategy": "drop",
                        "sampler_kwargs": {},
                        "sync_refill_failed_groups": mode == "sync",
                    },
                },
                "n_gpus_per_node": 1,
                "nnodes": 1,
            },
            "algorithm": {
                "filter_groups": {"enable": True, "metric": metric, "max_inflight_gen_batches": 3},
                "use_kl_in_reward": False,
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "norm_adv_by_std_in_grpo": False,
                "rollout_correction": None,
            },
            "data": {"train_batch_size": 2},
            "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
            "actor_rollout_ref": {
                "rollout": {"n": 2, "calculate_log_probs": True, "temperature": 0.7},
                "model": {},
                "actor": {},
            },
        }
    )


class AgentLoop(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # what runs in the actor
    """verl's own worker, with the outputs and scores of each session given."""

    def __init__(self) -> None:
        self.background_tasks = set[Any]()

    async def _compute_score(self, outputs: list[Any], kwargs: Any) -> None:
        for output in outputs:
            output.reward_score = kwargs["score"]
            output.extra_fields["reward_extra_info"] = {"acc": kwargs["score"], "pred": "two"} | (
                {"format": 0.5} if kwargs["session_id"] else {}
            )

    async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None:
        return

    def _compute_multi_modal_inputs(self, *args: Any) -> dict[str, Any]:
        return {}

    def _compute_position_ids(self, input_ids: Any, mask: Any, images: Any) -> Any:
        return torch.arange(input_ids.shape[1])[None]


def generate(uid: str, scores: list[float], step: int, outputs: int = 1) -> None:
    """Put a finished group into the queue, as verl's agent loop does."""
    fields: dict[str, Any] = {"num_turns": 4, "metrics": {}}
    for session, score in enumerate(scores):
        steps = {"min_global_steps": step, "max_global_steps": step}
        rows = [
            AgentLoopOutput(
                prompt_ids=[1, 2] + [7] * i, response_ids=[3 + session, 5], response_mask=[1, 1],
                response_logprobs=[-0.5, -1.0], extra_fields=steps, **fields,
            )
            for i in range(outputs)
        ]  # fmt: skip
        about = {"uid": uid, "session_id": session, "global_steps": step, "score": score}
        about["reward_model"] = {"ground_truth": "2"}
        asyncio.run(AgentLoop()._agent_loop_postprocess(rows, False, **about))
    tag = {"is_prompt": True, "status": "finished", "global_steps": step}
    tq.kv_batch_put(keys=[uid], partition_id="train", fields=None, tags=[tag])


def trainer_of(kind: Any, mode: str, sampler: str | None, metric: str = "acc") -> tuple[Any, list[int]]:
    """Return a trainer of verl's that was not started, and the prompts that its buffer asks for."""
    refills: list[int] = []

    class Trainer(kind):
        def __init__(self) -> None:
            self.config, self.trainer_mode = config(mode, sampler, metric), mode
            self.use_critic, self.now = False, 1
            self._rollout_moe_lb_metrics_accumulator = None

        def _add_prompts_to_generate(self, num: int) -> None:
            refills.append(num)
            for i in range(num):
                generate(f"refill{len(refills)}x{i}", [1.0, 0.0], self.now)

        def _get_n_gpus_for_throughput(self) -> int:
            return 1

    trainer = Trainer()
    trainer.replay_buffer = trainer._build_replay_buffer()
    trainer.replay_buffer.poll_interval = 0.01
    return trainer, refills


def clear() -> None:
    """Empty the queue."""
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(keys=[*keys], partition_id=partition)


def training(kind: Any, mode: str, sampler: str | None) -> Any:
    """Return two batches that a buffer gives to the trainer, with its metrics, and the order of its refills."""
    clear()
    trainer, refills = trainer_of(kind, mode, sampler)
    for uid, scores in (("a", [1.0, 1.0]), ("b", [1.0, 0.0]), ("c", [0.0, 0.0]), ("d", [0.5, 0.0])):
        generate(uid, scores, 1)
    generate("e", [1.0, 0.0], 2, outputs=2)
    batches = []
    for step, size in ((2, 6), (4, 2)):  # the first one needs refills
        trainer.now = step
        for uid in ("f", "g"):
            generate(f"{uid}{step}", [1.0, 0.0], step)
        meta, metrics = trainer.replay_buffer.sample(step, "train", size)
        batches.append((meta.keys, meta.tags, {name: str(value) for name, value in sorted(metrics.items())}))
        tq.kv_clear(keys=meta.keys, partition_id="train")
    return batches, refills


def served(folder: Path) -> None:
    """Verl's advantage and metrics of groups that a store serves."""
    clear()
    os.environ["TRAJECTORY_STORE"] = str(folder / "sync")
    trainer, _ = trainer_of(PPOTrainerSync, "sync", "ServingBuffer")
    batch, _ = trainer.replay_buffer.sample(1, "train", 3)
    trainer.config.actor_rollout_ref.rollout.moe_load_balance_metrics_interval = 0
    scores = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rm_scores", "rollout_log_probs"])
    sampled = scores.select("rollout_log_probs").rename_key_("rollout_log_probs", "old_log_probs")
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=sampled)
    metrics: dict[str, Any] = {}
    batch = trainer._compute_advantage(batch, metrics)
    advantages = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages", "rm_scores"])
    rewards = [float(row.sum()) for row in advantages["rm_scores"].unbind()]
    means = [float(row[0]) for row in advantages["advantages"].unbind()]
    trainer._compute_metrics(batch, metrics, {"step": 1.0, "gen": 1.0, "update_actor": 1.0}, 1, 0)
    assert metrics["num_turns/mean"] == 4.0, metrics["num_turns/mean"]
    assert metrics["critic/score/mean"] == sum(rewards) / len(rewards), metrics
    assert {round(value, 3) for value in means} >= {0.5, -0.5}, means
    sys.stdout.write(f"served {len(batch.keys)} rows, advantages {means}\n")


def main(folder: Path) -> None:
    """Compare trainings with and without our buffers, look at what is recorded, and serve it."""
    sys.stdout.write("starting\n")
    sys.stdout.flush()
    ray.init(num_cpus=12, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    tq.init()
    sys.stdout.write("queue\n")
    sys.stdout.flush()
    for kind, mode, plain, name in (
        (PPOTrainerSync, "sync", ReplayBuffer, "RecordingBuffer"),
        (PPOTrainerSeparateAsync, "separate_async", ReplayBufferAsync, "RecordingBufferAsync"),
    ):
        os.environ["TRAJECTORY_STORE"] = str(folder / mode)
        for metric in ("acc", "reward"):
            theirs, ours = (trainer_of(kind, mode, sampler, metric)[0].replay_buffer for sampler in (None, name))
            assert type(theirs) is plain, type(theirs)
            assert isinstance(ours, plain), type(ours)
            settings = [{setting: getattr(buffer, setting) for setting in SETTINGS} for buffer in (theirs, ours)]
            assert settings[0] | {"poll_interval": 0} == settings[1] | {"poll_interval": 0}, settings
            assert settings[1]["filter_groups_metric"] == metric
        without, with_ours = training(kind, mode, None), training(kind, mode, name)
        assert without == with_ours, (without, with_ours)
        assert with_ours[1], "nothing was refilled"
        with TrajectoryStore.open(folder / mode) as store:
            rows = store.read(store.ids())
        keys = [json.loads(meta)["prompt"]["key"] for meta in rows["meta"]]
        sampled = [key for batch, _, _ in with_ours[0] for key in batch]
        assert set(sampled) <= set(keys), set(sampled) - set(keys)
        assert {"a_0_0", "a_1_0", "c_0_0", "c_1_0"} <= set(keys), "what the filter drops is recorded, too"
        assert len(set(keys)) == len(keys)
        at = dict(zip(keys, range(len(keys)), strict=True))
        assert [rows["episode_size"][at[f"e_0_{i}"]] for i in range(2)] == [2, 2]
        assert str(rows["task_reward"][at["e_0_0"]]) == "nan"
        assert rows["task_reward"][at["e_0_1"]] == 1.0
        assert (rows["reward_acc"][at["b_0_0"]], rows["reward_format"][at["b_1_0"]]) == (1.0, 0.5)
        assert str(rows["reward_format"][at["b_0_0"]]) == "nan"
        assert json.loads(rows["meta"][at["b_0_0"]])["prompt"]["reward_extra_info"]["pred"] == "two"
        assert len({int(rows["group_id"][at[key]]) for key in ("e_0_0", "e_0_1", "e_1_0", "e_1_1")}) == 1
        sys.stdout.write(f"{mode}: {len(sampled)} sampled, {len(keys)} recorded, refills {with_ours[1]}\n")
    wrong = SimpleNamespace()
    try:
        trainer_of(PPOTrainerSeparateAsync, "separate_async", "RecordingBuffer")
    except Exception as error:  # noqa: BLE001 - of the store, by its name below
        wrong = error
    assert type(wrong).__name__ == "SchemaError", wrong
    assert "RecordingBufferAsync" in str(wrong)
    served(folder)
    sys.stdout.write("all accepted\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's actors end with their driver


if __name__ == "__main__":
    main(Path(sys.argv[1]))
