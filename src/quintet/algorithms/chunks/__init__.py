"""Advantages and losses of policies that output chunks of robot actions.

T is the number of chunks of a rollout, B that of robots, C the actions of a chunk, D the dimension of an action, and
N the chunk steps of a flattened mini-batch. Rewards have a level, the chunk (V = 1) or the action (V = C), and so have
log-probs and entropies, in addition the token: one dimension of an action.
"""
