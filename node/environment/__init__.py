"""Tasks: where prompts come from, where the answer stands in a completion, and what it is worth."""
