"""Where the loop's rollouts come from: prompts, group filtering, over-sampling, partial and asynchronous rollouts."""
