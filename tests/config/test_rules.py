from __future__ import annotations

import re

import pytest

from tianflow.config.loading import load_config, with_changes
from tianflow.config.model import AlgorithmSettings, Config, PPOSettings
from tianflow.config.rules import (
    advice,
    bound_in_force,
    check,
    largest_publish_lag,
    make_controllers,
    max_credits,
    samples_per_update,
    used_up,
)
from tianflow.errors import ConfigError, Problem

TABLES = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"name": "ppo"},
    "actors": {"count": 1, "rollout_steps": 16},
}


DETERMINISTIC = ["run.deterministic=true", "actors.count=1", "balance.max_staleness=0"]


def config(*overrides: str) -> Config:
    return load_config(TABLES, ["run.max_updates=1", *overrides])


def refused(*overrides: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return {problem.path: problem for problem in caught.value.problems}


def test_fewer_credits_than_an_update_takes_can_never_feed_the_learner() -> None:
    problem = refused("balance.credits=3", "algorithm.batch_trajectories=4")["balance.credits"]
    assert (
        "3 credits can never feed the learner, which needs 4 trajectories for one update"
        == problem.message
    )
    assert 4 == config("balance.credits=4", "algorithm.batch_trajectories=4").balance.credits


def test_a_fragment_is_never_longer_than_a_rollout() -> None:
    assert (
        "could never be cut"
        in refused("balance.min_fragment_steps=17")["balance.min_fragment_steps"].message
    )
    assert 16 == config("balance.min_fragment_steps=16").balance.min_fragment_steps


def test_a_minibatch_is_never_larger_than_an_update() -> None:
    assert "1 to 32" == refused("algorithm.minibatch_size=33")["algorithm.minibatch_size"].accepted
    assert 32 == samples_per_update(config("algorithm.minibatch_size=32"))


def test_defaults_that_exceed_short_rollouts_are_lowered() -> None:
    short = config("actors.rollout_steps=5")
    assert (5, 10) == (short.balance.min_fragment_steps, short.algorithm.minibatch_size)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ([], {"balance.max_staleness"}),
        (["balance.max_staleness=0", "actors.count=2"], {"actors.count"}),
        (["actors.count=0"], {"actors.count", "balance.max_staleness"}),
        (["balance.max_staleness=0", "balance.controller=open_loop"], {"balance.max_staleness"}),
    ],
)
def test_deterministic_runs_need_one_actor_that_alternates_with_the_learner(
    overrides: list[str], paths: set[str]
) -> None:
    assert paths == refused("run.deterministic=true", *overrides).keys()


@pytest.mark.parametrize(
    "overrides", [["balance.max_staleness=0"], ["balance.controller=lockstep"]]
)
def test_deterministic_runs_that_alternate_are_accepted(overrides: list[str]) -> None:
    assert config("run.deterministic=true", *overrides).run.deterministic


def test_a_run_has_at_least_one_controller() -> None:
    assert (
        "no rollout would begin" in refused("balance.controller=[]")["balance.controller"].message
    )


def test_an_importable_object_that_is_not_a_controller_is_refused() -> None:
    assert (
        "no handle(event)"
        in refused("balance.controller=tianflow.config.model:Config")["balance.controller"].message
    )


def test_the_refusal_of_an_unknown_parameter_gives_the_nearest() -> None:
    problem = refused("balance.controller=freshest", "balance.parameters.quiet_update=3")[
        "balance.parameters.quiet_update"
    ]
    assert "quiet_updates" == problem.nearest


def test_parameters_may_belong_to_any_of_several_controllers() -> None:
    controllers = "balance.controller=['staleness', 'freshest']"
    settings = config(controllers, "balance.parameters.quiet_updates=3")
    assert [] == check(settings)
    assert ["staleness", "freshest"] == list(make_controllers(settings))


def test_the_refusal_of_a_parameter_says_that_the_controllers_have_none() -> None:
    assert (
        "no parameters, for the controllers in force (staleness)"
        in refused("balance.parameters.speed=1")["balance.parameters.speed"].accepted
    )


