"""verl: reinforcement learning, fine-tuning and evaluation on prompts from files."""
