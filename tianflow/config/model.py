"""Settings models. They check files, overrides and HTTP bodies.

Importing this module is fast: it imports neither PyTorch nor Gymnasium. Sections are frozen; a
change creates a new `Config`. `LIVE` lists the settings that may change during a run.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from tianflow import plugins
from tianflow.config.engines import RaySettings, SlurmSettings
from tianflow.config.off_policy import DQNSettings, R2D2Settings, SACSettings, TD3Settings
from tianflow.config.on_policy import (
    A2CSettings,
    AlgorithmSettings,
    ImpalaSettings,
    PPOSettings,
)
from tianflow.config.schedules import ScheduledFraction
from tianflow.config.section import Fraction, Section
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
    """``"2GiB"`` -> 2147483648; integers are returned unchanged."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"a number of bytes, or a number with one of {', '.join(_UNITS)}")
        return int(Decimal(match[1]) * _UNITS[match[2]])
    return value


def parse_count(value: object) -> object:
    """``2e6`` -> 2000000: a float with an integer value becomes an integer; other values are
    unchanged.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
Staleness = Annotated[int, Field(ge=0)] | Literal["unbounded"]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Vectorization = Literal["auto", "native", "sync", "envpool"]
Precision = Literal["fp32", "tf32", "bf16"]
EvaluationName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
"""Name of a further evaluation: a part of metric names, and of paths of settings."""


class NormalisationSettings(Section):
    """Running normalisation. Its state is published with the weights and stored in checkpoints."""

    observations: bool = False
    """Normalisation of float observations."""
    images: bool = False
    """Normalisation of uint8 images, pixel by pixel. Constant pixels become 0."""
    returns: bool = False
    """Division of rewards by the standard deviation of the discounted return."""
    clip: PositiveFloat = 10.0
    """Largest absolute value of a normalised observation or reward."""


class EnvSettings(Section):
    """Environment, number of copies per actor, and supervision."""

    id: str
    """Environment: an id registered in Gymnasium, or module:attribute of an environment, a vector
    environment, or a factory function.
    """
    num_envs: PositiveInt = 8
    """Number of environments in each actor, stepped together."""
    vectorization: Vectorization = "auto"
    """Vectorisation of the environments.

    auto: the environment's own vector form if it exists, else sync. native: its own vector form;
    an error without one. sync: copies stepped one after the other. envpool: ``id`` is an id of
    envpool.
    """
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    set: dict[str, Any] = {}
    """Attributes of the environment or of its wrappers, set at the beginning of an episode. A
    change takes effect at the next reset of each environment. Without an entry, an attribute has
    the value of the constructor. Only for single environments.
    """
    wrappers: tuple[str, ...] = ()
    """Wrappers, innermost first: module:attribute of functions from environment to environment."""
    step_timeout_s: PositiveFloat = 60.0
    """Time limit of one step of one environment, in seconds. A host that exceeds it is killed and
    restarted. A native vector counts as one environment.
    """
    start_timeout_s: PositiveFloat = 120.0
    """Time limit for creating or first resetting one environment, in seconds. A host that exceeds
    it is killed.
    """
    max_failures: Annotated[int, Field(ge=0)] = 10
    """Number of environment failures per actor tolerated within ``failure_window_s``. One more ends
    the run.
    """
    failure_window_s: PositiveFloat = 60.0
    """Period over which failures are counted, in seconds."""
    normalisation: NormalisationSettings = NormalisationSettings()
    """Normalisation of observations and rewards."""


BUILT_IN_ALGORITHMS: dict[str, type[AlgorithmSettings]] = {
    "a2c": A2CSettings,
    "dqn": DQNSettings,
    "impala": ImpalaSettings,
    "ppo": PPOSettings,
    "r2d2": R2D2Settings,
    "sac": SACSettings,
    "td3": TD3Settings,
}
"""Settings models of built-in algorithms, available without importing PyTorch."""


def algorithm_names() -> tuple[str, ...]:
    """Names of all algorithms that are built in or installed, sorted."""
    return tuple(sorted({*BUILT_IN_ALGORITHMS, *plugins.names("tianflow.algorithms")}))


def algorithm_settings(name: str) -> type[AlgorithmSettings]:
    """The settings model of algorithm ``name``: built in, installed, or ``module:attribute``.

    Raises:
        ConfigError: the algorithm does not exist, or has no settings model.
    """
    if name in BUILT_IN_ALGORITHMS:
        return BUILT_IN_ALGORITHMS[name]
    settings = getattr(
        plugins.load("tianflow.algorithms", name, path="algorithm.name"), "settings", None
    )
    if not (isinstance(settings, type) and issubclass(settings, AlgorithmSettings)):
        message = (
            "is not an algorithm: its attribute `settings` must be a subclass of "
            "tianflow.config.model.AlgorithmSettings"
        )
        raise ConfigError([Problem("algorithm.name", name, message)])
    return settings


def read_algorithm(value: object) -> object:
    """Read a table with the model of the algorithm that it names, so that a dumped config can be
    read.
    """
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return algorithm_settings(value["name"]).model_validate(value)
    return value


class NetworkSettings(Section):
    """Network. Settings marked with a network's name apply to that built-in network."""

    name: str = "mlp"
    """Name: mlp, nature_cnn, impala_resnet, another installed network, or module:attribute."""
    hidden: tuple[PositiveInt, ...] = (64, 64)
    """Units of each hidden layer (mlp)."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation function between layers (mlp)."""
    lstm: Annotated[int, Field(ge=0)] = 0
    """Units of an LSTM after the torso; 0: without LSTM."""
    previous_step: bool | None = None
    """Action and reward of the previous step as inputs of the network, zero at the beginning of an
    episode. With an LSTM they are inputs of it, else of the torso. None: true for r2d2.
    """
    share_torso: bool = False
    """One torso shared by policy and value, instead of two (mlp)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the network."""


