"""The one model that checks files, overrides and HTTP bodies. Importing it is quick: no PyTorch, no
Gymnasium.

Sections are frozen; a change makes a new `Config`. What may change while a run goes on is marked in
`LIVE`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, SerializeAsAny

from tianflow import plugins
from tianflow.config.off_policy import DQNSettings, R2D2Settings, SACSettings, TD3Settings
from tianflow.config.on_policy import (
    A2CSettings,
    AlgorithmSettings,
    Fraction,
    ImpalaSettings,
    PPOSettings,
    Section,
)
from tianflow.errors import ConfigError, Problem

__all__ = [
    "A2CSettings",
    "AlgorithmSettings",
    "Fraction",
    "ImpalaSettings",
    "PPOSettings",
    "Section",
]

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(value: object) -> object:
    """``"2GiB"`` → 2147483648; integers pass through."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"a number of bytes, or a number with one of {', '.join(_UNITS)}")
        return int(Decimal(match[1]) * _UNITS[match[2]])
    return value


def parse_count(value: object) -> object:
    """``2e6`` → 2000000: a large whole number may be written like one; everything else passes
    through.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
Staleness = Annotated[int, Field(ge=0)] | Literal["unbounded"]


class NormalisationSettings(Section):
    """Running normalisation; its state travels with the weights and lies in checkpoints."""

    observations: bool = False
    """Leaves of floats."""
    images: bool = False
    """uint8 images, each pixel by itself: what never moves disappears, what is small and moves does
    not.
    """
    returns: bool = False
    """Rewards are divided by the standard deviation of the discounted return."""
    clip: PositiveFloat = 10.0
    """Nothing that is normalised goes beyond plus or minus this."""


class EnvSettings(Section):
    """Which environment, how many of it in one actor, and how it is watched."""

    id: str
    """A registered id of Gymnasium, or module:attribute of an environment, a vector environment, or
    a function that makes one.
    """
    num_envs: PositiveInt = 8
    """Copies in each actor, stepped together."""
    vectorization: Literal["auto", "native", "sync", "envpool"] = "auto"
    """auto: the environment's own vector form where it has one, else copies that take turns (sync);
    native: its own form, or an error;
    envpool: ``id`` is one of envpool's."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment."""
    wrappers: tuple[str, ...] = ()
    """module:attribute of functions from environment to environment, the innermost first."""
    step_timeout_s: PositiveFloat = 60.0
    """A host whose environments take longer for a step is killed and started anew."""
    start_timeout_s: PositiveFloat = 120.0
    """How long making the environments may take before the host is killed."""
    max_failures: Annotated[int, Field(ge=0)] = 10
    """Environments of an actor may fail so often in ``failure_window_s``; once more ends the run.
    """
    failure_window_s: PositiveFloat = 60.0
    """Seconds over which failures are counted."""
    normalisation: NormalisationSettings = NormalisationSettings()
    """What is scaled before it is learned from."""


BUILT_IN_ALGORITHMS: dict[str, type[AlgorithmSettings]] = {
    "a2c": A2CSettings,
    "dqn": DQNSettings,
    "impala": ImpalaSettings,
    "ppo": PPOSettings,
    "r2d2": R2D2Settings,
    "sac": SACSettings,
    "td3": TD3Settings,
}
"""Settings models that are known without importing what computes."""


def algorithm_settings(name: str) -> type[AlgorithmSettings]:
    """The settings model of the algorithm called ``name``: built in, an installed entry point, or
    ``module:attribute``.

    Raises:
        ConfigError: there is no such algorithm, or it has no settings model.
    """
    if name in BUILT_IN_ALGORITHMS:
        return BUILT_IN_ALGORITHMS[name]
    settings = getattr(
        plugins.load("tianflow.algorithms", name, path="algorithm.name"), "settings", None
    )
    if not (isinstance(settings, type) and issubclass(settings, AlgorithmSettings)):
        message = (
            "is not an algorithm: its `settings` must be a model derived from "
            "tianflow.config.model.AlgorithmSettings"
        )
        raise ConfigError([Problem("algorithm.name", name, message)])
    return settings


def read_algorithm(value: object) -> object:
    """Read a table by the model of the algorithm that it names, so that what was dumped can be read
    back.
    """
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return algorithm_settings(value["name"]).model_validate(value)
    return value


class NetworkSettings(Section):
    """``name`` is an installed network or ``module:attribute``; the rest is what the built-in ones
    read.
    """

    name: str = "mlp"
    """mlp, nature_cnn, impala_resnet, another installed one, or module:attribute."""
    hidden: tuple[PositiveInt, ...] = (64, 64)
    """mlp: units of each layer."""
    activation: Literal["relu", "tanh"] = "relu"
    """mlp: between layers."""
    lstm: Annotated[int, Field(ge=0)] = 0
    """Units of an LSTM after the torso; 0: none."""
    share_torso: bool = False
    """mlp: one torso for policy and value instead of two."""
    kwargs: dict[str, Any] = {}
    """Arguments of the network."""