@pytest.mark.parametrize(
    ("overrides", "bound", "ceiling"),
    [
        (["balance.max_staleness=3", "algorithm.batch_trajectories=2"], 3, 8),
        (["balance.max_staleness=3", "algorithm.batch_trajectories=2", "balance.credits=5"], 3, 5),
        (["balance.max_staleness=unbounded"], None, None),
        (["balance.max_staleness=3", "balance.controller=open_loop"], None, None),
        (["balance.max_staleness=3", "balance.controller=['open_loop', 'staleness']"], 3, 4),
        (["balance.max_staleness=3", "balance.controller=lockstep"], 0, 1),
        (["balance.max_staleness=3", "balance.controller=consume_only"], 3, None),
        (["balance.max_staleness=3", "balance.controller=['consume_only', 'open_loop']"], 3, None),
        (["balance.max_staleness=3", "balance.controller=['consume_only', 'staleness']"], 3, 4),
    ],
)
def test_the_credit_ceiling_follows_from_the_bound_in_force(
    overrides: list[str], bound: int | None, ceiling: int | None
) -> None:
    assert (bound, ceiling) == (
        bound_in_force(config(*overrides)),
        max_credits(config(*overrides)),
    )


# Advice
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("actors", "bound"), [(1, 1), (4, 4), (2, 3)])
def test_as_many_actors_as_the_bound_can_use_need_no_advice(actors: int, bound: int) -> None:
    assert [] == advice(config(f"actors.count={actors}", f"balance.max_staleness={bound}"))


def test_more_actors_than_the_bound_can_use_are_reported_as_idle() -> None:
    (sentence,) = advice(
        config("actors.count=8", "algorithm.batch_trajectories=2", "balance.max_staleness=1")
    )
    assert "A = 8 actors, B = 2 trajectories per update and max_staleness = 1" in sentence
    assert (
        "at most C - B = 2 trajectories roll out at the same time, and 6 of 8 actors are idle because of the bound"
        in sentence
    )
    assert "C/(A + B) = 0.40 of open loop" in sentence
    assert "max_staleness >= 4, or actors.count <= 2, avoids this" in sentence


def test_the_price_of_synchronous_training_is_reported() -> None:
    (sentence,) = advice(config("balance.max_staleness=0"))
    assert "0.50 of open loop; that is the price of synchronous training" in sentence


def test_a_limit_of_credits_that_idles_actors_is_reported() -> None:
    (sentence,) = advice(config("actors.count=4", "balance.max_staleness=8", "balance.credits=2"))
    assert "credits >= 5, or actors.count <= 1, avoids this" in sentence


def test_publishing_less_often_than_the_bound_requires_is_reported() -> None:
    (sentence,) = advice(config("weights.publish_interval_updates=3"))
    assert "versions are published sooner" in sentence
    assert [] == advice(config("weights.publish_interval_updates=2"))


def test_settings_of_built_in_networks_that_another_may_not_read_are_reported() -> None:
    name = "tests.support.networks:Fitting"
    own = f"network.name={name}"
    (sentence,) = advice(config(own, "network.hidden=[8]", "network.lstm=64"))
    assert sentence.startswith(
        f"the built-in networks use network.hidden, network.lstm; {name} does only if"
    )
    assert [] == advice(config("network.hidden=[8]", "network.lstm=64"))
    assert [] == advice(config(own, "network.kwargs.units=8", "network.previous_step=true"))


# Publishing by divergence
# --------------------------------------------------------------------------------------------------

DIVERGENCE = "weights.publish=divergence"


@pytest.mark.parametrize("algorithm", ["a2c", "impala", "ppo"])
def test_an_algorithm_with_action_probabilities_may_publish_by_divergence(algorithm: str) -> None:
    settings = config(f"algorithm.name={algorithm}", DIVERGENCE, "weights.divergence_nats=0.05")
    assert ("divergence", 0.05) == (settings.weights.publish, settings.weights.divergence_nats)


@pytest.mark.parametrize(
    ("algorithm", "environment"),
    [("dqn", "CartPole-v1"), ("r2d2", "CartPole-v1"), ("td3", "Pendulum-v1")],
)
def test_an_algorithm_without_action_probabilities_may_not(
    algorithm: str, environment: str
) -> None:
    lstm = "network.lstm=8" if algorithm == "r2d2" else "network.lstm=0"
    given = (f"algorithm.name={algorithm}", f"env.id={environment}", lstm)
    problem = refused(*given, DIVERGENCE)["weights.publish"]
    assert "divergence" == problem.value
    assert f"{algorithm} does not measure the divergence of two policies" in problem.message
    assert (
        "interval, or an algorithm that measures it (a2c, impala, ppo, sac, or" in problem.accepted
    )
    assert "interval" == config(*given).weights.publish


class _Unmeasured(AlgorithmSettings):
    """Settings of a plug-in that declare nothing."""

    name: str = "tests.config.test_rules:Unmeasured"


class Unmeasured:
    settings = _Unmeasured
    make_policy = make_learner = None


