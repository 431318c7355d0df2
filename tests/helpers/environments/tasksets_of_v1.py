"""Two tasksets in verifiers' own format, as users have them, of rows that are here: one turn, and a game
whose environment is the user. Copied into the folder of a test, as `sums` and as `words`."""

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    first: int = 1


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + 8):
            given = {"prompt": f"{n}+{n}=", "system_prompt": "Add.", "answer": str(n + n)}
            yield SumsTask(SumsData(**given), self.config.task)


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    pass


class WordsConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WordsEnv(vf.Env[WordsConfig]):
    async def run(self, task, agents):
        if task.data.word == "broken":
            raise OSError("its shop is closed")
        async with agents.player.interaction(task) as interaction:
            segment, guesses, won = await interaction.turn(), 0, False
            while not segment.terminated and not won:
                guesses, won = guesses + 1, task.data.word in segment.last_reply
                if not won:
                    segment = await interaction.turn("no")
        interaction.trace.record_reward("won", float(won), 1.0)
        interaction.trace.record_metric("guesses", float(guesses))


class WordsTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("abc", "xyz", "broken"):
            yield WordTask(WordData(prompt="guess", word=word), self.config.task)
