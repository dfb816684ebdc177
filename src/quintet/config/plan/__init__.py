"""What a run will do, worked out before anything heavy is loaded: how many games and updates (`arithmetic`), on which
devices (`placement`), in how much memory (`memory`), and what looks unwise (`advice`). `survey` is all of it.
"""

from quintet.config.plan.arithmetic import Plan, plan
from quintet.config.plan.shapes import PRESET_CONTEXTS
from quintet.config.plan.steps import steps_of

__all__ = ["PRESET_CONTEXTS", "Plan", "plan", "steps_of"]
