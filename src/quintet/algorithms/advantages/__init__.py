"""Advantage estimators, registered in `quintet.config.native.advantages`.

Each function takes a `Batch` and its config and returns `(advantages, returns)`, float32 or float64 [N] like the
rewards of the batch, 0 outside the loss mask. Estimators run over whole trajectories, also if a sliding window splits
them into several sequences. Trajectories without response tokens in the batch (it may be a part of a larger one) do
not enter any mean.
"""
