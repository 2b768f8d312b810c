"""The API server's dashboard and alerts."""

from __future__ import annotations

from tools.dashboards.signals import Alert, Panel, quantile, rate, share_or_zero

_ERRORS = share_or_zero('rate(gym_api_requests_total{status=~"5.."}[5m])', "rate(gym_api_requests_total[5m])")
_FIRST_TOKEN = quantile(0.95, "gym_engine_first_token_seconds", "instance")
_KV = "gym_engine_kv_bytes_used / gym_engine_kv_bytes_limit"

PANELS = (
    Panel(
        "Ready",
        "bool",
        {"{{instance}}": "gym_api_ready"},
        (
            Alert(
                "ApiDown",
                'up{job="gym-api"} == 0',
                "2m",
                "`/metrics` does not answer",
                "start `gym api`; its log has the reason",
                is_critical=True,
            ),
            Alert(
                "ApiNotReady",
                "gym_api_ready == 0",
                "10m",
                "the model is not loaded",
                "the log has the reason",
                is_critical=True,
            ),
        ),
        is_number=True,
    ),
    Panel(
        "Engine",
        "bool",
        {"{{instance}}": "gym_engine_healthy"},
        (
            Alert(
                "EngineDead",
                "gym_engine_healthy == 0",
                "1m",
                "no request is answered",
                "restart it; report the traceback from the log",
                is_critical=True,
            ),
        ),
        is_number=True,
    ),
    Panel("Active requests", "short", {"active": "gym_api_active_requests"}, is_number=True),
    Panel("Version of gym-fed", "short", {"{{version}}": "gym_api_info"}, is_number=True),
    Panel("Requests", "reqps", {"{{route}} {{status}}": rate("gym_api_requests_total", "route, status")}),
    Panel(
        "Share of requests that failed",
        "percentunit",
        {"{{instance}}": _ERRORS},
        (
            Alert(
                "ApiErrors",
                f"({_ERRORS}) > 0.05",
                "5m",
                "over 5% get 5xx",
                "the log has the reason",
                is_critical=True,
                threshold=0.05,
            ),
        ),
    ),
    Panel("Request time, 95%", "s", {"{{route}}": quantile(0.95, "gym_api_request_seconds", "route")}),
    Panel(
        "Time to the first token, 95%",
        "s",
        {"{{instance}}": _FIRST_TOKEN},
        (
            Alert(
                "FirstTokenSlow",
                f"{_FIRST_TOKEN} > 5",
                "10m",
                "over 5 s",
                "add a server, or lower `engine.max_concurrent`",
                threshold=5,
            ),
        ),
    ),
    Panel(
        "Time per token, 95%",
        "s",
        {"{{instance}}": quantile(0.95, "gym_engine_per_token_seconds", "instance")},
    ),
    Panel(
        "Tokens",
        "ops",
        {
            "prompt": rate("gym_engine_prompt_tokens_total"),
            "from the prefix cache": rate("gym_engine_cached_tokens_total"),
            "generated": rate("gym_engine_generated_tokens_total"),
            "proposed": rate("gym_engine_proposed_tokens_total"),
            "accepted": rate("gym_engine_accepted_tokens_total"),
        },
    ),
    Panel(
        "Requests in the engine",
        "short",
        {"running": "gym_engine_running", "queued": "gym_engine_queued"},
    ),
    Panel(
        "Refused, since too many waited",
        "ops",
        {"{{instance}}": rate("gym_engine_refused_total")},
        (
            Alert(
                "ApiOverloaded",
                "rate(gym_engine_refused_total[5m]) > 0",
                "5m",
                "requests get 429",
                "add a server; limit keys with `--requests-per-minute`",
            ),
        ),
    ),
    Panel("Finished by reason", "ops", {"{{reason}}": rate("gym_engine_finished_total", "reason")}),
    Panel(
        "KV cache in use",
        "percentunit",
        {"{{instance}}": _KV},
        (
            Alert(
                "KvCacheFull",
                f"{_KV} > 0.95",
                "15m",
                "over 95%",
                "raise `engine.kv_cache_size`",
                threshold=0.95,
            ),
        ),
    ),
    Panel("Preemptions", "ops", {"{{instance}}": rate("gym_engine_preemptions_total")}),
    Panel(
        "Time in the model",
        "percentunit",
        {"busy": rate("gym_engine_busy_seconds_total"), "forwards": rate("gym_engine_model_seconds_total")},
    ),
    Panel(
        "Steps",
        "ops",
        {
            "steps": rate("gym_engine_steps_total"),
            "failed": rate("gym_engine_failed_steps_total"),
            "embeddings": rate("gym_engine_embeddings_total"),
        },
        (
            Alert(
                "EngineStepsFailing",
                "increase(gym_engine_failed_steps_total[15m]) > 0",
                "0m",
                "a forward pass failed",
                "report the traceback from the log",
            ),
        ),
    ),
    Panel(
        "Rows of steps",
        "ops",
        {"all": rate("gym_engine_rows_total"), "of variants": rate("gym_engine_rows_with_variants_total")},
    ),
    Panel("Forwards", "ops", {"{{forward}}": rate("gym_engine_forwards_total", "forward")}),
    Panel(
        "Products of deltas",
        "ops",
        {
            "sign, {{kernel}}": rate("gym_engine_sign_products_total", "kernel"),
            "{{form}}": rate("gym_engine_packed_products_total", "form"),
        },
    ),
    Panel(
        "Variants in memory",
        "bytes",
        {"in memory": "gym_variants_resident_bytes", "limit": "gym_variants_cache_bytes"},
    ),
    Panel(
        "Variants",
        "short",
        {
            "in memory": "gym_variants_resident",
            "in use": "gym_variants_pinned",
            "loading": "gym_variants_loading",
        },
    ),
    Panel(
        "Use of variants",
        "ops",
        {
            "in memory": rate("gym_variants_hits_total"),
            "to load": rate("gym_variants_misses_total"),
            "loaded": rate("gym_variants_loads_total"),
            "evicted": rate("gym_variants_evictions_total"),
            "failed": rate("gym_variants_errors_total"),
        },
        (
            Alert(
                "VariantLoadsFailing",
                "increase(gym_variants_errors_total[15m]) > 0",
                "0m",
                "a variant cannot be loaded",
                "the log names the variant; have its owner push it again",
            ),
        ),
    ),
    Panel(
        "Seconds of a load, mean",
        "s",
        {"{{instance}}": "gym_variants_load_seconds_total / gym_variants_loads_total"},
    ),
    Panel(
        "Usage lines lost",
        "short",
        {"{{instance}}": "gym_api_usage_lost_total"},
        (
            Alert(
                "UsageLost",
                "increase(gym_api_usage_lost_total[15m]) > 0",
                "0m",
                "usage is not logged",
                "make room for `usage_log`; the process's log has the lines",
            ),
        ),
    ),
    Panel("Malformed tool calls", "ops", {"{{instance}}": rate("gym_api_malformed_tool_calls_total")}),
    Panel(
        "Refused by the filter",
        "ops",
        {"{{direction}} {{category}}": rate("gym_filter_refused_total", "direction, category")},
    ),
    Panel(
        "Process",
        "bytes",
        {
            "resident": 'process_resident_memory_bytes{job="gym-api"}',
            "virtual": 'process_virtual_memory_bytes{job="gym-api"}',
        },
    ),
    Panel("CPU, cores", "short", {"{{instance}}": 'rate(process_cpu_seconds_total{job="gym-api"}[5m])'}),
)