class ActorSettings(Section):
    """How many actors, in how many host processes, and how long a trajectory is."""

    count: Annotated[int, Field(ge=0, le=4096)] = 1
    """How many act. With more than 4096 a coordinator would be so busy that it is late to answer,
    and to stop when it is told to.
    """
    rollout_steps: PositiveInt = 32
    """T: steps of each environment in one trajectory."""
    hosts: PositiveInt | None = None
    """Host processes the actors are spread over; None: one each, at most one for every core."""
    inference: Literal["local"] = "local"
    """Where actions are computed: in the actor itself."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: actors compute the policy in bfloat16, with weights rounded to it; actions, and the
    log-probabilities recorded of them, are of that policy, in float32. Evaluation stays in fp32. It
    pays with convolutions, where the hardware has bfloat16.
    """
    refresh: Literal["trajectory", "step"] = "trajectory"
    """When newer weights are taken: at the start of a trajectory, or before any step."""


class BalanceSettings(Section):
    """The rules of balance. See DESIGN.md, "Balance"."""

    controller: str | tuple[str, ...] = "staleness"
    """Controllers that set credits: staleness, freshest, lockstep, open_loop, consume_only,
    sample_ratio, another installed one, or module:attribute; of several, the strictest wins."""
    parameters: dict[str, float] = {}
    """What the controllers read, by name."""
    max_staleness: Staleness = 1
    """The bound: how many updates older than the learner the policy may be that made what is
    trained on.
    """
    credits: PositiveInt | None = None
    """An upper limit on credits; None leaves it to the controller."""
    straggler_patience: Annotated[float, Field(ge=0.0)] = 10.0
    """Seconds for which a trajectory that stands in the way is waited for; then it is dropped."""
    min_fragment_steps: PositiveInt = 8
    """A trajectory that stands in the way and has so many steps is cut and used as it is."""
    memory_limit: Bytes = 2 * 2**30
    """Bytes, or text like "2GiB", that trajectories may take on their way to the learner."""


class ReplaySettings(Section):
    """Where trajectories are kept and drawn from, for algorithms that learn from replay."""

    shards: PositiveInt = 1
    """Processes that each hold a part; drawing is as from one."""
    capacity: Annotated[int, BeforeValidator(parse_count), Field(gt=0)] = 100_000
    """Environment steps in all shards together."""
    min_size: Annotated[int, BeforeValidator(parse_count), Field(gt=0)] = 1_000
    """Items that must be there before anything is drawn."""
    samples_per_insert: PositiveFloat | None = None
    """Items drawn for each one inserted; whichever side is ahead waits. None: neither waits."""
    error_buffer: PositiveFloat | None = None
    """How many draws either side may be ahead; None: as few as lets both go on."""
    selector: Literal["uniform", "prioritised", "fifo", "lifo"] = "uniform"
    """What is drawn: any item alike, by priority, the oldest, or the newest."""
    alpha: Annotated[float, Field(ge=0.0)] = 0.6
    """Exponent of priorities (arXiv 1511.05952); 0: all alike."""
    beta: Fraction = 0.4
    """Exponent of importance weights; 1 corrects the bias of prioritised drawing wholly."""
    max_samples: PositiveInt | None = None
    """Draws after which an item goes; None: without limit."""


class LearnerSettings(Section):
    """Where and how the learner computes."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto: a GPU where there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products and convolutions of the learner's networks, and their gradients, in
    bfloat16; parameters, losses, targets and optimiser stay float32. It pays with convolutions,
    where the hardware has bfloat16 (nature_cnn: 1.5 times as fast on such a CPU, impala_resnet
    about twice); small MLPs gain nothing, and lose a quarter of their speed to casting. An
    algorithm of your own has to heed it itself.
    """
    ranks: Annotated[int, Field(ge=1, le=1)] = 1
    """Processes that learn together; more than one is not there yet."""
    threads: PositiveInt = 1
    """Where images are learned from on a CPU, parts of a minibatch are, on so many threads, each
    with a gradient of its own; elsewhere it is the threads of PyTorch's operations. More than one
    pays where actors wait for the learner, as with several epochs.
    """
    prefetch: Annotated[int, Field(ge=0, le=1)] = 1
    """1: the next batch is pulled while an update runs, where the bound has room for it; and
    without a bound replay draws the one after that meanwhile, by the priorities of two updates
    before its own.
    """
    max_nonfinite_updates: Annotated[int, Field(ge=0)] = 10
    """More skipped updates than this in a row end the run."""
    slowdown: Annotated[float, Field(ge=0.0)] = 0.0
    """Test aid: sleep this many times the update's own time after each update."""


class WeightsSettings(Section):
    """When a version is published."""

    publish_interval_updates: PositiveInt = 1
    """Publish every so many updates; sooner whenever the bound needs it."""


class PlacementSettings(Section):
    """Which launcher, and which cores its processes may use."""

    launcher: str = "processes"
    """processes: coordinator, learner and actors apart (Linux); inline: one process; or another
    installed one.
    """
    affinity: Literal["auto", "none"] = "auto"
    """auto: the learner gets cores of its own when there are at least two; none: the system
    decides.
    """


