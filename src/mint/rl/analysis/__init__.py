"""What looks wrong in a run and what to do about it: diagnosis, doctor, planner and bisect."""
