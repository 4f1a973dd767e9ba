"""What the ranks of a group do in step, and how they notice that one does not."""