class ActorSettings(Section):
    """Actors, their host processes, and the length of trajectories."""

    count: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of actors, at most 4096: with more, the coordinator would answer and stop too late.

    auto: one a core; two with central inference, or three if that is on a GPU. They are counted
    when the run starts. Cores of a learner
    on a CPU are not counted.
    """
    rollout_steps: PositiveInt = 32
    """Steps of each environment in one trajectory (T)."""
    hosts: PositiveInt | None = None
    """Number of host processes for the actors; None: one per actor, at most one per core."""
    inference: Literal["local", "central"] = "local"
    """Place of inference. local: in the actor. central: in inference servers, which compute the
    actions of several actors together.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the actors' networks.

    bf16: actors compute the policy in bfloat16, with weights rounded to it. Actions and recorded
    log-probabilities are of that policy, in float32. Evaluation stays in fp32. Faster for
    convolutions on hardware with bfloat16.
    """
    refresh: Literal["trajectory", "step"] | None = None
    """Time of loading newer weights: at the start of a trajectory, or before every step. None:
    trajectory, or step with central inference, whose servers load weights between two batches.
    """


class InferenceSettings(Section):
    """Inference servers, for ``actors.inference = "central"``."""

    servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of inference servers, one process each."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Device of the servers. auto: a GPU if one is available. A server may share the learner's."""
    precision: Precision = "fp32"
    """Number format of the servers' networks: as ``actors.precision`` for local inference, or tf32,
    as ``learner.precision``.
    """
    max_batch: PositiveInt = 64
    """Largest number of requests in a batch. A request has the observations of one actor."""
    max_wait_s: Annotated[float, Field(ge=0.0)] = 0.001
    """Seconds that a request waits for others. A batch begins sooner when every actor has asked."""


