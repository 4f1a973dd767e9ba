"""An environment with a tool and several turns: the policy may ask a calculator before it answers.

    python examples/04_tool_environment.py

`MessageEnv` has two methods: how the conversation begins, and what follows a message of the policy. This one is written
out by hand. `mint.rl.ToolEnv` does the same for any list of Python functions, and describes them to the model.
"""

import json
import random
import re

from mint.rl import MessageEnv, MessageEnvAdapter, MessageStepResult, RLConfig, run_grpo

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ARITHMETIC = re.compile(r"\s*\d+\s*[-+*]\s*\d+\s*")


class CalculatorEnv(MessageEnv):
    """One question. A message with a tool call gets the tool's result; any other message is graded and ends it."""

    def __init__(self, left, right):
        self.left, self.right = left, right

    def initial_observation(self):
        """The conversation up to the policy's first message."""
        return [
            {"role": "system", "content": "You have a calculator."},
            {"role": "user", "content": f"What is {self.left} + {self.right}?"},
        ]

    def step(self, message):
        """`message["content"]` is the text that the policy has sampled."""
        call = CALL.search(message["content"])
        if call is not None:
            result = self.calculate(call[1])
            return MessageStepResult(
                episode_done=False, next_messages=[{"role": "tool", "content": result}], tool_calls=1
            )
        numbers = re.findall(r"-?\d+", message["content"])
        return MessageStepResult(reward=float(numbers == [str(self.left + self.right)]))

    def calculate(self, call):
        """Evaluates nothing but two numbers and an operator: what a model writes is never executed."""
        try:
            expression = json.loads(call)["arguments"]["expression"]
        except (ValueError, KeyError, TypeError):
            return "error: the call is not valid JSON with an expression"
        if not isinstance(expression, str) or not ARITHMETIC.fullmatch(expression):
            return "error: the expression must be two numbers and an operator"
        left, operator, right = re.split(r"([-+*])", expression)
        return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(left), int(right)))


class Additions(MessageEnvAdapter):
    """The task: its data, and an environment for each item."""

    def __init__(self):
        rng = random.Random(0)
        pairs = list({(rng.randrange(100, 1000), rng.randrange(10, 100)) for _ in range(2000)})
        self.heldout, self.training = pairs[:64], pairs[64:]

    def build_dataset(self):
        """The training items."""
        return self.training

    def build_heldout(self):
        """Items that are never trained on."""
        return self.heldout

    def make_env(self, item):
        """A fresh environment for each episode."""
        return CalculatorEnv(*item)


config = RLConfig(
    base_model="mint/tiny",
    steps=8,
    batch_size=8,
    group_size=8,
    max_tokens=48,
    max_turns=3,
    learning_rate=2e-3,
    seed=0,
)
result = run_grpo(Additions(), config)

before, after = result.heldout_before[1.0], result.heldout_after[1.0]  # sampled at temperature 1
print(f"held-out reward: {before.mean:.2f} before, {after.mean:.2f} after")
print(f"{result.samples} episodes in {result.steps} steps, {result.seconds:.0f} s")
print("run:", result.run_dir)
