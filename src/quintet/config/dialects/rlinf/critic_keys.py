"""Keys of the critic in RLinf's runs on text: those of the actor, by default with the actor's values."""

from collections.abc import Iterable, Iterator

from quintet.config.dialects.dialect import Reference
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.rlinf.key_values import TABLES
from quintet.config.dotted import has_key
from quintet.config.native.learners import CriticConfig
from quintet.config.native.megatron import MegatronConfig

HAS_CRITIC = "critic.use_critic_model"
NATIVE_DEFAULTS = {"critic": CriticConfig(megatron=MegatronConfig()).model_dump()}
DTYPE, WEIGHTS = "critic.model.precision", "critic.megatron.ckpt.hf_model_path"
BACKEND, STRATEGY = "critic.training_backend", "critic.fsdp_config.strategy"


def critic_reference(references: Iterable[Reference]) -> Reference:
    """Return the keys of the critic, which are those of the actor in other references."""
    return Reference("rlinf_critic", lambda: tuple(_critic_specs(spec for each in references for spec in each.load())))


def _critic_specs(specs: Iterable[KeySpec]) -> Iterator[KeySpec]:
    for spec in specs:
        if spec.key.startswith("actor."):
            yield _critic_spec(spec)


def _critic_spec(spec: KeySpec) -> KeySpec:
    key, native = _of_critic(spec.key), tuple(map(_of_critic, spec.native[:1] if spec.direct else ()))
    native = native if all(has_key(NATIVE_DEFAULTS, name) for name in native) else ()
    is_converted = bool(native) or key in TABLES["converted_critic_keys"] or spec.requires is not None
    end = "" if is_converted else " Has no effect here, since the critic follows the policy in it."
    condition = (_of_critic(spec.only_if[0]), spec.only_if[1]) if spec.only_if else (HAS_CRITIC, True)
    return spec.model_copy(
        update={
            "key": key,
            "effect": f"As {spec.key}, for the critic.{end}",
            "default": f"${{{spec.key}}}",
            "native": native,
            "computed": False,
            "aliases": tuple(map(_of_critic, spec.aliases)),
            "only_if": condition,
            "noop": tuple(_of_critic(value) if isinstance(value, str) else value for value in spec.noop),
        }
    )


def _of_critic(text: str) -> str:
    """Return a key of the actor, or a reference to one, as one of the critic."""
    prefix = "${" if text.startswith("${") else ""
    return f"{prefix}critic.{text.removeprefix(f'{prefix}actor.')}" if text.startswith(f"{prefix}actor.") else text
