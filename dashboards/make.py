"""Grafana dashboards: ``python -m dashboards.make`` writes them, ``--check`` compares the written
ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards.annotations import annotations
from dashboards.inference import inference_panels
from dashboards.learning import learning_panels
from dashboards.nodes import node_panels
from dashboards.panels import (
    RATE,
    SOURCE,
    Json,
    figure,
    heatmap,
    lines,
    mean,
    now,
    quantile,
    rate,
    rate_by,
    row,
    time_shares,
)
from dashboards.processes import process_panels
from dashboards.replay import replay_panels
from dashboards.service import service_panels, waiting_panels

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
COLUMNS = 24
DEFAULT = {"text": "default", "value": "default"}
"""Grafana's default data source."""


# Dashboards
# --------------------------------------------------------------------------------------------------


def variables() -> list[Json]:
    """Variables of a dashboard: data source and runs."""
    query = "label_values(tianflow_run_ready, run)"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": DEFAULT,
        },
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": SOURCE,
            "query": {"qryType": 1, "query": query, "refId": "run"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def dashboard(uid: str, title: str, about: str, panels: Sequence[Json]) -> Json:
    """A dashboard whose panels flow from left to right and wrap."""
    x = y = row = 0
    for number, made in enumerate(panels, start=1):
        place = made["gridPos"]
        if x + place["w"] > COLUMNS or (x and made["type"] == "row"):
            x, y, row = 0, y + row, 0
        place["x"], place["y"] = x, y
        made["id"] = number
        x, row = x + place["w"], max(row, place["h"])
    look = {"icon": "external link", "tooltip": "", "asDropdown": False, "targetBlank": False}
    links = [
        {
            "type": "dashboards",
            "title": "tianflow",
            "tags": ["tianflow"],
            "includeVars": True,
            "keepTime": True,
            **look,
        }
    ]
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["tianflow"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "links": links,
        "annotations": {"list": annotations()},
        "templating": {"list": variables()},
        "panels": list(panels),
    }


def overview() -> Json:
    """Return, throughput and bottleneck."""
    dropped = rate_by("run, reason", "trajectories_dropped_total")
    return dashboard(
        "tianflow-overview",
        "tianflow: overview",
        "Return, throughput and bottleneck of runs.",
        [
            figure("State", "State of the run.", f"{now('run_state')} == 1", legend="{{state}}"),
            figure(
                "Bottleneck",
                "Current bottleneck of the throughput.",
                f"{now('diagnosis')} == 1",
                legend="{{verdict}}",
            ),
            figure(
                "Mean return",
                "Mean of the last 100 episodes of training.",
                now("episode_return_mean"),
            ),
            figure("Steps", "Environment steps per second.", rate("env_steps_total"), unit="ops"),
            figure(
                "Staleness",
                "Maximum of the last 1,000 trajectories, in updates.",
                now("staleness_max_updates"),
            ),
            figure(
                "Violations",
                "Trajectories trained on beyond the bound: always 0.",
                now("staleness_violations_total"),
                bad_from=1,
            ),
            row("Learning"),
            *learning_panels(),
            row("Speed"),
            lines(
                "Environment steps",
                "Environment steps of the actors per second.",
                (rate("env_steps_total"), "{{run}} made"),
                unit="ops",
            ),
            lines(
                "Steps trained on",
                "Environment steps in batches per second; with replay, each draw counts.",
                (rate_by("run", "samples_trained_total"), "{{run}} trained on"),
                unit="ops",
            ),
            time_shares("Learner's time", "learner"),
            time_shares("Actors' time", "actor-.+"),
            lines(
                "Updates",
                "Updates settled per second.",
                (rate("learner_updates_total"), "{{run}}"),
                unit="ops",
                width=6,
            ),
            lines(
                "Update time",
                "Time of one update, median.",
                (quantile(0.5, "learner_update_seconds"), "{{run}} update"),
                unit="s",
                width=6,
            ),
            lines(
                "Publishing time",
                "Mean time to publish the weights of one update.",
                (mean("weights_publish_seconds"), "{{run}} publish"),
                unit="s",
                width=6,
            ),
            lines(
                "Maximum staleness",
                "Maximum of the last 1,000 trajectories, in updates.",
                (now("staleness_max_updates"), "{{run}} max"),
                width=6,
            ),
            lines(
                "Dropped trajectories",
                "Drops per second, by reason.",
                (dropped, "{{run}} {{reason}}"),
                unit="ops",
            ),
            lines(
                "Rows lost by sinks",
                "Rows of history that a slow or failed sink did not receive, per second.",
                (rate("sink_rows_dropped_total"), "{{run}} {{sink}}"),
                unit="ops",
            ),
            *waiting_panels(),
            row("Processes"),
            *process_panels(),
            row("Inference servers"),
            *inference_panels(),
            row("Nodes"),
            *node_panels(),
            row("Service"),
            *service_panels(),
        ],
    )


def balance() -> Json:
    """Staleness, its causes, and the controllers."""
    actors = "run, component"
    return dashboard(
        "tianflow-balance",
        "tianflow: balance",
        "Staleness of samples, its causes, and the controllers' actions.",
        [
            figure("Bound", "Maximum staleness in force.", now("staleness_bound_updates")),
            figure(
                "Staleness p99",
                "99th percentile of the last 1,000 trajectories.",
                now("staleness_p99_updates"),
            ),
            figure(
                "Publish lag",
                "Updates since the last published version.",
                now("publish_lag_updates"),
            ),
            figure(
                "Controller",
                "Controller whose request is in force.",
                f"{now('balance_controller_winning')} == 1",
                legend="{{controller}}",
            ),
            figure(
                "Settings",
                "Newest generation of the live settings.",
                now("balance_settings_generation"),
            ),
            figure(
                "Unaccounted",
                "Trajectories begun, less trained, inserted, dropped and open: always 0.",
                f"{now('trajectories_begun_total')} - {now('trajectories_trained_total')} - "
                f"{now('trajectories_inserted_total')}"
                f" - {now('trajectories_open')}"
                f" - on (run) sum by (run) ({now('trajectories_dropped_total')})",
                bad_from=1,
            ),
            heatmap(
                "Staleness at use",
                "Trained trajectories by staleness.",
                f"sum by (le) (increase({now('staleness_updates_bucket')}[{RATE}]))",
            ),
            lines(
                "Where staleness comes from",
                "Means of its two parts: until commit, and from commit to use.",
                (mean("staleness_in_flight_updates"), "{{run}} in flight"),
                (mean("staleness_in_queue_updates"), "{{run}} in queue"),
                (now("staleness_bound_updates"), "{{run}} bound"),
            ),
            lines(
                "Credits",
                "Permissions to begin a trajectory.",
                (now("credits_in_use"), "{{run}} in use"),
                (now("credits_limit"), "{{run}} in force"),
                (now("credits_target"), "{{run}} asked for"),
                (now("credits_ceiling"), "{{run}} ceiling"),
            ),
            lines(
                "Queue",
                "Trajectories that wait for the learner, open trajectories, and slots.",
                (now("queue_trajectories"), "{{run}} queued"),
                (now("trajectories_open"), "{{run}} open"),
                (now("slots_free"), "{{run}} free slots"),
                (now("slots_quarantined"), "{{run}} quarantined slots"),
            ),
            lines(
                "Age of the queue",
                "Time since the oldest commit in the queue.",
                (now("queue_oldest_age_seconds"), "{{run}}"),
                unit="s",
            ),
            lines(
                "Trajectories",
                "Trajectories per second: begun, committed, trained on, inserted, dropped and cut.",
                (rate("trajectories_begun_total"), "{{run}} begun"),
                (rate("trajectories_committed_total"), "{{run}} committed"),
                (rate("trajectories_trained_total"), "{{run}} trained"),
                (rate("trajectories_inserted_total"), "{{run}} inserted"),
                (rate_by("run", "trajectories_dropped_total"), "{{run}} dropped"),
                (rate("trajectories_cut_total"), "{{run}} cut"),
                (rate("trajectories_late_commits_total"), "{{run}} refused as late"),
                unit="ops",
            ),
            lines(
                "Trained share of each actor",
                "Environment steps trained on over steps committed; 0 with replay, which trains on "
                "items.",
                (
                    (
                        f"{rate_by(actors, 'steps_trained_total')} / "
                        f"{rate_by(actors, 'steps_committed_total')}"
                    ),
                    "{{run}} {{component}}",
                ),
                unit="percentunit",
            ),
            lines(
                "Off-policyness",
                "Distance of the acting policies from the learning policy.",
                (now("off_policy_kl_nats"), "{{run}} KL in nats"),
                (now("effective_sample_ratio"), "{{run}} effective sample ratio"),
                (now("weights_divergence_nats"), "{{run}} KL of published from newest in nats"),
            ),
            lines(
                "Versions",
                "Versions published, and versions settled without being published.",
                (rate("weights_published_total"), "{{run}} published"),
                (rate("weights_skipped_total"), "{{run}} skipped"),
                unit="ops",
            ),
            lines(
                "Controllers",
                "Directives given per second.",
                (rate("balance_directives_total"), "{{run}} {{controller}}"),
                unit="ops",
            ),
            lines(
                "Settings in force",
                "Newest generation, and oldest generation in force in a component.",
                (now("balance_settings_generation"), "{{run}} newest"),
                (
                    f"min by (run) ({now('component_settings_generation')})",
                    "{{run}} oldest in force",
                ),
            ),
            lines(
                "Changes",
                "Live changes of settings per second.",
                (rate("settings_changes_total"), "{{run}} in force"),
                (rate("settings_refused_total"), "{{run}} refused"),
                unit="ops",
            ),
            row("Replay"),
            *replay_panels(),
        ],
    )


def files() -> dict[Path, str]:
    """Path and text of every dashboard."""
    made = {"overview": overview(), "balance": balance()}
    return {
        FOLDER / f"{name}.json": json.dumps(board, indent=2, ensure_ascii=False) + "\n"
        for name, board in made.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the dashboards; with ``--check``, return 1 if those on disk differ."""
    made = files()
    if "--check" in arguments:
        stale = [
            str(path)
            for path, text in made.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            sys.stderr.write(f"out of date: {', '.join(stale)}; run: python -m dashboards.make\n")
        return 1 if stale else 0
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
