"""VAGEN: agents over worlds, on verl's keys."""
