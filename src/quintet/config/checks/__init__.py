"""Checks of a whole configuration: what this version, engine, backend or number of processes cannot do."""
