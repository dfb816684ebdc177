"""What a run is: schema, composition, arithmetic. Imports neither torch nor ray."""

from quintet.config.compose import Composed, dump_config, load_experiment
from quintet.config.native import Experiment
from quintet.config.plan import Plan, plan

__all__ = ["Composed", "Experiment", "Plan", "dump_config", "load_experiment", "plan"]
