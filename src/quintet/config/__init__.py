"""Configuration of runs: schema, composition, checks and plans. Imports neither torch nor ray."""