class BalanceSettings(Section):
    """Balance between actors and learner. See DESIGN.md, "Balance"."""

    controller: str | tuple[str, ...] = "staleness"
    """Controllers that set credits.

    One or several of staleness, freshest, lockstep, open_loop, consume_only, sample_ratio, another
    installed controller, or module:attribute. With several controllers, the strictest value of each
    setting is in force.
    """
    parameters: dict[str, float] = {}
    """Parameters of the controllers, by name."""
    max_staleness: Staleness = 1
    """Maximum staleness: how many updates a sample's policy may lag behind the learner."""
    credits: PositiveInt | None = None
    """Upper limit of credits; None: set by the controllers."""
    straggler_patience: Annotated[float, Field(ge=0.0)] = 10.0
    """Seconds to wait for a trajectory that blocks a batch. A trajectory that exceeds it is
    dropped.
    """
    min_fragment_steps: PositiveInt = 8
    """Steps that a trajectory needs to be cut short and used when it blocks a batch."""
    memory_limit: Bytes = 2 * 2**30
    """Memory for trajectories in transit to the learner, in bytes, or with a unit ("2GiB")."""


class ReplaySettings(Section):
    """Replay table, for algorithms that learn from replay."""

    shards: PositiveInt = 1
    """Number of replay shards, one process each. Draws cover all shards."""
    capacity: Annotated[int, BeforeValidator(parse_count), Field(gt=0)] = 100_000
    """Capacity of all shards together, in environment steps."""
    min_size: Annotated[int, BeforeValidator(parse_count), Field(gt=0)] = 1_000
    """Number of items in the table before the first draw."""
    samples_per_insert: PositiveFloat | None = None
    """Number of draws per inserted item. The side that is ahead waits. None: neither side waits."""
    error_buffer: PositiveFloat | None = None
    """Number of draws by which either side may be ahead; None: the smallest that lets both sides
    proceed.
    """
    selector: Literal["uniform", "prioritised", "fifo", "lifo"] = "uniform"
    """Distribution of draws: uniform, by priority, oldest first, or newest first."""
    alpha: Annotated[float, Field(ge=0.0)] | None = None
    """Exponent of priorities (arXiv 1511.05952); 0: uniform. None: 0.9 for r2d2, else 0.6."""
    beta: ScheduledFraction | None = None
    """Exponent of importance weights, or its schedule; 1: full correction of the bias of
    prioritised draws. None: 0.6 for r2d2, else from 0.4 to 1 over the limit of the run; without a
    limit 0.4.
    """
    max_samples: PositiveInt | None = None
    """Number of draws after which an item is removed; None: without limit."""


class LearnerSettings(Section):
    """Device, number format, and resources of the learner."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Device of the learner. auto: a GPU if one is available."""
    precision: Precision = "fp32"
    """Number format of the learner's networks.

    tf32: matrix products and convolutions on a GPU round their inputs to a mantissa of 10 bits;
    1.6 to 1.8 times as fast for images on an H200. On a CPU it is fp32.

    bf16: matrix products, convolutions and their gradients in bfloat16; parameters, losses, targets
    and optimiser in float32. Faster for convolutions on hardware with bfloat16 (1.5 times for
    nature_cnn on such a CPU, about 2 times for impala_resnet). Small MLPs become a quarter slower.

    A plug-in algorithm must apply this setting itself.
    """
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs of updates on a GPU: of a2c, impala, dqn, sac and td3, with one rank. A graph
    starts the hundreds of operations of an update with one call.

    auto: for shipped networks and algorithms. on: for plug-ins, too; their updates must compute
    with tensors only, since a graph repeats every other number. An update that cannot be captured
    ends the run; with auto it is computed without a graph.
    """
    ranks: PositiveInt = 1
    """Number of processes that train on parts of each batch, as one learner. It divides
    ``batch_trajectories``, or with replay ``batch_size``. On GPUs each rank has one.
    """
    threads: PositiveInt = 1
    """Number of CPU threads that share each image minibatch.

    For other observations, and on a GPU, it is the number of threads of PyTorch's operations. More
    than one thread helps when actors wait for the learner, for example with several epochs.
    """
    prefetch: Annotated[int, Field(ge=0, le=1)] = 1
    """1: pull the next batch during an update, if the bound permits it.

    Without a bound, replay then also draws the batch after the next. Its priorities are two updates
    old.
    """
    max_nonfinite_updates: Annotated[int, Field(ge=0)] = 10
    """Number of consecutive skipped updates (non-finite gradients) tolerated. One more ends the
    run.
    """
    slowdown: Annotated[float, Field(ge=0.0)] = 0.0
    """Test aid: sleep after each update, in multiples of the update's own time."""