class _Declared(PPOSettings):
    """Settings of a plug-in that inherit the declaration of PPO."""

    name: str = "tests.config.test_rules:Declared"


class LearnerWithout:
    def step(self) -> None: ...


class LearnerWith(LearnerWithout):
    def retain_policy(self) -> None: ...
    def divergence(self) -> None: ...


class Declared:
    settings, make_policy, make_learner = _Declared, None, LearnerWithout


class Measuring:
    settings, make_policy, make_learner = _Declared, None, LearnerWith


def test_a_plug_in_must_declare_and_measure_the_divergence() -> None:
    name = "algorithm.name=tests.config.test_rules:{}"
    assert (
        "Unmeasured does not measure the divergence"
        in refused(name.format("Unmeasured"), DIVERGENCE)["weights.publish"].message
    )
    problem = refused(name.format("Declared"), DIVERGENCE)["weights.publish"]
    assert "its learner LearnerWithout has no retain_policy() and divergence()" in problem.message
    assert "divergence" == config(name.format("Measuring"), DIVERGENCE).weights.publish
    assert "interval" == config(name.format("Declared")).weights.publish


# Number of actors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "gpu", "overrides"),
    [
        (7, False, []),
        (5, False, ["learner.threads=3"]),
        (4, False, ["learner.ranks=2", "learner.threads=2", "algorithm.batch_trajectories=2"]),
        (14, False, ["actors.inference=central", "actors.refresh=null"]),
        (8, True, []),
        (7, True, ["learner.device=cpu"]),
        (24, True, ["actors.inference=central", "actors.refresh=null"]),
        (
            16,
            True,
            ["actors.inference=central", "actors.refresh=null", "inference.device=cpu"],
        ),
        (1, False, ["learner.threads=20"]),
    ],
)
def test_as_many_actors_as_keep_the_cores_stepping(
    expected: int, gpu: bool, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("tianflow.core.devices.HAS_GPU", gpu)
    assert expected == config("actors.count=auto", *overrides).actors.count


def test_the_number_of_actors_is_counted_at_the_start_only() -> None:
    with pytest.raises(ConfigError) as refusal:
        with_changes(config(), {"actors": {"count": "auto"}})
    (problem,) = refusal.value.problems
    assert ("actors.count", "auto", "a number") == (problem.path, problem.value, problem.accepted)
    assert "is resolved when a run starts" in problem.message
    assert 3 == with_changes(config("actors.count=auto"), {"actors": {"count": 3}}).actors.count


# CUDA graphs of updates
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.name=ppo"], "the update of ppo has no fixed shapes"),
        (["algorithm.name=r2d2", "network.lstm=8"], "the update of r2d2 has no fixed shapes"),
        (["algorithm.name=impala", "learner.device=cpu"], "a CUDA graph needs a GPU"),
        (
            ["algorithm.name=a2c", "learner.ranks=2", "algorithm.batch_trajectories=2"],
            "the updates of 2 ranks wait for each other",
        ),
    ],
)
def test_graphs_are_refused_where_there_can_be_none(overrides: list[str], reason: str) -> None:
    problem = refused(*overrides, "learner.graphs=on")["learner.graphs"]
    assert reason in problem.message
    assert "auto, or off" == problem.accepted
    assert "auto" == config(*overrides).learner.graphs


# Ranks of the learner
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["a2c", "impala", "ppo"])
def test_ranks_divide_the_trajectories_of_a_batch(algorithm: str) -> None:
    given = (f"algorithm.name={algorithm}", "learner.ranks=2")
    problem = refused(*given, "algorithm.batch_trajectories=3")["algorithm.batch_trajectories"]
    assert "learner.ranks = 2 ranks get equal parts of each batch" == problem.message
    assert "a multiple of 2, or another number of ranks" == problem.accepted
    assert 2 == config(*given, "algorithm.batch_trajectories=4").learner.ranks


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_ranks_divide_the_items_of_a_draw(algorithm: str) -> None:
    lstm = "network.lstm=8" if algorithm == "r2d2" else "network.lstm=0"
    given = (f"algorithm.name={algorithm}", lstm, "learner.ranks=3")
    assert (
        "a multiple of 3, or another number of ranks"
        == refused(*given, "algorithm.batch_size=64")["algorithm.batch_size"].accepted
    )
    assert 3 == config(*given, "algorithm.batch_size=63").learner.ranks


