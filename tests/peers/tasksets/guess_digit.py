"""An environment of verifiers with several turns: a digit is guessed, and every wrong guess is answered."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Task(vf.Task[Data]):
    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / trace.num_turns

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[Config]):
    async def run(self, task, agents):
        if task.data.number == 9:
            raise OSError("no route")
        right = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and not right:
                right = str(task.data.number) in segment.last_reply
                if not right:
                    segment = await interaction.turn("0:")
        interaction.trace.record_reward("right", float(right), 1.0)


class Digits(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(10):
            yield Task(Data(prompt=f"U{number}", number=number), self.config.task)


__all__ = ["Digits", "Guess"]
