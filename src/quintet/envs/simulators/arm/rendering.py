"""Images of the arm from above: by MuJoCo and EGL, or drawn by NumPy."""

from __future__ import annotations

import atexit
import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from quintet.envs.simulators.arm.scene import (
    FOREARM,
    FOREARM_RADIUS,
    TABLE,
    TIP,
    TIP_RADIUS,
    UPPER,
    UPPER_RADIUS,
    VIEW_CENTER,
    VIEW_HEIGHT,
    Body,
    Color,
    elbow_positions,
    tip_positions,
)
from quintet.errors import MachineError

if TYPE_CHECKING:
    import mujoco

DRAWN_AT_ONCE: Final = 2**20
"""Pixels that NumPy draws at once; larger arrays leave the processor's cache."""


@dataclass(frozen=True, slots=True)
class Scenes:
    """Scenes of the arm to render, one for each of n images."""

    joints: np.ndarray
    """Joint angles, rad [n, 2]."""
    objects: np.ndarray
    """Positions of the objects, meters [n, K, 2]."""


class Renderer(Protocol):
    """Renders scenes as images, RGB uint8 [n, height, width, 3]."""

    def render(self, scenes: Scenes, height: int, width: int) -> np.ndarray:
        """Return the images."""

    def close(self) -> None:
        """Free the renderer."""


def build_renderer(
    kind: Literal["auto", "egl", "numpy"], model: mujoco.MjModel, bodies: tuple[Body, ...], largest: tuple[int, int]
) -> Renderer:
    """Return a renderer for images up to `largest` (height, width).

    Raises:
        MachineError: `kind` is `egl` and EGL does not work here.
    """
    if kind == "numpy":
        return NumpyRenderer(bodies)
    _load_triton()
    try:
        return EglRenderer(model, bodies, largest)
    except (
        Exception
    ) as error:  # PyOpenGL raises errors of many kinds, AttributeError among them, if libraries are missing
        if kind == "auto":
            return NumpyRenderer(bodies)
        raise MachineError(
            f"env.options.renderer=egl: EGL does not work on this machine ({type(error).__name__}: {error})",
            "install libegl1 and a driver (Mesa or NVIDIA), or set env.options.renderer=numpy",
        ) from error


def _load_triton() -> None:
    """Load triton's library, if it is installed, before Mesa's drivers. Both contain LLVM, and triton, which torch's
    optimizers import, crashes the process if it is loaded second."""
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")


class EglRenderer:
    """Renders by MuJoCo without shadows, reflections and multisampling."""

    def __init__(self, model: mujoco.MjModel, bodies: tuple[Body, ...], largest: tuple[int, int]) -> None:
        import mujoco
        from mujoco.egl import GLContext

        height, width = largest
        self._mujoco = mujoco
        self._model, self._data = model, mujoco.MjData(model)
        self._movable = [index for index, body in enumerate(bodies) if body.movable]
        self._fixed = [index for index, body in enumerate(bodies) if not body.movable]
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        mujoco.mj_forward(model, self._data)
        self._context: Any = GLContext(width, height)
        # mujoco has registered the exit handler that ends EGL; those registered later, as this one, run before it.
        atexit.register(self.close)
        self._context.make_current()
        self._options = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        self._scene = mujoco.MjvScene(model, maxgeom=32)
        for flag in (
            mujoco.mjtRndFlag.mjRND_SHADOW,
            mujoco.mjtRndFlag.mjRND_REFLECTION,
            mujoco.mjtRndFlag.mjRND_SKYBOX,
        ):
            self._scene.flags[flag] = 0
        self._buffers = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffers)

    def render(self, scenes: Scenes, height: int, width: int) -> np.ndarray:
        images = np.empty((len(scenes.joints), height, width, 3), np.uint8)
        self._context.make_current()
        rectangle = self._mujoco.MjrRect(0, 0, width, height)
        for image, joints, objects in zip(images, scenes.joints, scenes.objects, strict=True):
            self._render_one(image, joints, objects, rectangle)
        return images[:, ::-1]

    def _render_one(self, image: np.ndarray, joints: np.ndarray, objects: np.ndarray, rectangle: Any) -> None:
        self._data.qpos[:] = np.concatenate([joints, objects[self._movable].ravel()])
        self._data.mocap_pos[:, :2] = objects[self._fixed]
        self._mujoco.mj_kinematics(self._model, self._data)
        every = self._mujoco.mjtCatBit.mjCAT_ALL
        self._mujoco.mjv_updateScene(self._model, self._data, self._options, None, self._camera, every, self._scene)
        self._mujoco.mjr_render(rectangle, self._scene, self._buffers)
        self._mujoco.mjr_readPixels(image, None, rectangle, self._buffers)

    def close(self) -> None:
        if self._context is not None:
            atexit.unregister(self.close)
            self._context.make_current()
            self._buffers.free()
            self._context.free()
            self._context = None