class WeightsSettings(Section):
    """Publication of weights."""

    publish_interval_updates: PositiveInt = 1
    """Updates between published versions. The bound may force earlier publication."""
    publish: Literal["interval", "divergence"] = "interval"
    """Rule of publication.

    interval: every ``publish_interval_updates``. divergence: those of them whose policy differs
    from the published one by more than ``divergence_nats``, or that the bound requires, or without
    which actors would have too few credits. Only for a2c, impala, ppo, sac, and plug-ins that
    measure it.
    """
    divergence_nats: PositiveFloat = 0.01
    """Mean KL divergence per state, in nats, above which a version is published (divergence)."""
    divergence_states: PositiveInt = 256
    """Largest number of states of a batch on which it is measured (divergence)."""


ON_ONE_MACHINE = ("processes", "inline")
"""Launchers that start no host on another machine."""


class PlacementSettings(Section):
    """Launcher, and CPU cores of its processes."""

    launcher: str = "processes"
    """Launcher. processes: coordinator, learner and actors in separate processes (Linux); inline:
    one process; nodes: as processes, with actors on other machines that join the run; slurm: head
    and nodes as a job of Slurm; or another installed launcher.
    """
    affinity: Literal["auto", "none"] = "auto"
    """CPU affinity. auto: the learner gets cores of its own if at least two exist; none: set by the
    operating system.
    """


LISTEN = r"^tcp://(\*|\[[0-9A-Fa-f:.]{1,64}\]|[^\s:/\[\]*]{1,255}):(\*|\d{1,5})$"
"""An address to listen at."""


class ClusterSettings(Section):
    """Nodes: machines that run actors, for the launchers that use them (nodes, ray, slurm)."""

    replay: Literal["head", "nodes"] = "head"
    """Machines of the replay shards. nodes: those that offer the role replay; trajectories then go
    straight from the node of their actor to that of their shard. A shard whose node is lost starts
    on another one, or on the head.
    """
    expect: PositiveInt = 1
    """Number of nodes that have to work before the first actor starts. Together they offer every
    role that the run needs. More may join later.
    """
    lease_s: Annotated[float, Field(ge=2.0, le=3600.0)] = 15.0
    """Seconds without a word after which a node is lost. Its actors then start on other nodes."""
    listen: Annotated[str, Field(pattern=LISTEN)] = "tcp://*:*"
    """Address at which the head waits for nodes, tcp://HOST:PORT; * stands for every address of the
    head, and for any free port.
    """
    address: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Host name or address by which nodes reach the head; None: that of listen, or of the head's
    route to other machines.
    """
    encoding: Literal["stacks", "lz4", "plain"] = "stacks"
    """Encoding of trajectories on their way. stacks: without the images that stacks of images
    repeat (observations of bytes [K, height, width]); lz4: that, and compressed, for slow links;
    plain: as they are.
    """
    late_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """Largest share of time that late trajectories may cost other actors. That is the time in which
    the learner waits for them with a full batch and another actor needs a credit. Late actors rest
    until it is made up for; 1: they do not rest.
    """
    curve: bool = True
    """Encryption and authentication of connections, with keys made for each run (CURVE). false is
    for trusted networks only.
    """


class RunSettings(Section):
    """Seed, end conditions, and determinism."""

    seed: Seed = 1
    """Seed of networks, exploration and environments."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Name of the run and its directory; None: derived from algorithm and time."""
    preset: Annotated[str, Field(max_length=200)] | None = None
    """Origin of the settings: the preset or the defaults that ``train ALGORITHM --env ID`` chose.
    It has no effect.
    """
    init_from: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Run or checkpoint whose parameters a new run starts with; None: random ones. A name without a
    slash is a run in the directory of runs; RUN@best is its best checkpoint. Parameters that do
    not fit stay random.
    """
    target_return: float | None = None
    """Mean return that ends the run, measured by an evaluation of the newest version; None: no
    target.
    """
    max_env_steps: Count | None = None
    """Number of environment steps that ends the run; None: without limit."""
    max_updates: Count | None = None
    """Number of updates that ends the run; None: without limit."""
    max_seconds: PositiveFloat | None = None
    """Training time that ends the run, in seconds, without creating environments and the last
    evaluation.
    """
    deterministic: bool = False
    """Bit-for-bit repetition for the same seed. Requires one actor and a bound of 0."""
    barrier_updates: PositiveInt = 50
    """Updates between barriers of deterministic mode. A barrier drains, writes a checkpoint, and
    re-seeds. A resume begins at the newest barrier.
    """
    grace_s: PositiveFloat = 10.0
    """Seconds between asking a process to stop and killing it."""
    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Number of process restarts tolerated within ``restart_window_s``. One more ends the run."""
    restart_window_s: PositiveFloat = 300.0
    """Period over which restarts are counted, in seconds."""


