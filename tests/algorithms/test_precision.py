"""learner.precision and actors.precision: bfloat16 exists only inside networks, and float32 is
unaffected.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tests.support.effort import grid
from tests.support.pretended_device import pretended_device
from tianflow.algorithms.common import precision
from tianflow.algorithms.common.parameter_buffer import Adam
from tianflow.algorithms.common.precision import (
    Autocast,
    arithmetic,
    forward_in,
    in_float32,
    no_tf32_reason,
    set_acting_precision,
    slow_reason,
    to_float32,
)
from tianflow.components.agreement import LEAST_SPREAD, tolerance_of
from tianflow.config.model import (
    ActorSettings,
    Config,
    InferenceSettings,
    LearnerSettings,
    Precision,
)
from tianflow.core.payloads import LeafSpec
from tianflow.errors import ConfigError
from tianflow.interfaces import LearnerBatch
from tianflow.networks import Output
from tianflow.ops import distributions

CPU = torch.device("cpu")
IMAGE = LeafSpec("", (44, 44, 4), "uint8")
BF16 = LearnerSettings(precision="bf16")
every_actor_critic = pytest.mark.parametrize("algorithm", on_policy.ALGORITHMS)
every_off_policy = pytest.mark.parametrize("name", off_policy.FACTORIES)


@pytest.fixture(autouse=True)
def hardware_has_bfloat16(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """So that only the tests of the warning depend on the machine."""
    if "cpuinfo" not in request.fixturenames:
        monkeypatch.setattr(precision, "slow_reason", lambda _: "")


def halved(settings: Config) -> Config:
    return settings.model_copy(update={"learner": BF16})


def learners(settings: Config, spec: Any) -> tuple[Any, Any]:
    """One learner in float32, one in bfloat16, with equal weights."""
    factory: Any = on_policy.ALGORITHMS[settings.algorithm.name]
    return factory.make_learner(settings, spec, CPU), factory.make_learner(
        halved(settings), spec, CPU
    )


def first_gradient(learner: Any, batch: LearnerBatch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The gradient of the first optimiser step of an update, clipped."""
    gradients: list[Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Adam, "apply", lambda optimiser: gradients.append(optimiser._gradients.clone())
        )
        assert learner.step(batch).finite
    return gradients[0]


class Watch:
    """Records dtypes of floating-point tensors passed to functions, and whether autocast was
    active.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.autocast: dict[str, set[bool]] = {}

    def over(self, owner: Any, name: str) -> None:
        """Record calls of ``owner.name`` from now on; a module may be given by its name."""
        owner = importlib.import_module(owner) if isinstance(owner, str) else owner
        watched = getattr(owner, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            self.autocast.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))
            found = watched(*args, **kwargs)
            parts = [*args, *kwargs.values(), *(found if isinstance(found, tuple) else [found])]
            floats = {
                part.dtype
                for part in parts
                if isinstance(part, Tensor) and part.is_floating_point()
            }
            self.dtypes.setdefault(name, set()).update(floats)
            return found

        self._monkeypatch.setattr(owner, name, seen)

    def in_float32(self) -> set[str]:
        """Functions that got float32 only, outside of autocast."""
        return {
            name
            for name, dtypes in self.dtypes.items()
            if dtypes == {torch.float32} and self.autocast[name] == {False}
        }


def one_step(policy: Any, leaves: tuple[LeafSpec, ...], columns: int) -> Any:
    """The policy's step for one observation of each of ``columns`` environments."""
    observation = {
        name: leaf[0] for name, leaf in on_policy.observations(leaves, 1, columns).items()
    }
    return policy.act(
        observation,
        policy.initial_state(columns),
        policy.noise(1, columns, np.random.default_rng(0))[0],
    )


def emitted(learner: Any) -> set[torch.dtype]:
    """Outputs of the layers of the learner's network from now on; filled during computation."""
    found: set[torch.dtype] = set()
    for module in learner.model.network.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(lambda _, __, output: found.add(output.dtype))
    return found


# Bfloat16 stays inside
# --------------------------------------------------------------------------------------------------


ESTIMATORS = {"ppo": "gae", "impala": "vtrace", "a2c": "actor_critic_returns"}