class NumpyRenderer:
    """Draws flat circles and capsules with smooth edges, from the table upward."""

    def __init__(self, bodies: tuple[Body, ...]) -> None:
        self._bodies = bodies

    def render(self, scenes: Scenes, height: int, width: int) -> np.ndarray:
        at_once = max(1, DRAWN_AT_ONCE // (height * width))
        slices = (slice(start, start + at_once) for start in range(0, len(scenes.joints), at_once))
        parts = [self._draw(Scenes(scenes.joints[part], scenes.objects[part]), height, width) for part in slices]
        return np.concatenate(parts) if parts else np.empty((0, height, width, 3), np.uint8)

    def _draw(self, scenes: Scenes, height: int, width: int) -> np.ndarray:
        canvas = _Canvas(len(scenes.joints), height, width)
        order = sorted(range(len(self._bodies)), key=lambda index: self._bodies[index].shape != "disk")
        for index in order:
            body, center = self._bodies[index], scenes.objects[:, index]
            canvas.draw(center, center, body.radius, body.color)
        elbow, tip = elbow_positions(scenes.joints), tip_positions(scenes.joints)
        canvas.draw(np.zeros_like(elbow), elbow, UPPER_RADIUS, UPPER)
        canvas.draw(elbow, tip, FOREARM_RADIUS, FOREARM)
        canvas.draw(tip, tip, TIP_RADIUS, TIP)
        return canvas.images()

    def close(self) -> None:
        pass


class _Canvas:
    """n images on which capsules are drawn."""

    def __init__(self, number: int, height: int, width: int) -> None:
        self._pixel = np.float32(VIEW_HEIGHT / height)
        columns = (np.arange(width, dtype=np.float32) + 0.5 - width / 2) * self._pixel + VIEW_CENTER[0]
        rows = (height / 2 - np.arange(height, dtype=np.float32) - 0.5) * self._pixel + VIEW_CENTER[1]
        self._x, self._y = columns[None, None, :], rows[None, :, None]
        self._colors = np.empty((3, number, height, width), np.float32)
        self._colors[:] = np.array(TABLE, np.float32)[:, None, None, None]

    def draw(self, start: np.ndarray, end: np.ndarray, radius: float, color: Color) -> None:
        """Draw capsules, or circles where the ends, meters [n, 2], are equal."""
        x, y = self._x - _column(start, 0), self._y - _column(start, 1)
        if start is not end:
            way_x, way_y = _column(end - start, 0), _column(end - start, 1)
            along = np.clip((x * way_x + y * way_y) / (way_x**2 + way_y**2), 0, 1)
            x, y = x - along * way_x, y - along * way_y
        cover = np.clip((radius - np.sqrt(x * x + y * y)) / self._pixel + 0.5, 0, 1)
        for channel, value in zip(self._colors, color, strict=True):
            channel += cover * (np.float32(value) - channel)

    def images(self) -> np.ndarray:
        return np.ascontiguousarray(np.rint(self._colors * 255).astype(np.uint8).transpose(1, 2, 3, 0))


def _column(points: np.ndarray, axis: int) -> np.ndarray:
    return points[:, axis].astype(np.float32)[:, None, None]
