"""Factory of vector environments from ``env.*`` settings, and the specification of an
environment.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tianflow import plugins
from tianflow.envs import episode_metrics
from tianflow.envs.attributes import AttributeRefusedError, AttributeSetter
from tianflow.envs.progress import EnvironmentProgress
from tianflow.envs.using import with_environment
from tianflow.envs.vector import VectorEnvironment, failures_named
from tianflow.errors import ConfigError, EnvironmentFailedError, Problem

if TYPE_CHECKING:
    from tianflow.config.model import Config, EnvSettings
    from tianflow.core.payloads import EnvironmentSpec

ATARI_VECTOR = "ale_py.vector_env:AtariVectorEnv"
EXTRAS = {"ale_py": "atari", "mujoco": "mujoco"}
"""Extra of tianflow that installs a package required by environments."""
Maker = Callable[[int], Any]
"""Creates a `gymnasium.vector.VectorEnv` of a number of environments."""
Wrapper = Callable[[Any], Any]
"""Function from environment to environment."""


class Recipe(NamedTuple):
    """A factory of vectors, and properties that its environments do not report."""

    make: Maker
    frames_per_step: int = 1
    clips_rewards: bool = False


def environment_seed(
    run_seed: int,
    actor: int,
    num_envs: int,
    *,
    incarnation: int = 0,
    epoch: int = 0,
    failures: int = 0,
    stream: int = 0,
) -> int:
    """Seed of an actor's first environment; each next environment has the next seed.

    Seeds differ between actors and within a vector. Another incarnation, epoch, failure count or
    ``stream`` (0: training, 1: evaluation) has another base. Seeds are in 0..2^31, which every
    environment accepts.
    """
    base = np.random.SeedSequence(
        run_seed, spawn_key=(stream, epoch, incarnation, failures)
    ).generate_state(1)[0]
    return int(base) % 2**30 + actor * num_envs


def make(
    settings: EnvSettings,
    num_envs: int | None = None,
    *,
    around: Wrapper | None = None,
    progress: EnvironmentProgress | None = None,
    previous_step: bool = False,
    attributes: Callable[[], Mapping[str, Any]] | None = None,
) -> VectorEnvironment:
    """Create ``num_envs`` (default: from the settings) environments, without resetting them.

    A registered id uses its own vector environment if it has one (``vectorization`` auto or
    native), else a synchronous vector with NEXT_STEP autoreset. ``module:Name`` is an id registered
    by that module, or an attribute of it: a class or function that creates one environment, or a
    whole vector if it has a parameter ``num_envs``. With ``vectorization`` envpool it is an id of
    envpool. ``around`` is the outermost wrapper of each single environment; a native vector accepts
    none. ``progress`` follows the environments, from their constructors on. ``previous_step``: see
    `VectorEnvironment`. ``attributes``: those of ``env.set`` in force; None: of the settings.

    Raises:
        ConfigError: the settings are invalid, or a package of an extra is missing.
        EnvironmentFailedError: the environment's own code raised.
    """
    num_envs = settings.num_envs if num_envs is None else num_envs
    if "num_envs" in settings.kwargs:
        raise ConfigError(
            [
                Problem(
                    "env.kwargs.num_envs", settings.kwargs["num_envs"], "set env.num_envs instead"
                )
            ]
        )
    progress = following = progress or EnvironmentProgress()
    setter = AttributeSetter(attributes or (lambda: settings.set))
    with _quiet():
        recipe = _recipe(
            settings,
            () if around is None else (around,),
            lambda environment: setter(following.constructed(environment)),
        )
        with _extras_named(settings.id), failures_named("its constructor"):
            context = contextvars.copy_context()
            vector = context.run(recipe.make, num_envs)
        with contextlib.ExitStack() as refused:
            refused.callback(_close, vector)
            environment = _wrapped(
                vector,
                settings.id,
                num_envs,
                recipe,
                context=context,
                progress=progress,
                previous_step=previous_step,
            )
            refused.pop_all()
            return environment


def make_single(settings: EnvSettings) -> Any:
    """Make one `gymnasium.Env`, not yet reset, with the wrappers that are set.

    Raises:
        ConfigError, EnvironmentFailedError: as `make`; also if only a whole vector can be made.
    """
    try:
        environment = make(settings.model_copy(update={"vectorization": "sync"}), 1)
    except ConfigError as error:
        if [problem.path for problem in error.problems] != ["env.vectorization"]:
            raise
        accepted = "a maker of single environments"
        problem = Problem("env.id", settings.id, "makes a whole vector", accepted)
        raise ConfigError([problem]) from error
    return environment.single


def _wrapped(
    vector: Any,
    env_id: str,
    num_envs: int,
    recipe: Recipe,
    *,
    context: contextvars.Context,
    progress: EnvironmentProgress,
    previous_step: bool,
) -> VectorEnvironment:
    if getattr(vector, "num_envs", None) != num_envs:
        message = (
            f"creates {type(vector).__name__}, which is not a gymnasium.vector.VectorEnv of "
            f"{num_envs} environments"
        )
        raise ConfigError([Problem("env.id", env_id, message)])
    try:
        return VectorEnvironment(
            vector,
            env_id,
            recipe.frames_per_step,
            clips_rewards=recipe.clips_rewards,
            context=context,
            progress=progress,
            previous_step=previous_step,
        )
    except ValueError as error:
        raise ConfigError([Problem("env.id", env_id, str(error))]) from error


def _close(vector: Any) -> None:
    """Close a rejected vector, which may have processes of its own."""
    with contextlib.suppress(Exception):
        vector.close()


def probe(config: Config) -> EnvironmentSpec:
    """The specification of the environment: create one, reset it, and close it.

    ``num_envs`` of the result is that of the settings.

    Raises:
        ConfigError: at ``env.id`` or ``env.kwargs``, with the first line of the failure.
    """
    try:
        return with_environment(
            lambda: make(config.env, 1, previous_step=config.previous_step),
            lambda environment: _examine(environment, config),
        )
    except EnvironmentFailedError as error:
        cause = error.__cause__
        if isinstance(cause, AttributeRefusedError):
            raise ConfigError([cause.problem]) from error
        wrong_argument = isinstance(cause, TypeError) and "argument" in str(cause)
        path, value = (
            ("env.kwargs", config.env.kwargs) if wrong_argument else ("env.id", config.env.id)
        )
        raise ConfigError(
            [Problem(path, value, (error.summary.splitlines() or [""])[0])]
        ) from error
    except ValueError as error:
        raise ConfigError([Problem("env.id", config.env.id, str(error))]) from error


def _examine(environment: VectorEnvironment, config: Config) -> EnvironmentSpec:
    spec = environment.spec
    observation = {leaf.name: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in spec.observation}
    seed = environment_seed(config.run.seed, 0, 1)
    with _quiet():
        environment.reset(seed, observation, None)
        if environment.has_masks:
            environment.reset(seed, observation, np.zeros((1, spec.action.mask_size), np.bool_))
    return replace(spec, num_envs=config.env.num_envs, action_mask=environment.has_masks)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Gymnasium's warnings (newer versions, missing metadata), which users cannot act
    on.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"gymnasium\.")
        yield


def _recipe(settings: EnvSettings, around: tuple[Wrapper, ...], finished: Wrapper) -> Recipe:
    """The factory of the vector that ``settings`` name. ``finished`` is called with each single
    environment, after all wrappers.
    """
    import gymnasium

    if settings.vectorization == "envpool":
        return _from_envpool(settings, around)
    if settings.id.startswith(("ALE/", "ale_py:")):
        _register_atari(settings.id)
    module, colon, name = settings.id.partition(":")
    if colon:
        try:
            found = plugins.load_object(settings.id, path="env.id")
        except ConfigError as error:
            if name not in gymnasium.registry:
                raise _unknown_attribute(error, settings.id, module) from error
        else:
            return Recipe(_from_callable(settings, found, around, finished))
    found_spec = _registered(settings.id, name if colon else settings.id)
    return _from_spec(settings, found_spec, around, finished)


def _from_envpool(settings: EnvSettings, around: tuple[Wrapper, ...]) -> Recipe:
    """Factory of an envpool environment, if envpool is installed."""
    _wrappers(settings, around, native=True)
    try:
        from tianflow.envs.pooled import PooledVectorEnv, name_of
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        problem = Problem(
            "env.vectorization",
            "envpool",
            "envpool is not installed",
            f"{plugins.install_line('envpool')} first",
        )
        raise ConfigError([problem]) from error
    name, kwargs = name_of(settings.id, settings.kwargs), dict(settings.kwargs)
    with failures_named("its constructor"):
        pool = PooledVectorEnv(name, 1, **kwargs)
    if pool.clips_rewards:
        # Rewards are clipped after the returns are counted.
        kwargs["reward_clip"] = False
    return Recipe(
        lambda num_envs: PooledVectorEnv(name, num_envs, **kwargs),
        pool.frames_per_step,
        pool.clips_rewards,
    )


def _register_atari(given: str) -> None:
    try:
        import ale_py  # noqa: F401 - the import registers its ids
    except ImportError as error:
        raise _not_installed(given, "ale_py") from error


@contextlib.contextmanager
def _extras_named(given: str) -> Iterator[None]:
    """Convert a failure caused by a missing package of an extra to a `ConfigError` that names
    it.
    """
    try:
        yield
    except EnvironmentFailedError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModuleNotFoundError) and cause.name in EXTRAS:
                raise _not_installed(given, cause.name) from error
            cause = cause.__cause__
        raise


def _not_installed(given: str, package: str) -> ConfigError:
    return ConfigError(
        [
            Problem(
                "env.id",
                given,
                f"{package} is not installed",
                f"{plugins.install_line(EXTRAS[package])} first",
            )
        ]
    )


def _registered(given: str, name: str) -> Any:
    """The specification that Gymnasium registered as ``name`` (without a version: the newest)."""
    import gymnasium

    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        close = plugins.nearest(name, tuple(spec.id for spec in gymnasium.registry.values()))
        message = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            [Problem("env.id", given, message, "a registered id, or module:attribute", close)]
        ) from error


def _unknown_attribute(error: ConfigError, given: str, module: str) -> ConfigError:
    """``error`` with the nearest of the module's attributes and registered ids."""
    import gymnasium

    first = error.problems[0]
    known = [
        f"{module}:{spec.id}"
        for spec in gymnasium.registry.values()
        if str(spec.entry_point).startswith(f"{module}:")
    ]
    if first.nearest:
        known.append(f"{module}:{first.nearest}")
    return ConfigError(
        [
            Problem(
                first.path,
                first.value,
                first.message,
                first.accepted,
                plugins.nearest(given, tuple(known)),
            )
        ]
    )