@grid(algorithm=list(ESTIMATORS), network=["mlp", "nature_cnn"], lstm=[0, 5])
def test_log_probabilities_targets_and_losses_are_float32(
    algorithm: str, network: str, lstm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = ESTIMATORS[algorithm]
    env = on_policy.spec(on_policy.DISCRETE, *([IMAGE] if network == "nature_cnn" else []))
    settings = on_policy.config(algorithm, network=network, lstm=lstm)
    learner = learners(settings, env)[1]
    batch, layers, watch = (
        on_policy.batch_for(settings, env, learner),
        emitted(learner),
        Watch(monkeypatch),
    )
    module = f"tianflow.algorithms.{algorithm}"
    watch.over(distributions.Categorical, "evaluate")
    watch.over(module, estimator)
    watch.over(
        module if algorithm == "ppo" else "tianflow.algorithms.common.single_pass", "value_loss"
    )
    watch.over(torch.autograd, "backward")
    assert learner.step(batch).finite
    assert torch.bfloat16 in layers
    assert {"evaluate", estimator, "value_loss", "backward"} == watch.in_float32()


@pytest.mark.parametrize(
    ("name", "module", "others"),
    [
        ("dqn", "dqn", ("double_q_value", "taken")),
        ("r2d2", "r2d2", ("double_q_value", "taken", "summed", "sequence_priority")),
        ("sac", "common.continuous", ()),
        ("td3", "common.continuous", ()),
    ],
)
def test_targets_and_losses_from_replay_are_float32(
    name: str, module: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = off_policy.made(name, precision="bf16")[1]
    layers, watch = emitted(learner), Watch(monkeypatch)
    watched = {"n_step_target", "weighted_loss", *others}
    for function in watched:
        watch.over(f"tianflow.algorithms.{module}", function)
    if name == "sac":
        watch.over("tianflow.algorithms.sac", "squashed_sample")
    watch.over(torch.autograd, "backward")
    assert learner.step(LearnerBatch(off_policy.windows(name))).finite
    assert torch.bfloat16 in layers
    assert (
        watched | {"backward"} | ({"squashed_sample"} if name == "sac" else set())
        == watch.in_float32()
    )


def test_log_probabilities_have_more_digits_than_bfloat16() -> None:
    """A dtype float32 does not show whether the numbers were rounded before."""
    env = on_policy.spec()
    settings = on_policy.config()
    learner = learners(settings, env)[1]
    arrays = on_policy.batch_for(settings, env, learner).arrays
    output = learner.model.evaluate({"": arrays["obs/"]}, {}, arrays["start"])
    log_prob = learner.model.distribution.log_prob(output.parameters[:-1], arrays["action"])
    assert torch.equal(output.parameters, output.parameters.bfloat16().float())
    assert 0.5 < (log_prob != log_prob.bfloat16().float()).float().mean()


# Results


@grid(algorithm=list(on_policy.ALGORITHMS), network=["mlp", "nature_cnn"], kind=["discrete", "box"])
def test_its_gradient_is_that_of_float32_within_a_tenth(
    algorithm: str, network: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its length. It is not equal, which shows that bfloat16 was used."""
    env = on_policy.spec(on_policy.ACTIONS[kind], *([IMAGE] if network == "nature_cnn" else []))
    settings = on_policy.config(algorithm, network=network)
    whole, half = learners(settings, env)
    batch = on_policy.batch_for(settings, env, whole)
    expected, found = (first_gradient(learner, batch, monkeypatch) for learner in (whole, half))
    assert (
        0.0 < torch.linalg.vector_norm(found - expected) < 0.1 * torch.linalg.vector_norm(expected)
    )
    assert 0.995 < torch.cosine_similarity(found, expected, 0)


@every_off_policy
def test_its_gradient_from_replay_is_that_of_float32_within_a_tenth(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = LearnerBatch(off_policy.windows(name))
    whole, half = off_policy.made(name)[1], off_policy.made(name, precision="bf16")[1]
    expected, found = (first_gradient(learner, batch, monkeypatch) for learner in (whole, half))
    assert (
        0.0 < torch.linalg.vector_norm(found - expected) < 0.1 * torch.linalg.vector_norm(expected)
    )


@every_actor_critic
def test_parameters_gradients_and_optimiser_stay_float32(algorithm: str) -> None:
    env, settings = on_policy.spec(), on_policy.config(algorithm, lstm=5)
    whole, half = learners(settings, env)
    for seed in range(2):
        half.step(on_policy.batch_for(settings, env, half, seed))
    assert {torch.float32} == {
        tensor.dtype for leaf in half.model.network.parameters() for tensor in (leaf, leaf.grad)
    }
    expected = {name: (array.dtype, array.shape) for name, array in whole.state_dict().items()}
    assert expected == {
        name: (array.dtype, array.shape) for name, array in half.state_dict().items()
    }
    assert whole.table == half.table


@every_actor_critic
def test_it_resumes_bit_for_bit_and_from_either_precision(algorithm: str) -> None:
    env, settings = on_policy.spec(), on_policy.config(algorithm, lstm=5)
    whole, half = learners(settings, env)
    half.step(on_policy.batch_for(settings, env, half, 0))
    state, batch = half.state_dict(), on_policy.batch_for(settings, env, half, 1)
    again = learners(settings, env)[1]
    again.load_state_dict(state)
    assert half.step(batch) == again.step(batch)
    off_policy.same_state(half.state_dict(), again.state_dict())
    whole.load_state_dict(state)
    off_policy.same_state(state, whole.state_dict())
    assert whole.step(batch).finite


def test_actors_and_evaluation_act_in_float32_for_any_precision_of_the_learner() -> None:
    env, settings = on_policy.spec(), on_policy.config(lstm=5)
    arrays = []
    for each in (settings, halved(settings)):
        policy, learner = on_policy.pair(each, env)
        policy.load(learner.flat())
        arrays.append(on_policy.rollout(policy, env))
    off_policy.same_state(
        *({name: tensor.numpy() for name, tensor in each.items()} for each in arrays)
    )


# Actors
# --------------------------------------------------------------------------------------------------


@grid(network=["mlp", "nature_cnn", "impala_resnet"], kind=["discrete", "box"], lstm=[0, 5])
def test_an_actor_in_bfloat16_records_the_log_probabilities_of_the_policy_it_followed(
    kind: str, network: str, lstm: int
) -> None:
    """They equal, in float32, those of parameters rounded to bfloat16, which are close to those of
    float32.
    """
    env = on_policy.spec(on_policy.ACTIONS[kind], *([] if network == "mlp" else [IMAGE]))
    policy, _ = on_policy.pair(on_policy.config(network=network, lstm=lstm), env)
    exact = one_step(policy, env.observation, on_policy.N)
    policy.act_in_bfloat16()
    low = one_step(policy, env.observation, on_policy.N)
    assert {torch.float32} == {leaf.dtype for leaf in (low.parameters, *low.state.values())}
    assert torch.equal(low.parameters, low.parameters.bfloat16().float())
    assert 0.0 < (low.parameters - exact.parameters).abs().max() < 0.02
    recorded = policy.record(low.parameters, low.action)["log_prob"]
    assert torch.equal(
        distributions.distribution_for(env.action).log_prob(low.parameters, low.action), recorded
    )
    assert not torch.equal(recorded, recorded.bfloat16().float())


@every_actor_critic
def test_new_weights_reach_an_actor_in_bfloat16(algorithm: str) -> None:
    env, settings = on_policy.spec(), on_policy.config(algorithm, lstm=5)
    old, learner = on_policy.pair(settings, env)
    old.act_in_bfloat16()
    before = on_policy.rollout(old, env)
    learner.step(on_policy.batch_for(settings, env, learner))
    new, _ = on_policy.pair(settings, env)
    new.load(learner.flat())
    new.act_in_bfloat16()
    new.load(learner.flat())
    old.load(learner.flat())
    found, expected = on_policy.rollout(old, env), on_policy.rollout(new, env)
    assert torch.equal(expected["log_prob"], found["log_prob"])
    assert not torch.equal(before["log_prob"], found["log_prob"])


@every_off_policy
def test_an_actor_of_replay_acts_in_bfloat16_with_the_weights_that_were_loaded(name: str) -> None:
    policy, learner = off_policy.made(name)
    leaves, flat = ((off_policy.VECTOR, off_policy.NUMBER), off_policy.N), learner.flat().copy()
    exact = one_step(policy, *leaves)
    policy.act_in_bfloat16()
    low = one_step(policy, *leaves)
    policy.load(np.zeros_like(flat))
    nothing = one_step(policy, *leaves)
    policy.load(flat)
    assert low.parameters.dtype == torch.float32
    assert 0.0 < (low.parameters - exact.parameters).abs().max() < 0.02
    assert not torch.equal(nothing.parameters, low.parameters)
    assert torch.equal(one_step(policy, *leaves).parameters, low.parameters)


def test_a_small_network_on_arrays_is_not_used_instead() -> None:
    policy, _ = on_policy.pair(on_policy.config(), on_policy.spec())
    assert policy.on_arrays(on_policy.N) is not None
    policy.act_in_bfloat16()
    assert policy.on_arrays(on_policy.N) is None


def test_a_policy_without_bfloat16_is_refused_with_the_setting() -> None:
    settings = on_policy.config().model_copy(update={"actors": ActorSettings(precision="bf16")})
    unable: Any = object()
    with pytest.raises(ConfigError, match=r"actors\.precision.*ppo has no act_in_bfloat16"):
        set_acting_precision(settings, unable)
    set_acting_precision(on_policy.config(), unable)


# Float32 is unaffected


@every_actor_critic
def test_in_float32_no_layer_runs_under_autocast(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, settings = on_policy.spec(), on_policy.config(algorithm)
    learner = learners(settings, env)[0]
    layers, watch = emitted(learner), Watch(monkeypatch)
    watch.over(torch.nn.functional, "linear")
    learner.step(on_policy.batch_for(settings, env, learner))
    assert {torch.float32} == layers
    assert {"linear"} == watch.in_float32()


def test_float32_is_a_plain_call() -> None:
    output = Output(torch.ones(2), torch.ones(2), {})
    assert in_float32 is forward_in("fp32", CPU)
    assert output is in_float32(lambda: output)


# Conversion to float32


def test_bfloat16_outputs_are_converted_and_others_are_unchanged() -> None:
    low, whole, number = (
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2),
        torch.ones(2, dtype=torch.int64),
    )
    found = to_float32(Output(low, whole, {"h": low, "steps": number}))
    assert isinstance(found, Output)
    assert (torch.float32, torch.float32) == (found.parameters.dtype, found.state["h"].dtype)
    assert found.value is whole
    assert found.state["steps"] is number
    assert (torch.float32, True) == (to_float32((low, 3))[0].dtype, to_float32((low, 3))[1] == 3)


def test_weights_are_cast_for_every_call() -> None:
    """A cast weight that autocast caches would be older than the weight after an optimiser step."""
    layer, x, forward = torch.nn.Linear(4, 4), torch.ones(1, 4), Autocast(CPU)
    before = forward(layer, x)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert before.abs().sum() > 0.0
    assert torch.equal(torch.zeros(1, 4), forward(layer, x))


# Slow hardware


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", False),
        ("flags\t\t: fpu amx_bf16", False),
        ("Features\t: fp asimd bf16", False),
        ("flags\t\t: fpu avx2 avx512f", True),
        ("bugs\t\t: avx512_bf16", True),
        ("", True),
    ],
)
def test_a_cpu_without_bfloat16_is_detected_by_its_flags(
    line: str, slow: bool, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert slow == bool(slow_reason(CPU, cpuinfo))


def test_a_cpu_without_known_flags_counts_as_slow(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "missing"
    assert "cannot be read" in slow_reason(CPU, cpuinfo)


@pytest.mark.parametrize(
    ("wanted", "reason", "lines"),
    [("bf16", "it is emulated", 1), ("bf16", "", 0), ("fp32", "it is emulated", 0)],
)
def test_slow_bfloat16_causes_one_warning_and_is_used(
    wanted: Any,
    reason: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(precision, "slow_reason", lambda _: reason)
    settings = on_policy.config().model_copy(update={"learner": LearnerSettings(precision=wanted)})
    env = on_policy.spec()
    with caplog.at_level(logging.WARNING, "tianflow"):
        policy, learner = on_policy.pair(settings, env)
        assert learner.step(LearnerBatch(on_policy.rollout(policy, env))).finite
    warnings = [record for record in caplog.records if "bf16" in record.getMessage()]
    assert lines == len(warnings)
    assert all(reason == record.__dict__["reason"] for record in warnings)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision"):
        LearnerSettings(precision="fp16")


# tf32
# --------------------------------------------------------------------------------------------------


def flags() -> tuple[bool, bool]:
    """Whether matrix products and convolutions on a GPU round to tf32."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def in_precision(settings: Config, wanted: Precision) -> Config:
    return settings.model_copy(update={"learner": LearnerSettings(precision=wanted)})


def test_learner_and_servers_have_the_same_precision_by_default() -> None:
    assert LearnerSettings().precision == InferenceSettings().precision


@pytest.mark.parametrize(("expected", "wanted"), [(True, "tf32"), (False, "fp32")])
def test_an_update_on_a_device_rounds_to_tf32_only_if_that_is_set(
    expected: bool, wanted: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, env = in_precision(on_policy.config("impala"), wanted), on_policy.spec()
    policy, _ = on_policy.pair(settings, env)
    before, seen = flags(), []
    monkeypatch.setattr(precision, "no_tf32_reason", lambda _: "")
    with pretended_device() as device:
        learner = on_policy.ALGORITHMS["impala"].make_learner(settings, env, device)
        evaluate = learner.model.evaluate
        monkeypatch.setattr(
            learner.model, "evaluate", lambda *given: seen.append(flags()) or evaluate(*given)
        )
        arrays = on_policy.rollout(policy, env)
        learner.step(LearnerBatch({name: value.to(device) for name, value in arrays.items()}))
    assert {(expected, expected)} == set(seen)
    assert before == flags()


@pytest.mark.parametrize("wanted", ["fp32", "tf32", "bf16"])
def test_the_arithmetic_before_returns_after_an_error(wanted: Precision) -> None:
    before, context = flags(), arithmetic(torch.device("meta"), wanted)
    context.__enter__()
    assert (wanted == "tf32",) * 2 == flags()
    assert not context.__exit__(KeyError, KeyError(), None)
    assert before == flags()


@every_actor_critic
def test_a_tf32_run_that_is_resumed_on_a_cpu_continues_in_float32(algorithm: str) -> None:
    """The checkpoint is that of a learner on a device."""
    env = on_policy.spec()
    settings = in_precision(on_policy.config(algorithm, normalise=True), "tf32")
    policy, _ = on_policy.pair(settings, env)
    factory = on_policy.ALGORITHMS[algorithm]
    with pretended_device() as device:
        there = factory.make_learner(settings, env, device)
        arrays = on_policy.rollout(policy, env)
        there.step(LearnerBatch({name: value.to(device) for name, value in arrays.items()}))
        state = there.state_dict()
    here, exact = (
        factory.make_learner(each, env, CPU) for each in (settings, in_precision(settings, "fp32"))
    )
    arrays = on_policy.rollout(policy, env, seed=1)
    for learner in (here, exact):
        learner.load_state_dict(state)
        on_policy.same_state(state, learner.state_dict())
    assert here.step(LearnerBatch(arrays)) == exact.step(LearnerBatch(arrays))
    on_policy.same_state(exact.state_dict(), here.state_dict())


def test_tf32_on_a_cpu_is_called_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert in_float32 is forward_in("tf32", CPU)
    assert "learner.precision = tf32 is not faster" in caplog.text
    assert "a CPU computes it in float32" == no_tf32_reason(CPU)


def test_a_policy_needs_nothing_for_tf32() -> None:
    """The server's arithmetic rounds, so that a plug-in's policy does, too."""
    found = in_precision(on_policy.config("impala"), "fp32")
    found = found.model_copy(update={"inference": InferenceSettings(precision="tf32")})
    set_acting_precision(found, object(), "inference")  # type: ignore[arg-type]  # it has no method


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["nature_cnn", "impala_resnet"])
@pytest.mark.parametrize("wanted", ["fp32", "tf32", "bf16"])
def test_on_a_gpu_ratios_at_staleness_0_are_1_within_what_is_stated(
    wanted: Precision, network: str, record_property: Any
) -> None:
    """Actions were chosen by a policy on the GPU, as in a server."""
    device = torch.device("cuda", 0)
    env = on_policy.spec(on_policy.DISCRETE, LeafSpec("", (4, 84, 84), "uint8"))
    settings = in_precision(on_policy.config("impala", network=network), wanted)
    settings = settings.model_copy(update={"inference": InferenceSettings(precision=wanted)})
    learner = on_policy.ALGORITHMS["impala"].make_learner(settings, env, device)
    policy = on_policy.ALGORITHMS["impala"].make_policy(settings, env, device)
    policy.load(learner.flat())
    set_acting_precision(settings, policy, "inference")
    cpu = on_policy.ALGORITHMS["impala"].make_policy(settings, env)
    cpu.load(learner.flat())
    arrays = {name: value.to(device) for name, value in on_policy.rollout(cpu, env).items()}
    for t in range(on_policy.T):
        with arithmetic(device, wanted):
            chosen = policy.act({"": arrays["obs/"][t]}, {}, None)
            arrays["action"][t] = chosen.action
            arrays["log_prob"][t] = policy.log_prob(chosen.parameters, chosen.action)
    found = learner.step(LearnerBatch(arrays)).statistics["log_ratio_max"]
    valid = arrays["log_prob"][arrays["valid"]]
    spread = max(LEAST_SPREAD, float(valid.max() - valid.min()))
    record_property("largest log ratio over the spread", found / spread)
    assert found <= spread * tolerance_of(wanted, wanted)
