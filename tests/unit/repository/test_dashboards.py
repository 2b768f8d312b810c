"""Dashboards and alert rules: as in their tables, about metrics that exist, and every alert fires and is silent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gym_client.observe.metrics
import gym_server.observe.instruments
import gym_server.observe.metrics
import pytest
import yaml

import gym_fed.serving.http.metrics
from gym_fed.cli.docs import metrics_page
from tests.support.prometheus import needs_prometheus, promtool
from tools.dashboards.__main__ import DASHBOARDS, GROUPS, ROOT, dashboard, files

MODULES = (
    gym_server.observe.metrics,
    gym_server.observe.instruments,
    gym_fed.serving.http.metrics,
    gym_client.observe.metrics,
)
HUB, API = '{job="gym-hub", instance="h:1"}', '{job="gym-api", instance="a:1"}'
DAY = 86400

FIRING: dict[str, dict[str, str]] = {
    "HubDown": {f"up{HUB}": "0x200"},
    "HubNotRunning": {f"gym_hub_up{HUB}": "0x200"},
    "NoContributors": {f"gym_hub_connected{HUB}": "0x200", f"gym_hub_rounds_remaining{HUB}": "4x200"},
    "RoundsFailing": {f"gym_hub_failed_rounds_in_a_row{HUB}": "3x200"},
    "RoundStalled": {
        f"gym_hub_last_commit_timestamp_seconds{HUB}": "0x200",
        f"gym_hub_start_time_seconds{HUB}": "0x200",
        f"gym_hub_round_deadline_seconds{HUB}": "600x200",
        f"gym_hub_rounds_remaining{HUB}": "4x200",
        f"gym_hub_paused{HUB}": "0x200",
    },
    "HeldoutLossRising": {f"gym_hub_heldout_loss{HUB}": "2x60 2.2x200"},
    "UpdatesRefused": {
        'gym_hub_recent_updates{job="gym-hub", instance="h:1", verdict="refused", code="x"}': "4x200",
        'gym_hub_recent_updates{job="gym-hub", instance="h:1", verdict="merged", code=""}': "6x200",
    },
    "TasksLost": {
        'gym_hub_recent_tasks{job="gym-hub", instance="h:1", outcome="lost"}': "6x200",
        'gym_hub_recent_tasks{job="gym-hub", instance="h:1", outcome="replied"}': "4x200",
    },
    "DatabaseSlow": {
        'gym_hub_database_seconds_bucket{job="gym-hub", instance="h:1", kind="write", le="2.5"}': "0x200",
        'gym_hub_database_seconds_bucket{job="gym-hub", instance="h:1", kind="write", le="5.0"}': "0+9x200",
        'gym_hub_database_seconds_bucket{job="gym-hub", instance="h:1", kind="write", le="+Inf"}': "0+9x200",
    },
    "HubErrors": {'gym_hub_refusals_total{job="gym-hub", instance="h:1", code="internal"}': "0+1x200"},
    "Flood": {'gym_hub_refusals_total{job="gym-hub", instance="h:1", code="busy"}': "0+600x200"},
    "DiskBelowReserve": {
        f"gym_hub_disk_free_bytes{HUB}": "9x200",
        f"gym_hub_disk_reserve_bytes{HUB}": "10x200",
    },
    "DiskFilling": {f"gym_hub_disk_free_bytes{HUB}": "14x200", f"gym_hub_disk_total_bytes{HUB}": "100x200"},
    "WalLarge": {f"gym_hub_database_wal_bytes{HUB}": "2000000000x200"},
    "LedgerUnsigned": {
        f"gym_hub_model_version{HUB}": "0+1x200",
        f"gym_hub_ledger_signed_entries{HUB}": "7x200",
    },
    "CertificateEnding": {f"gym_hub_certificate_expiry_timestamp_seconds{HUB}": f"{13 * DAY}x200"},
    "ClockSkewed": {f"gym_hub_clock_skew_seconds{HUB}": "-61x200", f"gym_hub_clocks{HUB}": "3x200"},
    "BackupOld": {
        f"gym_hub_backup_timestamp_seconds{HUB}": "-180000x200",
        f"gym_hub_model_version{HUB}": "1x200",
    },
    "GcFailing": {'gym_hub_gc_passes_total{job="gym-hub", instance="h:1", outcome="failed"}': "0+1x200"},
    "EpsilonNearlySpent": {
        f"gym_hub_epsilon_spent{HUB}": "2.8x200",
        f"gym_hub_epsilon_budget{HUB}": "3x200",
    },
    "ApiDown": {f"up{API}": "0x200"},
    "ApiNotReady": {f"gym_api_ready{API}": "0x200"},
    "EngineDead": {f"gym_engine_healthy{API}": "0x200"},
    "ApiErrors": {
        'gym_api_requests_total{job="gym-api", instance="a:1", status="500"}': "0+6x200",
        'gym_api_requests_total{job="gym-api", instance="a:1", status="200"}': "0+94x200",
    },
    "FirstTokenSlow": {
        'gym_engine_first_token_seconds_bucket{job="gym-api", instance="a:1", le="5.0"}': "0x200",
        'gym_engine_first_token_seconds_bucket{job="gym-api", instance="a:1", le="10.0"}': "0+9x200",
        'gym_engine_first_token_seconds_bucket{job="gym-api", instance="a:1", le="+Inf"}': "0+9x200",
    },
    "ApiOverloaded": {f"gym_engine_refused_total{API}": "0+1x200"},
    "KvCacheFull": {
        f"gym_engine_kv_bytes_used{API}": "96x200",
        f"gym_engine_kv_bytes_limit{API}": "100x200",
    },
    "EngineStepsFailing": {f"gym_engine_failed_steps_total{API}": "0+1x200"},
    "VariantLoadsFailing": {f"gym_variants_errors_total{API}": "0+1x200"},
    "UsageLost": {f"gym_api_usage_lost_total{API}": "0+1x200"},
    "AgentSilent": {'gym_client_last_event_timestamp_seconds{job="node", instance="c:1"}': "-22000x200"},
    "AgentHubAway": {'gym_client_hub_reachable{job="node", instance="c:1"}': "0x200"},
    "AgentTasksFailing": {'gym_client_tasks_total{job="node", instance="c:1", event="failed"}': "0+1x200"},
}
"""Series, one sample a minute, with which each alert fires."""

HEALTHY = {
    f"up{HUB}": "1x200",
    f"up{API}": "1x200",
    f"gym_hub_up{HUB}": "1x200",
    f"gym_hub_connected{HUB}": "3x200",
    f"gym_hub_rounds_remaining{HUB}": "4x200",
    f"gym_hub_paused{HUB}": "0x200",
    f"gym_hub_failed_rounds_in_a_row{HUB}": "2x200",
    f"gym_hub_last_commit_timestamp_seconds{HUB}": "0+60x200",
    f"gym_hub_start_time_seconds{HUB}": "0x200",
    f"gym_hub_round_deadline_seconds{HUB}": "600x200",
    f"gym_hub_heldout_loss{HUB}": "2x60 2.05x200",
    'gym_hub_recent_updates{job="gym-hub", instance="h:1", verdict="refused", code="x"}': "3x200",
    'gym_hub_recent_updates{job="gym-hub", instance="h:1", verdict="merged", code=""}': "7x200",
    'gym_hub_recent_tasks{job="gym-hub", instance="h:1", outcome="lost"}': "5x200",
    'gym_hub_recent_tasks{job="gym-hub", instance="h:1", outcome="replied"}': "5x200",
    'gym_hub_database_seconds_bucket{job="gym-hub", instance="h:1", kind="write", le="2.5"}': "0+9x200",
    'gym_hub_database_seconds_bucket{job="gym-hub", instance="h:1", kind="write", le="+Inf"}': "0+9x200",
    'gym_hub_refusals_total{job="gym-hub", instance="h:1", code="internal"}': "1x200",
    'gym_hub_refusals_total{job="gym-hub", instance="h:1", code="busy"}': "0+60x200",
    f"gym_hub_disk_free_bytes{HUB}": "16x200",
    f"gym_hub_disk_reserve_bytes{HUB}": "10x200",
    f"gym_hub_disk_total_bytes{HUB}": "100x200",
    f"gym_hub_database_wal_bytes{HUB}": "1000000x200",
    f"gym_hub_model_version{HUB}": "0+1x200",
    f"gym_hub_ledger_signed_entries{HUB}": "0+9x200",
    f"gym_hub_certificate_expiry_timestamp_seconds{HUB}": f"{60 * DAY}x200",
    f"gym_hub_clock_skew_seconds{HUB}": "61x200",
    f"gym_hub_clocks{HUB}": "2x200",
    f"gym_hub_backup_timestamp_seconds{HUB}": "0+60x200",
    'gym_hub_gc_passes_total{job="gym-hub", instance="h:1", outcome="failed"}': "1x200",
    f"gym_hub_epsilon_spent{HUB}": "2x200",
    f"gym_hub_epsilon_budget{HUB}": "3x200",
    f"gym_api_ready{API}": "1x200",
    f"gym_engine_healthy{API}": "1x200",
    'gym_api_requests_total{job="gym-api", instance="a:1", status="500"}': "0+4x200",
    'gym_api_requests_total{job="gym-api", instance="a:1", status="200"}': "0+96x200",
    'gym_engine_first_token_seconds_bucket{job="gym-api", instance="a:1", le="5.0"}': "0+9x200",
    'gym_engine_first_token_seconds_bucket{job="gym-api", instance="a:1", le="+Inf"}': "0+9x200",
    f"gym_engine_refused_total{API}": "5x200",
    f"gym_engine_kv_bytes_used{API}": "90x200",
    f"gym_engine_kv_bytes_limit{API}": "100x200",
    f"gym_engine_failed_steps_total{API}": "1x200",
    f"gym_variants_errors_total{API}": "1x200",
    f"gym_api_usage_lost_total{API}": "1x200",
    'gym_client_last_event_timestamp_seconds{job="node", instance="c:1"}': "0+60x200",
    'gym_client_hub_reachable{job="node", instance="c:1"}': "1x200",
    'gym_client_tasks_total{job="node", instance="c:1", event="failed"}': "2x200",
}
"""Series near the thresholds with which no alert fires."""
AT = "3h"
"""When the alerts are looked at: after the longest of their waits. Time begins at 0."""


def test_the_files_are_those_of_the_tables() -> None:
    for path, text in files().items():
        assert path.read_text("utf-8") == text, f"{path}: run python -m tools.dashboards"


def test_every_metric_that_is_asked_for_exists() -> None:
    rows = [row for module in MODULES for row in module.ROWS]
    series = {row.series for row in rows}
    for row in rows:
        if row.kind == "histogram":
            series |= {f"{row.name}_sum", f"{row.name}_count"}
    queries = [
        query for _, panels in DASHBOARDS.values() for panel in panels for query in panel.queries.values()
    ]
    queries += [alert.expression for alerts in GROUPS.values() for alert in alerts]
    asked = {name for query in queries for name in re.findall(r"\bgym_\w+", query)}
    assert asked <= series


def test_the_built_page_explains_every_metric() -> None:
    page = metrics_page()
    for module in MODULES:
        for row in module.ROWS:
            assert f"| `{row.series}` | {row.kind} |" in page
            assert row.description in page


def test_every_metric_of_a_hub_and_an_api_is_on_a_dashboard() -> None:
    shown = "".join(json.dumps(dashboard(name)) for name in DASHBOARDS)
    for module in MODULES[:-1]:
        for row in module.ROWS:
            assert re.search(rf"\b{row.name}(_total|_bucket|_sum)?\b", shown), row.name


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap_and_fit_the_grid(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(name)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def unit_test(series: dict[str, str], alerts: list[str], firing: str = "") -> dict[str, Any]:
    """One test of promtool: ``firing`` fires, or nothing does."""
    checks: list[dict[str, Any]] = []
    rules = {
        rule["alert"]: rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    for name in alerts:
        check: dict[str, Any] = {"eval_time": AT, "alertname": name, "exp_alerts": []}
        if name == firing:
            rule, labels = rules[name], dict(re.findall(r'(\w+)="([^"]*)"', min(series)))
            kept = {key: labels[key] for key in KEPT.get(name, labels)}
            expected = {"exp_labels": {**kept, **rule["labels"]}, "exp_annotations": rule["annotations"]}
            check["exp_alerts"] = [expected]
        checks.append(check)
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": checks,
    }


def promtool_file(folder: Path, test: dict[str, Any], alert: str = "") -> Path:
    """A file with one test of promtool, for the rule of ``alert`` alone: promtool computes every rule it is given,
    at every minute of every test."""
    rules = RULES
    if alert:
        groups = yaml.safe_load(RULES.read_text())["groups"]
        (rule,) = (rule for group in groups for rule in group["rules"] if rule["alert"] == alert)
        rules = folder / f"{alert}.rules.yml"
        rules.write_text(yaml.safe_dump({"groups": [{"name": alert, "rules": [rule]}]}))
    file = folder / f"{alert or 'healthy'}.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]})
    )
    return file


RULES = ROOT / "deploy/prometheus/rules.yml"
KEPT = {
    "UpdatesRefused": ("instance",),
    "TasksLost": ("instance",),
    "ApiErrors": ("instance",),
    "FirstTokenSlow": ("instance",),
    "DatabaseSlow": (),
}
"""Labels that the aggregation of an alert keeps; of the others all."""


@needs_prometheus
def test_every_alert_fires_once_and_is_silent_at_a_healthy_hub(tmp_path: Path) -> None:
    names = [alert.name for alerts in GROUPS.values() for alert in alerts]
    assert sorted(names) == sorted(FIRING)
    tests = [promtool_file(tmp_path, unit_test(FIRING[name], [name], firing=name), name) for name in names]
    tests.append(promtool_file(tmp_path, unit_test(HEALTHY, names)))
    done = promtool("test", "rules", *tests)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@needs_prometheus
def test_the_config_of_prometheus_is_valid() -> None:
    done = promtool("check", "config", "--syntax-only", ROOT / "deploy/prometheus/prometheus.yml")
    assert done.returncode == 0, done.stderr