class _Differences(Section):
    """Base of tables whose entries replace other settings. An entry without a value is absent from
    the table: TOML has no null there.
    """

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class EvaluationEnvSettings(_Differences):
    """Settings of ``env`` that are different in an evaluation. The spaces must be the same."""

    id: str | None = None
    """Environment; None: that of ``env``."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments, merged over ``env.kwargs``. With another ``id`` they replace those."""
    set: dict[str, Any] = {}
    """Attributes, merged over ``env.set`` in the same way."""
    wrappers: tuple[str, ...] | None = None
    """Wrappers; None: those of ``env``."""
    vectorization: Vectorization | None = None
    """Vectorisation; None: that of ``env``."""


class FurtherEvaluationSettings(_Differences):
    """A further evaluation, reported beside the main one. It decides nothing."""

    env: EvaluationEnvSettings = EvaluationEnvSettings()
    """Settings that are different from ``env``. Those of ``evaluation.env`` do not apply."""
    episodes: PositiveInt | None = None
    """Number of complete episodes; None: as the main evaluation."""
    deterministic: bool | None = None
    """Most probable actions instead of sampled ones; None: as the main evaluation."""
    seed: Seed | None = None
    """Seed of environments and actions; None: as the main evaluation."""


class EvaluationSettings(Section):
    """Evaluation of one version, outside of training."""

    episodes: PositiveInt = 100
    """Number of complete episodes per evaluation."""
    num_envs: PositiveInt = 16
    """Number of environments for an evaluation."""
    every_s: PositiveFloat | None = None
    """Seconds between evaluations; None: only at the end, and when training returns reach the
    target.

    An evaluation that reaches the target is repeated with the newest version. If that one reaches
    the target, too, the run ends. A deterministic run evaluates at its next barrier.
    """
    every_steps: Count | None = None
    """Environment steps between evaluations, also beside ``every_s``; None: no such interval."""
    deterministic: bool = True
    """Most probable actions instead of sampled ones."""
    seed: Seed | None = None
    """Seed of environments and actions in evaluations; None: ``run.seed``."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of an evaluation, in seconds."""
    env: EvaluationEnvSettings = EvaluationEnvSettings()
    """Settings of the environment that are different from ``env``."""
    further: dict[EvaluationName, FurtherEvaluationSettings] = {}
    """Further evaluations by name, each a table with env, episodes, deterministic and seed. They
    play the version of the main evaluation, after it. Only the main one decides about
    ``run.target_return`` and the best checkpoint.
    """


class CheckpointSettings(Section):
    """Checkpoints: interval, number, and contents."""

    every_s: PositiveFloat = 60.0
    """Seconds between checkpoints. The run also writes one at its end."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to retain. While a run writes one, there is one more."""
    best: bool = True
    """The checkpoint of the version with the highest mean return of an evaluation, beside the
    newest ones. Each evaluation during training then writes the state of its version, which is
    deleted if it is not the best.
    """
    replay: bool = False
    """Replay contents in checkpoints. Without them, a resumed run begins with an empty table."""


