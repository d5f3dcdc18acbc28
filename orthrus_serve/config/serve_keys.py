"""The keys that a Ray Serve file may hold, as Ray 2.60 documents them (`serve build`, "Serve Config Files").

Serve ignores keys that it does not know, so a misspelt one would silently keep its default. This list exists to refuse
them without importing Ray; `tests/serve/test_serve_keys.py` compares it with Ray's own schema. Leaves out the values.
"""

from collections.abc import Mapping
from typing import TypeAlias

# A key maps to the keys below it, or to None where anything goes (free mappings, scalars, what another module reads).
Keys: TypeAlias = Mapping[str, "Keys | None"]


def _free(*names: str) -> dict[str, Keys | None]:
    return dict.fromkeys(names)


LOGGING: Keys = _free("encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs")

DEPLOYMENT: Keys = {
    **_free("name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "user_config"),
    **_free("graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s"),
    **_free("health_check_period_s", "health_check_timeout_s"),
    **_free("placement_group_bundles", "placement_group_strategy", "placement_group_bundle_label_selector"),
    **_free("max_replicas_per_node", "request_router_config", "gang_scheduling_config", "deployment_actors"),
    **_free("rolling_update_percentage", "max_surge_percent"),
    "autoscaling_config": _free(
        "min_replicas",
        "initial_replicas",
        "max_replicas",
        "target_ongoing_requests",
        "metrics_interval_s",
        "look_back_period_s",
        "smoothing_factor",
        "upscale_smoothing_factor",
        "downscale_smoothing_factor",
        "upscaling_factor",
        "downscaling_factor",
        "downscale_delay_s",
        "downscale_to_zero_delay_s",
        "upscale_delay_s",
        "aggregation_function",
        "policy",
    ),
    "backpressure_config": _free("status_code", "retry_after_s"),
    "ray_actor_options": _free(
        "runtime_env",
        "num_cpus",
        "num_gpus",
        "memory",
        "resources",
        "accelerator_type",
        "label_selector",
        "fallback_strategy",
    ),
    "logging_config": LOGGING,
}

APPLICATION: Keys = {
    **_free(
        "name", "route_prefix", "import_path", "runtime_env", "args", "autoscaling_policy", "external_scaler_enabled"
    ),
    # Ray's schema lists both and its validator refuses them: they belong to `http_options`.
    **_free("host", "port"),
    "deployments": DEPLOYMENT,
    "logging_config": LOGGING,
}

SERVE_FILE: Keys = {
    **_free("proxy_location", "target_capacity"),
    "http_options": _free(
        "host",
        "port",
        "root_path",
        "request_timeout_s",
        "keep_alive_timeout_s",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_keyfile_password",
        "ssl_ca_certs",
    ),
    "grpc_options": _free("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"),
    "controller_options": _free("runtime_env"),
    "logging_config": LOGGING,
    "tracing_config": None,
    "applications": APPLICATION,
}
