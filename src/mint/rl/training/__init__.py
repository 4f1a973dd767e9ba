"""From graded groups to optimizer steps: advantages, the KL penalty, datums, and the policy update."""
