"""A task set of verifiers with a tool, which a server of its own runs."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, digits: str) -> str:
        """Add up the digits of a text."""
        return str(sum(int(character) for character in digits if character.isdigit()))


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class Config(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Sums(vf.Taskset[Sum, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]

    def load(self):
        for digit in range(1, 5):
            yield Sum(Data(prompt=f"{digit}+{digit}", answer=str(2 * digit)), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
