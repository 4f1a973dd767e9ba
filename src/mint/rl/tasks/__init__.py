"""Parts of RL tasks: tools, judges, rubrics, graders and chat formats."""
