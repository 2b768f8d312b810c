"""The hub's dashboard and alerts."""

from __future__ import annotations

from tools.dashboards.signals import Alert, Panel, quantile, rate, share, share_or_zero

_UPDATES = "gym_hub_recent_updates"
_WRITES = quantile(0.99, "gym_hub_database_seconds", where='{kind="write"}')
_REFUSED = share_or_zero(f'{_UPDATES}{{verdict=~"refused|rejected"}}', _UPDATES)
_LOST = share('gym_hub_recent_tasks{outcome=~"lost|failed"}', "gym_hub_recent_tasks")
_LATE = " and ".join(
    f"time() - {since} > 3 * gym_hub_round_deadline_seconds"
    for since in ("gym_hub_last_commit_timestamp_seconds", "gym_hub_start_time_seconds")
)

PANELS = (
    Panel(
        "Running",
        "bool",
        {"{{instance}}": "gym_hub_up"},
        (
            Alert(
                "HubDown",
                'up{job="gym-hub"} == 0',
                "2m",
                "`/metrics` does not answer",
                "start `gym-server run`; its log has the reason",
                is_critical=True,
            ),
            Alert(
                "HubNotRunning",
                "gym_hub_up == 0",
                "5m",
                "only the dashboard runs",
                "start `gym-server run`",
                is_critical=True,
            ),
        ),
        is_number=True,
    ),
    Panel("Round", "short", {"round": "gym_hub_round", "version": "gym_hub_model_version"}, is_number=True),
    Panel(
        "Rounds to come",
        "short",
        {"rounds": "gym_hub_rounds_remaining", "paused": "gym_hub_paused"},
        is_number=True,
    ),
    Panel(
        "Contributors",
        "short",
        {"connected": "gym_hub_connected", "{{status}}": "gym_hub_accounts"},
        (
            Alert(
                "NoContributors",
                "gym_hub_connected == 0 and gym_hub_rounds_remaining > 0",
                "15m",
                "nobody is connected",
                "check the hub's address and port from outside",
            ),
        ),
        is_number=True,
    ),
    Panel("Rounds by state", "short", {"{{state}}": "gym_hub_rounds"}),
    Panel(
        "Recent rounds by state",
        "short",
        {"{{state}}": "gym_hub_recent_rounds", "failed in a row": "gym_hub_failed_rounds_in_a_row"},
        (
            Alert(
                "RoundsFailing",
                "gym_hub_failed_rounds_in_a_row >= 3",
                "0m",
                "3 rounds in a row made no version",
                "`gym-server rounds` has the reasons",
                threshold=3,
            ),
        ),
    ),
    Panel(
        "Time of a round",
        "s",
        {
            "last round": "gym_hub_last_round_seconds",
            "deadline": "gym_hub_round_deadline_seconds",
            "since the last commit": "time() - gym_hub_last_commit_timestamp_seconds "
            "and gym_hub_last_commit_timestamp_seconds > 0",
            "this round": "time() - gym_hub_round_opened_timestamp_seconds",
        },
        (
            Alert(
                "RoundStalled",
                f"{_LATE} and gym_hub_rounds_remaining > 0 and gym_hub_paused == 0",
                "1m",
                "no version for 3 deadlines",
                "`gym-server status` shows who the round is waiting for; `gym-server skip` ends it",
                is_critical=True,
            ),
        ),
    ),
    Panel(
        "Held-out loss",
        "nats",
        {"newest version": "gym_hub_heldout_loss", "before it": "gym_hub_heldout_loss_before"},
        (
            Alert(
                "HeldoutLossRising",
                "gym_hub_heldout_loss > 1.05 * min_over_time(gym_hub_heldout_loss[7d])",
                "0m",
                "loss is 5% above the week's best",
                "`gym-server rollback` to a better version; lower `gate.max_loss_increase`",
            ),
        ),
    ),
    Panel("Recent updates by verdict", "short", {"{{verdict}} {{code}}": _UPDATES}),
    Panel(
        "Share of updates refused or rejected",
        "percentunit",
        {"{{instance}}": _REFUSED},
        (
            Alert(
                "UpdatesRefused",
                f"({_REFUSED}) > 0.3 and sum by (instance) ({_UPDATES}) >= 10",
                "10m",
                "over 30% of updates",
                "`gym-server rounds` names the codes and contributors; `gym-server revoke` attackers",
                threshold=0.3,
            ),
        ),
    ),
    Panel(
        "Recent tasks by outcome",
        "short",
        {"{{outcome}}": "gym_hub_recent_tasks"},
        (
            Alert(
                "TasksLost",
                f"{_LOST} > 0.5 and sum by (instance) (gym_hub_recent_tasks) >= 10",
                "10m",
                "over half of the tasks",
                "reduce the work of the recipe, or raise `rounds.lease_seconds`",
            ),
        ),
    ),
    Panel("Queue", "short", {"{{state}}": "gym_hub_messages", "uploads": "gym_hub_uploads"}),
    Panel(
        "Merge phases, mean",
        "s",
        {"{{phase}}": "gym_hub_merge_phase_seconds_sum / gym_hub_merge_phase_seconds_count"},
    ),
    Panel(
        "Transactions, 99%",
        "s",
        {"{{kind}}": quantile(0.99, "gym_hub_database_seconds", "kind")},
        (
            Alert(
                "DatabaseSlow",
                f"{_WRITES} > 2.5",
                "10m",
                "writes take over 2.5 s",
                "move the database to a faster disk",
                threshold=2.5,
            ),
        ),
    ),
    Panel("Calls", "reqps", {"{{method}}": rate("gym_hub_calls_total", "method")}),
    Panel("Calls, 99%", "s", {"{{method}}": quantile(0.99, "gym_hub_call_seconds", "method")}),
    Panel(
        "Refused calls",
        "reqps",
        {"{{code}}": rate("gym_hub_refusals_total", "code")},
        (
            Alert(
                "HubErrors",
                'increase(gym_hub_refusals_total{code="internal"}[15m]) > 0',
                "0m",
                "a call failed in the hub",
                "report the traceback from the log",
            ),
            Alert(
                "Flood",
                'rate(gym_hub_refusals_total{code="busy"}[5m]) > 5',
                "5m",
                "callers exceed `limits`",
                "the log names them; block the addresses",
            ),
        ),
    ),
    Panel(
        "Objects moved",
        "Bps",
        {"sent": rate("gym_hub_download_bytes_total"), "received": rate("gym_hub_upload_bytes_total")},
    ),
    Panel("Connections", "short", {"open": "gym_hub_connections", "seeders": "gym_hub_seeders"}),
    Panel(
        "Downloads from contributors",
        "ops",
        {"given": rate("gym_hub_seeding_tickets_total"), "failed": rate("gym_hub_seeding_failures_total")},
    ),
    Panel(
        "Disk",
        "bytes",
        {
            "free": "gym_hub_disk_free_bytes",
            "reserve": "gym_hub_disk_reserve_bytes",
            "size": "gym_hub_disk_total_bytes",
            "objects": "gym_hub_objects_bytes",
        },
        (
            Alert(
                "DiskBelowReserve",
                "gym_hub_disk_free_bytes < gym_hub_disk_reserve_bytes",
                "1m",
                "no upload or round begins",
                "free space: `gym-server gc`, or a larger disk",
                is_critical=True,
            ),
            Alert(
                "DiskFilling",
                "gym_hub_disk_free_bytes / gym_hub_disk_total_bytes < 0.15",
                "15m",
                "over 85% is used",
                "as above",
            ),
        ),
    ),
    Panel("Objects", "short", {"objects": "gym_hub_objects"}),
    Panel(
        "SQLite",
        "bytes",
        {"database": "gym_hub_database_bytes", "WAL": "gym_hub_database_wal_bytes"},
        (
            Alert(
                "WalLarge",
                "gym_hub_database_wal_bytes > 1e9",
                "30m",
                "over 1 GB",
                "end programs that keep the database open",
                threshold=1e9,
            ),
        ),
    ),
    Panel(
        "Ledger",
        "short",
        {"entries": "gym_hub_ledger_entries", "signed": "gym_hub_ledger_signed_entries"},
        (
            Alert(
                "LedgerUnsigned",
                "changes(gym_hub_model_version[1h]) > 0 and changes(gym_hub_ledger_signed_entries[1h]) == 0",
                "10m",
                "versions without a signed head",
                "stop the hub; `gym-server ledger verify`",
                is_critical=True,
            ),
        ),
    ),
    Panel(
        "Certificate's time left",
        "s",
        {"{{instance}}": "gym_hub_certificate_expiry_timestamp_seconds - time()"},
        (
            Alert(
                "CertificateEnding",
                "gym_hub_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
                "1h",
                "14 days or less are left",
                "[renew it](hub-on-the-internet.md)",
                threshold=14 * 86400,
            ),
        ),
    ),
    Panel(
        "Clock",
        "s",
        {"ahead of contributors": "gym_hub_clock_skew_seconds"},
        (
            Alert(
                "ClockSkewed",
                "abs(gym_hub_clock_skew_seconds) > 60 and gym_hub_clocks >= 3",
                "5m",
                "a minute off the contributors' median",
                "synchronise the machine's clock with NTP",
                threshold=60,
            ),
        ),
    ),
    Panel("Clocks compared", "short", {"clocks": "gym_hub_clocks"}),
    Panel(
        "Time since the last backup",
        "s",
        {"{{instance}}": "time() - gym_hub_backup_timestamp_seconds"},
        (
            Alert(
                "BackupOld",
                "time() - gym_hub_backup_timestamp_seconds > 2 * 86400 and gym_hub_model_version > 0",
                "1h",
                "none for two days",
                "`gym-server backup --to URL --every 1d`",
                threshold=2 * 86400,
            ),
        ),
    ),
    Panel(
        "Garbage collection",
        "short",
        {"{{outcome}}": "gym_hub_gc_passes_total"},
        (
            Alert(
                "GcFailing",
                'increase(gym_hub_gc_passes_total{outcome="failed"}[1h]) > 1',
                "0m",
                "passes fail",
                "the log has the reason",
            ),
        ),
    ),
    Panel("Freed by garbage collection", "bytes", {"bytes": "gym_hub_gc_freed_bytes_total"}),
    Panel(
        "Credits",
        "short",
        {"pool": "gym_hub_reward_pool_credits", "last round": "gym_hub_last_round_credits"},
    ),
    Panel(
        "Epsilon",
        "short",
        {"spent": "gym_hub_epsilon_spent", "budget": "gym_hub_epsilon_budget"},
        (
            Alert(
                "EpsilonNearlySpent",
                "gym_hub_epsilon_spent / gym_hub_epsilon_budget > 0.9",
                "0m",
                "over 90% of the budget",
                "plan the end of the run: rounds stop when the budget is spent",
            ),
        ),
    ),
    Panel(
        "Process",
        "bytes",
        {
            "resident": 'process_resident_memory_bytes{job="gym-hub"}',
            "virtual": 'process_virtual_memory_bytes{job="gym-hub"}',
        },
    ),
    Panel("CPU, cores", "short", {"{{instance}}": 'rate(process_cpu_seconds_total{job="gym-hub"}[5m])'}),
    Panel("Version of gym-fed", "short", {"{{version}}": "gym_hub_info"}, is_number=True),
    Panel("Uptime", "s", {"{{instance}}": "time() - gym_hub_start_time_seconds"}, is_number=True),
)
