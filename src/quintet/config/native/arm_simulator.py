"""Options of the simulator `arm`, `env.options`."""

from typing import Literal

from pydantic import PositiveInt

from quintet.config.native.section import NonNegative, Section


class ArmOptions(Section):
    """Arm with two joints at a table, simulated by MuJoCo and seen from above."""

    control: Literal["tip", "joint"] = "tip"
    """What an action moves: the tip along x and y by up to 0.03 m, or the joints by up to 0.2 rad. 1 is the limit."""
    privileged_state: bool = False
    """Add the positions of the objects to the state, for policies without images."""
    progress_reward: NonNegative = 0.0
    """Reward per 0.1 m by which an action brings the task closer to its solution. 0 rewards the solution only."""
    renderer: Literal["auto", "egl", "numpy"] = "auto"
    """`egl` renders by MuJoCo and EGL, `numpy` draws the same scene without shading; `auto` uses EGL where it works."""
    blank_images: bool = False
    """Replace the images that the policy observes by black ones, as a control."""
    video_size: PositiveInt = 256
    """Height and width of pictures for people, pixels."""
    start_states: PositiveInt = 1_000_000
    """Number of distinct start states."""