@pytest.mark.parametrize(
    ("path", "message", "overrides"),
    [
        (
            "learner.ranks",
            "sums over several ranks are not those of a deterministic run",
            ["run.deterministic=true", "balance.max_staleness=0", "actors.count=1"],
        ),
        (
            "learner.ranks",
            "the launcher inline runs every component in one process",
            ["placement.launcher=inline"],
        ),
        (
            "learner.device",
            "one GPU is named, and each rank needs its own",
            ["learner.device=cuda:1"],
        ),
        (
            "learner.ranks",
            "the settings of tests.config.test_rules:Unmeasured do not declare splits_over_ranks",
            ["algorithm.name=tests.config.test_rules:Unmeasured"],
        ),
        (
            "learner.ranks",
            (
                "the settings of tests.config.test_rules:Declared declare splits_over_ranks, but "
                "its learner LearnerWithout has no join()"
            ),
            ["algorithm.name=tests.config.test_rules:Declared"],
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(
    path: str, message: str, overrides: list[str]
) -> None:
    given = ("algorithm.batch_trajectories=2", "learner.ranks=2", *overrides)
    assert message == refused(*given)[path].message


@pytest.mark.parametrize(
    ("path", "message", "overrides"),
    [
        ("run.deterministic", "the order of trajectories", ["run.deterministic=true"]),
        ("actors.count", "does not know the cores of its nodes", ["actors.count=auto"]),
        ("cluster.lease_s", "steps of environments are not seen", ["cluster.lease_s=60"]),
        ("cluster.lease_s", "are not seen", ["env.step_timeout_s=10"]),
        ("cluster.listen", "has the wrong form", ["cluster.listen=http://a:1"]),
        ("cluster.listen", "has the wrong form", ["cluster.listen=tcp://a"]),
        ("cluster.expect", "is out of range", ["cluster.expect=0"]),
    ],
)
def test_what_nodes_cannot_do_is_refused(path: str, message: str, overrides: list[str]) -> None:
    assert message in refused("placement.launcher=nodes", *overrides)[path].message


def test_settings_of_nodes_have_no_effect_on_one_machine() -> None:
    config("cluster.lease_s=60", "actors.count=auto")


def test_actors_on_nodes_may_ask_inference_servers_of_the_head() -> None:
    config("placement.launcher=nodes", "actors.inference=central")


@pytest.mark.parametrize(
    ("expected", "bound", "overrides"),
    [
        (8, 8, ["weights.publish=interval"]),
        (None, None, []),
        (7, 8, []),
        (5, 8, ["actors.count=3"]),
        (6, 8, ["actors.count=8", "algorithm.batch_trajectories=4"]),
        (5, 8, ["actors.count=9", "algorithm.batch_trajectories=4"]),
        (0, 1, []),
        (0, 0, []),
        (0, 3, ["actors.count=64"]),
        (6, 8, ["actors.count=64", "balance.credits=3"]),
        (8, 8, ["actors.count=64", "balance.credits=1"]),
        (8, 8, ["actors.count=0"]),
        (8, 8, ["actors.count=64", "balance.controller=consume_only"]),
    ],
)
def test_the_largest_publish_lag_leaves_the_credits_of_a_batch_and_of_each_actor(
    expected: int | None, bound: int | None, overrides: list[str]
) -> None:
    settings = config(DIVERGENCE, *overrides)
    assert expected == largest_publish_lag(settings, bound)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["balance.max_staleness=1"], "max_staleness >= 2 avoids this"),
        (["balance.max_staleness=4", "actors.count=4"], "max_staleness >= 5 avoids this"),
        (["balance.controller=lockstep"], "another controller than lockstep avoids this"),
    ],
)
def test_a_bound_under_which_no_version_can_be_skipped_is_reported(
    overrides: list[str], remedy: str
) -> None:
    found = [text for text in advice(config(DIVERGENCE, *overrides)) if "skips no version" in text]
    assert 1 == len(found)
    assert found[0].endswith(remedy)
    assert not [text for text in advice(config(*overrides)) if "skips no version" in text]


def test_the_remedy_of_that_advice_lets_versions_be_skipped() -> None:
    for actors in (1, 4, 9):
        settings = (DIVERGENCE, f"actors.count={actors}", "algorithm.batch_trajectories=2")
        (sentence,) = [
            text
            for text in advice(config(*settings, "balance.max_staleness=0"))
            if "skips no version" in text
        ]
        found = re.search(r"max_staleness >= (\d+)", sentence)
        assert found is not None
        bound = int(found[1])
        assert 1 == largest_publish_lag(config(*settings), bound)
        assert [] == [
            text
            for text in advice(config(*settings, f"balance.max_staleness={bound}"))
            if "skips no version" in text
        ]


