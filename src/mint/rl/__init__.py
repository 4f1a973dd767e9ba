"""Reinforcement learning over the public SDK: what a task is, the shared GRPO loop, and why a run does not learn."""

from mint.errors import MissingExtraError
from mint.extras import install_command

try:
    import numpy  # noqa: F401  # the base install is without
    import rich  # noqa: F401
except ModuleNotFoundError as error:
    to_install = f"{install_command('rl')}; or {install_command('local')} to train on this machine"
    raise MissingExtraError(
        f"mint.rl needs the package {error.name}, which is not installed", remedy=to_install
    ) from error

from mint.rl.adapter import MessageEnvAdapter, RLAdapter, Task
from mint.rl.analysis.diagnosis import diagnose
from mint.rl.analysis.doctor import Examination, examine
from mint.rl.analysis.run_record import RunRecord
from mint.rl.config import RLConfig
from mint.rl.estimate import Estimate
from mint.rl.finding import Finding
from mint.rl.loop import run_grpo
from mint.rl.message_env import Message, MessageEnv, MessageStepResult
from mint.rl.reward import Reward, UnsupportedError
from mint.rl.rollout import Group, Rollout, Turn
from mint.rl.run_result import RunResult
from mint.rl.tasks.calculator import calculator
from mint.rl.tasks.judges import PairwiseJudge
from mint.rl.tasks.mixture import mixture
from mint.rl.tasks.rubric import Rubric
from mint.rl.tasks.search import Search
from mint.rl.tasks.tool_calls import Tool, tool
from mint.rl.tasks.tool_env import Costs, ToolEnv
from mint.rl.tracking.progress import LiveProgress
from mint.runs.data_frames import LoadedRun, load_run

__all__ = [
    "Costs",
    "Estimate",
    "Examination",
    "Finding",
    "Group",
    "LiveProgress",
    "LoadedRun",
    "Message",
    "MessageEnv",
    "MessageEnvAdapter",
    "MessageStepResult",
    "PairwiseJudge",
    "RLAdapter",
    "RLConfig",
    "Reward",
    "Rollout",
    "Rubric",
    "RunRecord",
    "RunResult",
    "Search",
    "Task",
    "Tool",
    "ToolEnv",
    "Turn",
    "UnsupportedError",
    "calculator",
    "diagnose",
    "examine",
    "load_run",
    "mixture",
    "run_grpo",
    "tool",
]
