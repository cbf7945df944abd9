"""Which components there are, and where they go."""

from __future__ import annotations

import pytest

from tests.support.settings import cartpole
from tianflow.config.loading import load_config
from tianflow.config.rules import MOST_DOORBELLS
from tianflow.core.program import LauncherCapabilities
from tianflow.planning import placement

PROCESSES = LauncherCapabilities()
ONE_LOOP = LauncherCapabilities(processes=False, binds_cores=False)


@pytest.fixture
def cores(monkeypatch):
    """Pretend to have so many cores."""

    def pretend(count):
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(count)))

    return pretend


def placed(**sections):
    hosts = placement.build(cartpole(**sections), PROCESSES).hosts
    return {host.name: host for host in hosts}


def names(host):
    return [component.name for component in host.components]


def test_a_launcher_without_processes_gets_one_host_which_is_bound_to_no_core():
    program = placement.build(cartpole(actors={"count": 3}), ONE_LOOP)
    assert [(host.name, host.cores) for host in program.hosts] == [("inline", ())]
    assert program.hosts[0].components == program.components
    assert [c.name for c in program.components] == [
        "learner",
        "actor-0",
        "actor-1",
        "actor-2",
        "evaluator",
    ]


def test_on_two_cores_learner_and_actors_have_one_each(cores):
    cores(2)
    hosts = placed(actors={"count": 3})
    assert names(hosts["actors-0"]) == ["actor-0", "actor-1", "actor-2"]
    assert (hosts["learner"].cores, hosts["actors-0"].cores, hosts["evaluator"].cores) == (
        (0,),
        (1,),
        (1,),
    )


def test_on_one_core_nobody_is_bound(cores):
    cores(1)
    assert all(host.cores == () for host in placed().values())


def test_affinity_none_binds_nobody(cores):
    cores(4)
    hosts = placed(placement={"affinity": "none"})
    assert all(host.cores == () for host in hosts.values())


def test_a_launcher_that_cannot_bind_cores_is_not_asked_to(cores):
    cores(4)
    program = placement.build(cartpole(), LauncherCapabilities(binds_cores=False))
    assert len(program.hosts) > 1
    assert all(host.cores == () for host in program.hosts)


def test_many_cores_give_every_actor_host_its_own(cores):
    cores(5)
    hosts = placed(actors={"count": 4})
    assert [hosts[f"actors-{place}"].cores for place in range(4)] == [(1,), (2,), (3,), (4,)]


def test_as_many_hosts_as_set_share_the_cores_there_are(cores):
    cores(2)
    hosts = placed(actors={"count": 8, "hosts": 4})
    assert names(hosts["actors-1"]) == ["actor-1", "actor-5"]
    assert hosts["actors-3"].cores == (1,)


def test_a_learner_with_threads_gets_as_many_cores(cores):
    cores(4)
    hosts = placed(learner={"threads": 2}, actors={"count": 2})
    assert (hosts["learner"].cores, hosts["learner"].threads) == ((0, 1), 2)


def test_ranks_of_a_learner_have_cores_of_their_own_and_end_together(cores):
    cores(8)
    hosts = placed(
        actors={"count": 8},
        learner={"ranks": 2, "threads": 2},
        algorithm={"batch_trajectories": 2},
        placement={"launcher": "processes"},
    )
    assert [(0, 1), (2, 3)] == [hosts[name].cores for name in ("learner", "learner-1")]
    assert [("learner", 0), ("learner-1", 1)] == [
        (component.name, component.index)
        for name in ("learner", "learner-1")
        for component in hosts[name].components
    ]
    assert {"learner", "learner-1"} == {name for name, host in hosts.items() if host.group}
    assert [(4,), (5,), (6,), (7,)] == [hosts[f"actors-{place}"].cores for place in range(4)]
    assert "" == placed(actors={"count": 1})["learner"].group


def test_a_learner_on_a_gpu_has_no_core_of_its_own(cores, monkeypatch):
    cores(4)
    monkeypatch.setattr("tianflow.core.devices.HAS_GPU", True)
    hosts = placed(actors={"count": 4})
    assert () == hosts["learner"].cores
    assert [(0,), (1,), (2,), (3,)] == [hosts[f"actors-{place}"].cores for place in range(4)]
    assert (0,) == placed(actors={"count": 4}, learner={"device": "cpu"})["learner"].cores


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
def test_an_actor_keeps_its_host_whatever_the_count(cores, count):
    cores(4)
    everywhere = {
        c.name: host.name for host in placed(actors={"count": 16}).values() for c in host.components
    }
    here = {
        c.name: host.name
        for host in placed(actors={"count": count}).values()
        for c in host.components
    }
    assert here == {name: everywhere[name] for name in here}
    assert len(here) == count + 2


# Replay
# --------------------------------------------------------------------------------------------------


def replaying(capabilities, **sections):
    given = {
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": {"name": "dqn"},
        **sections,
    }
    return placement.build(load_config(given), capabilities)


def test_every_replay_shard_has_a_host_of_its_own(cores):
    cores(4)
    program = replaying(PROCESSES, replay={"shards": 3})
    hosts = {host.name: host for host in program.hosts}
    shards = [component for component in program.components if component.role == "replay"]
    assert [("replay-0", 0), ("replay-1", 1), ("replay-2", 2)] == [
        (shard.name, shard.index) for shard in shards
    ]
    assert [["replay-0"], ["replay-1"], ["replay-2"]] == [
        names(hosts[shard.name]) for shard in shards
    ]
    assert not set(hosts["learner"].cores) & set(hosts["replay-0"].cores)


def test_shards_share_the_one_host_of_a_launcher_without_processes():
    program = replaying(ONE_LOOP, replay={"shards": 2})
    (host,) = program.hosts
    assert {"replay-0", "replay-1"} < set(names(host))


def test_a_run_without_replay_has_no_shards():
    assert 0 == placement.shard_count(cartpole())
    program = placement.build(cartpole(), PROCESSES)
    assert not [component for component in program.components if component.role == "replay"]


def test_hosts_are_as_many_as_there_are_doorbells_at_most(cores):
    cores(400)
    assert placement.hosts_wanted(cartpole()) == 399
    central = cartpole(actors={"inference": "central"}, inference={"servers": 3})
    assert placement.hosts_wanted(central) == 245
    assert placement.bells_wanted(central) == MOST_DOORBELLS