def _wrappers(settings: EnvSettings, around: tuple[Wrapper, ...], *, native: bool) -> list[Wrapper]:
    """The wrapper functions in the settings, then ``around``."""
    if native and (settings.wrappers or around):
        message = "wrappers apply to single environments, and this one is a native vector"
        accepted = "env.vectorization = 'sync' if it has a single form, or no wrappers"
        raise ConfigError([Problem("env.wrappers", list(settings.wrappers), message, accepted)])
    if native and settings.set:
        message = "attributes are set on single environments, and this one is a native vector"
        accepted = "env.vectorization = 'sync' if it has a single form, or no attributes"
        raise ConfigError([Problem("env.set", dict(settings.set), message, accepted)])
    found: list[Wrapper] = []
    for index, name in enumerate(settings.wrappers):
        wrapper = plugins.load_object(name, path=f"env.wrappers.{index}")
        if not callable(wrapper):
            raise ConfigError(
                [
                    Problem(
                        f"env.wrappers.{index}",
                        name,
                        "is not callable",
                        "a function from an environment to an environment",
                    )
                ]
            )
        found.append(wrapper)
    return [*found, *around]


def _from_spec(
    settings: EnvSettings, spec: Any, around: tuple[Wrapper, ...], finished: Wrapper
) -> Recipe:
    """Factory that uses `gymnasium.make_vec`: the id's own vector environment, or a synchronous
    one.

    The vector of Atari games clips rewards by default. Here it returns them unclipped, because
    returns are scores of the game, and `VectorEnvironment` clips the rewards for learning.
    """
    import gymnasium

    has_own = spec.vector_entry_point is not None and not spec.additional_wrappers
    if settings.vectorization == "native" and not has_own:
        raise ConfigError(
            [
                Problem(
                    "env.vectorization",
                    "native",
                    f"{spec.id} has no vector environment of its own",
                    "auto or sync",
                )
            ]
        )
    native = has_own and settings.vectorization != "sync"
    wrappers, kwargs = _wrappers(settings, around, native=native), dict(settings.kwargs)
    atari = spec.vector_entry_point == ATARI_VECTOR
    given = {**({"frameskip": 4} if atari else {}), **spec.kwargs, **kwargs}
    clips = native and atari and bool(given.get("reward_clipping", True))
    if not native:
        wrappers.append(finished)
        # Observations are copied to the slot at once, so the vector need not copy them.
        kwargs["vector_kwargs"] = {"copy": False, **_mapping(kwargs.get("vector_kwargs", {}))}
        kwargs["disable_env_checker"] = True
    elif atari:
        # Placement avoids two computing threads in one process.
        kwargs.setdefault("num_threads", 1)
        kwargs["reward_clipping"] = False
    mode, frames = "vector_entry_point" if native else "sync", given.get("frameskip", 1)

    def vector(num_envs: int) -> Any:
        made = gymnasium.make_vec(
            spec, num_envs=num_envs, vectorization_mode=mode, wrappers=wrappers, **kwargs
        )
        return made if native else _merging_what_is_read(made)

    return Recipe(vector, frames if isinstance(frames, int) else 1, clips)