class HttpSettings(Section):
    """Control server of the run."""

    enabled: bool = True
    """Server with console, control and metrics."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, /metrics requires a token, too."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: any free port, which is printed."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted host names, in addition to localhost and the bound address."""
    allowed_imports: tuple[str, ...] = ()
    """Modules whose objects a change over HTTP may name."""
    max_streams: Annotated[int, Field(ge=0)] = 32
    """Largest number of open event streams. Further ones are refused."""
    max_connections: Annotated[int, Field(ge=1)] = 256
    """Largest number of open connections, in addition to event streams. Further ones are
    refused.
    """
    max_requests_per_s: PositiveFloat = 200.0
    """Largest rate of requests from one address, per second, measured over one second."""


class MetricsSettings(Section):
    """Interval and destinations of metrics."""

    interval_s: PositiveFloat = 1.0
    """Seconds between reports of a host, and between samples of plain status lines."""
    sinks: tuple[str, ...] = ()
    """Sinks for history rows, in addition to the history file: tensorboard, wandb, mlflow, another
    installed sink, or module:attribute.
    """
    kwargs: dict[str, dict[str, Any]] = {}
    """Keyword arguments of sinks, by name. They are stored with the config; put secrets in
    environment variables.
    """


class Config(Section):
    """All settings of a run. ``algorithm`` is the settings model of the named algorithm."""

    env: EnvSettings
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(read_algorithm)]
    network: NetworkSettings = NetworkSettings()
    actors: ActorSettings = ActorSettings()
    inference: InferenceSettings = InferenceSettings()
    balance: BalanceSettings = BalanceSettings()
    replay: ReplaySettings = ReplaySettings()
    learner: LearnerSettings = LearnerSettings()
    weights: WeightsSettings = WeightsSettings()
    placement: PlacementSettings = PlacementSettings()
    cluster: ClusterSettings = ClusterSettings()
    ray: RaySettings = RaySettings()
    slurm: SlurmSettings = SlurmSettings()
    run: RunSettings = RunSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    http: HttpSettings = HttpSettings()
    metrics: MetricsSettings = MetricsSettings()

    @property
    def bound(self) -> int | None:
        """The staleness bound as a number; None when unbounded."""
        return None if self.balance.max_staleness == "unbounded" else self.balance.max_staleness

    @property
    def central(self) -> bool:
        """True if inference servers select the actions."""
        return self.actors.inference == "central"

    @property
    def acting_precision(self) -> Precision:
        """Number format of the networks that choose actions: of inference servers, or of actors."""
        return self.inference.precision if self.central else self.actors.precision

    @property
    def previous_step(self) -> bool:
        """True if the network sees action and reward of the previous step."""
        given = self.network.previous_step
        return self.algorithm.previous_step if given is None else given

    @property
    def priority_exponents(self) -> tuple[float, float]:
        """Exponents of priorities (alpha) and of importance weights (beta), as they are set.
        `tianflow.config.schedules` resolves a schedule of beta.
        """
        alpha, beta = getattr(self.algorithm, "priority_exponents", (0.6, 0.4))
        given = self.replay.alpha, self.replay.beta
        return (alpha if given[0] is None else given[0], beta if given[1] is None else given[1])


LIVE: dict[str, tuple[str, ...]] = {
    "env": ("set",),
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
    "evaluation": ("every_s", "every_steps", "episodes"),
    "weights": ("publish_interval_updates", "divergence_nats", "divergence_states"),
    "actors": ("count",),
    "inference": ("max_batch", "max_wait_s"),
}
"""Settings that may change during a run, by section. `live_of` adds those of the algorithm."""


def live_of(config: Config) -> dict[str, tuple[str, ...]]:
    """`LIVE` with the live settings of the algorithm of ``config``."""
    return {**LIVE, "algorithm": config.algorithm.live}