class RunSettings(Section):
    """Seed, when to end, and how strictly to repeat."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Of networks, exploration and environments."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Of the run and its directory; None: made from algorithm and time."""
    target_return: float | None = None
    """The run ends when an evaluation of the newest version has this mean return; None: no target.
    """
    max_env_steps: Count | None = None
    """The run ends after so many environment steps."""
    max_updates: Count | None = None
    """The run ends after so many updates."""
    max_seconds: PositiveFloat | None = None
    """The run ends after so many seconds of training; making environments and the last evaluation
    are not among them.
    """
    deterministic: bool = False
    """The same seed gives the same run, bit for bit: one actor, bound 0."""
    barrier_updates: PositiveInt = 50
    """Deterministic mode: every so many updates is a barrier that drains, checkpoints and re-seeds.
    """
    grace_s: PositiveFloat = 10.0
    """Seconds between asking a process to end and killing it."""
    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Processes that die are started anew, so often in ``restart_window_s``; once more ends the
    run.
    """
    restart_window_s: PositiveFloat = 300.0
    """Seconds over which restarts are counted."""


class EvaluationSettings(Section):
    """Evaluation of exactly one version, off the training path."""

    episodes: PositiveInt = 100
    """Whole episodes of each evaluation."""
    num_envs: PositiveInt = 16
    """Environments that it is played in."""
    every_s: PositiveFloat | None = None
    """Seconds between evaluations; None: only when the returns of training reach the target, and at
    the end. One that reaches the target is confirmed by another of the newest version, and ends the
    run.
    """
    deterministic: bool = True
    """Take the most probable action instead of a sampled one."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which an evaluation is given up."""


class CheckpointSettings(Section):
    """How often the whole state is written, and how many are kept."""

    every_s: PositiveFloat = 60.0
    """Seconds between checkpoints; there is one at the end in any case."""
    keep: PositiveInt = 3
    """Newest checkpoints that stay."""
    replay: bool = False
    """Keep what is in replay, too; otherwise a resumed run begins with an empty one."""


class HttpSettings(Section):
    """The control server beside the run."""

    enabled: bool = True
    """False: no console, no control, no metrics."""
    host: str = "127.0.0.1"
    """Address to listen at; beyond loopback /metrics asks for a token, too."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one, which is printed."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted besides localhost and the address bound."""
    max_streams: Annotated[int, Field(ge=0)] = 32
    """Open streams of events; more are refused."""
    max_connections: Annotated[int, Field(ge=1)] = 256
    """Open connections, besides one for every stream that is allowed; more are refused."""
    max_requests_per_s: PositiveFloat = 200.0
    """Requests a second from one address, over one second; more are refused."""


class MetricsSettings(Section):
    """How often numbers are gathered, and where they go."""

    interval_s: PositiveFloat = 1.0
    """Seconds between two reports of a host, and between two plain lines' samples."""
    sinks: tuple[str, ...] = ()
    """Where rows of the run's history go besides its file: tensorboard, wandb, mlflow, another
    installed one, or module:attribute.
    """
    kwargs: dict[str, dict[str, Any]] = {}
    """Arguments of sinks, by name. They are written with the config, so secrets belong into the
    environment.
    """


class Config(Section):
    """Everything about a run. ``algorithm`` is the settings model of the named algorithm."""

    env: EnvSettings
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(read_algorithm)]
    network: NetworkSettings = NetworkSettings()
    actors: ActorSettings = ActorSettings()
    balance: BalanceSettings = BalanceSettings()
    replay: ReplaySettings = ReplaySettings()
    learner: LearnerSettings = LearnerSettings()
    weights: WeightsSettings = WeightsSettings()
    placement: PlacementSettings = PlacementSettings()
    run: RunSettings = RunSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    http: HttpSettings = HttpSettings()
    metrics: MetricsSettings = MetricsSettings()

    @property
    def bound(self) -> int | None:
        """The staleness bound as a number; None when unbounded."""
        return None if self.balance.max_staleness == "unbounded" else self.balance.max_staleness


LIVE: dict[str, tuple[str, ...]] = {
    "balance": (
        "max_staleness",
        "credits",
        "straggler_patience",
        "min_fragment_steps",
        "controller",
        "parameters",
    ),
    "algorithm": AlgorithmSettings.live,
    "replay": ("samples_per_insert", "error_buffer", "beta"),
    "learner": ("slowdown",),
    "evaluation": ("every_s", "episodes"),
    "weights": ("publish_interval_updates",),
    "actors": ("count",),
}
"""Settings that may change while a run goes on, by section. Everything else needs a new run.
`live_of` knows those of the algorithm.
"""


def live_of(config: Config) -> dict[str, tuple[str, ...]]:
    """`LIVE`, with what may change of the algorithm that ``config`` names."""
    return {**LIVE, "algorithm": config.algorithm.live}
