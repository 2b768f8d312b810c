"""The alerts about a contributor's agent, for its owner; agents have no dashboard."""

from __future__ import annotations

from tools.dashboards.signals import Alert

ALERTS = (
    Alert(
        "AgentSilent",
        "time() - gym_client_last_event_timestamp_seconds > 6 * 3600",
        "0m",
        "no event for 6 hours",
        "run `gym-client join` again",
    ),
    Alert(
        "AgentHubAway",
        "gym_client_hub_reachable == 0",
        "30m",
        "the hub does not answer",
        "ask its coordinator; the agent retries",
    ),
    Alert(
        "AgentTasksFailing",
        'increase(gym_client_tasks_total{event="failed"}[1h]) > 2',
        "0m",
        "3 tasks failed in an hour",
        "the agent's output has the reason",
    ),
)
