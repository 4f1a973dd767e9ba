"""Reinforcement learning over the public SDK: the shared GRPO loop, and what an RL task is."""

from mint.rl.adapter import RLAdapter
from mint.rl.config import RLConfig
from mint.rl.evaluation import Estimate
from mint.rl.findings import Finding
from mint.rl.loop import RunResult, run_grpo
from mint.rl.progress import LiveProgress
from mint.rl.rollouts import Group, Rollout

__all__ = ["Estimate", "Finding", "Group", "LiveProgress", "RLAdapter", "RLConfig", "Rollout", "RunResult", "run_grpo"]
