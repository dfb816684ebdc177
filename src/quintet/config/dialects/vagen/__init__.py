"""VAGEN: agents over envs, on verl's keys."""
