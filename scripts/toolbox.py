"""Tools that run: environments of trainer/rollouts/environments.py, whose tools a chat offers and
executes."""

from collections.abc import Sequence

from common.errors import UserError, reason
from trainer.rollouts.environments import Call, load_environment, tool_message

ROUNDS = 8  # of calls and results to one question


class Toolbox:
    """The tools of environments.

    names: as `--environment` of train_agent.py takes them. Raises UserError if there is no such environment,
    or it cannot be made."""

    def __init__(self, names: Sequence[str]):
        self.tools: list[dict] = []
        self.owners = {}  # name of a tool -> its environment
        for name in names:
            try:
                environment = load_environment(name)({})
            except UserError as error:
                raise UserError(str(error).replace("--environment", "--tools")) from error
            except Exception as error:  # a user's environment can raise anything
                raise UserError(
                    f"--tools {name}: it cannot be made without a record ({reason(error)})"
                ) from error
            self.tools += environment.tools
            answers = getattr(environment, "answers", ())  # other names of its tools, too
            names_of_tools = [tool["function"]["name"] for tool in environment.tools]
            self.owners |= dict.fromkeys([*answers, *names_of_tools], environment)

    def reply(self, calls: Sequence[Call]) -> list[dict]:
        """A message of role `tool` for each call, in their order; an error message for one that cannot be
        answered."""
        return [self._reply(call) for call in calls]

    def _reply(self, call: Call) -> dict:
        if call["name"] not in self.owners:
            return tool_message(f"error: no tool named {call['name']}")
        try:
            (message,) = self.owners[call["name"]].reply([call])
            return tool_message(message["content"])
        except Exception as error:  # as above
            return tool_message(f"error: {reason(error)}")