def test_a_run_without_an_end_condition_is_reported() -> None:
    assert "this run ends only when it is stopped" in advice(config("run.max_updates=null"))[0]


def test_limits_that_a_resumed_run_has_reached_are_reported() -> None:
    before = {"version": [1, 10], "env_steps": 640, "elapsed_s": 8.0}
    limits = ["run.max_updates=10", "run.max_env_steps=640", "run.max_seconds=8"]
    assert ["run.max_env_steps = 640", "run.max_updates = 10", "run.max_seconds = 8"] == [
        sentence.partition(" is used up")[0]
        for sentence in used_up(config(*limits), before).values()
    ]
    assert {} == used_up(
        config("run.max_updates=11", "run.max_env_steps=641", "run.max_seconds=8"),
        before | {"trained_s": 4.0},
    )


def test_a_run_without_actors_is_reported() -> None:
    assert "nothing is sampled until actors are added" in advice(config("actors.count=0"))[0]


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (["run.max_updates=null"], "none is set of run.max_env_steps, run.max_updates"),
        (["run.max_updates=9"], ""),
        (["run.max_updates=null", "run.max_env_steps=9"], ""),
        (["run.max_updates=null", "run.max_seconds=9"], ""),
        (
            ["run.max_updates=null", "run.max_seconds=9", *DETERMINISTIC],
            "could not repeat bit for bit",
        ),
        (["run.max_updates=9", "run.max_seconds=9", *DETERMINISTIC], ""),
    ],
)
def test_a_linear_learning_rate_needs_an_end_that_it_can_reach(
    limits: list[str], refused: str
) -> None:
    settings = ["run.target_return=null", "algorithm.learning_rate_schedule=linear", *limits]
    if not refused:
        config(*settings)
        return
    with pytest.raises(ConfigError, match=refused) as error:
        config(*settings)
    assert ["algorithm.learning_rate_schedule"] == [
        problem.path for problem in error.value.problems
    ]


CENTRAL = 'actors.inference="central"'


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (['actors.refresh="trajectory"'], "actors.refresh", "between two batches"),
        (['actors.precision="bf16"'], "actors.precision", "servers compute the actions"),
        (["actors.rollout_steps=65537"], "actors.rollout_steps", "room for 65536 rows"),
        (["actors.hosts=248"], "actors.hosts", "248 of them at most"),
        (["inference.servers=8", "actors.hosts=241"], "actors.hosts", "at most 240"),
        (["inference.servers=0"], "inference.servers", ""),
        (["inference.max_batch=0"], "inference.max_batch", ""),
        (["inference.max_wait_s=-1.0"], "inference.max_wait_s", ""),
        (['inference.device="tpu"'], "inference.device", ""),
    ],
)
def test_settings_that_central_inference_cannot_have_are_refused(
    overrides: list[str], path: str, words: str
) -> None:
    found = refused(CENTRAL, *overrides)
    assert words in str(found[path])
    assert {path} == set(found)


def test_the_same_settings_are_accepted_with_local_inference() -> None:
    config('actors.refresh="trajectory"', 'actors.precision="bf16"', "actors.hosts=248")


def test_idle_hosts_of_central_inference_are_named() -> None:
    warned = "with one actor a host (2 actors) a host is idle"
    alone, more = (
        " ".join(
            advice(
                config(
                    CENTRAL, "actors.count=2", f"actors.hosts={hosts}", "balance.max_staleness=4"
                )
            )
        )
        for hosts in (2, 1)
    )
    assert warned in alone
    assert warned not in more
    assert warned not in " ".join(advice(config("actors.count=2", "actors.hosts=2")))


# Launchers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [(), ("actors.count=auto",)])
def test_an_object_that_is_not_a_launcher_is_refused_by_path(overrides: tuple[str, ...]) -> None:
    problem = refused("placement.launcher=os:path", *overrides)["placement.launcher"]
    assert "is not a launcher: it has no capabilities" == problem.message


def test_the_capabilities_of_a_launcher_and_not_its_name_decide_about_counted_actors() -> None:
    """One from a file of its own may run on one machine, or on several."""
    one = "tianflow.launchers.processes:ProcessLauncher"
    several = "tianflow.launchers.nodes:NodeLauncher"
    assert config(f"placement.launcher={one}", "actors.count=auto").actors.count >= 1
    problems = refused(f"placement.launcher={several}", "actors.count=auto")
    assert "does not know the cores of its nodes" in problems["actors.count"].message