def _merging_what_is_read(vector: Any) -> Any:
    """A synchronous ``vector`` that merges only action masks, final observations and metrics of
    infos.

    A run reads nothing else of them, and Gymnasium cannot merge every pair of infos: values of
    different types or shapes raise.
    """
    merge = vector._add_info  # noqa: SLF001 - Gymnasium has no public way to choose what is merged

    def merge_read(infos: dict[str, Any], info: dict[str, Any], index: int) -> dict[str, Any]:
        read = {name: info[name] for name in ("action_mask", "final_obs") if name in info}
        merged: dict[str, Any] = merge(infos, read, index)
        if episode_metrics.KEY in info or episode_metrics.FINAL in info:
            episode_metrics.merge(merged, info, index)
        return merged

    vector._add_info = merge_read  # noqa: SLF001 - as above
    return vector


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ConfigError(
        [
            Problem(
                "env.kwargs.vector_kwargs",
                value,
                "is not a table",
                "a table of arguments of SyncVectorEnv",
            )
        ]
    )


def _from_callable(
    settings: EnvSettings, found: Any, around: tuple[Wrapper, ...], finished: Wrapper
) -> Maker:
    """Factory from the user's class or function, of one environment or of a vector."""
    import gymnasium

    if not callable(found):
        raise ConfigError(
            [
                Problem(
                    "env.id",
                    settings.id,
                    "is not callable",
                    "a class or function that creates an environment",
                )
            ]
        )
    whole = _makes_vectors(found)
    if settings.vectorization == ("sync" if whole else "native"):
        message = (
            "creates a native vector"
            if whole
            else "creates single environments (a function with num_envs creates vectors)"
        )
        raise ConfigError(
            [
                Problem(
                    "env.vectorization", settings.vectorization, f"{settings.id} {message}", "auto"
                )
            ]
        )
    wrappers, kwargs = _wrappers(settings, around, native=whole), dict(settings.kwargs)
    if whole:
        return lambda num_envs: found(num_envs=num_envs, **kwargs)
    vector_kwargs = {"copy": False, **_mapping(kwargs.pop("vector_kwargs", {}))}

    def one() -> Any:
        environment = found(**kwargs)
        if not isinstance(environment, gymnasium.Env):
            raise TypeError(
                f"{settings.id} created {type(environment).__name__}, not a gymnasium.Env"
            )
        for wrapper in wrappers:
            environment = wrapper(environment)
        return finished(environment)

    return lambda num_envs: _merging_what_is_read(
        gymnasium.vector.SyncVectorEnv([one] * num_envs, **vector_kwargs)
    )


def _makes_vectors(found: Callable[..., Any]) -> bool:
    import gymnasium

    if inspect.isclass(found) and issubclass(found, gymnasium.Env | gymnasium.vector.VectorEnv):
        return issubclass(found, gymnasium.vector.VectorEnv)
    try:
        return "num_envs" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False
